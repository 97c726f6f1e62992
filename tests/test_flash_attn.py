"""FlashAttention's calls mean what FlashAttention's documentation says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, FP8_DTYPES, HALF_DTYPES, LAYOUTS, Draw
from flash_case import FlashCase, assert_as_documented, build_flash

from paged_attn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

# Queries, and keys of the cache: FlashAttention's own grid.
LENGTHS = [(1, 128), (1, 339), (3, 799), (3, 1024), (64, 256), (64, 800)]
PAGES = (1, 4, 128, 256)
HEADS = {"mha": (6, 6), "gqa": (6, 3), "mqa": (6, 1)}


def draw_options(draw: Draw, num_queries: int, longest: int) -> dict[str, Any]:
    """Arguments of `build_flash`: what goes together, each about as often with as without."""

    def coin() -> bool:
        return draw.rng.random() < 0.5

    causal = coin()
    ordered = causal or num_queries == 1
    window = [-1, -1]
    if ordered and coin():
        window = [draw.rng.randint(0, longest), draw.rng.choice((-1, 0, 1, longest))]
    elif coin():
        window = [draw.rng.randint(0, longest), 0]  # without causal=True, and as if with it
    ordered = ordered or window[1] == 0
    new = draw.rng.choice((None, num_queries, draw.rng.randint(1, num_queries)))
    # The dims that are rotated are a multiple of 16, as FlashAttention's kernels want it.
    head_dim = draw.rng.choice((32, 64, 80, 128))
    rotary = new is not None and draw.rng.choice((0, 16, head_dim // 2 // 16 * 16, head_dim))
    return {
        "new_len": new,
        "head_dim": head_dim,
        "dtype": draw.rng.choice(DTYPES),
        "layout": draw.rng.choice(LAYOUTS),
        "rotary_dim": rotary or 0,
        "alibi": ordered and coin(),
        "sinks": draw.rng.choice((None, None, torch.float32)),
        "options": {
            "causal": causal,
            "window_size": draw.rng.choice((tuple, list))(window),
            "softcap": draw.rng.choice((0.0, 0.0, 15.0)),
            "rotary_interleaved": coin(),
        },
    }


def draw_lengths(draw: Draw, longest: int, num_queries: int, new: int | None) -> list[int]:
    """Three sequences, one with the most keys that leave room, one without any in the cache."""
    room = num_queries if new else 0  # the angles of rotary queries end where the cache does
    return [longest - room, draw.rng.randint(1, longest - room), 0]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("num_queries", "longest"), LENGTHS)
def test_kvcache(
    draw: Draw, device: str, num_queries: int, longest: int, page: int, heads: str
) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    options = draw_options(draw, num_queries, longest)
    flash = build_flash(
        draw,
        draw_lengths(draw, longest, num_queries, options["new_len"]),
        query_len=num_queries,
        block_size=page,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        **options,
    )
    arguments = flash.with_kvcache()
    assert_as_documented(flash, flash_attn_with_kvcache, arguments, draw.rng.random() < 0.5)


@pytest.mark.parametrize("with_batch_idx", [False, True])
@pytest.mark.parametrize(("num_queries", "longest"), LENGTHS[:4])
def test_contiguous_cache(
    draw: Draw, device: str, num_queries: int, longest: int, with_batch_idx: bool
) -> None:
    """A cache of one block a sequence is read, and written, where it lies."""
    options = draw_options(draw, num_queries, longest)
    cached = [
        length or 1 for length in draw_lengths(draw, longest, num_queries, options["new_len"])
    ]
    flash = build_flash(
        draw,
        cached,
        query_len=num_queries,
        block_size=longest + 1,
        spare_columns=0,
        num_blocks=len(cached) + 3 * with_batch_idx,
        num_heads=6,
        num_kv_heads=3,
        **options,
    )
    arguments = flash.with_kvcache(contiguous=True)
    if not with_batch_idx:
        # The pool in the order of the sequences.
        tables = flash.case.block_tables
        for cache in (flash.case.k_cache, flash.case.v_cache):
            cache.copy_(cache[arguments["cache_batch_idx"].long()].clone())
        tables.copy_(torch.arange(len(cached))[:, None])
        del arguments["cache_batch_idx"]
    assert_as_documented(flash, flash_attn_with_kvcache, arguments, draw.rng.random() < 0.5)


MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "local": {"window_size": (40, 0)},
}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 32, 64])
@pytest.mark.parametrize("num_new", [3, 2, 5])
@pytest.mark.parametrize("mask", MASKS)
def test_rotary(
    draw: Draw, device: str, mask: str, num_new: int, rotary_dim: int, interleaved: bool
) -> None:
    """Queries turn with their place only where a mask makes their order matter."""
    flash = build_flash(
        draw,
        [90, 0, 7, 31],
        query_len=3,
        new_len=num_new,
        rotary_dim=rotary_dim,
        dtype=draw.rng.choice(DTYPES),
        options={"rotary_interleaved": interleaved, **MASKS[mask]},
    )
    assert_as_documented(flash, flash_attn_with_kvcache, flash.with_kvcache())


@pytest.mark.parametrize("name", ["page_table", "block_table"])
@pytest.mark.parametrize("new_len", [None, [2, 0, 5, 1], [4, 1, 0, 2]])
@pytest.mark.parametrize("rotary_dim", [0, 32])
def test_ragged_queries(
    draw: Draw, device: str, rotary_dim: int, new_len: list[int] | None, name: str
) -> None:
    """FlashAttention 3's spellings; k and v as long as q, and not."""
    flash = build_flash(
        draw,
        [70, 3, 16, 0],
        query_len=[2, 0, 5, 1],
        new_len=new_len,
        rotary_dim=rotary_dim if new_len else 0,
        options={**MASKS[draw.rng.choice(list(MASKS))], "softcap": 5.0},
    )
    arguments = flash.with_kvcache()
    arguments[name] = arguments.pop("block_table")
    arguments["max_seqlen_q"] = draw.rng.choice((None, 5, 9))
    assert_as_documented(flash, flash_attn_with_kvcache, arguments, draw.rng.random() < 0.5)


