"""Kernels that overlap on CUDA: what the kernel before writes, however late, is what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import Case, Draw, build
from test_append import new_tokens, twin
from test_cuda import capture

pytestmark = pytest.mark.gpu

ops = torch.ops.paged_attn

PAUSE_CYCLES = 500_000
QUERIES: list[Any] = [None, 3, [2, 1, 0, 4, 1, 9]]
LENS = [300, 5, 0, 70, 1000, 129]
WRITTEN_LAST = ["q", "key", "value", "k_cache", "v_cache", "block_tables", "context_lens"]


def build_case(draw: Draw, query_len: Any, lens: list[int]) -> Case:
    return build(draw, lens, query_len=query_len, num_heads=16, num_kv_heads=4, head_dim=128)


def overwrite(destination: torch.Tensor, source: torch.Tensor) -> None:
    """By a kernel: a copy may be no kernel, which nothing can overlap. A sum would lose -0."""
    torch.mul(source, 1, out=destination)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("last", WRITTEN_LAST)
@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("op", ["decode", "append_decode"])
def test_arguments_written_late(
    draw: Draw, op: str, query_len: Any, last: str, in_graph: bool
) -> None:
    """All of them are, after a pause, by the kernels before; the last one's kernel comes last."""
    right = build_case(draw, query_len, LENS)
    key, value = (t.contiguous() for t in new_tokens(draw, right))
    tensors = {
        "q": right.q,
        "key": key,
        "value": value,
        "k_cache": right.k_cache,
        "v_cache": right.v_cache,
        "block_tables": right.block_tables,
        "context_lens": right.context_lens,
    }
    # What is there before: all tokens in block 0, and too many of them.
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    held["context_lens"] += right.block_tables.shape[1] * right.k_cache.shape[1]
    names = [name for name in tensors if name != last] + [last]

    def call(given: dict[str, torch.Tensor]) -> torch.Tensor:
        rest = [given[name] for name in ("k_cache", "v_cache", "block_tables", "context_lens")]
        if op == "decode":
            return ops.decode(given["q"], *rest, right.cu_seqlens_q)
        return ops.append_decode(
            given["q"], given["key"], given["value"], *rest, right.cu_seqlens_q
        )

    out = torch.empty_like(right.q)

    def run() -> None:
        torch.cuda._sleep(PAUSE_CYCLES)
        for name in names:
            overwrite(held[name], tensors[name])
        out.copy_(call(held))

    start = {name: tensor.clone() for name, tensor in held.items()}
    replay: Callable[[], None] = run
    if in_graph:
        replay = capture(run).replay
    for name, tensor in start.items():
        held[name].copy_(tensor)
    torch.cuda.synchronize()
    replay()
    torch.cuda.synchronize()
    expected = call(tensors)
    assert_same_bits(out, expected)
    if op == "append_decode":
        assert_same_bits(held["k_cache"], tensors["k_cache"])
        assert_same_bits(held["v_cache"], tensors["v_cache"])


@pytest.mark.parametrize("query_len", QUERIES)
def test_layers_in_a_row(draw: Draw, query_len: Any) -> None:
    """Each layer's queries, keys and values come from the output of the one before."""
    case = build_case(draw, query_len, LENS)
    layers = [twin(case) for _ in range(12)]

    def forward(layers: list[Case], attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        q = case.q
        for layer in layers:
            key = q[..., ::4, :].contiguous()
            q = attend(q, key, key * 0.5, *layer.args[1:])
        return q

    def apart(*arguments: Any) -> torch.Tensor:
        q, key, value, *rest = arguments
        torch.cuda.synchronize()
        ops.append_kv(key, value, *rest)
        torch.cuda.synchronize()
        return ops.decode(q, *rest)

    expected_layers = [twin(case) for _ in layers]
    expected = forward(expected_layers, apart)
    out = torch.empty_like(case.q)
    graph = capture(lambda: out.copy_(forward(layers, ops.append_decode)))
    for _ in range(20):
        for layer in layers:
            layer.k_cache.copy_(case.k_cache)
            layer.v_cache.copy_(case.v_cache)
        graph.replay()
        assert_same_bits(out, expected)
        for layer, expected_layer in zip(layers, expected_layers, strict=True):
            assert_same_bits(layer.k_cache, expected_layer.k_cache)
            assert_same_bits(layer.v_cache, expected_layer.v_cache)
