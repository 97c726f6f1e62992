"""The numbers behind the CUDA launch: what each decides, which card has which, bad ones refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from test_heuristics import BATCHES, HEADS, ONE, PLAIN, choose

from paged_attn import _library

ops = torch.ops.paged_attn
DEFAULTS = ops._table_tuning(0, 0)


def tuned(**values: int) -> list[int]:
    """The defaults with other values."""
    return list(
        {**dict(zip(ops._tuning_names().split(), DEFAULTS, strict=True)), **values}.values()
    )


# A number, another value, arguments of `choose`, and what that changes from and to.
EFFECTS: list[tuple[str, int, tuple[Any, ...], bool, str, int, int]] = [
    ("head_lanes_least_segments", 15000, (128,), False, "head_lanes", 8, 4),
    ("head_lanes_least_segments_unaligned", 8750, (16, (32, 8), 120), False, "head_lanes", 8, 1),
    ("head_lanes_least_used", 9000, (64, (40, 10)), False, "head_lanes", 4, 2),
    ("many_sequences", 3000, (32,), False, "head_lanes", 4, 2),
    ("unit_cost", 4, (32,), False, "unit_cost", 6, 8),
    ("unit_cost_of_token_lane", 1, (32,), False, "unit_cost", 6, 4),
    ("most_unit_cost", 12, (8,), False, "unit_cost", 16, 12),
    ("most_unit_cost", 64, (8,), False, "unit_cost", 16, 18),
    ("unit_cost_least_segments", 10000, (8,), False, "unit_cost", 16, 0),
    ("least_tiles_of_token_lane", 2, (8,), False, "min_tiles", 8, 16),
    ("one_sequence_most_idle", 0, (1,), False, "variant", ONE, PLAIN),
    ("one_sequence_most_idle", 2500, (1, (48, 48)), False, "variant", ONE, PLAIN),
    ("one_sequence_whole_tiles", 16, (1,), False, "min_tiles", 32, 16),
    ("one_sequence_whole_tiles", 16, (8,), False, "min_tiles", 8, 8),
    ("equal_parts_most_idle", 2000, (12,), False, "grid", 132, 132),
    ("equal_parts_most_idle", 10000, (12,), False, "grid", 132, 96),
    ("equal_parts_most_idle", 2000, (3,), False, "grid", 132, 120),
    ("equal_parts_most_idle", 0, (8,), False, "grid", 128, 132),
    ("invariant_unit_cost", 12, (64,), True, "unit_cost", 8, 12),
    ("invariant_chunk_shift", 5, (8,), True, "least_chunk_shift", 3, 5),
    (
        "invariant_chunk_shift_of_short_rows",
        5,
        (8, (32, 8), 64),
        True,
        "least_chunk_shift",
        4,
        5,
    ),
    ("invariant_short_row_bytes", 256, (8,), True, "least_chunk_shift", 3, 4),
]


@pytest.mark.parametrize(
    ("name", "value", "shape", "batch_invariant", "field", "before", "after"), EFFECTS
)
def test_each_number_decides_what_it_says(
    name: str,
    value: int,
    shape: tuple[Any, ...],
    batch_invariant: bool,
    field: str,
    before: int,
    after: int,
) -> None:
    options: dict[str, Any] = {"batch_invariant": batch_invariant}
    assert getattr(choose(*shape, **options), field) == before
    assert getattr(choose(*shape, **options, tuning=tuned(**{name: value})), field) == after


def test_every_number_is_tested() -> None:
    assert list(dict.fromkeys(effect[0] for effect in EFFECTS)) == ops._tuning_names().split()


def limits() -> dict[str, tuple[int, int]]:
    """The least and the most that each number may be, as errors tell."""
    found = {}
    for name in ops._tuning_names().split():
        with pytest.raises(ValueError, match="tuning must be of") as error:
            choose(tuning=tuned(**{name: -1}))
        told = re.search(rf"{name} from (\d+) to (\d+), got -1$", str(error.value))
        assert told
        found[name] = int(told[1]), int(told[2])
        with pytest.raises(ValueError, match=f"{name} from"):
            choose(tuning=tuned(**{name: found[name][1] + 1}))
    return found


@pytest.mark.parametrize("at", [0, 1], ids=["least", "most"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_whatever_the_numbers_are_what_is_chosen_can_be_launched(
    batch_invariant: bool, at: int
) -> None:
    """All as small or as large as they may be, or one of them."""
    extremes = {name: bounds[at] for name, bounds in limits().items()}
    tunings = [tuned(**extremes), *(tuned(**{name: v}) for name, v in extremes.items())]
    shapes = itertools.product(BATCHES, HEADS, [64, 72, 256])
    for shape, tuning in itertools.product(shapes, tunings):
        config = choose(*shape, batch_invariant=batch_invariant, tuning=tuning)
        assert config.head_lanes * config.token_lanes == config.rings
        assert 1 <= config.grid <= 132
        assert config.min_tiles >= 1
        assert 0 <= config.unit_cost <= 64


def test_too_few_or_too_many_numbers_are_refused() -> None:
    for numbers in (DEFAULTS[:-1], [*DEFAULTS, 1]):
        with pytest.raises(
            ValueError, match=rf"must be {len(DEFAULTS)} numbers .*, got {len(numbers)}$"
        ):
            choose(tuning=numbers)


def test_cards_are_found_in_the_table() -> None:
    """One that nobody has measured has the H200's numbers so far."""
    assert ops._table_tuning(90, 132) == ops._table_tuning(90, 114) == DEFAULTS
    assert ops._table_tuning(120, 188) == DEFAULTS


def test_a_process_may_have_other_numbers() -> None:
    if _library.why_no_cuda is not None:
        pytest.skip(f"the CUDA library is not loaded: {_library.why_no_cuda}")
    with pytest.raises(ValueError, match=r"got 1$"):
        ops._set_tuning([1])
    with pytest.raises(ValueError, match="unit_cost from 0 to 64, got 65"):
        ops._set_tuning(tuned(unit_cost=65))
    ops._set_tuning(tuned(unit_cost=5))
    try:
        if torch.cuda.is_available():
            assert ops._tuning(0) == tuned(unit_cost=5)
    finally:
        ops._set_tuning([])
    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(0)
        card = 10 * properties.major + properties.minor, properties.multi_processor_count
        assert ops._tuning(0) == ops._table_tuning(*card)
