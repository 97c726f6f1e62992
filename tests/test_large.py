"""Sizes at which 32-bit offsets and grid limits break."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import FP8_DTYPES, Case, Draw, build

from paged_attn import reference

ops = torch.ops.paged_attn

# Positions are int32 in shape, offsets not: these pools have more than 2^31 elements each and more
# than 2^32 bytes. They are left as allocated, so that memory is used only where blocks are written.
BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
BLOCKS = 2**31 // (BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM) + 50


def big_case(draw: Draw, interleaved: bool) -> Case:
    """Three sequences whose blocks lie at the bottom, across the 2^31st element and at the top."""
    case = build(draw, [40, 33, 64], num_heads=16, num_kv_heads=8, head_dim=128, spare_columns=0)
    shape = (BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    if interleaved:
        pool = torch.empty(BLOCKS, 2, *shape, dtype=torch.float16, device=draw.device)
        k_cache, v_cache = pool.unbind(1)
    else:
        k_cache = torch.empty(BLOCKS, *shape, dtype=torch.float16, device=draw.device)
        v_cache = torch.empty(BLOCKS, *shape, dtype=torch.float16, device=draw.device)
    places = [BLOCKS - 1, 0, BLOCKS // 2, BLOCKS - 2, BLOCKS - 50, BLOCKS - 51, 1, BLOCKS // 4]
    places += [BLOCKS - 3, BLOCKS // 2 + 1]
    tables = case.block_tables.clone()
    used = [(b, c) for b, count in enumerate((3, 3, 4)) for c in range(count)]
    for place, (b, c) in zip(places, used, strict=True):
        for big, small in ((k_cache, case.k_cache), (v_cache, case.v_cache)):
            big[place] = small[int(case.block_tables[b, c])]
        tables[b, c] = place
    return case.with_(k_cache=k_cache, v_cache=v_cache, block_tables=tables)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pool_beyond_two_to_the_31_elements(draw: Draw, device: str, interleaved: bool) -> None:
    case = big_case(draw, interleaved)
    assert case.k_cache.numel() > 2**31
    assert_accurate(case, *case.decode_with_lse())

    key = draw.normal(3, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float16)
    blocks = [BLOCKS - 1, 2, BLOCKS // 2]
    slots = torch.tensor([b * BLOCK_SIZE + 5 for b in blocks], device=device)
    ops.reshape_and_cache(key, -key, case.k_cache, case.v_cache, slots)
    for row, block in enumerate(blocks):
        assert_same_bits(case.k_cache[block, 5], key[row])
        assert_same_bits(case.v_cache[block, 5], -key[row])

    out = ops.append_decode(case.q, key, -key, *case.args[1:])
    newest = [case.live_slots(b) for b in range(3)]
    for row, (live, offsets) in enumerate(newest):
        assert_same_bits(case.k_cache[live[-1], offsets[-1]], key[row])
        assert_same_bits(case.v_cache[live[-1], offsets[-1]], -key[row])
    assert_accurate(case, out)

    mapping = torch.tensor([[BLOCKS - 1, 3], [0, BLOCKS - 10]], device=device)
    ops.copy_blocks([case.k_cache], [case.v_cache], mapping)
    for source, destination in mapping.tolist():
        assert_same_bits(case.k_cache[destination], case.k_cache[source])
        assert_same_bits(case.v_cache[destination], case.v_cache[source])
    ops.swap_blocks([case.k_cache], [case.v_cache], torch.tensor([[BLOCKS - 2, BLOCKS - 20]]))
    assert_same_bits(case.v_cache[BLOCKS - 20], case.k_cache[BLOCKS - 2])


def test_strides_beyond_two_to_the_31(draw: Draw, device: str) -> None:
    """Few blocks, heads and tokens, but far apart: each stride alone overflows 32 bits."""
    case = build(draw, [3], num_heads=2, num_kv_heads=1, head_dim=8, block_size=2, spare_columns=0)
    case = case.with_(k_cache=case.k_cache[:2], v_cache=case.v_cache[:2])
    tables = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    k_cache = storage.as_strided((2, 2, 1, 8), (2**31 + 16, 8, 8, 1))
    v_cache = torch.empty(2, 2, 1, 8, dtype=torch.float16, device=device)
    for cache in (k_cache, v_cache):
        cache.copy_(draw.normal(2, 2, 1, 8))
    case = case.with_(k_cache=k_cache, v_cache=v_cache, block_tables=tables)
    assert_accurate(case, *case.decode_with_lse())
    case = case.with_(k_cache=v_cache, v_cache=k_cache)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
def test_fp8_strides_beyond_two_to_the_32(
    draw: Draw, device: str, cache_dtype: torch.dtype
) -> None:
    k_cache = torch.empty(2**32 + 64, dtype=cache_dtype, device=device)
    k_cache = k_cache.as_strided((2, 2, 1, 8), (2**32 + 16, 8, 8, 1))
    v_cache = torch.empty(2, 2, 1, 8, dtype=cache_dtype, device=device)
    for cache in (k_cache, v_cache):
        for block in cache:
            block.copy_(draw.normal(2, 1, 8).to(cache_dtype))
    case = build(draw, [0], num_heads=2, num_kv_heads=1, head_dim=8, block_size=2)
    case = case.with_(
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=torch.tensor([[1, 0]], dtype=torch.int32, device=device),
        context_lens=torch.tensor([3], dtype=torch.int32, device=device),
    )
    assert_accurate(case, *case.decode_with_lse())
    case = case.with_(k_cache=v_cache, v_cache=k_cache)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("ragged", [False, True])
def test_more_heads_than_a_grid_dimension(draw: Draw, device: str, ragged: bool) -> None:
    """B * H > 65 535, and B alone with many heads in few KV heads."""
    batch = 1100
    lens = [draw.rng.randint(0, 3) for _ in range(batch)]
    case = build(
        draw,
        lens,
        query_len=[1] * batch if ragged else None,
        num_heads=64,
        num_kv_heads=64,
        head_dim=8,
        block_size=2,
    )
    assert case.q.shape[0] * case.q.shape[1] > 65535
    assert_accurate(case, *case.decode_with_lse())


def test_batch_beyond_65535(draw: Draw, device: str) -> None:
    """V tells which sequence a row came from: compared without the row-by-row reference."""
    batch = 66000
    k_cache = torch.zeros(batch, 1, 1, 8, dtype=torch.float32, device=device)
    v_cache = torch.arange(batch, dtype=torch.float32, device=device)[:, None, None, None]
    v_cache = v_cache.expand(-1, 1, 1, 8).contiguous()
    places = torch.randperm(batch, generator=draw.generator, device=device).int()
    lens = torch.ones(batch, dtype=torch.int32, device=device)
    q = draw.normal(batch, 1, 8)
    out = ops.decode(q, k_cache, v_cache, places[:, None], lens)
    assert_same_bits(out, places.float()[:, None, None].expand_as(out))


@pytest.mark.parametrize("batch", [3000, 70_000])
def test_many_ragged_sequences(draw: Draw, device: str, batch: int) -> None:
    """More entries than a thread block has threads, good ones and one bad one."""
    lens = draw.integers(0, 2, batch, dtype=torch.int32)
    cu = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    cu[1:] = lens.cumsum(0)
    tokens = int(cu[-1])
    tables = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    key = draw.normal(tokens, 1, 8, dtype=torch.float16)
    owner = torch.repeat_interleave(torch.arange(batch, device=device), lens.long())
    slots = 2 * owner + torch.arange(tokens, device=device) - cu[owner].long()
    bad = batch // 3
    for is_bad in (False, True):
        if is_bad:
            cu[bad] = -5
            slots[(owner == bad) | (owner == bad - 1)] = -1
        caches = [torch.zeros(batch, 2, 1, 8, dtype=torch.float16, device=device) for _ in "kv"]
        expected = [torch.zeros_like(cache) for cache in caches]
        ops.append_kv(key, key, *caches, tables, lens, cu)
        reference.reshape_and_cache(key, key, *expected, slots)
        assert_same_bits(caches[0], expected[0])
        assert_same_bits(caches[1], expected[1])


def test_more_than_65535_of_what_each_op_takes(draw: Draw, device: str) -> None:
    """Tokens, sequences, pairs of blocks and rows of states."""
    count = 66_000
    key = draw.normal(count, 1, 8, dtype=torch.float16)
    places = torch.randperm(count, generator=draw.generator, device=device)
    caches = [torch.zeros(count, 1, 1, 8, dtype=torch.float16, device=device) for _ in "kv"]
    ops.reshape_and_cache(key, -key, *caches, places)
    assert_same_bits(caches[0][places, 0], key)
    assert_same_bits(caches[1][places, 0], -key)
    lens = torch.ones(count, dtype=torch.int32, device=device)
    ops.append_kv(-key, key, *caches, places.int()[:, None], lens)
    assert_same_bits(caches[0][places, 0], -key)
    assert_same_bits(caches[1][places, 0], key)

    mapping = torch.stack([places, places + count], 1)
    pools = [torch.cat([cache, torch.zeros_like(cache)]) for cache in caches]
    ops.copy_blocks(pools[:1], pools[1:], mapping)
    for pool, cache in zip(pools, caches, strict=True):
        assert_same_bits(pool[count:], cache)
    target = torch.zeros_like(caches[0])
    ops.swap_blocks(caches[:1], [target], torch.arange(count)[:, None].expand(-1, 2).contiguous())
    assert_same_bits(target, caches[0])

    lse = draw.normal(count, 1)
    merged, merged_lse = ops.merge_states([key, -key], [lse, torch.full_like(lse, -torch.inf)])
    assert_same_bits(merged, key)
    assert_same_bits(merged_lse, lse)


@pytest.mark.parametrize("block_size", [16, 1])
def test_context_of_a_million_tokens(draw: Draw, device: str, block_size: int) -> None:
    length = 2**20 + 3
    case = build(
        draw,
        [length],
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        dtype=torch.float32,
    )
    assert_accurate(case, *case.decode_with_lse())


def test_table_131072_columns_wide(draw: Draw, device: str) -> None:
    case = build(draw, [40, 0, 17, 700], num_heads=6, spare_columns=131072 - 44)
    assert case.block_tables.shape[1] == 131072
    assert_accurate(case, *case.decode_with_lse())


def test_table_so_wide_that_work_is_dealt_in_coarser_steps(draw: Draw, device: str) -> None:
    """3000 rows of one table with room for 8 million tokens each, of which few are there."""
    batch, live = 3000, 15
    case = build(draw, [900], block_size=64, num_heads=8, num_kv_heads=8)
    row = torch.full((2**17,), -1, dtype=torch.int32, device=device)
    row[:live] = case.block_tables[0, :live]
    lens = draw.integers(0, 900, batch, dtype=torch.int32)
    wide = case.with_(
        q=draw.normal(batch, 8, 64, dtype=torch.float16),
        block_tables=row.expand(batch, -1),
        context_lens=lens,
    )
    out = wide.decode()
    narrow = wide.with_(block_tables=row[:live].expand(batch, -1))
    torch.testing.assert_close(out, narrow.decode(), atol=2e-3, rtol=2e-3)
    some = slice(0, batch, 60)
    few = narrow.with_(
        q=wide.q[some], block_tables=narrow.block_tables[some], context_lens=lens[some].contiguous()
    )
    assert_accurate(few, out[some])
