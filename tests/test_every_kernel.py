"""Every compiled CUDA kernel, on small cases that take its branches: the sanitizers' subset.

The device runs no kernel but ours, for compute-sanitizer looks at all of them: inputs are drawn and
results compared on the CPU; between the two there are plain copies of memory. The CPU computes some
of the cases too, which shows that the comparisons hold. That every kernel is reached is shown by
test_kernel_list.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_lse, assert_same_bits, ulp
from attention_case import DTYPES, FP8_DTYPES, HALF_DTYPES, Case, Draw, build, pools
from test_cache import whole_storage

from paged_attn import reference, set_early_start

ops = torch.ops.paged_attn

# Shared memory a block: all that the device has, and what compute capability 8.9 and 12.0 have.
LIMITS = [2**31 - 1, 99 * 1024]
HEAD_DIMS = [64, 128, 256]
# Of q and of the cache.
DTYPE_PAIRS = [(dtype, dtype) for dtype in DTYPES] + [
    (dtype, fp8) for dtype in HALF_DTYPES for fp8 in FP8_DTYPES
]
# Few and many sequences; split and whole units; blocks of more, fewer and other than 16 tokens.
# Those without options have kernels of their own, and of these one sequence.
SHAPES: list[tuple[list[int], int, tuple[int, int], dict[str, Any]]] = [
    ([700], 16, (8, 8), {"batch_invariant": True}),
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
    ([2500], 16, (8, 2), {}),
    ([20 + 7 * i for i in range(40)], 32, (16, 8), {}),
    ([700, 3], 3, (3, 1), {}),
    ([700, 40], 8, (32, 2), {"batch_invariant": True}),
    ([700, 40], 8, (32, 2), {"batch_invariant": True, "sinks": torch.float32, "causal": False}),
]
ROWS = [1, 16]
GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def short_queries(batch: int) -> list[int] | None:
    """One query, or ragged ones, 0 to 3 a sequence."""
    return [(1 + b * 5) % 4 for b in range(batch)] if batch > 1 else None


@pytest.fixture
def draw(draw: Draw) -> Draw:
    """On the CPU, whichever device the test is of."""
    return Draw(draw.seed, "cpu")


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The same bytes there with the same strides: one copy of contiguous memory, and views."""
    storage = whole_storage(tensor).to(device, copy=True)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def case_on(device: str, case: Case) -> Case:
    def move(value: Any) -> Any:
        return moved(value, device) if isinstance(value, torch.Tensor) else value

    fields = {name: move(value) for name, value in vars(case).items()}
    return Case(**{**fields, "options": {k: move(v) for k, v in case.options.items()}})