def test_rotary_of_ragged_queries_is_that_of_each(draw: Draw, device: str) -> None:
    """Also where rotary_seqlens says where the angles begin, and rows belong to no sequence."""
    cached, queries = [70, 3, 16], [2, 4, 1]
    flash = build_flash(
        draw,
        cached,
        query_len=queries,
        outside_rows=(2, 3),
        new_len=5,
        rotary_dim=64,
        options={"causal": True},
    )
    start = torch.tensor([9, 0, 5], dtype=torch.int32, device=device)
    arguments = flash.with_kvcache() | {"rotary_seqlens": start}
    ours = flash_attn_with_kvcache(**arguments)
    for b, cache_len in enumerate(cached):
        rows = flash.case.rows_of(b)
        alone = arguments | {
            "q": flash.case.q[rows][None],
            "cu_seqlens_q": None,
            "rotary_seqlens": start[b : b + 1],
            "block_table": flash.case.block_tables[b : b + 1],
            "cache_seqlens": cache_len,
            "k": flash.k[b : b + 1],
            "v": flash.v[b : b + 1],
        }
        torch.testing.assert_close(ours[rows], flash_attn_with_kvcache(**alone)[0])
        shifted = alone | {
            "rotary_seqlens": None,
            **{name: arguments[name].roll(cache_len - int(start[b]), 0) for name in ANGLES},
        }
        torch.testing.assert_close(ours[rows], flash_attn_with_kvcache(**shifted)[0])


ANGLES = ("rotary_cos", "rotary_sin")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("mask", MASKS)
def test_varlen(draw: Draw, device: str, mask: str, page: int, packed: bool) -> None:
    """Prefixes, whole prompts, more queries than keys, none; paged, or packed one by one."""
    queries = [7, 40, 5, 0, 1, 3]
    flash = build_flash(
        draw,
        [7, 300, 2, 20, 65, 0],
        query_len=queries,
        outside_rows=draw.rng.choice(((0, 0), (2, 3))),
        block_size=page,
        num_heads=6,
        num_kv_heads=draw.rng.choice((1, 3, 6)),
        dtype=draw.rng.choice(DTYPES),
        layout=draw.rng.choice(LAYOUTS),
        q_layout=draw.rng.choice(("contiguous", "qkv", "heads_first")),
        alibi=mask != "all" and draw.rng.random() < 0.5,
        sinks=draw.rng.choice((None, torch.float32)),
        options={"softcap": draw.rng.choice((0.0, 9.0)), **MASKS[mask]},
    )
    arguments = flash.varlen(packed=packed)
    assert_as_documented(flash, flash_attn_varlen_func, arguments, draw.rng.random() < 0.5)


@pytest.mark.parametrize("packed", [False, True])
def test_seqused_k(draw: Draw, device: str, packed: bool) -> None:
    """Fewer keys than cu_seqlens_k says; which with a block table need not be given."""
    long = build_flash(draw, [90, 40, 8], query_len=[2, 3, 1], options={"causal": True})
    used = torch.tensor([70, 4, 8], dtype=torch.int32, device=device)
    arguments = long.varlen(packed=packed) | {"seqused_k": used}
    if not packed:
        arguments["cu_seqlens_k"] = arguments["max_seqlen_k"] = None
    short = FlashCase(**{**vars(long), "cached": used.tolist()})
    assert_as_documented(short, flash_attn_varlen_func, arguments, True)


@pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES])
@pytest.mark.parametrize("new_len", [None, 2])
def test_descales(
    draw: Draw, device: str, new_len: int | None, cache_dtype: torch.dtype | None
) -> None:
    """One number for each KV head, or for all, expanded to [B, G]."""
    flash = build_flash(
        draw,
        [90, 5, 33],
        query_len=2,
        new_len=new_len,
        descale=True,
        cache_dtype=cache_dtype,
        dtype=draw.rng.choice(HALF_DTYPES),
        options={"causal": True, "softmax_scale": 0.2},
    )
    arguments = flash.with_kvcache()
    assert arguments["k_descale"].shape == arguments["v_descale"].shape == (3, 2)
    assert_as_documented(flash, flash_attn_with_kvcache, arguments, draw.rng.random() < 0.5)


