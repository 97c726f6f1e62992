"""The CUDA launch is chosen from shapes, processors and shared memory, and is one that exists."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_batch_invariance import LENS

INSTANTIATIONS = Path(__file__).parents[1] / "csrc/cuda/decode/instantiations"
SHARED_KB = [99, 163, 227]  # what blocks may have on compute capability 8.9 and 12.0, 8.0, 9.0
BATCHES = [0, 1, 2, 7, 32, 64, 300, 70000]
HEADS = [(1, 1), (8, 1), (71, 1), (9, 3), (10, 5), (32, 8), (64, 8), (32, 32), (24, 12)]
HEAD_DIMS = [8, 64, 72, 128, 136, 256]
# Bytes of an element of q and of the cache.
DTYPES = {
    "fp16": (2, 2),
    "bf16": (2, 2),
    "fp32": (4, 4),
    "fp16_e4m3": (2, 1),
    "fp16_e5m2": (2, 1),
    "bf16_e4m3": (2, 1),
    "bf16_e5m2": (2, 1),
}


# Of enum Variant.
GENERAL, INVARIANT, PLAIN, ONE = range(4)


class Config(NamedTuple):
    variant: int
    head_dim: int
    rings: int
    row_tiles: int
    stages: int
    head_lanes: int
    token_lanes: int
    grid: int
    unit_blocks: int
    min_tiles: int
    unit_cost: int
    line_shift: int
    max_chunks: int
    leaves: int
    least_chunk_shift: int
    has_state_buffers: bool
    has_unit_buffers: bool
    shared_bytes: int


def choose(
    batch: int = 1,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    *,
    query_len: int = 1,
    ragged_tokens: int | None = None,
    max_query_len: int = 0,
    element_bytes: int = 2,
    cache_bytes: int | None = None,
    batch_invariant: bool = False,
    table_tokens: int = 4096,
    has_options: bool = False,
    num_sms: int = 132,
    shared_kb: int = 227,
    tuning: Sequence[int] = (),
) -> Config:
    """The choice for uniform queries, or for `ragged_tokens` ragged ones in all."""
    ragged = ragged_tokens is not None
    return Config(
        *torch.ops.paged_attn._decode_config(
            element_bytes,
            element_bytes if cache_bytes is None else cache_bytes,
            batch_invariant,
            batch,
            0 if ragged else query_len,
            ragged_tokens if ragged else batch * query_len,
            max_query_len,
            *heads,
            head_dim,
            table_tokens,
            has_options,
            num_sms,
            shared_kb * 1024,
            tuning,
        )
    )


@pytest.mark.parametrize("shared_kb", [*SHARED_KB, 120, 200])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_chosen_can_be_launched(
    head_dim: int, dtype: str, batch_invariant: bool, shared_kb: int
) -> None:
    names = {path.stem for path in INSTANTIATIONS.glob("*.cu")}
    element_bytes, cache_bytes = DTYPES[dtype]
    for batch, heads, query_len in itertools.product(BATCHES, HEADS, [1, 2, 9]):
        config = choose(
            batch,
            heads,
            head_dim,
            query_len=query_len,
            element_bytes=element_bytes,
            cache_bytes=cache_bytes,
            batch_invariant=batch_invariant,
            shared_kb=shared_kb,
        )
        assert config.head_dim >= head_dim
        assert config.head_dim // 2 < max(head_dim, 64)
        rows = 8 * config.row_tiles
        shape = f"d{config.head_dim}_rings{config.rings}_rows{rows}_stages{config.stages}"
        assert f"{dtype}_{shape}" in names
        # Beside what the launch asks for the kernel keeps 12 bytes a thread, and some.
        threads = 32 * config.rings * config.row_tiles
        assert config.shared_bytes + 12 * threads + 256 <= shared_kb * 1024
        assert config.head_lanes * config.token_lanes == config.rings
        assert config.token_lanes & (config.token_lanes - 1) == 0
        # Named barriers: one a ring from 1 on, 16 in all.
        assert config.row_tiles == 1 or config.rings <= 15
        assert 1 <= config.grid <= 132
        assert config.min_tiles >= 1


def grid_of(segments: int, num_sms: int) -> int:
    """Equal parts of few segments if they leave at most 5 % of the processors idle, else all."""
    equal_parts = num_sms // segments * segments
    return equal_parts if equal_parts * 20 >= num_sms * 19 else num_sms


# Of 60 and 100 processors exactly 5 % are idle for some numbers of segments.
@pytest.mark.parametrize("num_sms", [1, 58, 60, 100, 108, 132, 188])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8)])
def test_few_segments_are_cut_into_equal_parts(heads: tuple[int, int], num_sms: int) -> None:
    for batch in range(2, num_sms + 2):
        config = choose(batch, heads, num_sms=num_sms)
        segments = batch * -(-heads[1] // config.head_lanes)
        assert config.grid == grid_of(segments, num_sms)


def test_equal_parts_are_only_those_that_few_processors_pay_for() -> None:
    assert choose(4).grid == choose(8).grid == choose(16).grid == 128
    assert choose(3).grid == choose(6).grid == choose(12).grid == 132


def test_one_sequence_fills_the_card() -> None:
    assert choose(1).grid == 128
    assert choose(1, (8, 1)).grid == 132
    # Two blocks for each unit would leave 29 % and 30.3 % of the processors idle.
    assert choose(1, (47, 47)).grid == 94
    assert choose(1, (46, 46)).grid == 132
    assert choose(1).head_lanes == 1


@pytest.mark.parametrize("num_sms", [1, 58, 108, 132, 148])
@pytest.mark.parametrize("query_len", [1, 4, 9, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_one_sequences_units_have_as_many_blocks_each(
    heads: tuple[int, int], query_len: int, num_sms: int
) -> None:
    config = choose(1, heads, query_len=query_len, num_sms=num_sms)
    passes = -(-query_len * (heads[0] // heads[1]) // (8 * config.row_tiles))
    units = heads[1] * passes
    most = num_sms // units * units
    if most * 10 >= num_sms * 7:
        assert config.variant == ONE
        assert config.unit_blocks == num_sms // units
        assert config.grid == most
        assert (config.head_lanes, config.token_lanes) == (1, config.rings)
    else:
        assert config.variant == PLAIN
        segments = -(-heads[1] // config.head_lanes) * passes
        assert config.grid == grid_of(segments, num_sms)


def test_kernels_are_compiled_for_what_most_calls_ask() -> None:
    """And those with every option for the rest."""
    fp8: dict[str, Any] = {"cache_bytes": 1}
    assert choose(2).variant == choose(2, **fp8).variant == PLAIN
    assert choose(1).variant == ONE
    assert choose(1, ragged_tokens=1).variant == choose(1, **fp8).variant == PLAIN
    assert choose(2, batch_invariant=True).variant == INVARIANT
    assert choose(1, batch_invariant=True).variant == INVARIANT
    assert choose(2, batch_invariant=True, head_dim=256).variant == GENERAL
    assert choose(2, batch_invariant=True, has_options=True).variant == GENERAL
    assert choose(1, has_options=True).variant == GENERAL
    assert choose(2, element_bytes=4).variant == GENERAL
    assert choose(1, shared_kb=99).variant == PLAIN
    assert choose(2, shared_kb=99, **fp8).variant == GENERAL


def test_heads_lie_side_by_side_as_long_as_every_processor_has_a_segment() -> None:
    assert choose(128).head_lanes == 8
    assert choose(64).head_lanes == 4
    assert choose(26).head_lanes == 1
    assert choose(16, (64, 8)).head_lanes == 1
    assert choose(32, (32, 32)).head_lanes == 8
    assert choose(128, (8, 1)).head_lanes == 1


def test_of_many_sequences_at_most_two_rings_share_a_heads_tokens() -> None:
    assert choose(26).token_lanes == 8
    assert choose(27).token_lanes == 2
    assert choose(32).token_lanes == 2
    assert choose(32, (8, 1)).token_lanes == 8  # there are no other heads to take


@pytest.mark.parametrize("heads", [(8, 8), (9, 3)])
def test_batch_invariance_pairs_the_rings_of_many_sequences(heads: tuple[int, int]) -> None:
    """Those of test_batch_invariance.py; bits must not show it."""
    many = choose(len(LENS), heads, head_dim=64, batch_invariant=True)
    alone = choose(1, heads, head_dim=64, batch_invariant=True)
    assert (many.head_lanes, many.token_lanes) == (4, 2)
    assert (alone.head_lanes, alone.token_lanes) == (1, 8)


def test_heads_that_share_memory_lines_lie_side_by_side() -> None:
    assert choose(16).head_lanes == 1
    assert choose(16, head_dim=120).head_lanes == 8
    assert choose(16, head_dim=192).head_lanes == choose(16, head_dim=256).head_lanes
    assert choose(1, head_dim=120).head_lanes == 1  # merges of 132 parts would cost more


def test_units_count_for_more_than_their_tiles_where_blocks_have_several() -> None:
    assert choose(32).unit_cost == 6
    assert choose(300, (8, 1)).unit_cost == 16
    assert choose(300, (32, 8)).unit_cost == 4
    assert choose(8).unit_cost == 16
    assert choose(7).unit_cost == 0
    assert choose(1).unit_cost == 0


def test_rows_beyond_a_tile_share_the_ring() -> None:
    assert choose(heads=(8, 1)).row_tiles == 1
    assert choose(heads=(9, 1)).row_tiles == 2
    assert choose(heads=(4, 1), query_len=3).row_tiles == 2


def test_what_decides_a_sequences_bits_does_not_depend_on_the_batch() -> None:
    """Where batch_invariant is asked for; the line's steps decide only who computes what."""
    for heads, head_dim, cache_bytes in itertools.product(HEADS, HEAD_DIMS, [1, 2]):
        chosen = {
            choose(
                batch,
                heads,
                head_dim,
                query_len=query_len,
                cache_bytes=cache_bytes,
                batch_invariant=True,
                table_tokens=table_tokens,
            )
            for batch in BATCHES
            for query_len in [1, 2, 9]
            for table_tokens in [100, 2**20]
        }
        # Who computes what may depend on it: all rings the same head's tokens, or two.
        assert {config.token_lanes for config in chosen} <= {config.rings for config in chosen} | {
            2
        }
        who = dict.fromkeys(
            ("line_shift", "head_lanes", "token_lanes", "min_tiles", "unit_cost"), 0
        )
        assert len({config._replace(**who) for config in chosen}) == 1


