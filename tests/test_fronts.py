"""The Python fronts are the ops: the same arguments, the same defaults, the same bits."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import OPTION_SETS, Draw, build
from test_arguments import TENSORS
from test_cache_dispatch import BUILD

import paged_attn

FRONTS = ("decode", "decode_with_lse", *BUILD)
OUTPUTS = ("out", "lse")


def parameters(op: str) -> dict[str, inspect.Parameter]:
    """Of a front, without the outputs that the op has in another overload."""
    signature = inspect.signature(getattr(paged_attn, op)).parameters
    return {name: parameter for name, parameter in signature.items() if name not in OUTPUTS}


@pytest.mark.parametrize("op", FRONTS)
def test_arguments_and_defaults_are_the_schemas(op: str) -> None:
    arguments = getattr(torch.ops.paged_attn, op).default._schema.arguments
    ours = parameters(op)
    assert list(ours) == [argument.name for argument in arguments]
    for argument, parameter in zip(arguments, ours.values(), strict=True):
        is_keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert is_keyword_only == argument.kwarg_only
        if argument.has_default_value():
            assert parameter.default == argument.default_value
            assert type(parameter.default) is type(argument.default_value)
        else:
            assert parameter.default is inspect.Parameter.empty


@pytest.mark.parametrize("op", FRONTS)
def test_docstrings_name_every_argument(op: str) -> None:
    front = getattr(paged_attn, op)
    described = re.findall(r"^ {8}(\w+): ", front.__doc__ or "", re.M)
    names = list(inspect.signature(front).parameters)
    assert described[: len(names)] == names


@pytest.mark.parametrize("query_len", [None, 3, [2, 0, 1]])
@pytest.mark.parametrize("name", OPTION_SETS)
def test_every_option_arrives(draw: Draw, device: str, name: str, query_len: Any) -> None:
    options = {**OPTION_SETS[name], "scale": 0.3, "batch_invariant": True}
    if isinstance(query_len, list):
        options["max_query_len"] = 2
    case = build(draw, [90, 5, 9], query_len=query_len, fill=0.0, **options)
    expected = case.decode_with_lse()
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    for positional in (False, True):
        tensors = dict(zip(TENSORS, case.args, strict=False))
        arguments = {**tensors, **case.options}
        ordered = [arguments.pop(key, None) for key in TENSORS] if positional else []
        for results in (
            paged_attn.decode_with_lse(*ordered, **arguments),
            paged_attn.decode_with_lse(*ordered, **arguments, out=out, lse=lse),
            (paged_attn.decode(*ordered, **arguments), lse),
            (paged_attn.decode(*ordered, **arguments, out=out.zero_()), lse),
        ):
            for ours, theirs in zip(results, expected, strict=True):
                assert_same_bits(ours, theirs)


@pytest.mark.parametrize("name", OPTION_SETS)
def test_every_option_arrives_in_append_decode(draw: Draw, device: str, name: str) -> None:
    case = build(draw, [90, 5, 9], fill=0.0, scale=0.3, **OPTION_SETS[name])
    key = draw.normal(3, 2, 64, dtype=case.q.dtype)
    out = paged_attn.append_decode(case.q, key, -key, *case.args[1:], **case.options)
    assert_same_bits(out, case.decode())


def test_outputs_are_given_together(draw: Draw, device: str) -> None:
    case = build(draw, [5])
    out, lse = case.decode_with_lse()
    for given in ({"out": out}, {"lse": lse}):
        message = rf"^paged_attn\.decode_with_lse: .+ got only {next(iter(given))}"
        with pytest.raises(ValueError, match=message):
            paged_attn.decode_with_lse(*case.args, **given)
