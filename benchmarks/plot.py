"""Draws the results of benchmark runs: python -m benchmarks.plot FILE.json... [--out FOLDER].

A file gives a figure for each sweep in it, one for its traces, one for cells of no sweep, and one
for what options cost; `figures` has their style.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import PEERS
from benchmarks.sweeps import SWEEPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.figures import Labels

Cell = dict[str, Any]

X_LABELS = {
    "context": "context, tokens a sequence",
    "batch": "sequences",
    "group": "query heads a KV head",
    "query": "queries a sequence",
    "page": "tokens a block",
}
ROW_TITLES = {
    "": "decode beside its peers",
    "trace": "decode steps of request traces",
    "ops": "the ops around decode",
}
OVER_READ = "time over that of merely reading the same K and V"
OVER_COPY = "time over that of copying as many bytes"
OVER_OURS = "time over that of paged_attn without options"
BASE_PAGE = 16

Point = tuple[float | str, float]
Lines = dict[str, list[Point]]


def why_not() -> str | None:
    """Why nothing can be drawn here, None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plots need matplotlib: pip install matplotlib"
    return None


def medians(cell: Cell) -> dict[str, float]:
    """Median µs of each kernel that was timed, ours first, and of the read limit as "read"."""
    order = sorted(cell["kernels"], key=lambda key: key != "ours")
    kernels = {key: cell["kernels"][key] for key in order}
    times = {key: entry["median_us"] for key, entry in kernels.items() if "median_us" in entry}
    return times if cell["read"] is None else {**times, "read": cell["read"]["median_us"]}


def queries(cell: Cell, key: str) -> int:
    """Queries a sequence of a kernel."""
    options = cell["kernels"].get(key, {}).get("options") or {}
    return int(options.get("queries", (1, 1))[1])


def is_variant(cell: Cell, key: str) -> bool:
    """Whether a kernel is ours with options."""
    return bool(cell["kernels"].get(key, {}).get("options"))


def common(cells: list[Cell]) -> list[str]:
    """What all cells have in common, in words."""
    words = {
        "batch": "batch {}",
        "heads": "{} query heads",
        "kv_heads": "{} KV heads",
        "head_dim": "d{}",
        "context": "context {}",
        "page": "page {}",
        "dtype": "{}",
    }
    found = []
    for field, text in words.items():
        values = {str(cell.get("shape", {}).get(field)) for cell in cells}
        drawn = field == "context" and any(cell.get("shape", {}).get("lengths") for cell in cells)
        if len(values) == 1 and values != {"None"} and not drawn:
            found.append(text.format(*values))
    return found


