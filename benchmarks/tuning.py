"""The numbers that the CUDA launch heuristics rest on, and what other values of them would change.

Names, defaults and limits are csrc/cuda/decode/tuning.h's, asked for through private ops; here are
the values worth trying and the cells to try them in. Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import cases, sweeps
from benchmarks.cases import DTYPES, Cell

# Values to try for each number; the one in force is always compared with.
CANDIDATES = {
    "head_lanes_least_segments": (5000, 7500, 8750, 10000, 15000, 20000),
    "head_lanes_least_segments_unaligned": (0, 625, 1250, 2500, 5000, 8750),
    "head_lanes_least_used": (5000, 6000, 7500, 9000, 10000),
    "many_sequences": (500, 1000, 2000, 3000, 5000, 100000),
    "unit_cost": (0, 1, 2, 4, 6),
    "unit_cost_of_token_lane": (0, 1, 2, 3),
    "most_unit_cost": (4, 8, 12, 16, 24),
    "unit_cost_least_segments": (2500, 5000, 7500, 10000),
    "least_tiles_of_token_lane": (1, 2, 4),
    "one_sequence_most_idle": (0, 500, 1000, 1667, 3000),
    "one_sequence_whole_tiles": (1, 16, 32, 64),
    "equal_parts_most_idle": (0, 500, 1000, 2000, 10000),
    "invariant_unit_cost": (0, 4, 8, 12, 16),
    "invariant_chunk_shift": (2, 3, 4, 5),
    "invariant_chunk_shift_of_short_rows": (3, 4, 5),
    "invariant_short_row_bytes": (64, 128, 256),
}

# Beside a sweep of batch sizes and the table's cells: rows that are no whole memory lines, KV heads
# that are no power of 2, more KV heads than most, short ragged batches.
MORE_SHAPES = (
    "4,32,8,120,8192",
    "16,32,8,120,8192",
    "64,32,8,120,4096",
    "64,40,10,128,4096",
    "128,10,5,128,2048",
    "1,40,40,128,8192",
    "1,48,48,128,8192",
    "1,56,56,128,8192",
    "1,32,8,128,256",
    "1,32,8,128,1024",
    "8,32,8,128,100-1000",
    "16,32,8,128,100-1000",
    "32,9,3,64,100-1000",
)

Config = tuple[int, ...]


@dataclass(frozen=True)
class Card:
    """What of a card decides the choice.

    Attributes:
        name: the card's.
        compute_capability: major * 10 + minor.
        num_sms: multiprocessors.
        shared_memory: bytes that a block may opt in to.
    """

    name: str
    compute_capability: int
    num_sms: int
    shared_memory: int


def this_card() -> Card:
    """The current CUDA device."""
    properties: Any = torch.cuda.get_device_properties()
    return Card(
        properties.name,
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def names() -> list[str]:
    """The numbers, in the order of lists."""
    return torch.ops.paged_attn._tuning_names().split()


def changed(numbers: list[int], name: str, value: int) -> list[int]:
    """The list with another value for one number."""
    at = names().index(name)
    return [*numbers[:at], value, *numbers[at + 1 :]]


def variant_of(name: str) -> str:
    """The variant of decode that a number decides about, see `variants.SYNTAX`."""
    return "invariant" if name.startswith("invariant_") else ""


def all_cells(quick: bool = False) -> list[Cell]:
    """The cells to try candidates in, every other one if it shall be quick."""
    base = sweeps.base_cell("cuda", None, None)
    batches = [c for c in sweeps.sweep_cells("batch", base) if c.context == base.context]
    more = [cases.parse_shape(text, "cuda") for text in MORE_SHAPES]
    by_shape: dict[Cell, Cell] = {}
    for cell in [*batches, *cases.cells_for("cuda"), *more]:
        by_shape.setdefault(replace(cell, name="", sweep="", series="", x=0), cell)
    return list(by_shape.values())[:: 2 if quick else 1]


def config_of(cell: Cell, variant: str, card: Card, numbers: list[int]) -> Config:
    """The launch configuration that a card with these numbers chooses for a cell."""
    nbytes = DTYPES[cell.dtype].itemsize
    table_tokens = max(cell.lengths or (cell.context_range[1] - 1,))
    return tuple(
        torch.ops.paged_attn._decode_config(
            nbytes,
            nbytes,
            variant == "invariant",
            cell.batch,
            1,
            cell.batch,
            0,
            cell.heads,
            cell.kv_heads,
            cell.head_dim,
            -(-table_tokens // cell.page) * cell.page,
            False,
            card.num_sms,
            card.shared_memory,
            numbers,
        )
    )


@dataclass(frozen=True)
class Launch:
    """Numbers, and the configuration that they give in some cell."""

    numbers: tuple[int, ...]
    config: Config


@dataclass(frozen=True)
class Trial:
    """A cell in which other numbers change the launch.

    Attributes:
        cell: the shape.
        variant: of decode, see `variants.SYNTAX`.
        base: with the numbers so far.
        others: by key those that differ from it; several may have the same configuration.
    """

    cell: Cell
    variant: str
    base: Launch
    others: dict[int, Launch]


def find_trial(
    cell: Cell, variant: str, card: Card, numbers: list[int], others: dict[int, list[int]]
) -> Trial | None:
    """What there is to measure of others beside the numbers in a cell, None if nothing."""
    base = Launch(tuple(numbers), config_of(cell, variant, card, numbers))
    launches = {
        key: Launch(tuple(values), config_of(cell, variant, card, values))
        for key, values in others.items()
    }
    different = {k: launch for k, launch in launches.items() if launch.config != base.config}
    return Trial(cell, variant, base, different) if different else None


def find_candidates(name: str, numbers: list[int]) -> dict[int, list[int]]:
    """By a number's other values the numbers with these."""
    current = numbers[names().index(name)]
    return {v: changed(numbers, name, v) for v in CANDIDATES[name] if v != current}


