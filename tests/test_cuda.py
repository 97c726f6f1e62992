"""What only CUDA has: graphs, streams, devices, asynchrony, scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import DTYPES, OPTION_SETS, Case, Draw, build

import paged_attn

pytestmark = pytest.mark.gpu

QUERIES: list[Any] = [None, 3, [2, 1, 0, 4, 1, 9]]
Outputs = tuple[torch.Tensor, torch.Tensor]
# Each leaves something of its own in scratch.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": OPTION_SETS["all"],
    "all_noncausal": OPTION_SETS["all_noncausal"],
    "batch_invariant": {"batch_invariant": True},
    "batch_invariant_all": {"batch_invariant": True, **OPTION_SETS["all"]},
}


def arguments_of(way: str, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of a way's options; with q in fp32 without fp8."""
    options = dict(WAYS[way])
    if dtype == torch.float32:
        options.pop("cache_dtype", None)
    return options


def poison_free_memory() -> None:
    """Fills what the allocator holds free, in every size class, with 0xFF."""
    blocks = []
    for power in range(9, 27):
        for _ in range(8 if power < 20 else 3):
            blocks.append(torch.full((2**power,), 255, dtype=torch.uint8, device="cuda"))


def outputs_of(case: Case) -> Outputs:
    out = torch.full_like(case.q, float("nan"))
    lse = torch.full(case.q.shape[:-1], float("nan"), device="cuda")
    return out, lse


def call_into(case: Case, outputs: Outputs) -> None:
    out, lse = outputs
    torch.ops.paged_attn.decode_with_lse.out(*case.args, **case.options, out=out, lse=lse)


@contextmanager
def assert_no_waiting() -> Iterator[None]:
    """Calls inside return while work before them still runs; PyTorch's own syncs are errors.

    Call it once before: kernels are loaded and memory is taken at first use, which may wait.
    """
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        before.record()
        yield
        still_running = not before.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_running, "a call waited for the device"


