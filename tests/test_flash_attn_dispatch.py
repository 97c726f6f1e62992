"""FlashAttention's calls compile, can be captured, and do not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import Draw
from flash_case import FlashCase, build_flash
from test_cuda import assert_no_waiting

from paged_attn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

CALLS = ("decode", "append", "append_rotary", "append_ragged", "varlen", "packed", "lse")
LONGEST = 64


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw_call(draw: Draw, name: str, batch: int) -> tuple[FlashCase, Callable[..., Any]]:
    cached = [draw.rng.randint(0, LONGEST - 4) for _ in range(batch)]
    # The ends differ, so that those of q and of k never are one tensor.
    queries: Any = [4, *(draw.rng.randint(0, 4) for _ in range(batch - 2)), 3]
    how: dict[str, Any] = {"num_blocks": 4 * batch, "fill": 0.0, "options": {"causal": True}}
    if name == "append_ragged":
        how |= {"new_len": [*reversed(queries)], "rotary_dim": 32}
    elif name.startswith("append"):
        how |= {"new_len": 2, "rotary_dim": 32 if name == "append_rotary" else 0}
        queries = 2
    elif name in ("decode", "lse"):
        queries = 1
    if name == "lse":
        how["options"] = {"return_softmax_lse": True, "empty_lse_inf": True}
    # Tables of one width, so that only the batch differs between calls.
    filled = [LONGEST - 4, *cached[1:]]
    flash = build_flash(draw, filled, query_len=queries, **how)
    function = flash_attn_varlen_func if name in ("varlen", "packed") else flash_attn_with_kvcache
    return flash, function


def arguments_of(flash: FlashCase, name: str) -> dict[str, Any]:
    if name not in ("varlen", "packed"):
        return flash.with_kvcache()
    arguments = flash.varlen(packed=name == "packed")
    return arguments | {"max_seqlen_q": 4, "max_seqlen_k": LONGEST}


def clones(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def assert_same(ours: Any, theirs: Any) -> None:
    for first, second in zip(ours, theirs, strict=True):
        if isinstance(first, torch.Tensor):
            assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in CALLS), ("append_ragged", "inductor"), ("lse", "inductor")],
)
def test_compile_without_breaks(draw: Draw, device: str, name: str, backend: str) -> None:
    """And what is compiled once serves other batch sizes."""
    compiled: Any = None
    for batch in (7, 2, 5):
        flash, function = draw_call(draw, name, batch)
        arguments = arguments_of(flash, name)
        twin = clones(arguments)
        again = compiled is not None
        if not again:
            compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
        with (
            torch._dynamo.config.patch(error_on_recompile=again),
            # Sizes that are equal by chance in the first call stay apart.
            torch.fx.experimental._config.patch(use_duck_shape=False),
            torch.no_grad(),
        ):
            ours, theirs = compiled(**arguments), function(**twin)
        if backend == "inductor" and "rotary_cos" in arguments:
            # Compiled arithmetic contracts: rotated elements may differ in their last bit.
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(arguments["k_cache"], twin["k_cache"])
            continue
        assert_same(ours if name == "lse" else [ours], theirs if name == "lse" else [theirs])
        assert_same(arguments.values(), twin.values())


def test_compile_with_lengths_as_one_number(draw: Draw, device: str) -> None:
    """A plain number that grows at each step is compiled anew once, not at each step."""
    flash, function = draw_call(draw, "append", 2)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for step in range(5):
        with torch._dynamo.config.patch(error_on_recompile=step >= 3):
            arguments = flash.with_kvcache() | {"cache_seqlens": 10 + step}
            twin = clones(arguments)
            assert_same_bits(compiled(**arguments), function(**twin))
            assert_same_bits(arguments["k_cache"], twin["k_cache"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits_for_the_device(draw: Draw, name: str) -> None:
    flash, function = draw_call(draw, name, 3)
    arguments = arguments_of(flash, name)
    function(**arguments)
    with assert_no_waiting():
        function(**arguments)
        if name in ("decode", "append"):
            function(**(arguments | {"cache_seqlens": 7}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_graphs_replay_with_other_content(draw: Draw, name: str) -> None:
    """Captured over one batch, replayed over another of the same shapes."""
    flash, function = draw_call(draw, name, 3)
    captured = clones(arguments_of(flash, name))
    function(**clones(captured))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = function(**captured)
    # Other tokens; other lengths where that keeps every shape.
    changed = clones(arguments_of(flash, name))
    for key in ("q", "k", "v"):
        if changed.get(key) is not None:
            changed[key] = draw.normal(*changed[key].shape, dtype=changed[key].dtype)
    if changed.get("cache_seqlens") is not None:
        changed["cache_seqlens"] = draw.integers(
            0, LONGEST - 4, *changed["cache_seqlens"].shape, dtype=torch.int32
        )
    for key, value in changed.items():
        if isinstance(value, torch.Tensor):
            captured[key].copy_(value)
    graph.replay()
    theirs = function(**changed)
    assert_same(ours if name == "lse" else [ours], theirs if name == "lse" else [theirs])
    assert_same(captured.values(), changed.values())
