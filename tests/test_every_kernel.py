"""Every compiled CUDA kernel, on small cases that take its branches: the sanitizers' subset."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate
from attention_case import DTYPES, Draw, build

pytestmark = pytest.mark.gpu

# Shared memory a block: all that the device has, and what compute capability 8.9 and 12.0 have.
LIMITS = [None, 99 * 1024]
# Few and many sequences; split and whole units; blocks of more, fewer and other than 16 tokens.
SHAPES = [
    ([700], 16, (8, 8)),
    ([0, 33, 1, 260, 17], 3, (4, 2)),
    ([20 + 7 * i for i in range(40)], 32, (16, 8)),
]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lens", "block_size", "heads"), SHAPES)
def test_every_kernel(
    draw: Draw,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    limit: int | None,
    lens: list[int],
    block_size: int,
    heads: tuple[int, int],
) -> None:
    if limit is not None:
        monkeypatch.setenv("PAGED_ATTN_MAX_SHARED_MEMORY", str(limit))
    num_heads, num_kv_heads = heads
    query_lens = [(1 + b * 5) % 4 for b in range(len(lens))] if rows == 1 else rows
    case = build(
        draw,
        lens,
        query_len=query_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert_accurate(case, *case.decode_with_lse())