def test_ragged_rows_are_guessed_from_what_is_known() -> None:
    assert choose(8, ragged_tokens=8).row_tiles == 1
    assert choose(8, ragged_tokens=40).row_tiles == 2
    assert choose(8, ragged_tokens=40, max_query_len=2).row_tiles == 1
    assert choose(8, ragged_tokens=8, max_query_len=5).row_tiles == 2
    assert choose(0, ragged_tokens=5).grid >= 1


def test_the_line_is_cut_into_single_tiles_unless_it_is_too_long_for_32_bits() -> None:
    """Coarser steps, and with them the table's width in the choice, are a last resort."""
    for batch, heads in [(256, (32, 8)), (1024, (32, 8)), (64, (128, 1))]:
        assert choose(batch, heads, table_tokens=131072).line_shift == 0
    assert choose(512, query_len=4, table_tokens=131072).line_shift == 0
    for batch, table_tokens in [(70000, 2**20), (2**20, 2**20), (2**27, 2**31 - 1)]:
        config = choose(batch, (32, 32), table_tokens=table_tokens)
        units = batch * -(-32 // config.head_lanes)
        steps = -(-table_tokens // (16 << config.line_shift))
        assert 0 < config.line_shift <= 30
        assert units * steps < 2**31
    assert choose(2**31 - 1, (32, 32)).line_shift > 30


def test_one_sequence_has_no_line_of_its_own_that_is_too_long_for_32_bits() -> None:
    assert choose(1, (128, 128), table_tokens=2**26).variant == ONE
    assert choose(1, (128, 128), table_tokens=2**28).variant == PLAIN
    assert choose(1, (64, 64), table_tokens=2**31 - 1).variant == PLAIN


def test_too_little_shared_memory_is_noticed() -> None:
    assert choose(shared_kb=48).rings == 0


def test_every_shape_is_compiled_and_no_other() -> None:
    generate = [sys.executable, INSTANTIATIONS / "generate.py", "--check"]
    result = subprocess.run(generate, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 1 <= len(list(INSTANTIATIONS.glob("*.cu"))) <= 150
