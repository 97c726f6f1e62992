"""The ops behave as PyTorch's own: schema, fake tensors, compile, gradients, inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, FP8_DTYPES, OPTION_SETS, Case, Draw, build
from torch._subclasses.fake_tensor import FakeTensorMode

QUERIES: list[Any] = [None, 3, [2, 0, 1]]
OVERLOADS = ("decode", "decode_out", "decode_with_lse", "lse_out")
ops = torch.ops.paged_attn


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def new_outputs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(case.q)
    return out, torch.zeros(case.q.shape[:-1], device=case.q.device)


def opchecks(case: Case) -> list[str]:
    schema = ["test_schema"] if case.k_cache.dtype not in FP8_DTYPES else []  # torch's cannot
    return [*schema, "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


def overload_and_outputs(overload: str, case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    out, lse = new_outputs(case)
    return {
        "decode": (ops.decode.default, {}),
        "decode_out": (ops.decode.out, {"out": out}),
        "decode_with_lse": (ops.decode_with_lse.default, {}),
        "lse_out": (ops.decode_with_lse.out, {"out": out, "lse": lse}),
    }[overload]


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overload", OVERLOADS)
def test_opcheck_decode(
    draw: Draw, device: str, overload: str, dtype: torch.dtype, query_len: Any
) -> None:
    case = build(draw, [20, 5, 9], query_len=query_len, dtype=dtype, fill=0.0)
    op, outputs = overload_and_outputs(overload, case)
    torch.library.opcheck(op, case.args, {"scale": 0.3, **outputs})


@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("overload", OVERLOADS)
def test_opcheck_decode_under_options(draw: Draw, device: str, overload: str, name: str) -> None:
    query_len = draw.rng.choice(QUERIES)
    case = build(draw, [90, 5, 9], query_len=query_len, fill=0.0, **OPTION_SETS[name])
    op, outputs = overload_and_outputs(overload, case)
    torch.library.opcheck(op, case.args, {**case.options, **outputs}, test_utils=opchecks(case))


@pytest.mark.parametrize("name", OPTION_SETS)
def test_opcheck_append_decode_under_options(draw: Draw, device: str, name: str) -> None:
    query_len = draw.rng.choice(QUERIES)
    case = build(draw, [90, 5, 9], query_len=query_len, fill=0.0, **OPTION_SETS[name])
    key = draw.normal(*case.q.shape[:-2], 2, 64, dtype=case.q.dtype)
    arguments = (case.q, key, -key, *case.args[1:])
    torch.library.opcheck(
        ops.append_decode.default, arguments, case.options, test_utils=opchecks(case)
    )


def test_opcheck_decode_requiring_grad(draw: Draw, device: str) -> None:
    case = build(draw, [20, 5, 9], fill=0.0)
    case.q.requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.decode.default, case.args, test_utils=checks)


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_reshape_and_cache(
    draw: Draw, device: str, dtype: torch.dtype, layout: str
) -> None:
    case = build(draw, [20, 5], dtype=dtype, layout=layout, fill=0.0)
    key = draw.normal(3, 2, 64, dtype=dtype)
    slots = torch.tensor([4, -1, 17], device=device)
    k_cache, v_cache = case.k_cache, case.v_cache
    torch.library.opcheck(ops.reshape_and_cache.default, (key, key, k_cache, v_cache, slots))


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("q_layout", ["contiguous", "qkv", "heads_first"])
def test_meta_and_fake_tensors(draw: Draw, device: str, q_layout: str, query_len: Any) -> None:
    case = build(draw, [20, 5, 9], query_len=query_len, q_layout=q_layout)
    real = case.decode_with_lse()
    meta = [t.to("meta") if t is not None else None for t in case.args]
    for ours, theirs in zip(ops.decode_with_lse(*meta), real, strict=True):
        assert ours.device.type == "meta"
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) if t is not None else None for t in case.args]
        results = (*ops.decode_with_lse(*fake), ops.decode(*fake))
    for ours, theirs in zip(results, (*real, real[0]), strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.stride() == theirs.stride()


def mark_dynamic(case: Case) -> None:
    """Batch (or tokens) and table width; the pool's shape stays."""
    torch._dynamo.mark_dynamic(case.q, 0)
    torch._dynamo.mark_dynamic(case.block_tables, 0)
    torch._dynamo.mark_dynamic(case.block_tables, 1)
    torch._dynamo.mark_dynamic(case.context_lens, 0)
    if case.cu_seqlens_q is not None:
        torch._dynamo.mark_dynamic(case.cu_seqlens_q, 0)


def batches(draw: Draw, query_len: Any, **options: Any) -> Iterator[Case]:
    for batch in (2, 3, 7, 16, 5):
        lens = [draw.rng.randint(1, 60) for _ in range(batch)]
        ragged = [draw.rng.randint(1, 4) for _ in lens]
        yield build(
            draw,
            lens,
            query_len=ragged if query_len == "ragged" else query_len,
            num_blocks=80,
            spare_columns=draw.rng.randint(2, 30),
            fill=0.0,
            **options,
        )


