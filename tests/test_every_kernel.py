"""Every compiled CUDA kernel, on small cases that take its branches: the sanitizers' subset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from attention_case import DTYPES, FP8_DTYPES, HALF_DTYPES, Draw, build

pytestmark = pytest.mark.gpu

# Shared memory a block: all that the device has, and what compute capability 8.9 and 12.0 have.
LIMITS = [2**31 - 1, 99 * 1024]
HEAD_DIMS = [64, 128, 256]
# Of q and of the cache.
DTYPE_PAIRS = [(dtype, dtype) for dtype in DTYPES] + [
    (dtype, fp8) for dtype in HALF_DTYPES for fp8 in FP8_DTYPES
]
# Few and many sequences; split and whole units; blocks of more, fewer and other than 16 tokens.
SHAPES: list[tuple[list[int], int, tuple[int, int], dict[str, Any]]] = [
    ([700], 16, (8, 8), {"batch_invariant": True, "causal": False}),
    (
        [0, 33, 1, 260, 17],
        3,
        (4, 2),
        {
            "window": 37,
            "softcap": 2.0,
            "alibi": True,
            "sinks": torch.float32,
            "k_scale": "[]",
            "v_scale": "[G]",
        },
    ),
    ([20 + 7 * i for i in range(40)], 32, (16, 8), {}),
]


def short_queries(batch: int) -> list[int]:
    """Ragged queries, 0 to 3 a sequence."""
    return [(1 + b * 5) % 4 for b in range(batch)]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize(("lens", "block_size", "heads", "options"), SHAPES)
def test_every_kernel(
    draw: Draw,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    rows: int,
    limit: int,
    lens: list[int],
    block_size: int,
    heads: tuple[int, int],
    options: dict[str, Any],
) -> None:
    num_heads, num_kv_heads = heads
    case = build(
        draw,
        lens,
        query_len=short_queries(len(lens)) if rows == 1 else rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        **options,
    )
    previous = torch.ops.paged_attn._set_shared_memory_cap(limit)
    try:
        results = case.decode_with_lse()
    finally:
        torch.ops.paged_attn._set_shared_memory_cap(previous)
    assert_accurate(case, *results)
