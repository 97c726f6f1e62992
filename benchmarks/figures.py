"""The few kinds of figure that results are drawn as, in one style.

Imported only where something is drawn, for it needs matplotlib. Colours are Okabe and Ito's, which
colour-blind readers can tell apart; a kernel has its colour and marker in all figures.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.sweeps import tokens_text

BLACK, BLUE, SKY, GREEN = "#000000", "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILION, PURPLE, YELLOW, GREY = "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#777777"

# Colour and marker by key of the kernel.
LOOKS = {
    "ours": (BLUE, "o"),
    "read": (GREY, ""),
    "fi_tc": (ORANGE, "s"),
    "fi_cc": (VERMILION, "v"),
    "xqa_nhd": (GREEN, "D"),
    "xqa_hnd": (SKY, "^"),
    "fa3": (PURPLE, "P"),
    "fa3_meta": (PURPLE, "X"),
    "vllm": (ORANGE, "s"),
    "flex": (YELLOW, "h"),
    "tutorial": (BLACK, "x"),
    "sdpa": (GREY, "*"),
}
# Those of kernels that are not in `LOOKS`, in turn: ours with options.
OTHER_LOOKS = (
    *((SKY, "^"), (VERMILION, "v"), (GREEN, "D"), (PURPLE, "P"), (ORANGE, "s"), (BLACK, "x")),
    *((SKY, "h"), (VERMILION, "X"), (GREEN, "<"), (PURPLE, ">"), (ORANGE, "d"), (BLACK, "*")),
)

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}

LEGEND_COLUMNS = 5
LEGEND_ROW_INCHES = 0.19
SMALL_PRINT_CHARACTERS_AN_INCH = 24
NARROWEST = 5.0

# Where the linear panel of `rows` ends, at least.
LEAST_SPLIT = 2.5


@dataclass
class Labels:
    """The words around a figure.

    Attributes:
        title: what it shows.
        subtitle: what all of it has in common.
        small_print: where it comes from: date, device, command.
        names: what the legend calls a kernel, by its key.
    """

    title: str
    subtitle: str
    small_print: str
    names: dict[str, str]


@dataclass
class Series:
    """Values of one kernel.

    Attributes:
        key: the kernel's.
        points: x and y; in rows x is the row's name.
        worst: in rows, the worst of the values that y is the median of, by row.
    """

    key: str
    points: list[tuple[float | str, float]] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)


class Sheet:
    """A figure with panels side by side, titled, with a legend above and small print below."""

    def __init__(
        self,
        labels: Labels,
        keys: list[str],
        widths: list[float],
        height: float,
        *,
        bars: Iterable[str] = (),
        lines: bool = True,
    ):
        """Lays out the sheet; inside `mpl.rc_context(STYLE)`.

        Args:
            labels: the words around it.
            keys: kernels of the legend; a single one needs none.
            widths: of the panels, in inches.
            height: of the panels, in inches.
            bars: those of the keys that are drawn as bars.
            lines: whether the other keys are lines, or only markers.
        """
        others = [key for key in keys if key not in LOOKS]
        self.looks = dict(LOOKS)
        for i, key in enumerate(others):
            self.looks[key] = OTHER_LOOKS[i % len(OTHER_LOOKS)]
        self.labels = labels
        legend_rows = -(-len(keys) // LEGEND_COLUMNS) if len(keys) > 1 else 0
        under_title = 0.28 + (0.16 if labels.subtitle else 0)
        top = under_title + 0.1 + LEGEND_ROW_INCHES * legend_rows
        width = max(sum(widths), NARROWEST)
        small_print = textwrap.fill(labels.small_print, int(width * SMALL_PRINT_CHARACTERS_AN_INCH))
        bottom = 0.12 + 0.11 * (small_print.count("\n") + 1)
        total = height + top + bottom
        self.figure = Figure(figsize=(width, total), dpi=160)
        self.figure.set_layout_engine("constrained", rect=(0, bottom / total, 1, height / total))
        ratios = {"width_ratios": widths}
        grid = self.figure.subplots(1, len(widths), sharey=True, squeeze=False, gridspec_kw=ratios)
        self.axes: list[Axes] = grid[0].tolist()
        title = labels.title[:1].upper() + labels.title[1:]
        self.figure.text(0.06 / width, 1 - 0.08 / total, title, va="top", weight="bold")
        self.figure.text(0.06 / width, 1 - 0.26 / total, labels.subtitle, va="top", fontsize=8)
        self.figure.text(
            0.06 / width, 0.06 / total, small_print, fontsize=5.5, color="#555555", va="bottom"
        )
        if legend_rows:
            self.figure.legend(
                handles=[self._handle(key, key in bars, lines) for key in keys],
                loc="upper left",
                bbox_to_anchor=(0, 1 - under_title / total),
                ncols=LEGEND_COLUMNS,
                fontsize=8,
                handlelength=1.8,
            )

    def name(self, key: str) -> str:
        """What a kernel is called."""
        return self.labels.names.get(key, key)

    def style(self, key: str, *, line: bool) -> dict[str, Any]:
        """Arguments of plot for a kernel."""
        color, marker = self.looks[key]
        return {
            "color": color,
            "marker": marker,
            "linestyle": ("--" if key == "read" else "-") if line else "",
            "markeredgecolor": BLACK if color == YELLOW else color,
            "markeredgewidth": 1.5 if marker == "x" else 0.5,
        }

    def _handle(self, key: str, bar: bool, line: bool) -> Artist:
        if bar:
            return Patch(color=self.looks[key][0], label=self.name(key))
        return Line2D([], [], **self.style(key, line=line), label=self.name(key))


def lines(
    labels: Labels, panels: dict[str, list[Series]], x_label: str, y_label: str, scale: str
) -> Figure:
    """A panel beside another, a line a kernel; x doubles from tick to tick.

    Args:
        labels: the words around it.
        panels: lines by the panel's title.
        x_label: below each panel.
        y_label: left of the first.
        scale: "log"; "zero": linear from 0; "one": linear about 1.
    """
    keys = list(dict.fromkeys(line.key for panel in panels.values() for line in panel))
    with mpl.rc_context(STYLE):
        sheet = Sheet(labels, keys, [3.1] * len(panels), 2.7)
        for axis, (title, panel) in zip(sheet.axes, panels.items(), strict=True):
            for line in sorted(panel, key=lambda line: line.key == "ours"):
                xs, ys = [float(x) for x, _ in line.points], [y for _, y in line.points]
                style = sheet.style(line.key, line=True)
                axis.plot(xs, ys, **style, label=sheet.name(line.key))
            _double(axis, sorted({float(x) for line in panel for x, _ in line.points}))
            axis.set(title=title if len(panels) > 1 else "", xlabel=x_label)
        first = sheet.axes[0]
        first.set_ylabel(y_label)
        values = [y for panel in panels.values() for line in panel for _, y in line.points]
        if scale == "log":
            first.set_yscale("log")
            _plain_log(first.yaxis)
        elif scale == "zero":
            first.set_ylim(0, 1.08 * max(values))
        else:
            first.set_ylim(min(0.9, 0.97 * min(values)), max(1.1, 1.03 * max(values)))
            for axis in sheet.axes:
                axis.axhline(1, color=BLACK, linewidth=0.8, zorder=1)
    return sheet.figure


def rows(labels: Labels, series: list[Series], x_label: str) -> Figure:
    """A row a cell: a bar for ours, a marker for every other kernel.

    x is linear as far as most bars reach, then goes on logarithmically in a panel of its own. A
    thin line at a bar's end reaches to the worst value where a row stands for several.
    """
    names = list(dict.fromkeys(str(x) for line in series for x, _ in line.points))
    place = {name: i for i, name in enumerate(names)}
    far = max(max(line.worst.values()) for line in series)
    ours = sorted(y for line in series if line.key == "ours" for y in line.worst.values())
    split = max(LEAST_SPLIT, 1.2 * ours[len(ours) * 3 // 4]) if ours else LEAST_SPLIT
    limits = [(0, split), (split, 1.15 * far)] if far > split else [(0, max(1.2, 1.05 * far))]
    with mpl.rc_context(STYLE):
        keys = [line.key for line in series]
        height = 0.55 + 0.27 * len(names)
        sheet = Sheet(labels, keys, [5.2, 2.4][: len(limits)], height, bars=["ours"], lines=False)
        for axis, (low, high) in zip(sheet.axes, limits, strict=True):
            for line in series:
                at = [(y, place[str(x)], line.worst[str(x)]) for x, y in line.points]
                if line.key == "ours":
                    axis.barh([i for _, i, _ in at], [y for y, _, _ in at], height=0.62, color=BLUE)
                    for y, i, worst in at:
                        axis.plot([y, worst], [i, i], color=BLUE, linewidth=2.5)
                else:
                    inside = [(y, i) for y, i, _ in at if low < y <= high]
                    xs, ys = [y for y, _ in inside], [i for _, i in inside]
                    style = sheet.style(line.key, line=False)
                    (markers,) = axis.plot(xs, ys, **style, zorder=4, clip_on=False)
                    markers.set_in_layout(False)
            axis.axvline(1, color=BLACK, linewidth=1, zorder=3)
            axis.set_xlim(low, high)
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="y", visible=False)
        near = sheet.axes[0]
        near.set_yticks(range(len(names)), names, fontsize=8)
        near.set_ylim(len(names) - 0.5, -0.5)
        near.set_xlabel(x_label)
        _bar_values(
            near, [(place[str(x)], y) for s in series if s.key == "ours" for x, y in s.points]
        )
        for beyond in sheet.axes[1:]:
            beyond.set_xscale("log")
            beyond.set_xlim(split, 1.15 * far)
            _plain_log(beyond.xaxis)
            beyond.spines["left"].set_linestyle(":")
            beyond.set_xlabel("… logarithmic")
    return sheet.figure


def ratios(labels: Labels, series: list[Series], x_label: str) -> Figure:
    """A bar a kernel, its ratio to ours in the median of the cells, and a dot a cell."""
    with mpl.rc_context(STYLE):
        sheet = Sheet(labels, ["ours"], [6.4], 0.55 + 0.27 * len(series))
        axis = sheet.axes[0]
        middles = [statistics.median(y for _, y in line.points) for line in series]
        axis.barh(range(len(series)), middles, height=0.62, color=BLUE)
        for i, line in enumerate(series):
            if len(line.points) > 1:
                values = [y for _, y in line.points]
                axis.plot(values, [i] * len(values), "o", color=ORANGE, markersize=3)
        axis.axvline(1, color=BLACK, linewidth=1)
        axis.set_yticks(range(len(series)), [sheet.name(line.key) for line in series])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(series) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(x_label)
        _bar_values(axis, list(enumerate(middles)))
    return sheet.figure


def _bar_values(axis: Axes, values: list[tuple[int, float]]) -> None:
    """Writes each value left of its bar, between it and its name."""
    axis.tick_params(axis="y", length=0, pad=32)
    for i, value in values:
        text = axis.annotate(
            f"{value:.2f}",
            (0, i),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7.5,
            color=BLUE,
            weight="bold",
        )
        text.set_in_layout(False)  # the names' padding has made room for it


def _double(axis: Axes, ticks: list[float]) -> None:
    """A logarithmic x axis with the given ticks, thinned to doublings where they are dense."""
    axis.set_xscale("log", base=2)
    if len(ticks) > 9:
        ratios_ = [tick / ticks[0] for tick in ticks]
        ticks = [t for t, r in zip(ticks, ratios_, strict=True) if math.log2(r).is_integer()]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens_text(round(x))))


def _plain_log(axis: Axis) -> None:
    """Labels 1, 2, 5, 10 instead of powers."""
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
