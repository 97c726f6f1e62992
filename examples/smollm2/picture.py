"""One picture of the pool over time: which sequence owned which block, and how full it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from examples.smollm2.engine import Request, Step

FREE = "#f0efeb"
INK = "#33322f"
HELD, EMPTY = "#5b6779", "#e2a05b"
# Neighbours in the list differ in hue and in lightness; sequences beyond the last start over.
PALETTE = (
    "#e07b67", "#3d7ea6", "#8fae5d", "#7a4f8c", "#d9a93f", "#3f9c8f", "#b5475f", "#7fb0d6",
    "#5d7a3a", "#c49ad0", "#9a6a3c", "#4d5aa8", "#e3a0a8", "#2f6f6a", "#b7a04a", "#87526a",
)  # fmt: skip
MAX_LEGEND = 24


def check_path(path: Path) -> None:
    """Tries to write there; better now than after all has been computed.

    Raises:
        ValueError: matplotlib writes no files of that name.
        OSError: The folder cannot be made or written to.
    """
    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path} must end in one of {', '.join(sorted(known))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def draw(steps: Sequence[Step], requests: Sequence[Request], block_size: int, path: Path) -> None:
    """Writes the picture.

    Args:
        steps: All steps of an engine, in order.
        requests: The engine's requests.
        block_size: Tokens a block.
        path: The file, whose ending names the format; its folder is made where missing.
    """
    owners = np.stack([step.owners for step in steps], axis=1)  # [num_blocks, steps]
    colours = {r.seq_id: PALETTE[i % len(PALETTE)] for i, r in enumerate(requests)}

    figure = Figure(figsize=(11, 6.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    pool, share = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    for axes in (pool, share):
        axes.tick_params(colors=INK, labelsize=9, length=0)
        axes.spines[:].set_visible(False)
    pool.set_title(
        f"{len(requests)} sequences in one pool: {owners.shape[0]} blocks, {block_size} slots each",
        loc="left", color=INK, fontsize=12, pad=14,
    )  # fmt: skip
    _draw_pool(pool, owners, colours)
    _draw_preemptions(pool, steps)
    _draw_share(share, steps, owners, block_size)
    if len(requests) <= MAX_LEGEND:
        _draw_legend(figure, requests, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_pool(axes: Axes, owners: np.ndarray, colours: dict[int, str]) -> None:
    """Image of owners [num_blocks, steps], a thin line between blocks."""
    num_blocks, num_steps = owners.shape
    known = np.array(sorted(colours))
    index = np.where(owners < 0, 0, np.searchsorted(known, owners) + 1)
    axes.imshow(
        index, cmap=ListedColormap([FREE, *(colours[i] for i in known)]), vmin=0, vmax=len(known),
        aspect="auto", interpolation="nearest", origin="lower",
        extent=(0, num_steps, 0, num_blocks),
    )  # fmt: skip
    if num_blocks <= 100:
        axes.hlines(np.arange(1, num_blocks), 0, num_steps, color="white", linewidth=0.5)
    for seq_id in colours:
        _draw_label(axes, owners == seq_id, str(seq_id))
    axes.set_ylim(0, num_blocks)
    axes.set_ylabel("physical block", color=INK)


def _draw_label(axes: Axes, owned: np.ndarray, text: str) -> None:
    """Puts text into the tallest run of blocks that the sequence ever owned, if it fits there."""
    num_blocks, num_steps = owned.shape
    step = int(owned.sum(axis=0).argmax())
    edges = np.diff(np.concatenate([[0], owned[:, step], [0]]).astype(int))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not starts.size:
        return
    tallest = int((ends - starts).argmax())
    bottom, top = starts[tallest], ends[tallest]
    gaps = np.flatnonzero(~owned[(bottom + top) // 2])
    left = int(gaps[gaps < step].max(initial=-1)) + 1
    right = int(gaps[gaps > step].min(initial=num_steps))
    if top - bottom >= num_blocks / 40 and right - left >= num_steps / 50:
        axes.text(
            (left + right) / 2, (bottom + top) / 2, text,
            ha="center", va="center_baseline", color="white", fontsize=9, weight="bold",
        )  # fmt: skip


def _draw_preemptions(axes: Axes, steps: Sequence[Step]) -> None:
    times = [t for t, step in enumerate(steps) if step.preempted]
    if times:
        axes.plot(
            times, [1.015] * len(times), "v", color=INK, markersize=5, clip_on=False,
            transform=axes.get_xaxis_transform(), label="a sequence is preempted",
        )  # fmt: skip
        _legend_above(axes, (1, 1.02), 1)


def _draw_share(axes: Axes, steps: Sequence[Step], owners: np.ndarray, block_size: int) -> None:
    """Slots of the pool that hold a token, and reserved ones that do not yet."""
    held = np.array([sum(step.context_lens) for step in steps]) / (owners.shape[0] * block_size)
    reserved = (owners >= 0).mean(axis=0)
    edges = np.arange(len(steps) + 1)
    axes.stairs(reserved, edges, fill=True, color=EMPTY, label="reserved, still empty")
    axes.stairs(held, edges, fill=True, color=HELD, label="hold a token")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50", "100 %"])
    axes.set_ylabel("slots", color=INK)
    axes.set_xlabel("step", color=INK)
    axes.set_facecolor(FREE)
    _legend_above(axes, (1, 0.98), 2)


def _legend_above(axes: Axes, anchor: tuple[float, float], columns: int) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=anchor, ncols=columns, frameon=False, fontsize=9,
        labelcolor=INK, borderaxespad=0.2, handlelength=1.2,
    )  # fmt: skip


def _draw_legend(figure: Figure, requests: Sequence[Request], colours: dict[int, str]) -> None:
    lengths = {r.seq_id: f"{len(r.prompt)} + {len(r.generated)}" for r in requests}
    figure.legend(
        handles=[Patch(color=colours[i], label=f"{i}: {text}") for i, text in lengths.items()],
        title="prompt + new tokens", title_fontsize=9, alignment="left",
        loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK, handlelength=1.2,
    ).get_title().set_color(INK)  # fmt: skip
