"""Scratch belongs to a call, may hold anything, and is no more than promised: on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import DTYPES, Case, Draw, build
from test_append import new_tokens
from test_cuda import (
    QUERIES,
    WAYS,
    Outputs,
    arguments_of,
    call_into,
    capture,
    graph_case,
    outputs_of,
    poison_free_memory,
    refill,
)
from test_every_kernel import LIMITS

pytestmark = pytest.mark.gpu
ops = torch.ops.paged_attn


def busy_case(draw: Draw, query_len: Any, dtype: torch.dtype, way: str) -> Case:
    """One sequence that many blocks share, beside short ones."""
    return build(
        draw,
        [5000, 17, 0, 100, 1, 640],
        query_len=query_len,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        dtype=dtype,
        **arguments_of(way, dtype),
    )


def scratch_of(case: Case, outputs: Outputs) -> int:
    """Bytes that a call takes beside its outputs."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call_into(case, outputs)
    return torch.cuda.max_memory_allocated() - before


def assert_equal(ours: Outputs, theirs: Outputs) -> None:
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left, right)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", QUERIES)
def test_scratch_may_hold_anything(
    draw: Draw, query_len: Any, dtype: torch.dtype, way: str
) -> None:
    case = busy_case(draw, query_len, dtype, way)
    expected = case.decode_with_lse()
    for _ in range(10):
        poison_free_memory()
        assert_equal(case.decode_with_lse(), expected)
    assert_accurate(case, *expected)


@pytest.mark.parametrize("way", WAYS)
def test_canaries_around_scratch(draw: Draw, way: str) -> None:
    """A call gets its scratch out of memory whose every other byte it leaves alone."""
    case = busy_case(draw, 3, torch.float16, way)
    outputs = outputs_of(case)
    call_into(case, outputs)
    expected = tuple(tensor.clone() for tensor in outputs)
    size, margin, canary = 192 << 20, 4 << 20, 0xA5
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        memory = torch.full((size,), canary, dtype=torch.uint8, device="cuda")
        address = memory.data_ptr()
        del memory
        front = torch.empty(margin, dtype=torch.uint8, device="cuda")
        scratch = scratch_of(case, outputs)
        behind = torch.empty(size - margin, dtype=torch.uint8, device="cuda")
    # Smaller allocations would come from elsewhere.
    assert scratch > 1 << 20
    assert (front.data_ptr(), behind.data_ptr()) == (address, address + margin)
    # A window may leave so little that no blocks share it.
    assert bool((behind[:scratch] != canary).any()) or case.options.get("window", -1) > 0
    assert bool((behind[scratch:] == canary).all())
    assert bool((front == canary).all())
    assert_equal(outputs, expected)


@pytest.mark.parametrize("way", WAYS)
def test_scratch_between_replays(draw: Draw, way: str) -> None:
    """A second graph in the same memory pool overwrites the first one's scratch each time."""
    case = graph_case(draw, 2, torch.float16, **arguments_of(way, torch.float16))
    refill(case, draw, [16000, 7, 900, 1, 20, 3000])
    outputs = outputs_of(case)
    graph = capture(lambda: call_into(case, outputs))
    poison = capture(poison_free_memory, pool=graph.pool())
    graph.replay()
    expected = tuple(tensor.clone() for tensor in outputs)
    assert_accurate(case, *outputs)
    for _ in range(20):
        poison.replay()
        for tensor in outputs:
            tensor.fill_(float("nan"))
        graph.replay()
        assert_equal(outputs, expected)