@pytest.mark.parametrize("query_len", [None, 3, "ragged"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_once_for_all_batch_sizes(
    draw: Draw, device: str, backend: str, query_len: Any
) -> None:
    def layer(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k_cache, v_cache, *rest = args
        out = ops.decode(q, k_cache, v_cache, *rest, scale=0.2)
        again, lse = ops.decode_with_lse(q, k_cache, v_cache, *rest, scale=0.2)
        return out, again, lse

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for case in batches(draw, query_len):
            mark_dynamic(case)
            for ours, theirs in zip(compiled(*case.args), layer(*case.args), strict=True):
                assert_same_bits(ours, theirs)


@pytest.mark.parametrize("query_len", [None, "ragged"])
@pytest.mark.parametrize("name", ["all", "all_noncausal"])
def test_compile_under_options_once_for_all_batch_sizes(
    draw: Draw, device: str, name: str, query_len: Any
) -> None:
    def layer(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.decode_with_lse(*args, **options)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for case in batches(draw, query_len, **OPTION_SETS[name]):
            mark_dynamic(case)
            ours, theirs = compiled(case.args, case.options), layer(case.args, case.options)
            for first, second in zip(ours, theirs, strict=True):
                assert_same_bits(first, second)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_writing_then_reading(draw: Draw, device: str, backend: str) -> None:
    """The order of a cache's write and read survives functionalisation."""

    def step(q: torch.Tensor, key: torch.Tensor, slots: torch.Tensor, *rest: Any) -> Any:
        k_cache, v_cache, *others = rest
        ops.reshape_and_cache(key, -key, k_cache, v_cache, slots)
        out = torch.empty_like(q)
        ops.decode.out(q, k_cache, v_cache, *others, out=out)
        return out

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for case in batches(draw, None):
            mark_dynamic(case)
            newest = [case.live_slots(b) for b in range(case.q.shape[0])]
            slots = torch.stack([blocks[-1] * 16 + offsets[-1] for blocks, offsets in newest])
            key = draw.normal(case.q.shape[0], 2, 64, dtype=torch.float16)
            torch._dynamo.mark_dynamic(key, 0)
            torch._dynamo.mark_dynamic(slots, 0)
            twin = case.with_(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
            ours = compiled(case.q, key, slots, *case.args[1:])
            theirs = step(case.q, key, slots, *twin.args[1:])
            assert_same_bits(ours, theirs)
            assert_same_bits(case.k_cache, twin.k_cache)
            assert_same_bits(case.v_cache, twin.v_cache)


@pytest.mark.parametrize("op", ["decode", "decode_with_lse"])
def test_backward_raises(draw: Draw, device: str, op: str) -> None:
    """q may require grad; only asking for a gradient is an error."""
    case = build(draw, [20, 5])
    expected = case.decode()
    case.q.requires_grad_()
    result = getattr(ops, op)(*case.args)
    out = result[0] if isinstance(result, tuple) else result
    assert_same_bits(out.detach(), expected)
    with pytest.raises(RuntimeError, match="forward only"):
        out.sum().backward()
    assert case.q.grad is None


@pytest.mark.parametrize("op", ["decode", "decode_with_lse", "append_decode"])
@pytest.mark.parametrize("argument", ["k_cache", "alibi_slopes", "sinks", "k_scale", "v_scale"])
def test_backward_to_what_is_not_the_query_raises(
    draw: Draw, device: str, argument: str, op: str
) -> None:
    """Sinks above all, for models learn them."""
    options = {key: value for key, value in OPTION_SETS["all"].items() if key != "cache_dtype"}
    case = build(draw, [20, 5], fill=0.0, **options)
    inputs = {"k_cache": case.k_cache, **case.options}
    inputs[argument].requires_grad_()
    rest = (case.v_cache, case.block_tables, case.context_lens)
    tokens = ()
    if op == "append_decode":
        tokens = (draw.normal(2, 2, 64, dtype=case.q.dtype),) * 2
    result = getattr(ops, op)(case.q, *tokens, inputs.pop("k_cache"), *rest, **inputs)
    out = result[0] if isinstance(result, tuple) else result
    with pytest.raises(RuntimeError, match="forward only"):
        out.sum().backward()


def test_backward_through_a_model_raises(draw: Draw, device: str) -> None:
    case = build(draw, [20, 5], dtype=torch.float32)
    weight = draw.normal(64, 64).requires_grad_()
    case = case.with_(q=case.q @ weight)
    with pytest.raises(RuntimeError, match="forward only"):
        (case.decode() * 2).sum().backward()


def test_modes_without_gradients(draw: Draw, device: str) -> None:
    case = build(draw, [20, 5])
    expected = case.decode()
    case.q.requires_grad_()
    with torch.no_grad():
        assert_same_bits(case.decode(), expected)
    with torch.inference_mode():
        out = case.decode()
        assert out.is_inference()
        assert_same_bits(out, expected)
        key = draw.normal(1, 2, 64, dtype=torch.float16)
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
        ops.reshape_and_cache(key, key, k_cache, v_cache, slot)
        assert_same_bits(k_cache[0, 0], key[0])


def test_results_are_new_tensors(draw: Draw, device: str) -> None:
    """Contiguous whatever q's strides, and aliases of nothing."""
    case = build(draw, [20, 5], q_layout="heads_first")
    out, lse = case.decode_with_lse()
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert out.data_ptr() != case.q.data_ptr()
    assert case.decode().data_ptr() != out.data_ptr()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_a_query_that_requires_grad(draw: Draw, device: str, backend: str) -> None:
    """Models outside no_grad compile and run; only their backward raises."""
    case = build(draw, [20, 5, 9], fill=0.0)
    q, *rest = case.args
    expected = ops.decode(q, *rest)
    compiled = torch.compile(lambda q: ops.decode(q, *rest) * 2, fullgraph=True, backend=backend)
    out = compiled(q.clone().requires_grad_())
    torch.testing.assert_close(out.detach(), expected * 2)
    with pytest.raises(RuntimeError, match="forward only"):
        out.sum().backward()