@pytest.mark.parametrize("window_size", [(-1, 3), (89, -1), (200, 50), (89, 3), (-2, -7)])
def test_a_window_that_hides_nothing(draw: Draw, device: str, window_size: Any) -> None:
    options = {"window_size": window_size}
    flash = build_flash(draw, [90, 4], query_len=4, block_size=9, spare_columns=0, options=options)
    assert_as_documented(flash, flash_attn_with_kvcache, flash.with_kvcache(), True)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 5), (8, -1), (8, 0), (8, 3), (0, 0)])
@pytest.mark.parametrize("ragged", [False, True])
def test_one_query_is_the_last_token(
    draw: Draw, device: str, ragged: bool, window_size: Any
) -> None:
    """So causal=False, the default, goes with ALiBi and any window."""
    options = {"window_size": window_size}
    flash = build_flash(
        draw, [90, 4], query_len=[1, 1] if ragged else 1, alibi=True, options=options
    )
    arguments = flash.with_kvcache() | ({"max_seqlen_q": 1} if ragged else {})
    assert_as_documented(flash, flash_attn_with_kvcache, arguments, True)


@pytest.mark.parametrize("sinks", [None, torch.float32])
def test_rows_without_keys(draw: Draw, device: str, sinks: torch.dtype | None) -> None:
    """0 and -inf, FlashAttention 2's +inf if asked for; a sink is then all that there is."""
    flash = build_flash(draw, [0, 2, 5], query_len=3, sinks=sinks, options={"causal": True})
    arguments = flash.with_kvcache()
    assert_as_documented(flash, flash_attn_with_kvcache, arguments, True)
    plus = flash_attn_with_kvcache(**arguments, return_softmax_lse=True, empty_lse_inf=True)
    ours = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert_same_bits(plus[0], ours[0])
    assert bool((ours[0][0] == 0).all())
    assert bool((ours[0][1, 0] == 0).all())
    empty = torch.zeros_like(ours[1], dtype=torch.bool)
    if sinks is None:
        empty[0] = empty[1, :, 0] = True
    assert torch.equal(ours[1] == -math.inf, empty)
    assert torch.equal(plus[1] == math.inf, empty)
    assert_same_bits(plus[1][~empty], ours[1][~empty])


def test_lengths_as_one_number(draw: Draw, device: str) -> None:
    """An int for all; with None the cache is full."""
    flash = build_flash(draw, [32, 32], block_size=16, spare_columns=0, query_len=2)
    arguments = flash.with_kvcache()
    expected = flash_attn_with_kvcache(**arguments)
    for lengths in (32, None):
        assert_same_bits(
            flash_attn_with_kvcache(**(arguments | {"cache_seqlens": lengths})), expected
        )
    short = flash_attn_with_kvcache(**(arguments | {"cache_seqlens": 20}))
    twenty = torch.full((2,), 20, dtype=torch.int32, device=device)
    assert_same_bits(short, flash_attn_with_kvcache(**(arguments | {"cache_seqlens": twenty})))
    assert not torch.equal(short, expected)


def test_results_of_varlen(draw: Draw, device: str) -> None:
    """FlashAttention 2 returns three, vLLM's fork two."""
    flash = build_flash(draw, [32, 9], query_len=[2, 3])
    arguments = flash.varlen()
    out, lse = flash_attn_varlen_func(**arguments, return_softmax_lse=True)
    three = flash_attn_varlen_func(**arguments, return_attn_probs=True)
    assert lse.shape == (4, 5)
    assert_same_bits(three[0], out)
    assert_same_bits(three[1], lse)
    assert (three[2].numel(), three[2].dtype) == (0, out.dtype)


def test_what_is_about_speed_changes_nothing(draw: Draw, device: str) -> None:
    flash = build_flash(draw, [90, 5], query_len=[2, 1])
    metadata = torch.zeros(3, dtype=torch.int32, device=device)
    tuning = {"num_splits": 3, "pack_gqa": True, "sm_margin": 2}
    kvcache = flash.with_kvcache()
    tuned = flash_attn_with_kvcache(**kvcache, **tuning, scheduler_metadata=metadata)
    assert_same_bits(tuned, flash_attn_with_kvcache(**kvcache))
    varlen = flash.varlen()
    tuned = flash_attn_varlen_func(**varlen, **tuning, deterministic=True)
    assert_same_bits(tuned, flash_attn_varlen_func(**varlen))


def test_strided_inputs(draw: Draw, device: str) -> None:
    """As FlashAttention, q, k and v may have a last dim that is strided."""
    flash = build_flash(draw, [20, 5], new_len=1)
    arguments = flash.with_kvcache()
    strided = {
        name: arguments[name].transpose(-1, -2).contiguous().transpose(-1, -2) for name in "qkv"
    }
    assert all(tensor.stride(-1) != 1 for tensor in strided.values())
    expected = flash_attn_with_kvcache(**arguments)
    assert_same_bits(flash_attn_with_kvcache(**(arguments | strided)), expected)
