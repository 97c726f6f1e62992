"""What only CUDA has, for the ops around decode: graphs, streams, devices, asynchrony."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import Draw
from test_append import assert_appended, new_tokens, twin
from test_cache import FP8
from test_cache_dispatch import BUILD
from test_cuda import QUERIES, assert_no_waiting, capture, graph_case, poison_free_memory, refill

import paged_attn

pytestmark = pytest.mark.gpu
ops = torch.ops.paged_attn


@pytest.mark.parametrize("op", sorted(BUILD))
def test_no_host_sync(draw: Draw, op: str) -> None:
    arguments = BUILD[op](draw)
    getattr(ops, op)(**arguments)
    with assert_no_waiting():
        getattr(ops, op)(**arguments)


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_append_decode_in_a_graph(draw: Draw, dtype: torch.dtype, query_len: Any) -> None:
    """Captured short, replayed long, while what scratch held is poisoned in between."""
    case = graph_case(draw, query_len, dtype)
    key, value = (t.contiguous() for t in new_tokens(draw, case))
    out = torch.empty_like(case.q)

    def run() -> None:
        out.copy_(ops.append_decode(case.q, key, value, *case.args[1:]))

    graph = capture(run)
    for lens in ([300, 5, 0, 70, 1, 129], [1, 1, 1, 1, 1, 1], [9, 200, 33, 0, 64, 5]):
        refill(case, draw, lens)
        key.copy_(draw.normal(*key.shape))
        expected_case = twin(case)
        expected = ops.append_decode(case.q, key, value, *expected_case.args[1:])
        poison_free_memory()
        graph.replay()
        assert_same_bits(out, expected)
        assert_same_bits(case.k_cache, expected_case.k_cache)
        assert_same_bits(case.v_cache, expected_case.v_cache)


def test_merge_states_in_a_graph(draw: Draw) -> None:
    outs = [draw.normal(7, 4, 64, dtype=torch.float16) for _ in range(20)]
    lses = [draw.normal(7, 4) for _ in outs]
    merged, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])

    def run() -> None:
        new_out, new_lse = ops.merge_states(outs, lses)
        merged.copy_(new_out)
        lse.copy_(new_lse)

    graph = capture(run)
    for tensor in (*outs, *lses):
        tensor.copy_(draw.normal(*tensor.shape))
    expected = ops.merge_states(outs, lses)
    graph.replay()
    assert_same_bits(merged, expected[0])
    assert_same_bits(lse, expected[1])


@pytest.mark.parametrize("op", ["reshape_and_cache", "append_kv", "append_decode", "copy_blocks"])
def test_checks_while_a_graph_is_captured(draw: Draw, checks: None, op: str) -> None:
    arguments = BUILD[op](draw)
    paged_attn.set_checks(False)
    getattr(ops, op)(**arguments)
    torch.cuda.synchronize()
    paged_attn.set_checks(True)
    with (
        pytest.raises(RuntimeError, match=rf"paged_attn\.{op}: checks are on"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        getattr(ops, op)(**arguments)


@pytest.mark.parametrize("op", sorted(set(BUILD) - {"swap_blocks"}))
def test_the_current_stream_is_used(draw: Draw, op: str) -> None:
    """Inputs that a side stream is still writing are waited for by order alone."""
    arguments, again = BUILD[op](draw), BUILD[op](draw.again())
    name = {"copy_blocks": "k_caches", "merge_states": "outs"}.get(op, "value")
    late, expected = arguments[name], again[name]
    late, expected = (late[0], expected[0]) if isinstance(late, list) else (late, expected)
    expected.copy_(late)
    late_values = late.clone()
    late.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(late_values)
        ours = getattr(ops, op)(**arguments)
    side.synchronize()
    theirs = getattr(ops, op)(**again)
    for name, value in arguments.items():
        first, second = (x if isinstance(x, list) else [x] for x in (value, again[name]))
        for a, b in zip(first, second, strict=True):
            if a is not None:
                assert torch.equal(a, b), name
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, theirs)), strict=True):
        if a is not None:
            assert_same_bits(a, b)


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_devices_store_the_same_bits(
    draw: Draw, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    key = (draw.normal(64, 3, 72) * torch.exp2(draw.normal(64, 3, 72) * 6)).to(dtype)
    scale = torch.exp2(draw.normal(3))
    slots = torch.randperm(96, generator=draw.generator, device="cuda")[:64]
    stored = []
    for device in ("cuda", "cpu"):
        caches = [torch.zeros(12, 8, 3, 72, device=device).to(cache_dtype) for _ in range(2)]
        rows, where, scales = key.to(device), slots.to(device), scale.to(device)
        ops.reshape_and_cache(rows, -rows, *caches, where, scales, scales)
        stored.append(caches)
    for ours, theirs in zip(*stored, strict=True):
        assert_same_bits(ours.cpu(), theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("op", sorted(BUILD))
def test_the_other_device(draw: Draw, op: str) -> None:
    """While another device is current."""
    arguments = BUILD[op](draw)
    expected = getattr(ops, op)(**BUILD[op](draw.again()))
    moved: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, list):
            moved[name] = [t.to("cuda:1") for t in value]
        elif value is not None and value.is_cuda:
            moved[name] = value.to("cuda:1")
        else:
            moved[name] = value
    results = getattr(ops, op)(**moved)
    assert torch.cuda.current_device() == 0
    if expected is not None:
        for ours, theirs in zip(
            results if isinstance(results, tuple) else (results,),
            expected if isinstance(expected, tuple) else (expected,),
            strict=True,
        ):
            assert ours.device == torch.device("cuda:1")
            assert_same_bits(ours.to("cuda:0"), theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_swap_between_two_devices(draw: Draw) -> None:
    """Ordered behind the work of both devices' streams, and before what they get later."""
    src = torch.zeros(64, 1 << 16, device="cuda:0")
    dst = torch.zeros(64, 1 << 16, device="cuda:1")
    mapping = torch.tensor([[i, 63 - i] for i in range(32)])
    torch.cuda._sleep(50_000_000)
    src.fill_(3.0)
    with torch.cuda.device(1):
        torch.cuda._sleep(50_000_000)
        dst.fill_(1.0)
    ops.swap_blocks([src], [dst], mapping)
    src.fill_(7.0)
    assert bool((dst[32:] == 3.0).all())
    assert bool((dst[:32] == 1.0).all())


@pytest.mark.parametrize("query_len", QUERIES)
def test_append_under_memory_that_others_poisoned(draw: Draw, query_len: Any) -> None:
    """append_kv has no scratch; whatever free memory holds, the result is the reference's."""
    case = graph_case(draw, query_len, torch.float16)
    for _ in range(3):
        poison_free_memory()
        assert_appended(draw, case)