class Book:
    """The figures of one result file."""

    def __init__(self, content: dict[str, Any]):
        """Sorts the cells by what they are points of."""
        self._figures = importlib.import_module("benchmarks.figures")
        on_gpu = content["cuda"] is not None
        self._time_unit, self._time = ("µs", 1.0) if on_gpu else ("ms", 1e-3)
        # From bytes over µs.
        self._rate_unit, self._rate = ("TB/s", 1e-6) if on_gpu else ("GB/s", 1e-3)
        self._parts: dict[str, list[Cell]] = {}
        for cell in content["cells"]:
            self._parts.setdefault(cell.get("shape", {}).get("sweep", ""), []).append(cell)
        invalid = sum(not cell["valid"] for cell in content["cells"])
        warning = f"INVALID cells, in which something beat the read limit: {invalid}"
        self._small_print = ", ".join(
            [
                content["date"][:16].replace("T", " "),
                content["device"],
                f"torch {content['torch']}",
                *([warning] if invalid else []),
                content["command"],
            ]
        )

    def figures(self) -> dict[str, Figure]:
        """Figures by name."""
        made: dict[str, Figure | None] = {}
        for name, cells in self._parts.items():
            if name in ("context", "batch", "group", "page"):
                made[name] = self._lines(name, cells)
            elif name == "query":
                made[name] = self._query(cells)
            elif name != "options":
                made[name or "cells"] = self._rows(name, cells)
            if name != "query":
                about = "options" if name in ("", "options") else f"{name}_options"
                made[about] = self._options(cells)
        return {name: figure for name, figure in made.items() if figure is not None}

    def _labels(self, title: str, cells: list[Cell]) -> Labels:
        names = {peer.key: peer.title for peer in PEERS}
        names |= {"ours": "paged_attn", "read": "read limit"}
        subtitle = ", ".join(common(cells))
        labels: Labels = self._figures.Labels(title, subtitle, self._small_print, names)
        return labels

    def _lines(self, name: str, cells: list[Cell]) -> Figure | None:
        """Each kernel at every x, a panel a series: bandwidth, or time, or time over one page's."""
        panels: dict[str, Lines] = {}
        for cell in cells:
            panel = panels.setdefault(cell["shape"]["series"], {})
            for key, median in medians(cell).items():
                if not is_variant(cell, key):
                    rate = cell["bytes"] / median * self._rate
                    y = rate if name == "context" else median * self._time
                    panel.setdefault(key, []).append((cell["shape"]["x"], y))
        if name == "context":
            return self._panels(name, panels, f"K and V read, {self._rate_unit}", "zero")
        if name != "page":
            return self._panels(name, panels, f"time of a call, {self._time_unit}", "log")
        over_base = {
            title: {key: over_nearest(line, BASE_PAGE) for key, line in panel.items()}
            for title, panel in panels.items()
        }
        label = f"time over that at {BASE_PAGE} tokens a block"
        return self._panels(name, over_base, label, "one")

    def _query(self, cells: list[Cell]) -> Figure | None:
        """Ours with 1 query a sequence and more, beside the read limit, a panel a group."""
        panels: dict[str, Lines] = {}
        for cell in cells:
            times = medians(cell)
            ours = sorted(
                (queries(cell, key), time * self._time)
                for key, time in times.items()
                if key == "ours" or is_variant(cell, key)
            )
            panel: Lines = {"ours": [(q, time) for q, time in ours]}
            if "read" in times:
                panel["read"] = [(q, times["read"] * self._time) for q, _ in ours]
            panels[cell["shape"]["series"]] = panel
        return self._panels("query", panels, f"time of a call, {self._time_unit}", "log")

    def _panels(
        self, name: str, panels: dict[str, Lines], y_label: str, scale: str
    ) -> Figure | None:
        drawn = {
            title: [self._figures.Series(key, line) for key, line in panel.items() if line]
            for title, panel in panels.items()
        }
        if not any(drawn.values()):
            return None
        labels = self._labels(SWEEPS[name].title, self._parts[name])
        figure: Figure = self._figures.lines(labels, drawn, X_LABELS[name], y_label, scale)
        return figure

    def _rows(self, name: str, cells: list[Cell]) -> Figure | None:
        """Times over the read limit, a row a cell, or a trace with the median of its steps."""
        values: dict[str, dict[str, list[float]]] = {}
        for cell in cells:
            times = medians(cell)
            for key, time in times.items():
                if key != "read" and "read" in times and not is_variant(cell, key):
                    of_rows = values.setdefault(key, {})
                    of_rows.setdefault(self._row(name, cell), []).append(time / times["read"])
        if not values:
            return None
        series = [
            self._figures.Series(
                key,
                [(row, statistics.median(ratios)) for row, ratios in of_rows.items()],
                {row: max(ratios) for row, ratios in of_rows.items()},
            )
            for key, of_rows in values.items()
        ]
        title = SWEEPS[name].title if name in SWEEPS else ROW_TITLES[name]
        label = OVER_COPY if name == "ops" else OVER_READ
        if name == "trace":
            label += "; thin: the worst step"
        figure: Figure = self._figures.rows(self._labels(title, cells), series, label)
        return figure

    @staticmethod
    def _row(name: str, cell: Cell) -> str:
        if name == "trace":
            return str(cell["shape"]["series"])
        if name == "ragged":
            return str(cell["shape"]["x"])
        if name == "layout":
            return f"{cell['shape']['x']}, {cell['shape']['series']}"
        return str(cell["cell"])

    def _options(self, cells: list[Cell]) -> Figure | None:
        """What variants take over plain ours in the same cells."""
        ratios: Lines = {}
        for cell in cells:
            times = medians(cell)
            for key, time in times.items():
                if is_variant(cell, key) and "ours" in times:
                    ratios.setdefault(key, []).append((cell["cell"], time / times["ours"]))
        if not ratios:
            return None
        series = [self._figures.Series(key, points) for key, points in ratios.items()]
        labels = self._labels(SWEEPS["options"].title, cells)
        label = OVER_OURS + ("; dots: single cells" if len(cells) > 1 else "")
        figure: Figure = self._figures.ratios(labels, series, label)
        return figure


def over_nearest(line: list[Point], x: int) -> list[Point]:
    """A line over its own value where it is nearest to x."""
    base = min(line, key=lambda point: abs(float(point[0]) - x))[1]
    return [(at, y / base) for at, y in line]


def draw(content: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Writes a result file's figures as FOLDER/STEM-NAME.png and says where.

    Raises:
        ValueError: it is no result of a benchmark's cells, or there is nothing in it to draw.
    """
    try:
        figures = Book(content).figures()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no result of a benchmark: {error!r}") from None
    if not figures:
        raise ValueError("nothing in it was timed")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{stem}-{name}.png")
        figure.savefig(paths[-1])
        print(f"drawn: {paths[-1]}", file=sys.stderr)
    return paths


def main(arguments: list[str] | None = None) -> int:
    """Draws the files; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot",
        description="Draws result files of benchmarks.decode and benchmarks.cache_ops.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        parser.error(reason)
    for file in options.files:
        try:
            draw(json.loads(file.read_text()), options.out, file.stem)
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
