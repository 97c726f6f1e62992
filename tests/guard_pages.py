"""Runs the ops on memory whose neighbours are not mapped, and compares what they do.

Usage: python guard_pages.py cpu|cuda SEED CONFIGS
       python guard_pages.py cpu|cuda --prove

An access outside ends the process or the CUDA context, so this is a program of its own. It prints
`ok`. With `--prove` it reads one element past the end instead, which must fail.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import (
    DTYPES,
    OPTION_SETS,
    Case,
    Draw,
    alibi_slopes,
    build,
    cache_scale,
    option_set,
    write,
)
from guarded_memory import MEMORY, guarded

from paged_attn import reference

ops = torch.ops.paged_attn
BLOCK_SIZES = (1, 8, 16, 48, 128)
BAD_IDS = (-1, 2**31 - 1, -(2**31))
INT_MAX = 2**31 - 1


def whole_pool(draw: Draw, shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """K and V of normal numbers in at least 4 blocks of `shape`, exactly whole pages each."""
    page = MEMORY[draw.device](1).page
    block_bytes = math.prod(shape) * dtype.itemsize
    num_blocks = math.lcm(page, block_bytes) // block_bytes
    num_blocks *= -(-4 // num_blocks)
    caches = [torch.empty(num_blocks, *shape, dtype=dtype, device=draw.device) for _ in "kv"]
    for cache in caches:
        write(cache, slice(None), draw.normal(*cache.shape))
    return [guarded(cache) for cache in caches]


def whole_case(draw: Draw, dtype: torch.dtype, name: str) -> Case:
    """Every block of the pool is some sequence's, each of whose inputs ends at unmapped memory."""
    rng = draw.rng
    options = option_set(name, dtype)
    heads, group, block_size = rng.choice((1, 2)), rng.choice((1, 3, 8)), rng.choice(BLOCK_SIZES)
    shape = (block_size, heads, rng.choice((64, 72, 128, 256)))
    k_cache, v_cache = whole_pool(draw, shape, options.pop("cache_dtype", dtype))
    num_blocks = k_cache.shape[0]
    # All of the pool's blocks dealt out.
    cuts = sorted(rng.sample(range(1, num_blocks), 2))
    counts = [cuts[0], cuts[1] - cuts[0], num_blocks - cuts[1]]
    ends = [rng.choice((block_size, rng.randint(1, block_size))) for _ in counts]
    lens = [(count - 1) * block_size + end for count, end in zip(counts, ends, strict=True)]
    query_len = rng.choice((None, 3, [2, 0, 5]))
    case = build(
        draw,
        [0] * 3,
        query_len=query_len,
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=shape[2],
        block_size=block_size,
        dtype=dtype,
        batch_invariant=rng.random() < 0.3,
    )
    order = rng.sample(range(num_blocks), num_blocks)
    tables = torch.full((3, max(counts)), 2147480000, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = alibi_slopes(draw, heads * group)
    if "sinks" in options:
        options["sinks"] = draw.normal(heads * group)
    for scale in {"k_scale", "v_scale"} & options.keys():
        options[scale] = cache_scale(draw, options[scale], heads)
    options = {k: guarded(v) if torch.is_tensor(v) else v for k, v in options.items()}
    return Case(
        q=guarded(case.q),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=guarded(tables.to(draw.device)),
        context_lens=guarded(torch.tensor(lens, dtype=torch.int32, device=draw.device)),
        cu_seqlens_q=guarded(case.cu_seqlens_q) if case.cu_seqlens_q is not None else None,
        options={**case.options, **options},
    )


def check_decode(draw: Draw, case: Case) -> None:
    """Good content, then bad ids and lengths, into outputs that end at unmapped memory too."""
    out = guarded(torch.empty_like(case.q))
    lse = guarded(torch.empty(case.q.shape[:-1], device=draw.device))

    def decode() -> None:
        ops.decode_with_lse.out(*case.args, **case.options, out=out, lse=lse)

    decode()
    assert_accurate(case, out, lse)
    kept = case.block_tables.clone()
    for bad in (*BAD_IDS, case.k_cache.shape[0]):
        live = -(-int(case.context_lens[1]) // case.k_cache.shape[1])
        case.block_tables[1, live - 1] = bad
        decode()
        rows = case.rows_of(1)
        assert bool(out[rows].isnan().all())
        assert int(out.isnan().sum()) == out[rows].numel()
    case.block_tables.copy_(kept)
    lens = case.context_lens.clone()
    case.context_lens.fill_(INT_MAX)
    decode()
    assert bool(out.isnan().all())
    case.context_lens.copy_(lens)


def check_long_tables(draw: Draw, case: Case) -> None:
    """Tables wider than a launch looks at, and one sequence that goes over the pool many times."""
    num_blocks, block_size = case.k_cache.shape[:2]
    rows = torch.arange(131072, device=draw.device) % num_blocks
    tables = guarded(rows.int().expand(3, -1).contiguous())
    lens = case.context_lens.clamp(max=131072 * block_size)
    lens[0] = min(131072 * block_size, 300_000 if draw.device == "cuda" else 5000)
    wide = case.with_(block_tables=tables, context_lens=lens)
    assert_accurate(wide, *wide.decode_with_lse())


def check_writes(draw: Draw, case: Case) -> None:
    """append_kv and append_decode; slots at both ends of the pool, and beyond them."""
    num_blocks, block_size, heads, head_dim = case.k_cache.shape
    dtype = case.q.dtype
    scales = {name: case.options.get(name) for name in ("k_scale", "v_scale")}
    expected = case.with_(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())

    def assert_caches() -> None:
        for name in ("k_cache", "v_cache"):
            assert_same_bits(getattr(case, name), getattr(expected, name))

    tokens = [guarded(draw.normal(*case.q.shape[:-2], heads, head_dim, dtype=dtype)) for _ in "kv"]
    rest = case.args[3:]
    ops.append_kv(*tokens, case.k_cache, case.v_cache, *rest, **scales)
    reference.append_kv(*tokens, expected.k_cache, expected.v_cache, *rest, *scales.values())
    assert_caches()
    out = ops.append_decode(case.q, *tokens, *case.args[1:], **case.options)
    assert_caches()
    assert_accurate(case, out)
    lens = case.context_lens.clone()
    case.context_lens.fill_(INT_MAX)
    assert bool(ops.append_decode(case.q, *tokens, *case.args[1:], **case.options).isnan().all())
    case.context_lens.copy_(lens)
    assert_caches()

    last = num_blocks * block_size - 1
    slots = guarded(torch.tensor([0, last, last + 1, -1, -(2**40), 2**40], device=draw.device))
    tokens = [guarded(draw.normal(6, heads, head_dim, dtype=dtype)) for _ in "kv"]
    ops.reshape_and_cache(*tokens, case.k_cache, case.v_cache, slots, **scales)
    reference.reshape_and_cache(
        *tokens, expected.k_cache, expected.v_cache, slots, *scales.values()
    )
    assert_caches()


def check_blocks(draw: Draw, case: Case) -> None:
    """copy_blocks and swap_blocks of the first and the last block, and beyond them."""
    num_blocks = case.k_cache.shape[0]
    bad = [[num_blocks, 0], [0, num_blocks], [-1, 0], [0, -1], [2**40, 0], [1, -(2**40)]]
    for good in ([[num_blocks - 1, 0]], [[0, num_blocks - 1]], [[0, 2], [1, 3]]):
        mapping = guarded(torch.tensor(good + bad, device=draw.device))
        expected = [cache.clone() for cache in (case.k_cache, case.v_cache)]
        ops.copy_blocks([case.k_cache], [case.v_cache], mapping)
        reference.copy_blocks(expected[:1], expected[1:], mapping)
        assert_same_bits(case.k_cache, expected[0])
        ops.swap_blocks([case.v_cache], [case.k_cache], mapping.cpu())
        reference.swap_blocks(expected[1:], expected[:1], mapping.cpu())
        assert_same_bits(case.k_cache, expected[0])
        assert_same_bits(case.v_cache, expected[1])


def check_merge(draw: Draw, case: Case) -> None:
    """merge_states of two halves that end at unmapped memory."""
    out, lse = (guarded(t) for t in case.decode_with_lse())
    merged, _ = ops.merge_states([out, guarded(out)], [lse, guarded(lse)])
    assert_same_bits(merged, out.contiguous())


def check(draw: Draw, dtype: torch.dtype, name: str) -> None:
    case = whole_case(draw, dtype, name)
    for check_some in (check_decode, check_long_tables, check_merge, check_writes, check_blocks):
        check_some(draw, case)


def prove(device: str) -> None:
    memory: Any = MEMORY[device](2**21)
    print(int(memory.view().sum(dtype=torch.int64)) >= 0, flush=True)
    print(memory.view(past_the_end=4)[-4:].clone().sum().item())


def main() -> None:
    device, argument, *count = sys.argv[1:]
    if device == "cuda":
        torch.zeros(1, device="cuda")
    if argument == "--prove":
        prove(device)
        return
    for config in range(int(count[0])):
        draw = Draw(int(argument) + config, device)
        check(draw, draw.rng.choice(DTYPES), draw.rng.choice(list(OPTION_SETS)))
    print("ok")


if __name__ == "__main__":
    main()
