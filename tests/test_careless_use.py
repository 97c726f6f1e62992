"""Mistakes that no single argument shows by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_lse, assert_same_bits
from attention_case import Draw, build
from test_arguments import (
    ALL_OPTIONS,
    CANARY,
    HEADS,
    OVERLOADS,
    TENSORS,
    Arguments,
    call,
    decode_arguments,
)
from test_cache_dispatch import BUILD

import paged_attn


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("argument", TENSORS[1:])
def test_a_meta_tensor_among_real_ones(
    draw: Draw, device: str, argument: str, overload: str
) -> None:
    arguments = decode_arguments(draw, [2, 1, 1], **ALL_OPTIONS)
    arguments[argument] = arguments[argument].to("meta")
    with pytest.raises(ValueError, match=f"{argument} must be on q's device {device}"):
        call(overload, arguments)
    assert bool((arguments["out"] == CANARY).all())


def test_a_meta_tensor_in_reshape_and_cache(draw: Draw, device: str) -> None:
    case = build(draw, [20, 5], fill=0.0)
    key = draw.normal(3, 2, 64, dtype=torch.float16)
    slots = torch.tensor([4, -1, 17], device="meta")
    with pytest.raises(ValueError, match="slot_mapping must be on key's device"):
        torch.ops.paged_attn.reshape_and_cache(key, key, case.k_cache, case.v_cache, slots)


@pytest.mark.parametrize("strides", [(64, 32, 1), (2, 128, 64), (64, 64, 1)])
def test_an_output_that_overlaps_itself(
    draw: Draw, device: str, strides: tuple[int, int, int]
) -> None:
    case = build(draw, [40, 17, 1], num_heads=HEADS)
    buffer = torch.full((10000,), CANARY, dtype=torch.float16, device=device)
    if strides[-1] != 1:
        case = case.with_(q=case.q.contiguous())
    out = buffer.as_strided(case.q.shape, strides)
    with pytest.raises(ValueError, match=r"paged_attn\.decode: out must be"):
        torch.ops.paged_attn.decode.out(*case.args, out=out)
    assert bool((buffer == CANARY).all())


def test_none_for_a_tensor(draw: Draw, device: str) -> None:
    arguments = decode_arguments(draw)
    arguments["k_cache"] = None
    with pytest.raises((ValueError, TypeError), match=r"k_cache"):
        call("decode", arguments)


@pytest.mark.parametrize("scale", [1e300, -3.5e38])
def test_a_scale_beyond_float32(draw: Draw, device: str, scale: float) -> None:
    case = build(draw, [40, 17, 1], num_heads=HEADS)
    with pytest.raises(ValueError, match="scale must be finite in float32"):
        case.decode(scale=scale)


def test_a_table_with_more_columns_than_there_are_positions(draw: Draw, device: str) -> None:
    case = build(draw, [40])
    wide = case.block_tables.as_strided((1, 2**31), (0, 0))
    with pytest.raises(ValueError, match="block_tables must be"):
        case.with_(block_tables=wide).decode()


@pytest.mark.usefixtures("checks")
def test_no_queries_at_all(draw: Draw, device: str) -> None:
    """Nothing is read, so nothing can be bad."""
    case = build(draw, [20, 5], query_len=0)
    case.block_tables.fill_(-7)
    out, lse = case.decode_with_lse()
    assert out.shape == case.q.shape
    assert lse.shape == case.q.shape[:-1]
    torch.ops.paged_attn.decode_with_lse.out(*case.args, out=out, lse=torch.empty_like(lse))


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize(("lens", "cu"), [([20], [0, 5]), ([], [5]), ([20, 5], [0, 0, -1])])
def test_entries_beyond_no_query_tokens(
    draw: Draw, device: str, lens: list[int], cu: list[int]
) -> None:
    """A bad cu_seqlens_q is told also where there is no row that it could spoil."""
    case = build(draw, lens, query_len=[0] * len(lens))
    case = case.with_(cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device))
    with pytest.raises(IndexError, match=rf"cu_seqlens_q\[{len(cu) - 1}\]"):
        case.decode()


def all_arguments(draw: Draw, op: str) -> Arguments:
    """Of a Python front."""
    if op in BUILD:
        return {key: value for key, value in BUILD[op](draw).items() if value is not None}
    outputs = {"decode": ("lse",), "decode_with_lse": ()}[op]
    arguments = decode_arguments(draw, [2, 1, 1], **{**ALL_OPTIONS, "cache_dtype": None})
    return {key: value for key, value in arguments.items() if key not in outputs}


FRONTS = ("decode", "decode_with_lse", *BUILD)
NOT_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy array": lambda t: t.float().cpu().numpy(),
    "list": lambda t: t.flatten()[:3].tolist(),
    "number": lambda t: 1.5,
    "string": lambda t: "q",
    "list of tensors": lambda t: [t],
}


@pytest.mark.parametrize("what", NOT_TENSORS)
@pytest.mark.parametrize("op", FRONTS)
def test_what_is_no_tensor(draw: Draw, device: str, op: str, what: str) -> None:
    """The dispatcher's own error names the op and the argument; nothing is written."""
    for name, value in all_arguments(draw, op).items():
        arguments = all_arguments(draw.again(), op)
        if isinstance(value, torch.Tensor):
            arguments[name] = NOT_TENSORS[what](value)
        elif isinstance(value, list):
            arguments[name] = [NOT_TENSORS[what](t) for t in value]
        else:
            continue
        with pytest.raises((TypeError, RuntimeError), match=rf"paged_attn::{op}\(\).*'{name}'"):
            getattr(paged_attn, op)(**arguments)


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks", "merge_states"])
def test_a_tensor_where_a_list_belongs(draw: Draw, device: str, op: str) -> None:
    for name, value in all_arguments(draw, op).items():
        if isinstance(value, list):
            arguments = {**all_arguments(draw, op), name: value[0]}
            with pytest.raises(RuntimeError, match=rf"paged_attn::{op}\(\).*'{name}'"):
                getattr(paged_attn, op)(**arguments)