def capture(run: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def refill(case: Case, draw: Draw, lens: list[int]) -> None:
    """Other lengths, tables and values in the same tensors."""
    num_blocks, block_size = case.k_cache.shape[:2]
    tables = torch.full_like(case.block_tables, 2147480000)
    order = draw.rng.sample(range(num_blocks), num_blocks)
    for b, length in enumerate(lens):
        count = -(-length // block_size)
        blocks = [order.pop() for _ in range(count)]
        tables[b, :count] = torch.tensor(blocks, dtype=torch.int32)
    case.block_tables.copy_(tables)
    case.context_lens.copy_(torch.tensor(lens, dtype=torch.int32))
    case.q.copy_(draw.normal(*case.q.shape))
    for cache in (case.k_cache, case.v_cache):
        cache.copy_(draw.normal(*cache.shape))


def graph_case(draw: Draw, query_len: Any, dtype: torch.dtype, **options: Any) -> Case:
    """Captured with contexts of at most 3 tokens; the table has room for thousands."""
    return build(
        draw,
        [1, 2, 0, 3, 1, 2],
        query_len=query_len,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        dtype=dtype,
        num_blocks=2000,
        spare_columns=1023,
        **options,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", QUERIES)
def test_capture_short_replay_long(
    draw: Draw, query_len: Any, dtype: torch.dtype, way: str
) -> None:
    """Replays have eager's bits, up to the table's full width, padded rows included."""
    case = graph_case(draw, query_len, dtype, **arguments_of(way, dtype))
    outputs = outputs_of(case)
    graph = capture(lambda: call_into(case, outputs))
    full = case.block_tables.shape[1] * 16
    for lens in (
        [full, 7, 900, 1, 0, 3000],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, full],
        [2047, 2048, 2049, 1024, 16, 17],
    ):
        refill(case, draw, lens)
        for tensor in outputs:
            tensor.fill_(float("nan"))
        poison_free_memory()
        graph.replay()
        eager = outputs_of(case)
        call_into(case, eager)
        for ours, theirs in zip(outputs, eager, strict=True):
            assert_same_bits(ours, theirs)
        assert_accurate(case, *outputs)


def test_lengths_change_after_capture_long(draw: Draw) -> None:
    case = graph_case(draw, None, torch.float16)
    refill(case, draw, [16000, 7, 900, 1, 0, 3000])
    outputs = outputs_of(case)
    graph = capture(lambda: call_into(case, outputs))
    refill(case, draw, [1, 0, 3, 5, 100, 0])
    graph.replay()
    assert_accurate(case, *outputs)


@pytest.mark.parametrize("query_len", QUERIES)
def test_one_graph_replayed_on_two_streams_in_turn(draw: Draw, query_len: Any) -> None:
    case = graph_case(draw, query_len, torch.float16)
    refill(case, draw, [16000, 7, 900, 1, 20, 3000])
    outputs = outputs_of(case)
    graph = capture(lambda: call_into(case, outputs))
    expected = case.decode()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        assert_same_bits(outputs[0], expected)


def test_cache_write_in_a_graph(draw: Draw) -> None:
    """New slots at each replay, then a decode that reads them."""
    case = graph_case(draw, None, torch.float16)
    refill(case, draw, [40] * 6)
    key = draw.normal(6, 4, 128, dtype=torch.float16)
    slots = torch.full((6,), -1, dtype=torch.int64, device="cuda")
    outputs = outputs_of(case)

    def step() -> None:
        torch.ops.paged_attn.reshape_and_cache(key, -key, case.k_cache, case.v_cache, slots)
        call_into(case, outputs)

    graph = capture(step)
    for length in (33, 17, 16, 1):
        refill(case, draw, [length] * 6)
        newest = [case.live_slots(b) for b in range(6)]
        slots.copy_(torch.stack([blocks[-1] * 16 + offsets[-1] for blocks, offsets in newest]))
        key.copy_(draw.normal(6, 4, 128))
        graph.replay()
        for row, (blocks, offsets) in enumerate(newest):
            assert_same_bits(case.k_cache[blocks[-1], offsets[-1]], key[row])
        assert_accurate(case, *outputs)


def test_checks_mode_while_capturing(draw: Draw, checks: None) -> None:
    case = graph_case(draw, None, torch.float16)
    outputs = outputs_of(case)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Exception, match=r"(?i)captur"), torch.cuda.graph(graph):
        call_into(case, outputs)
    torch.cuda.synchronize()
    previous = paged_attn.set_checks(False)
    assert previous
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("query_len", QUERIES)
def test_side_stream(draw: Draw, query_len: Any) -> None:
    """Work is ordered after what the current stream holds, and only there."""
    lens = [40, 17, 3, 100, 1, 640]
    case = build(draw, lens, query_len=query_len, num_heads=8)
    expected = case.decode()
    q, keys, values = case.q.clone(), case.k_cache.clone(), case.v_cache.clone()
    key = draw.normal(1, 2, 64, dtype=torch.float16)
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    for _ in range(5):
        case.q.fill_(float("nan"))
        case.v_cache.zero_()
        poison_free_memory()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            case.q.copy_(q)
            case.k_cache.copy_(keys)
            case.v_cache.copy_(values)
            out = case.decode()
            case.q.zero_()
            torch.ops.paged_attn.reshape_and_cache(key, key, case.k_cache, case.v_cache, slot)
            case.v_cache.zero_()
        stream.synchronize()
        assert_same_bits(out, expected)
        assert not bool(case.v_cache.any())


@pytest.mark.parametrize("query_len", QUERIES)
def test_no_synchronisation(draw: Draw, query_len: Any) -> None:
    case = build(draw, [40, 17, 3, 100, 1, 640], query_len=query_len, num_heads=8)
    expected = case.decode()
    key = draw.normal(2, 2, 64, dtype=torch.float16)
    slots = torch.full((2,), -1, dtype=torch.int64, device="cuda")
    torch.ops.paged_attn.reshape_and_cache(key, key, case.k_cache, case.v_cache, slots)
    warm = [case.decode_with_lse() for _ in range(3)]
    del warm
    with assert_no_waiting():
        out = case.decode()
        both = case.decode_with_lse()
        torch.ops.paged_attn.reshape_and_cache(key, key, case.k_cache, case.v_cache, slots)
    assert_same_bits(out, expected)
    assert_same_bits(both[0], expected)


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def test_device_guard(draw: Draw, two_devices: None) -> None:
    """Tensors on cuda:1 while cuda:0 is current."""
    case = build(draw, [40, 17, 3, 1000], num_heads=8)
    expected = case.decode()
    moved = case.with_(
        **{
            name: getattr(case, name).to("cuda:1")
            for name in ("q", "k_cache", "v_cache", "block_tables", "context_lens")
        }
    )
    assert torch.cuda.current_device() == 0
    out = moved.decode()
    assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    assert_same_bits(out.cpu(), expected.cpu())
    key = torch.ones(1, 2, 64, dtype=torch.float16, device="cuda:1")
    slot = torch.zeros(1, dtype=torch.int64, device="cuda:1")
    torch.ops.paged_attn.reshape_and_cache(key, key, moved.k_cache, moved.v_cache, slot)
    assert bool((moved.k_cache[0, 0] == 1).all())
    mixed = moved.with_(context_lens=case.context_lens)
    with pytest.raises(ValueError, match=r"context_lens must be .*cuda:1.*, got .*cuda:0"):
        mixed.decode()
