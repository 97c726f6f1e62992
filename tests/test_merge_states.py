"""merge_states: attention over disjoint keys becomes attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from accuracy import assert_accurate, assert_lse, assert_same_bits, ulp
from attention_case import DTYPES, Draw, build

from paged_attn import reference

merge_states = torch.ops.paged_attn.merge_states


def states(
    draw: Draw, parts: int, *shape: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outs = [draw.normal(*shape, dtype=dtype) for _ in range(parts)]
    return outs, [3 * draw.normal(*shape[:-1]) for _ in range(parts)]


def assert_merged(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    """One rounding to the result's dtype, and fp32's in between."""
    out, lse = merge_states(outs, lses)
    expected, expected_lse = reference.merge_states(outs, lses)
    assert out.dtype == outs[0].dtype
    assert out.shape == outs[0].shape
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_lse(lse, expected_lse)
    error = (out.double() - expected).abs()
    largest = torch.stack(outs).double().nan_to_num(0.0).abs().amax() if out.numel() else 0.0
    assert bool((error <= 0.5 * ulp(expected, out.dtype) + 1e-6 * largest).all())


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_definition(draw: Draw, device: str, dtype: torch.dtype, parts: int) -> None:
    for lead in ((), (5,), (2, 3)):
        heads, dim = draw.rng.choice((1, 3, 8)), draw.rng.choice((1, 7, 8, 64, 72, 128, 200))
        assert_merged(*states(draw, parts, *lead, heads, dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_is_the_result(draw: Draw, device: str, dtype: torch.dtype) -> None:
    (out,), (lse,) = states(draw, 1, 6, 4, 64, dtype=dtype)
    out[..., ::3] = -0.0
    lse[0] = 1e30
    lse[1] = -1e30
    lse[2] = math.inf
    merged, merged_lse = merge_states([out], [lse])
    assert_same_bits(merged, out)
    assert_same_bits(merged_lse, lse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_that_saw_nothing_vanish(
    draw: Draw, device: str, dtype: torch.dtype, value: float
) -> None:
    outs, lses = states(draw, 3, 6, 4, 64, dtype=dtype)
    outs[1][..., ::3] = -0.0
    for part in (0, 2):
        outs[part][1:] = value
        lses[part][1:] = -math.inf
    merged, lse = merge_states(outs, lses)
    assert_same_bits(merged[1:], outs[1][1:])
    assert_same_bits(lse[1:], lses[1][1:])
    assert not merged.isnan().any()
    lses[1][3] = -math.inf
    merged, lse = merge_states(outs, lses)
    assert_same_bits(merged[3], torch.zeros_like(merged[3]))
    assert bool((lse[3] == -math.inf).all())
    assert_same_bits(merged[4], outs[1][4])


def test_bad_rows_stay_bad(draw: Draw, device: str) -> None:
    """A sequence with bad content is NaN in its part, and so in the whole."""
    outs, lses = states(draw, 3, 4, 2, 64, dtype=torch.float16)
    outs[1][2] = math.nan
    lses[1][2] = math.nan
    merged, lse = merge_states(outs, lses)
    assert bool(merged[2].isnan().all())
    assert bool(lse[2].isnan().all())
    assert not merged[[0, 1, 3]].isnan().any()


def test_logarithms_far_apart(draw: Draw, device: str) -> None:
    outs, lses = states(draw, 2, 5, 2, 64, dtype=torch.float32)
    lses[0] += 80_000.0
    merged, lse = merge_states(outs, lses)
    assert_same_bits(merged, outs[0])
    assert_same_bits(lse, lses[0])
    lses[1] = lses[0].clone()
    assert_merged(outs, lses)


def test_strides(draw: Draw, device: str) -> None:
    """Parts of one buffer side by side, heads first, rows with gaps, and misaligned rows."""
    stacked = draw.normal(6, 3, 4, 64, dtype=torch.float16)
    logs = draw.normal(6, 3, 4)
    assert_merged(list(stacked.unbind(1)), list(logs.unbind(1)))
    by_head = [draw.normal(4, 6, 72, dtype=torch.bfloat16).transpose(0, 1)[..., :64] for _ in "ab"]
    assert_merged(by_head, [draw.normal(4, 6).t() for _ in "ab"])
    assert_merged([t[..., 1:] for t in by_head], [draw.normal(6, 4) for _ in "ab"])
    row = draw.normal(1, 4, 64)
    assert_merged([row.expand(6, -1, -1), draw.normal(6, 4, 64)], [draw.normal(6, 4)] * 2)
    odd = draw.normal(1, 1, 64).as_strided((1, 1, 64), (0, 2**62, 1))
    assert_merged([odd, draw.normal(1, 1, 64)], [draw.normal(1, 1) for _ in "ab"])


def test_of_no_rows(draw: Draw, device: str) -> None:
    for shape in ((0, 4, 64), (3, 0, 64)):
        assert_merged(*states(draw, 2, *shape, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_parts_as_there_may_be(draw: Draw, device: str, dtype: torch.dtype) -> None:
    outs, lses = states(draw, 512, 2, 2, 16, dtype=dtype)
    assert_merged(outs, lses)
    with pytest.raises(ValueError, match=r"outs must be from 1 to 512 tensors, got 513"):
        merge_states([*outs, outs[0]], [*lses, lses[0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_caches(draw: Draw, device: str, dtype: torch.dtype) -> None:
    """Columns of a block table apart, decoded apart and merged, are one decode."""
    block_size = 16
    case = build(draw, [90, 17, 64, 5], dtype=dtype, block_size=block_size)
    parts = []
    for first, last in ((0, 1), (1, 4), (4, 8)):
        lens = (case.context_lens - first * block_size).clamp(0, (last - first) * block_size)
        part = case.with_(block_tables=case.block_tables[:, first:last], context_lens=lens)
        parts.append(part.decode_with_lse())
    out, lse = merge_states([out for out, _ in parts], [lse for _, lse in parts])
    if dtype == torch.float32:
        assert_accurate(case, out, lse)
    expected, expected_lse = case.decode_with_lse()
    torch.testing.assert_close(
        out, expected, atol=2e-2 if dtype == torch.bfloat16 else 2e-3, rtol=0
    )
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_merging_pairs_is_merging_all(draw: Draw, device: str) -> None:
    outs, lses = states(draw, 3, 4, 2, 64, dtype=torch.float32)
    first = merge_states(outs[:2], lses[:2])
    out, lse = merge_states([first[0], outs[2]], [first[1], lses[2]])
    expected, expected_lse = merge_states(outs, lses)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-5)
