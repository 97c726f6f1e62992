"""What no query may see never matters: slots, table entries, later tokens, other sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import DTYPES, LAYOUTS, OPTION_SETS, Draw, build, option_set, write

POISONS = (float("nan"), float("inf"), float("-inf"), 6e4)
LENS = [0, 1, 15, 16, 17, 40, 3]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_of_nobody(
    draw: Draw, device: str, dtype: torch.dtype, layout: str, poison: float
) -> None:
    """Unallocated blocks, the last block's tail and the bytes between rows."""
    block_size = draw.rng.choice((8, 12, 16, 48, 128))
    query_len = draw.rng.choice((None, 3, [1, 0, 2, 9, 1, 4, 1]))
    arguments: dict[str, Any] = {
        "query_len": query_len,
        "num_heads": 6,
        "head_dim": draw.rng.choice((40, 64, 128)),
        "block_size": block_size,
        "layout": layout,
        "dtype": dtype,
    }
    clean = build(draw.again(), LENS, fill=0.0, **arguments).decode_with_lse()
    poisoned = build(draw.again(), LENS, fill=poison, **arguments).decode_with_lse()
    for ours, theirs in zip(poisoned, clean, strict=True):
        assert not bool(ours.isnan().any())
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("query_len", [None, 5, [1, 0, 2, 9, 1, 4, 1, 2]])
def test_slots_that_no_query_sees(
    draw: Draw, device: str, query_len: Any, name: str, poison: float
) -> None:
    """Under every option, those before the window too: whole blocks and the first one's begin."""
    dtype = draw.rng.choice(DTYPES)
    arguments = option_set(name, dtype)
    if "window" in arguments:
        arguments["window"] = draw.rng.choice((1, 5, 16, 37, 300))
    arguments.update(
        query_len=query_len,
        num_heads=10,
        head_dim=draw.rng.choice((40, 64, 128)),
        block_size=draw.rng.choice((1, 3, 16, 48, 128)),
        dtype=dtype,
    )
    lens = [*LENS, 700]
    clean = build(draw.again(), lens, fill=0.0, **arguments).decode_with_lse()
    poisoned = build(draw.again(), lens, fill=poison, **arguments).decode_with_lse()
    for ours, theirs in zip(poisoned, clean, strict=True):
        assert not bool(ours.isnan().any())
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 300])
@pytest.mark.parametrize("query_len", [None, 4, [1, 0, 2, 9, 1, 4, 1, 3]])
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_table_entries_that_the_window_hides(
    draw: Draw, device: str, block_size: int, query_len: Any, window: int
) -> None:
    def run(padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        return build(
            draw.again(),
            [*LENS, 700],
            block_size=block_size,
            query_len=query_len,
            padding=padding,
            window=window,
        ).decode_with_lse()

    expected = run(0)
    assert not bool(expected[0].isnan().any())
    for padding in (-1, 1, 2**31 - 1, 2147480000, -(2**31)):
        for ours, theirs in zip(run(padding), expected, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("query_len", [None, 4, [1, 0, 2, 9, 1, 4, 1]])
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_table_entries_past_the_live_part(
    draw: Draw, device: str, block_size: int, query_len: Any
) -> None:
    def run(padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        return build(
            draw.again(),
            LENS,
            block_size=block_size,
            query_len=query_len,
            spare_columns=70,
            padding=padding,
        ).decode_with_lse()

    expected = run(0)
    for padding in (-1, 1, 2**31 - 1, 2147480000, -(2**31)):
        for ours, theirs in zip(run(padding), expected, strict=True):
            assert_same_bits(ours, theirs)


def test_stale_table_entries(draw: Draw, device: str) -> None:
    """Entries past the live part that name blocks which other sequences own by now."""
    case = build(draw, LENS, block_size=8)
    expected = case.decode()
    tables = case.block_tables
    dead = tables < 0
    stale = tables.max(dim=1, keepdim=True).values.flip(0).clamp(min=0).expand_as(tables)
    case = case.with_(block_tables=torch.where(dead, stale, tables).contiguous())
    assert_same_bits(case.decode(), expected)


@pytest.mark.parametrize("spoilt", ["k_cache", "v_cache"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_visible_nan(draw: Draw, device: str, dtype: torch.dtype, spoilt: str) -> None:
    """One NaN that a query sees is not lost on the way, wherever it sits."""
    case = build(draw, [40, 17, 600], num_heads=6, dtype=dtype)
    for b in range(3):
        blocks, offsets = case.live_slots(b)
        at = draw.rng.randrange(len(blocks))
        getattr(case, spoilt)[blocks[at], offsets[at], :, draw.rng.randrange(64)] = float("nan")
    out, lse = case.decode_with_lse()
    if spoilt == "k_cache":
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())
    else:
        assert bool((out.isnan().sum(-1) == 1).all())
        assert not bool(lse.isnan().any())


@pytest.mark.parametrize("spoilt", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", OPTION_SETS)
def test_visible_nan_under_options(draw: Draw, device: str, name: str, spoilt: str) -> None:
    dtype = draw.rng.choice(DTYPES)
    case = build(draw, [40, 17, 600], num_heads=6, dtype=dtype, **option_set(name, dtype))
    for b in range(3):
        blocks, offsets = case.live_slots(b)
        at, column = draw.rng.randrange(len(blocks)), draw.rng.randrange(64)
        write(getattr(case, spoilt)[..., column], (blocks[at], offsets[at]), float("nan"))
    out, lse = case.decode_with_lse()
    if spoilt == "k_cache":
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())
    else:
        assert bool((out.isnan().sum(-1) == 1).all())
        assert not bool(lse.isnan().any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_other_sequences_keys(draw: Draw, device: str, value: float) -> None:
    """A sequence of NaN makes its own rows NaN and leaves all bits of the others."""
    case = build(draw, [40, 17, 100, 1], num_heads=6)
    expected = case.decode()
    slots = case.live_slots(2)
    case.k_cache[slots] = value
    case.v_cache[slots] = value
    out = case.decode()
    assert bool(out[2].isnan().all())
    for b in (0, 1, 3):
        assert_same_bits(out[b], expected[b])


@pytest.mark.parametrize("ratio", [1, 3, 8, 24])
def test_groups_do_not_cross_kv_heads(draw: Draw, device: str, ratio: int) -> None:
    case = build(draw, [40, 17, 100], num_heads=3 * ratio, num_kv_heads=3)
    expected = case.decode()
    blocks, offsets = case.all_live_slots()
    case.v_cache[blocks, offsets, 1] = float("nan")
    out = case.decode()
    own = slice(ratio, 2 * ratio)
    assert bool(out[:, own].isnan().all())
    assert_same_bits(out[:, :ratio], expected[:, :ratio])
    assert_same_bits(out[:, 2 * ratio :], expected[:, 2 * ratio :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [5, [5, 5, 5]])
def test_later_tokens(draw: Draw, device: str, query_len: Any, dtype: torch.dtype) -> None:
    """The newest key and value reach the last query only."""
    case = build(draw, [50, 16, 5], num_heads=6, query_len=query_len, dtype=dtype)
    expected, expected_lse = case.decode_with_lse()
    for b in range(3):
        blocks, offsets = case.live_slots(b)
        case.k_cache[blocks[-1], offsets[-1]] += 3
        case.v_cache[blocks[-1], offsets[-1]] -= 7
    out, lse = case.decode_with_lse()
    shape = (3, 5, 6)
    out, lse = out.reshape(*shape, 64), lse.reshape(shape)
    expected, expected_lse = expected.reshape(*shape, 64), expected_lse.reshape(shape)
    assert_same_bits(out[:, :-1], expected[:, :-1])
    assert_same_bits(lse[:, :-1], expected_lse[:, :-1])
    assert not torch.equal(out[:, -1], expected[:, -1])


def test_position_of_each_query(draw: Draw, device: str) -> None:
    """Query t of Q equals a single query over a context that ends at its position."""
    lens = [37, 4, 2]
    case = build(draw, lens, num_heads=6, query_len=4)
    assert_accurate(case, *case.decode_with_lse())
    out = case.decode()
    for t in range(4):
        single = case.with_(q=case.q[:, t].contiguous(), context_lens=case.context_lens - (3 - t))
        torch.testing.assert_close(out[:, t], single.decode(), atol=2e-3, rtol=2e-3)
