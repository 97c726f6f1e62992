"""The ops that move cache data behave as PyTorch's own: schema, fakes, compile, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, Draw
from test_append import twin
from test_block_arguments import copy_arguments, merge_arguments, swap_arguments
from test_blocks import same_storages, twins
from test_cache import FP8
from test_cache_arguments import (
    append_arguments,
    append_decode_arguments,
    cache_arguments,
    tensors_of,
)
from test_dispatch import batches, mark_dynamic
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.paged_attn
BUILD: dict[str, Any] = {
    "reshape_and_cache": cache_arguments,
    "append_kv": append_arguments,
    "append_decode": append_decode_arguments,
    "copy_blocks": copy_arguments,
    "swap_blocks": swap_arguments,
    "merge_states": merge_arguments,
}
# opcheck's schema test cannot run on fp8 tensors.
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("query_len", [None, 3, [2, 0, 1]])
@pytest.mark.parametrize("op", ["append_kv", "append_decode"])
def test_opcheck_append(draw: Draw, device: str, op: str, query_len: Any) -> None:
    arguments = BUILD[op](draw, query_len)
    torch.library.opcheck(getattr(ops, op).default, tuple(arguments.values()))


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks", "merge_states"])
def test_opcheck_lists(draw: Draw, device: str, op: str) -> None:
    arguments = BUILD[op](draw)
    torch.library.opcheck(getattr(ops, op).default, tuple(arguments.values()))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("op", ["reshape_and_cache", "append_kv"])
def test_opcheck_fp8(draw: Draw, device: str, op: str, dtype: torch.dtype) -> None:
    arguments = BUILD[op](draw)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].to(dtype)
    scales = torch.ones(1, device=device), torch.ones(2, device=device)
    torch.library.opcheck(
        getattr(ops, op).default, (*arguments.values(), *scales), test_utils=FP8_CHECKS
    )


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
def test_opcheck_fp8_lists(draw: Draw, device: str, op: str, dtype: torch.dtype) -> None:
    arguments = BUILD[op](draw)
    values = [
        [t.to(dtype) for t in value] if isinstance(value, list) else value
        for value in arguments.values()
    ]
    torch.library.opcheck(getattr(ops, op).default, tuple(values), test_utils=FP8_CHECKS)


@pytest.mark.parametrize("op", sorted(BUILD))
def test_meta_and_fake_tensors(draw: Draw, device: str, op: str) -> None:
    arguments = BUILD[op](draw)
    real = getattr(ops, op)(**arguments)
    results = real if isinstance(real, tuple) else (real,)

    def convert(value: Any, how: Any) -> Any:
        if isinstance(value, list):
            return [how(t) for t in value]
        return how(value) if value is not None else None

    meta = {name: convert(value, lambda t: t.to("meta")) for name, value in arguments.items()}
    on_meta = getattr(ops, op)(**meta)
    with FakeTensorMode() as mode:
        fakes = {name: convert(value, mode.from_tensor) for name, value in arguments.items()}
        on_fakes = getattr(ops, op)(**fakes)
    for theirs, is_meta in ((on_meta, True), (on_fakes, False)):
        for ours, wanted in zip(
            theirs if isinstance(theirs, tuple) else (theirs,), results, strict=True
        ):
            if wanted is None:
                assert ours is None
                continue
            assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)
            assert ours.stride() == wanted.stride()
            assert ours.device.type == ("meta" if is_meta else device)


@pytest.mark.parametrize("query_len", [None, "ragged"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_appending_and_reading(
    draw: Draw, device: str, backend: str, query_len: Any
) -> None:
    """The order of writes and reads survives, and batch sizes do not recompile."""

    def step(q: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
        ops.append_kv(key, -key, *rest)
        first = ops.decode(q, *rest)
        return first, ops.append_decode(q, key + 1, key, *rest)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for case in batches(draw, query_len):
            mark_dynamic(case)
            key = draw.normal(case.q.shape[0], 2, 64, dtype=torch.float16)
            torch._dynamo.mark_dynamic(key, 0)
            other = twin(case)
            ours = compiled(case.q, key, *case.args[1:])
            theirs = step(case.q, key, *other.args[1:])
            for first, second in zip(ours, theirs, strict=True):
                assert_same_bits(first, second)
            assert_same_bits(case.k_cache, other.k_cache)
            assert_same_bits(case.v_cache, other.v_cache)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks", "merge_states"])
def test_compile_of_lists(draw: Draw, device: str, op: str, backend: str) -> None:
    arguments = BUILD[op](draw)
    theirs = {k: twins(v) if isinstance(v, list) else v for k, v in arguments.items()}

    def run(**kwargs: Any) -> Any:
        return getattr(ops, op)(**kwargs)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    with torch.no_grad():
        ours, wanted = compiled(**arguments), run(**theirs)
    if wanted is not None:
        for first, second in zip(ours, wanted, strict=True):
            torch.testing.assert_close(first, second)
    same_storages(
        tensors_of({k: v for k, v in arguments.items() if isinstance(v, list)}),
        tensors_of({k: v for k, v in theirs.items() if isinstance(v, list)}),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_lists_once_for_all_sizes(draw: Draw, device: str, backend: str) -> None:
    """Numbers of pairs and of rows, with as many tensors."""

    def run(caches: Any, pairs: Any, pairs_on_host: Any, outs: Any, lses: Any) -> Any:
        ops.copy_blocks(caches[:1], caches[1:], pairs)
        ops.swap_blocks(caches[:1], caches[1:], pairs_on_host)
        return ops.merge_states(outs, lses)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for size in (2, 3, 7, 16, 5):
            caches = [draw.normal(40, 4, 2, 8, dtype=torch.float16) for _ in "kv"]
            ids = draw.rng.sample(range(40), 2 * size)
            pairs = torch.tensor(ids).view(size, 2)
            pairs = pairs.to(device, copy=True), pairs
            outs = [draw.normal(size, 4, 64) for _ in range(3)]
            lses = [draw.normal(size, 4) for _ in range(3)]
            for tensor in (*pairs, *outs, *lses):
                torch._dynamo.mark_dynamic(tensor, 0)
            theirs = twins(caches)
            ours, wanted = compiled(caches, *pairs, outs, lses), run(theirs, *pairs, outs, lses)
            for first, second in zip(ours, wanted, strict=True):
                assert_same_bits(first, second)
            same_storages(caches, theirs)


@pytest.mark.parametrize("needs", ["q", "key"])
def test_backward_of_append_decode_raises(draw: Draw, device: str, needs: str) -> None:
    arguments = append_decode_arguments(draw)
    expected = ops.append_decode(**arguments)
    assert not expected.requires_grad
    arguments[needs] = arguments[needs].clone().requires_grad_()
    out = ops.append_decode(**arguments)
    assert_same_bits(out.detach(), expected)
    with pytest.raises(RuntimeError, match="forward only"):
        out.sum().backward()
    with torch.no_grad():
        assert not ops.append_decode(**arguments).requires_grad
    with torch.inference_mode():
        assert_same_bits(ops.append_decode(**arguments), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_append_decode_that_requires_grad(draw: Draw, device: str, backend: str) -> None:
    q, *rest = append_decode_arguments(draw).values()
    expected = ops.append_decode(q, *rest)
    compiled = torch.compile(
        lambda q: ops.append_decode(q, *rest) * 2, fullgraph=True, backend=backend
    )
    out = compiled(q.clone().requires_grad_())
    torch.testing.assert_close(out.detach(), expected * 2)
    with pytest.raises(RuntimeError, match="forward only"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_merge_states_raises(draw: Draw, device: str, dtype: torch.dtype) -> None:
    outs = [draw.normal(5, 4, 64, dtype=dtype).requires_grad_() for _ in range(3)]
    out, _ = ops.merge_states(outs, [draw.normal(5, 4) for _ in outs])
    with pytest.raises(RuntimeError, match="forward only"):
        out.float().sum().backward()


def test_writing_while_gradients_are_recorded(draw: Draw, device: str) -> None:
    """key of a model outside no_grad."""
    arguments = append_arguments(draw)
    arguments["key"].requires_grad_()
    ops.append_kv(**arguments)
    assert not arguments["k_cache"].requires_grad
    assert bool((arguments["k_cache"] != 0).any())