@pytest.mark.parametrize("op", FRONTS)
def test_a_tensor_whose_memory_was_freed(draw: Draw, device: str, op: str) -> None:
    """As frameworks do to what they offload: it keeps its shape, and its address is null."""
    for name, value in all_arguments(draw, op).items():
        arguments = all_arguments(draw.again(), op)
        freed = arguments[name][-1] if isinstance(value, list) else arguments[name]
        if not isinstance(freed, torch.Tensor):
            continue
        freed.untyped_storage().resize_(0)
        with pytest.raises(
            ValueError, match=rf"paged_attn\.{op}: {name}\S* must be allocated, got"
        ):
            getattr(paged_attn, op)(**arguments)


@pytest.mark.parametrize("op", FRONTS)
def test_other_kinds_of_tensors(draw: Draw, device: str, op: str) -> None:
    """Sparse ones have no rows to point to."""
    for name, value in all_arguments(draw, op).items():
        arguments = all_arguments(draw.again(), op)
        if isinstance(value, list):
            arguments[name] = [t.to_sparse() for t in value]
        elif isinstance(value, torch.Tensor):
            arguments[name] = value.to_sparse()
        else:
            continue
        with pytest.raises(NotImplementedError, match=f"paged_attn::{op}"):
            getattr(paged_attn, op)(**arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 2**70},
        {"max_query_len": 2**70},
        {"window": float("nan")},
        {"softcap": None},
        {"softcap": 1j},
        {"scale": [1.0]},
        {"causal": []},
        {"batch_invariant": "yes"},
    ],
    ids=str,
)
def test_options_of_wrong_types(draw: Draw, device: str, wrong: Arguments) -> None:
    for op in ("decode", "decode_with_lse", "append_decode"):
        arguments = all_arguments(draw, op)
        with pytest.raises((TypeError, RuntimeError), match=rf"(?s)paged_attn::{op}|too large"):
            getattr(paged_attn, op)(**{**arguments, **wrong})


