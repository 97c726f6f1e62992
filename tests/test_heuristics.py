"""The CUDA launch is chosen from shapes, processors and shared memory, and is one that exists."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

INSTANTIATIONS = Path(__file__).parents[1] / "csrc/cuda/decode/instantiations"
SHARED_KB = [99, 163, 227]  # what blocks may have on compute capability 8.9 and 12.0, 8.0, 9.0
BATCHES = [0, 1, 2, 7, 32, 64, 300, 70000]
HEADS = [(1, 1), (8, 1), (71, 1), (9, 3), (10, 5), (32, 8), (64, 8), (32, 32), (24, 12)]
HEAD_DIMS = [8, 64, 72, 128, 136, 256]


class Config(NamedTuple):
    head_dim: int
    rings: int
    row_tiles: int
    stages: int
    head_lanes: int
    token_lanes: int
    grid: int
    min_tiles: int
    shared_bytes: int


def choose(
    batch: int = 1,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    *,
    query_len: int = 1,
    element_bytes: int = 2,
    num_sms: int = 132,
    shared_kb: int = 227,
) -> Config:
    return Config(
        *torch.ops.paged_attn._decode_config(
            element_bytes, batch, query_len, *heads, head_dim, num_sms, shared_kb * 1024
        )
    )


@pytest.mark.parametrize("shared_kb", SHARED_KB)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_chosen_can_be_launched(head_dim: int, element_bytes: int, shared_kb: int) -> None:
    names = {path.stem for path in INSTANTIATIONS.glob("*.cu")}
    dtypes = {2: ["fp16", "bf16"], 4: ["fp32"]}[element_bytes]
    for batch, heads, query_len in itertools.product(BATCHES, HEADS, [1, 2, 9]):
        config = choose(
            batch,
            heads,
            head_dim,
            query_len=query_len,
            element_bytes=element_bytes,
            shared_kb=shared_kb,
        )
        assert config.head_dim >= head_dim
        assert config.head_dim // 2 < max(head_dim, 64)
        rows = 8 * config.row_tiles
        shape = f"d{config.head_dim}_rings{config.rings}_rows{rows}_stages{config.stages}"
        assert {f"{dtype}_{shape}" for dtype in dtypes} <= names
        # Beside what the launch asks for the kernel keeps 16 bytes a thread, and some.
        threads = 32 * config.rings * config.row_tiles
        assert config.shared_bytes + 16 * threads + 256 <= shared_kb * 1024
        assert config.head_lanes * config.token_lanes == config.rings
        assert config.token_lanes & (config.token_lanes - 1) == 0
        # Named barriers: one a head lane from 1 on, one a ring from 9 on, 16 in all.
        assert config.head_lanes <= 8
        assert config.row_tiles == 1 or config.rings <= 7
        assert 1 <= config.grid <= 132
        assert config.min_tiles >= 1


@pytest.mark.parametrize("num_sms", [1, 58, 108, 132, 188])
@pytest.mark.parametrize("batch", [1, 3, 8, 50, 64])
def test_few_segments_are_cut_into_equal_parts(batch: int, num_sms: int) -> None:
    config = choose(batch, num_sms=num_sms)
    segments = batch * (8 // config.head_lanes)
    if segments < num_sms:
        assert config.grid % segments == 0
        assert config.grid > num_sms - segments
    else:
        assert config.grid == num_sms


def test_one_sequence_fills_the_card() -> None:
    assert choose(1).grid == 128
    assert choose(1, (8, 1)).grid == 132
    assert choose(1).head_lanes == 1


def test_many_sequences_are_read_in_whole_rows() -> None:
    assert choose(64).head_lanes == 8
    assert choose(64, (32, 32)).head_lanes == 8


def test_rows_beyond_a_tile_share_the_ring() -> None:
    assert choose(heads=(8, 1)).row_tiles == 1
    assert choose(heads=(9, 1)).row_tiles == 2
    assert choose(heads=(4, 1), query_len=3).row_tiles == 2


def test_too_little_shared_memory_is_noticed() -> None:
    assert choose(shared_kb=48).rings == 0


def test_every_shape_is_compiled_and_no_other() -> None:
    generate = [sys.executable, INSTANTIATIONS / "generate.py", "--check"]
    result = subprocess.run(generate, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 1 <= len(list(INSTANTIATIONS.glob("*.cu"))) <= 150
