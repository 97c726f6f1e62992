"""Mistakes that no single argument shows by itself."""

from __future__ import annotations

import pytest
import torch
from attention_case import Draw, build
from test_arguments import CANARY, HEADS, OVERLOADS, call, decode_arguments


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("argument", ["k_cache", "v_cache", "block_tables", "context_lens"])
def test_a_meta_tensor_among_real_ones(
    draw: Draw, device: str, argument: str, overload: str
) -> None:
    arguments = decode_arguments(draw)
    arguments[argument] = arguments[argument].to("meta")
    with pytest.raises(ValueError, match=f"{argument} must be on q's device {device}"):
        call(overload, arguments)
    assert bool((arguments["out"] == CANARY).all())


def test_a_meta_tensor_in_reshape_and_cache(draw: Draw, device: str) -> None:
    case = build(draw, [20, 5], fill=0.0)
    key = draw.normal(3, 2, 64, dtype=torch.float16)
    slots = torch.tensor([4, -1, 17], device="meta")
    with pytest.raises(ValueError, match="slot_mapping must be on key's device"):
        torch.ops.paged_attn.reshape_and_cache(key, key, case.k_cache, case.v_cache, slots)


@pytest.mark.parametrize("strides", [(64, 32, 1), (2, 128, 64), (64, 64, 1)])
def test_an_output_that_overlaps_itself(
    draw: Draw, device: str, strides: tuple[int, int, int]
) -> None:
    case = build(draw, [40, 17, 1], num_heads=HEADS)
    buffer = torch.full((10000,), CANARY, dtype=torch.float16, device=device)
    if strides[-1] != 1:
        case = case.with_(q=case.q.contiguous())
    out = buffer.as_strided(case.q.shape, strides)
    with pytest.raises(ValueError, match=r"paged_attn\.decode: out must be"):
        torch.ops.paged_attn.decode.out(*case.args, out=out)
    assert bool((buffer == CANARY).all())


def test_none_for_a_tensor(draw: Draw, device: str) -> None:
    arguments = decode_arguments(draw)
    arguments["k_cache"] = None
    with pytest.raises((ValueError, TypeError), match=r"k_cache"):
        call("decode", arguments)


@pytest.mark.parametrize("scale", [1e300, -3.5e38])
def test_a_scale_beyond_float32(draw: Draw, device: str, scale: float) -> None:
    case = build(draw, [40, 17, 1], num_heads=HEADS)
    with pytest.raises(ValueError, match="scale must be finite in float32"):
        case.decode(scale=scale)


def test_a_table_with_more_columns_than_there_are_positions(draw: Draw, device: str) -> None:
    case = build(draw, [40])
    wide = case.block_tables.as_strided((1, 2**31), (0, 0))
    with pytest.raises(ValueError, match="block_tables must be"):
        case.with_(block_tables=wide).decode()


@pytest.mark.usefixtures("checks")
def test_no_queries_at_all(draw: Draw, device: str) -> None:
    """Nothing is read, so nothing can be bad."""
    case = build(draw, [20, 5], query_len=0)
    case.block_tables.fill_(-7)
    out, lse = case.decode_with_lse()
    assert out.shape == case.q.shape
    assert lse.shape == case.q.shape[:-1]
    torch.ops.paged_attn.decode_with_lse.out(*case.args, out=out, lse=torch.empty_like(lse))


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize(("lens", "cu"), [([20], [0, 5]), ([], [5]), ([20, 5], [0, 0, -1])])
def test_entries_beyond_no_query_tokens(
    draw: Draw, device: str, lens: list[int], cu: list[int]
) -> None:
    """A bad cu_seqlens_q is told also where there is no row that it could spoil."""
    case = build(draw, lens, query_len=[0] * len(lens))
    case = case.with_(cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device))
    with pytest.raises(IndexError, match=rf"cu_seqlens_q\[{len(cu) - 1}\]"):
        case.decode()