@pytest.mark.parametrize("op", FRONTS)
def test_inputs_that_require_grad(draw: Draw, device: str, op: str) -> None:
    """Are read and written as any others, with autograd on."""
    expected = all_arguments(draw.again(), op)
    plain = getattr(paged_attn, op)(**expected)
    arguments = all_arguments(draw.again(), op)
    for value in arguments.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.requires_grad_()
    ours = getattr(paged_attn, op)(**arguments)
    for a, b in zip(results(ours, arguments), results(plain, expected), strict=True):
        assert_same_bits(a.detach(), b)


def results(returned: Any, arguments: Arguments) -> list[torch.Tensor]:
    """What an op returned, and all that it could have written to."""
    found = []
    for value in (returned, *arguments.values()):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                found.append(tensor)
    return found


def refusal_of(op: str, arguments: Arguments) -> str:
    """The ValueError's text, empty if there is none."""
    try:
        getattr(paged_attn, op)(**arguments)
    except ValueError as error:
        return str(error)
    return ""


# Arguments that may be without elements together.
ALIKE = [
    {"k_cache", "v_cache"},
    {"k_cache", "v_cache", "key", "value"},
    {"key", "value", "q"},
    {"k_caches", "v_caches"},
    {"srcs", "dsts"},
    {"outs", "lses"},
]


@pytest.mark.parametrize("op", FRONTS)
def test_sizes_of_zero(draw: Draw, device: str, op: str) -> None:
    """Of each argument's dimensions, alone or with others: nothing to do, or refused by name."""
    names = all_arguments(draw.again(), op).keys()
    for group in [{name} for name in names] + [group & names for group in ALIKE if group & names]:
        for dim in range(-4, 0):
            arguments = all_arguments(draw.again(), op)

            def without(tensor: torch.Tensor, dim: int = dim) -> torch.Tensor:
                return tensor.narrow(dim, 0, 0) if tensor.dim() >= -dim else tensor

            for name in group:
                value = arguments[name]
                if isinstance(value, list):
                    arguments[name] = [without(t) for t in value]
                elif isinstance(value, torch.Tensor):
                    arguments[name] = without(value)
            before = [t.clone() for t in results(None, arguments)]
            if refusal := refusal_of(op, arguments):
                assert re.match(rf"paged_attn\.{op}: \S+ must be .+, got .+", refusal)
                for tensor, old in zip(results(None, arguments), before, strict=True):
                    assert_same_bits(tensor, old)


WRITTEN: dict[str, set[str]] = {
    "decode": {"out"},
    "decode_with_lse": {"out", "lse"},
    "reshape_and_cache": {"k_cache", "v_cache"},
    "append_kv": {"k_cache", "v_cache"},
    "append_decode": {"k_cache", "v_cache"},
    "copy_blocks": {"k_caches", "v_caches"},
    "swap_blocks": {"dsts"},
    "merge_states": set(),
}


@pytest.mark.parametrize("op", FRONTS)
def test_what_is_only_read_keeps_its_bytes(draw: Draw, device: str, op: str) -> None:
    arguments = all_arguments(draw, op)
    getattr(paged_attn, op)(**arguments)
    for name, expected in all_arguments(draw.again(), op).items():
        for ours, theirs in zip(
            *(v if isinstance(v, list) else [v] for v in (arguments[name], expected)), strict=True
        ):
            if isinstance(theirs, torch.Tensor) and name not in WRITTEN[op]:
                a, b = (x.contiguous().view(torch.uint8) for x in (ours, theirs))
                assert torch.equal(a, b), name


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS, {"causal": False, "sinks": torch.float16}])
def test_an_empty_pool(draw: Draw, device: str, options: Arguments) -> None:
    """Nothing can be read from it: sequences with tokens are NaN, the others as ever."""
    case = build(draw, [40, 0, 1], fill=0.0, **options)
    case = case.with_(k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    out, lse = case.decode_with_lse()
    assert bool(out[[0, 2]].isnan().all())
    assert bool(lse[[0, 2]].isnan().all())
    assert bool((out[1] == 0).all())
    sinks = case.options.get("sinks")
    expected = torch.full_like(lse[1], float("-inf")) if sinks is None else sinks.float()
    assert_lse(lse[1], expected.double())
