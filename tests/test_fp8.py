"""Caches in fp8: every value is read exactly, at every head dim."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate, assert_lse, assert_same_bits
from attention_case import FP8_DTYPES, HALF_DTYPES, Draw, build, write


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_every_fp8_value(
    draw: Draw, device: str, head_dim: int, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """All 256 bytes, NaN, infinities, subnormals and the largest among them, as V and as K."""
    case = build(
        draw, [1] * 256, num_kv_heads=1, head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype
    )
    blocks, offsets = case.all_live_slots()
    every = torch.arange(256, dtype=torch.uint8, device=device)
    case.v_cache.view(torch.uint8)[blocks, offsets] = every[:, None, None]
    write(case.k_cache, (blocks, offsets), 1.0)
    values = every.view(cache_dtype).float()
    out = case.decode()
    expected = values.to(dtype)[:, None, None].expand_as(out)
    assert_same_bits(out + 0, expected + 0)  # either zero

    case.k_cache.view(torch.uint8)[blocks, offsets] = 0
    column = draw.rng.randrange(head_dim)
    case.k_cache.view(torch.uint8)[blocks, offsets, :, column] = every[:, None]
    write(case.v_cache, (blocks, offsets), 1.0)
    _, lse = case.decode_with_lse(scale=1.0)
    keys = case.q[..., column].double() * values.double()[:, None]
    finite = values.isfinite()
    assert_lse(lse[finite], keys[finite])
    assert bool(lse[values.isnan()].isnan().all())


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_fp8_of_every_head_dim(
    draw: Draw, device: str, head_dim: int, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    case = build(
        draw,
        [40, 17],
        num_heads=10,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        k_scale="[G]",
        v_scale="[G]",
    )
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
def test_largest_fp8_values(draw: Draw, device: str, cache_dtype: torch.dtype) -> None:
    """What saturated writes leave behind: sums of them neither overflow nor lose digits."""
    case = build(draw, [1, 50, 700], num_heads=10, cache_dtype=cache_dtype, v_scale="[G]")
    slots = case.all_live_slots()
    largest = torch.finfo(cache_dtype).max
    shape = (len(slots[0]), 2, 64)
    write(case.v_cache, slots, largest * (draw.integers(0, 1, *shape, dtype=torch.float32) * 2 - 1))
    case.options["v_scale"] = torch.tensor([1.0, 0.25], device=device)
    assert_accurate(case, *case.decode_with_lse())
