"""The same inputs give the same bits, whichever overload, placement of blocks or run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import DTYPES, OPTION_SETS, Case, Draw, build, option_set, write

import paged_attn

LENS = [700, 17, 0, 100, 1, 64, 300]
QUERIES: list[Any] = [None, 3, [2, 1, 0, 4, 1, 9, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
@pytest.mark.parametrize("query_len", QUERIES)
def test_placement_of_blocks(
    draw: Draw, device: str, query_len: Any, block_size: int, dtype: torch.dtype
) -> None:
    case = build(
        draw,
        LENS,
        query_len=query_len,
        block_size=block_size,
        dtype=dtype,
        **option_set(draw.rng.choice(list(OPTION_SETS)), dtype),
    )
    expected, expected_lse = case.decode_with_lse()
    num_blocks = case.k_cache.shape[0]
    for _ in range(3):
        places = torch.randperm(num_blocks, generator=draw.generator, device=device)
        k_cache, v_cache = torch.empty_like(case.k_cache), torch.empty_like(case.v_cache)
        write(k_cache, places, case.k_cache)
        write(v_cache, places, case.v_cache)
        tables = case.block_tables
        moved = torch.where(tables < 0, tables, places[tables.clamp(min=0)].int())
        out, lse = case.with_(
            k_cache=k_cache, v_cache=v_cache, block_tables=moved.contiguous()
        ).decode_with_lse()
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)


def test_shared_blocks(draw: Draw, device: str) -> None:
    """Sequences that share a prefix read the same bits as from copies of it."""
    case = build(draw, [64, 64], num_heads=6)
    for cache in (case.k_cache, case.v_cache):
        cache[case.block_tables[1, :4].long()] = cache[case.block_tables[0, :4].long()]
    expected = case.decode()
    tables = case.block_tables.clone()
    tables[1] = tables[0]
    assert_same_bits(case.with_(block_tables=tables).decode(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", QUERIES)
def test_run_to_run(draw: Draw, device: str, query_len: Any, dtype: torch.dtype) -> None:
    for name in ("plain", draw.rng.choice(list(OPTION_SETS))):
        case = build(
            draw, LENS, query_len=query_len, num_heads=8, dtype=dtype, **option_set(name, dtype)
        )
        assert_runs_agree(case)


def assert_runs_agree(case: Case) -> None:
    expected, expected_lse = case.decode_with_lse()
    for _ in range(25):
        out, lse = case.decode_with_lse()
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("name", OPTION_SETS)
def test_run_to_run_when_split(draw: Draw, device: str, name: str) -> None:
    """One sequence and few heads: several threads or blocks share a context."""
    case = build(draw, [20000], num_heads=2, num_kv_heads=1, **OPTION_SETS[name])
    expected = case.decode()
    for _ in range(50):
        assert_same_bits(case.decode(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", QUERIES)
def test_four_overloads(draw: Draw, device: str, query_len: Any, dtype: torch.dtype) -> None:
    options = option_set(draw.rng.choice(list(OPTION_SETS)), dtype)
    case = build(draw, LENS, query_len=query_len, num_heads=6, dtype=dtype, scale=0.2, **options)
    expected, expected_lse = case.decode_with_lse()
    out = torch.full_like(expected, float("nan"))
    lse = torch.full_like(expected_lse, float("nan"))

    assert_same_bits(case.decode(), expected)
    torch.ops.paged_attn.decode.out(*case.args, **case.options, out=out)
    assert_same_bits(out, expected)
    torch.ops.paged_attn.decode_with_lse.out(
        *case.args, **case.options, out=out.fill_(float("nan")), lse=lse
    )
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("query_len", QUERIES)
def test_python_fronts(draw: Draw, device: str, query_len: Any) -> None:
    case = build(draw, LENS, query_len=query_len, num_heads=6, scale=0.2)
    expected, expected_lse = case.decode_with_lse()
    out = torch.full_like(expected, float("nan"))
    lse = torch.full_like(expected_lse, float("nan"))

    assert_same_bits(paged_attn.decode(*case.args, **case.options), expected)
    assert paged_attn.decode(*case.args, **case.options, out=out) is out
    assert_same_bits(out, expected)
    for ours, theirs in zip(
        paged_attn.decode_with_lse(*case.args, **case.options),
        (expected, expected_lse),
        strict=True,
    ):
        assert_same_bits(ours, theirs)
    out.fill_(float("nan"))
    paged_attn.decode_with_lse(*case.args, **case.options, out=out, lse=lse)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_against_one_by_one(draw: Draw, device: str, dtype: torch.dtype) -> None:
    case = build(draw, LENS, query_len=QUERIES[2], num_heads=6, dtype=dtype)
    out, lse = case.decode_with_lse()
    for b in range(len(LENS)):
        rows = case.rows_of(b)
        alone = case.sequence(b)
        alone_out, alone_lse = alone.decode_with_lse()
        assert_accurate(alone, out[rows], lse[rows])
        torch.testing.assert_close(out[rows], alone_out, atol=4e-3, rtol=8e-3)
        torch.testing.assert_close(lse[rows], alone_lse, atol=1e-5, rtol=1e-5)


def test_query_shapes_agree(draw: Draw, device: str) -> None:
    """[B, H, D], [B, 1, H, D] and ragged queries of one token each say the same."""
    case = build(draw, [40, 300, 7], num_heads=6)
    expected = case.decode()
    with_dim = case.with_(q=case.q[:, None])
    torch.testing.assert_close(with_dim.decode()[:, 0], expected, atol=1e-3, rtol=1e-3)
    ragged = case.with_(cu_seqlens_q=torch.arange(4, dtype=torch.int32, device=device))
    torch.testing.assert_close(ragged.decode(), expected, atol=1e-3, rtol=1e-3)