@pytest.mark.parametrize("way", WAYS)
def test_replays_with_more_and_more_parts(draw: Draw, way: str) -> None:
    """What a replay leaves in scratch, which nobody else writes to, is no start for the next."""
    case = graph_case(draw, None, torch.float16, **arguments_of(way, torch.float16))
    outputs = outputs_of(case)
    graph = capture(lambda: call_into(case, outputs))
    full = case.block_tables.shape[1] * 16
    for length in sorted(draw.rng.randint(100, full) for _ in range(20)):
        refill(case, draw, [length, 0, full - length, 0, 0, length // 3])
        for tensor in outputs:
            tensor.fill_(float("nan"))
        graph.replay()
        replayed = tuple(tensor.clone() for tensor in outputs)
        call_into(case, outputs)
        assert_equal(replayed, outputs)
        assert_accurate(case, *replayed)


def at_once(works: list[Callable[[], Any]], check: Callable[[], None]) -> None:
    """Runs them again and again, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in works]
    for _ in range(20):
        torch.cuda.synchronize()
        for _ in range(10):
            for work, stream in zip(works, streams, strict=True):
                with torch.cuda.stream(stream):
                    work()
        torch.cuda.synchronize()
        check()


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_two_at_once(draw: Draw, way: str, is_captured: bool) -> None:
    """Graphs, and calls, on two streams: whatever one uses belongs to it alone."""
    cases = [
        graph_case(draw, None, dtype, **arguments_of(way, dtype))
        for dtype in (torch.float16, torch.bfloat16)
    ]
    refill(cases[0], draw, [16000, 7, 900, 1, 20, 3000])
    refill(cases[1], draw, [100, 9000, 0, 40, 5000, 6000])
    outputs = [outputs_of(case) for case in cases]
    expected = [case.decode_with_lse() for case in cases]
    works = [partial(call_into, case, out) for case, out in zip(cases, outputs, strict=True)]
    if is_captured:
        works = [capture(work).replay for work in works]

    def check() -> None:
        for ours, theirs in zip(outputs, expected, strict=True):
            assert_equal(ours, theirs)
            for tensor in ours:
                tensor.fill_(float("nan"))

    at_once(works, check)


@pytest.fixture
def other_work() -> Iterator[Callable[[Draw], None]]:
    """Allocates, multiplies and frees on a stream of its own."""
    stream = torch.cuda.Stream()
    held: list[torch.Tensor] = []

    def work(draw: Draw) -> None:
        with torch.cuda.stream(stream):
            size = draw.rng.randint(1, 2048)
            matrix = torch.full((size, size), 3.0, device="cuda")
            held.append(matrix @ matrix)
        if len(held) > 8:
            held.pop(draw.rng.randrange(len(held)))

    yield work
    stream.synchronize()
    held.clear()


def assert_a_thousand_alike(
    step: Callable[[], Iterable[torch.Tensor]], other_work: Callable[[], None]
) -> None:
    """Bit by bit, with other work between them; the device is not waited for before the last."""
    expected = [tensor.clone().view(torch.uint8) for tensor in step()]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        other_work()
        for ours, theirs in zip(step(), expected, strict=True):
            differing += (ours.view(torch.uint8) != theirs).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("way", ["plain", "all", "batch_invariant"])
@pytest.mark.parametrize("query_len", QUERIES)
def test_a_thousand_runs_under_pressure(
    draw: Draw, other_work: Callable[[Draw], None], query_len: Any, way: str
) -> None:
    case = busy_case(draw, query_len, torch.float16, way)
    assert_a_thousand_alike(case.decode_with_lse, partial(other_work, draw))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("limit", LIMITS)
def test_bits_do_not_depend_on_who_merges(
    draw: Draw, other_work: Callable[[Draw], None], limit: int, head_dim: int
) -> None:
    """Two units of many parts, and a block with a part of both that is now last in one of them and
    now in both; also with the small ring buffers in which few parts find room at once."""
    case = build(draw, [20000, 15000], num_heads=8, num_kv_heads=1, head_dim=head_dim)
    previous = ops._set_shared_memory_cap(limit)
    try:
        assert_a_thousand_alike(case.decode_with_lse, partial(other_work, draw))
    finally:
        ops._set_shared_memory_cap(previous)


def test_a_thousand_appends_under_pressure(draw: Draw, other_work: Callable[[Draw], None]) -> None:
    """append_decode of the same tokens, and merges of what it gives."""
    case = busy_case(draw, 3, torch.bfloat16, "plain")
    key, value = (t.contiguous() for t in new_tokens(draw, case))

    def step() -> list[torch.Tensor]:
        out = ops.append_decode(case.q, key, value, *case.args[1:])
        lses = [torch.zeros(out.shape[:-1], device="cuda") for _ in "ab"]
        return [out, *ops.merge_states([out, -2 * out], lses), case.k_cache, case.v_cache]

    assert_a_thousand_alike(step, partial(other_work, draw))


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("columns", [64, 131072])
@pytest.mark.parametrize("query_len", [None, 8])
@pytest.mark.parametrize("batch", [1, 64])
def test_scratch_is_bounded(
    draw: Draw, batch: int, query_len: Any, columns: int, options: dict[str, Any]
) -> None:
    """At most 64 MB and twice the output, whatever the table's width."""
    case = build(
        draw,
        [draw.rng.randint(1, 900) for _ in range(batch)],
        query_len=query_len,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        spare_columns=columns,
        **options,
    )
    outputs = outputs_of(case)
    call_into(case, outputs)
    assert (
        scratch_of(case, outputs) <= 64 * 10**6 + 2 * outputs[0].numel() * outputs[0].element_size()
    )