def assert_same_storage(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert_same_bits(whole_storage(ours).cpu(), whole_storage(expected))


@pytest.mark.parametrize(
    ("device", "limit", "head_dim"),
    [
        ("cpu", None, 64),
        *(
            pytest.param("cuda", limit, head_dim, marks=GPU)
            for limit in LIMITS
            for head_dim in HEAD_DIMS
        ),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize(("lens", "block_size", "heads", "options"), SHAPES)
def test_decode(
    draw: Draw,
    device: str,
    limit: int | None,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    rows: int,
    lens: list[int],
    block_size: int,
    heads: tuple[int, int],
    options: dict[str, Any],
) -> None:
    case = build(
        draw,
        lens,
        query_len=short_queries(len(lens)) if rows == 1 else rows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        **options,
    )
    there = case_on(device, case)
    previous = None if limit is None else ops._set_shared_memory_cap(limit)
    try:
        out, lse = there.decode_with_lse()
    finally:
        if previous is not None:
            ops._set_shared_memory_cap(previous)
    assert_accurate(case, out.cpu(), lse.cpu())


@GPU
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lens", [[700], [300, 5, 0, 40]], ids=len)
def test_early_start(draw: Draw, lens: list[int], head_dim: int) -> None:
    case = case_on("cuda", build(draw, lens, num_heads=32, num_kv_heads=4, head_dim=head_dim))
    expected = case.decode().cpu()
    set_early_start(True)
    try:
        assert_same_bits(case.decode().cpu(), expected)
    finally:
        set_early_start(False)


# key's dtype, the cache's, and whether there are scales: without, caches of key's dtype take bytes.
WRITES = [
    *((dtype, dtype, has_scales) for dtype in DTYPES for has_scales in (False, True)),
    *((dtype, fp8, True) for dtype in HALF_DTYPES for fp8 in FP8_DTYPES),
]
WAYS = ["slots int64", "slots int32", "one token", "several", "ragged", "bad ragged"]


def write_case(
    draw: Draw, write: tuple[torch.dtype, torch.dtype, bool], is_aligned: bool, way: str
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], list[torch.Tensor | None]]:
    """(key, value), caches and what says which token goes where, scales behind it."""
    dtype, cache_dtype, has_scales = write
    num_blocks, block_size, num_kv_heads, head_dim = 9, 3, 3, 64
    lens = [4, 0, 9, 1, 7]
    batch, tokens = len(lens), 7
    rows = {"one token": (batch,), "several": (batch, 2)}.get(way, (tokens,))
    shape = (2, *rows, num_kv_heads, head_dim)
    # Rows that begin one element past a multiple of 16 bytes are copied by elements.
    skipped = 0 if is_aligned else 1
    numbers = draw.normal(torch.Size(shape).numel() + skipped, dtype=dtype)
    key, value = numbers[skipped:].view(shape).unbind()
    caches = pools("HND", num_blocks, block_size, num_kv_heads, head_dim, cache_dtype, "cpu", 2.0)
    scales = [torch.exp2(draw.normal(num_kv_heads)), torch.exp2(draw.normal(1)[0])]
    if way.startswith("slots"):
        slots = draw.rng.sample(range(num_blocks * block_size), 4)
        slots += [-1, 2**31 - 1, -(2**31)]
        where = [torch.tensor(slots, dtype=torch.int32 if "32" in way else torch.int64)]
    else:
        tables = torch.tensor(draw.rng.sample(range(num_blocks), 9), dtype=torch.int32)
        tables = torch.cat([tables, torch.tensor([-1], dtype=torch.int32)])
        rows_of = [[0, 1, 9], [9, 9, 9], [2, 3, 4], [5, 9, 9], [6, 7, 8]]
        where = [tables[torch.tensor(rows_of)], torch.tensor(lens, dtype=torch.int32)]
        cu = {"ragged": [0, 2, 2, 5, 6, 7], "bad ragged": [0, 2, 99, 5, 6, 7]}.get(way)
        where.append(torch.tensor(cu, dtype=torch.int32) if cu else None)
    return (key, value), list(caches), [*where, *(scales if has_scales else (None, None))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("write", WRITES, ids=str)
def test_writes(
    draw: Draw,
    device: str,
    write: tuple[torch.dtype, torch.dtype, bool],
    is_aligned: bool,
    way: str,
) -> None:
    """reshape_and_cache and append_kv."""
    tokens, caches, where = write_case(draw, write, is_aligned, way)
    assert (tokens[0].data_ptr() % 16 == 0) == is_aligned
    op = "reshape_and_cache" if way.startswith("slots") else "append_kv"
    ours = [moved(cache, device) for cache in caches]
    there = [moved(t, device) if t is not None else None for t in (*tokens, *where)]
    getattr(ops, op)(*there[:2], *ours, *there[2:])
    getattr(reference, op)(*tokens, *caches, *where)
    assert bool((caches[0].float() != 2.0).any())
    for cache, wanted in zip(ours, caches, strict=True):
        assert_same_storage(cache, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_len", [None, 3, [2, 0, 5, 1, 0, 4]])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS)
def test_append_decode(
    draw: Draw, device: str, dtype: torch.dtype, cache_dtype: torch.dtype, query_len: Any
) -> None:
    """The kernels that write and those that read, chained."""
    lens = [33, 1, 70, 16, 0, 2]
    case = build(draw, lens, query_len=query_len, dtype=dtype, cache_dtype=cache_dtype, fill=1.0)
    key, value = draw.normal(2, *case.q.shape[:-2], 2, 64, dtype=dtype).unbind()
    there = case_on(device, case)
    tokens = moved(key, device), moved(value, device)
    out = ops.append_decode(there.q, *tokens, *there.args[1:])
    reference.append_kv(key, value, case.k_cache, case.v_cache, *case.args[3:])
    assert_same_storage(there.k_cache, case.k_cache)
    assert_same_storage(there.v_cache, case.v_cache)
    assert_accurate(case, out.cpu())


# Bytes that copy_blocks moves at a time, and for how many pools its parameters have room.
PIECES = [16, 8, 4, 2, 1]
POOLS = [64, 512]


def copied_pools(storage: torch.Tensor, piece: int, layers: int, runs: int) -> list[torch.Tensor]:
    """K, then V of every layer: blocks in one run, or in several with gaps between."""
    num_blocks, block_size, num_kv_heads, row = 5, 2, 3, 16 * 9
    rows = storage[piece % 16 :][: layers * 2 * num_blocks * 4 * 4 * 2 * row]
    if runs == 1:
        size = layers * 2 * num_blocks * block_size * num_kv_heads * row
        shaped = rows[:size].view(layers * 2, num_blocks, block_size, num_kv_heads, row)
    else:
        shaped = rows.view(layers * 2, num_blocks, 4, 4, 2 * row)
        shaped = shaped[:, :, :block_size, 1 : 1 + num_kv_heads, :row]
    return list(shaped.unbind())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("most_pools", POOLS)
@pytest.mark.parametrize("piece", PIECES)
def test_copy_blocks(draw: Draw, device: str, piece: int, most_pools: int, runs: int) -> None:
    layers = 2 if most_pools == 64 else 33
    size = 16 + layers * 2 * 5 * 4 * 4 * 2 * 16 * 9
    storage = draw.integers(0, 255, size, dtype=torch.uint8)
    mapping = torch.tensor([[0, 3], [-1, 0], [4, 1], [0, 5], [2**40, 0]])
    ours = moved(storage, device)
    caches = copied_pools(ours, piece, layers, runs)
    wanted = copied_pools(storage, piece, layers, runs)
    assert wanted[0].data_ptr() % 16 == piece % 16
    ops.copy_blocks(caches[:layers], caches[layers:], moved(mapping, device))
    reference.copy_blocks(wanted[:layers], wanted[layers:], mapping)
    assert torch.equal(ours.cpu(), storage)


@pytest.mark.parametrize("row", [32, 48])
@pytest.mark.parametrize(
    ("source", "destination"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]
)
@GPU
def test_swap_blocks(draw: Draw, source: str, destination: str, row: int) -> None:
    """No kernels, but CUDA's copies in one and two dimensions: blocks side by side and apart."""
    src, dst = (draw.normal(6, row)[:, :32] for _ in range(2))
    mapping = torch.tensor([[0, 2], [1, 3], [5, 0], [-1, 1], [7, 1]])
    ours = moved(dst, destination)
    ops.swap_blocks([moved(src, source)], [ours], mapping)
    torch.cuda.synchronize()
    reference.swap_blocks([src], [dst], mapping)
    assert_same_storage(ours, dst)


# For how many states merge_states's parameters have room.
STATES = [16, 512]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most_states", STATES)
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states(
    draw: Draw, device: str, dtype: torch.dtype, is_aligned: bool, most_states: int
) -> None:
    parts = 3 if most_states == 16 else 20
    skipped = 0 if is_aligned else 1
    outs = [draw.normal(5, 3, 64 + skipped, dtype=dtype)[..., skipped:] for _ in range(parts)]
    lses = [3 * draw.normal(5, 3) for _ in range(parts)]
    for lse in lses:
        lse[draw.rng.randrange(5)] = float("-inf")
    lses[0][4] = 1.0
    ours = [[moved(t, device) for t in tensors] for tensors in (outs, lses)]
    out, lse = (t.cpu() for t in ops.merge_states(*ours))
    expected, expected_lse = reference.merge_states(outs, lses)
    assert_lse(lse, expected_lse)
    bound = 0.5 * ulp(expected, dtype) + 1e-6 * torch.stack(outs).abs().max()
    assert bool(((out.double() - expected).abs() <= bound).all())
