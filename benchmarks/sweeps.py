"""Named sweeps: cells that differ in one thing, in the order of that thing.

A sweep varies a base shape, which is the device's unless the user gives one. Points whose pools
would be larger than `MOST_BYTES` times the base's are left out, so that a sweep fits wherever its
base does comfortably.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import traces
from benchmarks.cases import LAYOUTS, Cell, usual

MOST_BYTES = 16

PAGES = (1, 8, 16, 32, 64, 128, 256)
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)
QUERY_LENS = (2, 3, 4, 6, 8, 16)
OPTIONS = ("invariant", "e4m3", "e5m2", "softcap=30", "alibi", "sinks", "q1-4", "apart", "append")


def base_cell(device: str, heads: tuple[int, ...] | None, shape: tuple[int, ...] | None) -> Cell:
    """The cell that sweeps vary and whose heads traces have.

    Args:
        device: "cuda" or "cpu".
        heads: query heads, KV heads and head dim, if not 32, 8 and 128.
        shape: sequences and context, if not the device's.

    Raises:
        ValueError: a shape that `Cell` refuses.
    """
    batch, context = shape or ((16, 8192) if device == "cuda" else (2, 2048))
    num_heads, kv_heads, head_dim = heads or (32, 8, 128)
    return Cell("", batch, num_heads, kv_heads, head_dim, context, **usual(device))


def tokens_text(tokens: int) -> str:
    """4096 as 4k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _heads_text(cell: Cell) -> str:
    return f"{cell.heads}/{cell.kv_heads} d{cell.head_dim}"


def _context(base: Cell) -> Iterator[Cell]:
    """Contexts by doubling, for one sequence, the base's number and four times that."""
    middle = base.context_range[0]
    for batch in sorted({1, base.batch, 4 * base.batch}):
        for power in range(-4, 5):
            context = max(1, int(middle * 2**power))
            yield replace(base, batch=batch, context=context, series=f"batch {batch}", x=context)


def _batch(base: Cell) -> Iterator[Cell]:
    """1 to 4 times the base's sequences, at the base's context and a quarter of it."""
    contexts = sorted({max(1, base.context_range[0] // 4), base.context_range[0]})
    batches = sorted({2**i for i in range(20) if 2**i <= 4 * base.batch} | {base.batch})
    batches = sorted({*batches, *(3 * b // 2 for b in batches if 1 < b < batches[-1])})
    for context in contexts:
        for batch in batches:
            series = f"context {tokens_text(context)}"
            yield replace(base, batch=batch, context=context, series=series, x=batch)


def _group(base: Cell) -> Iterator[Cell]:
    """Query heads a KV head."""
    for group in GROUPS:
        yield replace(base, heads=group * base.kv_heads, series=f"batch {base.batch}", x=group)


def _query(base: Cell) -> Iterator[Cell]:
    """The base with several groups; the queries are variants."""
    for group in (1, 4, 8):
        yield replace(base, heads=group * base.kv_heads, series=f"group {group}", x=group)


def _page(base: Cell) -> Iterator[Cell]:
    """Tokens a block, for the base and for one sequence."""
    for batch in sorted({1, base.batch}):
        for page in PAGES:
            yield replace(base, batch=batch, page=page, series=f"batch {batch}", x=page)


def _layout(base: Cell) -> Iterator[Cell]:
    """Memory orders of the pool, their blocks scattered or one after the other."""
    for layout in LAYOUTS:
        for scattered in (True, False):
            series = "scattered" if scattered else "contiguous"
            yield replace(base, layout=layout, scattered=scattered, series=series, x=layout)


def _ragged(base: Cell) -> Iterator[Cell]:
    """Distributions of length over as many tokens in all."""
    count = max(2, base.batch)
    total = count * base.context_range[0]
    for name, weights in _distributions(count).items():
        lengths = tuple(spread(total, weights))
        yield replace(base, batch=count, lengths=lengths, series="lengths", x=name)


def _distributions(count: int) -> dict[str, list[float]]:
    zipf = np.random.default_rng(0).permutation(1.0 / np.arange(1, count + 1)).tolist()
    known = {"uniform": [1.0] * count, "Zipf": zipf}
    for name in traces.built_in():
        known[name] = [float(n) for n in traces.draw_lengths(name, count, 0)]
    return known


def spread(total: int, weights: list[float]) -> list[int]:
    """Whole numbers of at least 1 that add up to `total`, in proportion to the weights."""
    bounds = np.round(np.cumsum(weights) * ((total - len(weights)) / sum(weights)))
    return (np.diff(bounds, prepend=0).astype(np.int64) + 1).tolist()


def _options(base: Cell) -> Iterator[Cell]:
    """The base alone; the options are variants."""
    yield replace(base, series="options", x="base")


@dataclass(frozen=True)
class Sweep:
    """What a sweep varies.

    Attributes:
        title: what the plot shows.
        cells: makes the points of a base.
        variants: columns beside ours.
    """

    title: str
    cells: Callable[[Cell], Iterator[Cell]]
    variants: tuple[str, ...] = ()


SWEEPS = {
    "context": Sweep("bandwidth against context length", _context),
    "batch": Sweep("time against the number of sequences", _batch),
    "group": Sweep("time against query heads a KV head", _group),
    "query": Sweep("time against queries a sequence", _query, tuple(f"q{n}" for n in QUERY_LENS)),
    "page": Sweep("time against tokens a block", _page),
    "layout": Sweep("memory orders of the pool", _layout),
    "ragged": Sweep("distributions of length, equal bytes", _ragged),
    "options": Sweep("what options cost", _options, OPTIONS),
}


def sweep_cells(name: str, base: Cell) -> list[Cell]:
    """A sweep's points, named."""
    limit = MOST_BYTES * base.most_pool_bytes
    cells = []
    for cell in SWEEPS[name].cells(base):
        if cell.most_pool_bytes > limit:
            continue
        label = f"{name} {cell.x}: B{cell.batch} {_heads_text(cell)} "
        label += f"{tokens_text(cell.context_range[0])}" if not cell.lengths else "ragged"
        if not cell.scattered:
            label += " contiguous"
        cells.append(replace(cell, name=label, sweep=name))
    return cells


def trace_cells(source: str, base: Cell, batch: int, steps: int, seed: int) -> list[Cell]:
    """A cell for each sampled decode step of a trace.

    Raises:
        ValueError: see `traces.step_lengths`.
    """
    sampled = traces.step_lengths(source, batch, steps, seed)
    name = source if source in traces.built_in() else source.rsplit("/", 1)[-1]
    return [
        replace(
            base,
            name=f"{name} step {step}: B{batch} {_heads_text(base)}",
            batch=batch,
            lengths=tuple(lengths),
            sweep="trace",
            series=name,
            x=step,
        )
        for step, lengths in sampled
    ]
