"""How the work is split must not show: one long sequence among many, spare lanes, many parts."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate
from attention_case import Draw, build

HEAD_DIMS = [64, 128, 256]


@pytest.mark.parametrize("heads", [(6, 6), (21, 7), (8, 8), (12, 1)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_long_sequence_among_many(
    draw: Draw, device: str, head_dim: int, heads: tuple[int, int]
) -> None:
    """Its tokens are most of the batch's: many blocks have a part of it."""
    lens = [1 + b % 40 for b in range(150)]
    lens[77] = 9000
    num_heads, num_kv_heads = heads
    case = build(draw, lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("query_len", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_sequence_over_the_whole_device(
    draw: Draw, device: str, dtype: torch.dtype, query_len: int | None
) -> None:
    """More parts than are merged at a time."""
    case = build(
        draw,
        [20000],
        query_len=query_len,
        num_heads=4,
        num_kv_heads=1,
        head_dim=128,
        dtype=dtype,
    )
    assert_accurate(case, *case.decode_with_lse())