@dataclass(frozen=True)
class Row:
    """What other numbers cost in one cell.

    Attributes:
        cell: its name.
        median_us: a call's time with the numbers so far, infinite where its result is wrong.
        ratios: times of the others that change the launch over that, by key.
    """

    cell: str
    median_us: float
    ratios: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds of it; None: the result is wrong."""
        ratios = {str(k): v if math.isfinite(v) else None for k, v in self.ratios.items()}
        median = self.median_us if math.isfinite(self.median_us) else None
        return {"cell": self.cell, "median_us": median, "ratios": ratios}


def mean_cost(rows: list[Row], key: int) -> float:
    """The geometric mean over all rows, of which those whose launch stays the same count as 1."""
    return math.exp(sum(math.log(row.ratios.get(key, 1.0)) for row in rows) / max(len(rows), 1))


def best_value(rows: list[Row], current: int, least_gain: float) -> int:
    """The candidate that costs least, the current value unless that gains `least_gain`."""
    values = sorted({value for row in rows for value in row.ratios})
    costs = {value: mean_cost(rows, value) for value in values}
    best = min(costs, key=lambda value: costs[value], default=current)
    return best if costs.get(best, 1.0) < 1 - least_gain else current


def table(title: str, rows: list[Row]) -> str:
    """What others cost in each cell, over the numbers so far."""
    if not rows:
        return f"{title}: no candidate changes the launch of any cell here"
    keys = sorted({key for row in rows for key in row.ratios})
    heading = "time over that so far; =: the same launch"
    width = max(len(heading), *(len(row.cell) for row in rows))

    def line(name: str, median: str, texts: list[str]) -> str:
        return " ".join([f"{name:{width}s} {median:>8s}", *(f"{text:>7s}" for text in texts)])

    def text(ratio: float | None) -> str:
        return "=" if ratio is None else f"{ratio:.3f}" if math.isfinite(ratio) else "WRONG"

    lines = [title, line(heading, "µs", ["new" if key < 0 else str(key) for key in keys])]
    for row in rows:
        lines.append(
            line(row.cell, f"{row.median_us:.1f}", [text(row.ratios.get(k)) for k in keys])
        )
    lines.append(line("geometric mean", "", [text(mean_cost(rows, key)) for key in keys]))
    return "\n".join(lines)


def cpp_entry(card: Card, numbers: list[int], comment: str) -> str:
    """The card's entry for kTunings in tuning.h."""
    fields = [f"         /*{name}=*/{value}," for name, value in zip(names(), numbers, strict=True)]
    head = [f"    // {card.name}: {comment}", f"    {{{card.compute_capability},"]
    return "\n".join([*head, f"     {card.num_sms},", "     {", *fields, "     }},"])
