"""Every wrong argument of the ops that write tokens is named, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_case import Draw, build
from test_arguments import (
    ALL_OPTIONS,
    DIM,
    WRONG_DECODE,
    WRONG_OPTIONS,
    Arguments,
    Mutation,
    cast,
    change,
    decode_arguments,
    option,
    reshaped,
    strided,
    table,
)

ops = torch.ops.paged_attn


def tensors_of(arguments: Arguments) -> list[torch.Tensor]:
    found = []
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found.extend(t for t in value if isinstance(t, torch.Tensor))
    return found


def assert_refused(op: str, arguments: Arguments, argument: str) -> None:
    before = [t.clone() for t in tensors_of(arguments)]
    message = rf"^paged_attn\.{op}: ({argument}) must be .+, got .+"
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(**arguments)
    for tensor, old in zip(tensors_of(arguments), before, strict=True):
        assert torch.equal(tensor.cpu().double(), old.cpu().double())


def to_fp8(arguments: Arguments) -> None:
    cast("k_cache v_cache", torch.float8_e4m3fn)(arguments)


def other_fp8(arguments: Arguments) -> None:
    cast("v_cache", torch.float8_e5m2)(arguments)


def expanded(name: str) -> Mutation:
    return change(name, lambda t: t[:1].expand(t.shape))


def new(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Mutation:
    return lambda a: a.update({name: torch.ones(shape, dtype=dtype, device=a["key"].device)})


SCALES: list[tuple[str, Mutation, str]] = [
    ("k_scale of two dims", new("k_scale", 1, 1), "k_scale"),
    ("k_scale for other heads", new("k_scale", 3), "k_scale"),
    ("v_scale empty", new("v_scale", 0), "v_scale"),
    ("v_scale float16", new("v_scale", 1, dtype=torch.float16), "v_scale"),
    (
        "v_scale strided",
        lambda a: a.update(v_scale=torch.ones(4, device=a["key"].device)[::2]),
        "v_scale",
    ),
]


def cache_arguments(draw: Draw) -> Arguments:
    case = build(draw, [40, 17, 1], head_dim=DIM, fill=0.0)
    return {
        "key": draw.normal(5, 2, DIM, dtype=torch.float16),
        "value": draw.normal(5, 2, DIM, dtype=torch.float16),
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "slot_mapping": torch.tensor([3, 1, 40, -1, 9], device=draw.device),
    }


WRONG_CACHE: list[tuple[str, Mutation, str]] = [
    ("key of rank 2", reshaped("key", lambda t: t.shape[:2]), "key"),
    ("key of rank 4", reshaped("key", lambda t: (1, *t.shape)), "key"),
    ("value of rank 2", reshaped("value", lambda t: t.shape[:2]), "value"),
    ("value of other tokens", reshaped("value", lambda t: (6, 2, DIM)), "value"),
    ("value of other heads", reshaped("value", lambda t: (5, 3, DIM)), "value"),
    ("value of another dtype", cast("value", torch.float32), "value"),
    ("key, value of other heads", reshaped("key value", lambda t: (5, 3, DIM)), "(key|k_cache)"),
    ("key, value of another D", reshaped("key value", lambda t: (5, 2, 72)), "(key|k_cache)"),
    ("float64", cast("key value k_cache v_cache", torch.float64), "key"),
    ("key's last dim strided", strided("key"), "key"),
    ("value's last dim strided", strided("value"), "value"),
    ("k_cache of rank 3", reshaped("k_cache", lambda t: t.shape[1:]), "k_cache"),
    ("v_cache of rank 5", reshaped("v_cache", lambda t: (1, *t.shape)), "v_cache"),
    ("k_cache of another dtype", cast("k_cache", torch.float32), "k_cache"),
    ("v_cache of another dtype", cast("v_cache", torch.bfloat16), "v_cache"),
    ("v_cache of another pool", reshaped("v_cache", lambda t: (1, *t.shape[1:])), "v_cache"),
    ("v_cache of another head dim", reshaped("v_cache", lambda t: (*t.shape[:3], 72)), "v_cache"),
    ("k_cache's last dim strided", strided("k_cache"), "k_cache"),
    ("v_cache's last dim strided", strided("v_cache"), "v_cache"),
    ("slot_mapping of rank 2", reshaped("slot_mapping", lambda t: (5, 1)), "slot_mapping"),
    ("slot_mapping of rank 0", reshaped("slot_mapping", lambda t: ()), "slot_mapping"),
    ("slot_mapping int16", cast("slot_mapping", torch.int16), "slot_mapping"),
    ("slot_mapping float32", cast("slot_mapping", torch.float32), "slot_mapping"),
    ("slot_mapping longer than key", reshaped("slot_mapping", lambda t: (6,)), "slot_mapping|key"),
    ("fp8 with float32", lambda a: (cast("key value", torch.float32)(a), to_fp8(a)), "key"),
    ("v_cache of another fp8", lambda a: (to_fp8(a), other_fp8(a)), "v_cache"),
    ("k_cache expanded", expanded("k_cache"), "k_cache"),
    ("v_cache expanded", expanded("v_cache"), "v_cache"),
    *SCALES,
]


@table(WRONG_CACHE)
def test_wrong_reshape_and_cache(draw: Draw, device: str, mutate: Mutation, argument: str) -> None:
    arguments = cache_arguments(draw)
    ops.reshape_and_cache(**arguments)
    mutate(arguments)
    assert_refused("reshape_and_cache", arguments, argument)


def append_arguments(draw: Draw, query_len: Any = None) -> Arguments:
    case = build(draw, [40, 17, 1], query_len=query_len, num_heads=6, head_dim=DIM, fill=0.0)
    rows = case.q.shape[:-2]
    return {
        "key": draw.normal(*rows, 2, DIM, dtype=torch.float16),
        "value": draw.normal(*rows, 2, DIM, dtype=torch.float16),
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_tables": case.block_tables,
        "context_lens": case.context_lens,
        "cu_seqlens_q": case.cu_seqlens_q,
    }


def append_decode_arguments(draw: Draw, query_len: Any = None) -> Arguments:
    arguments = append_arguments(draw, query_len)
    q = draw.normal(*arguments["key"].shape[:-2], 6, DIM, dtype=torch.float16)
    return {"q": q, **arguments}


WRONG_APPEND: list[tuple[str, Mutation, str]] = [
    ("key of rank 2", reshaped("key", lambda t: t.shape[:2]), "key"),
    ("key of rank 5", reshaped("key", lambda t: (1, 1, *t.shape)), "key"),
    ("key of another batch", reshaped("key value", lambda t: (4, *t.shape[1:])), "key"),
    ("value of another batch", reshaped("value", lambda t: (4, *t.shape[1:])), "value"),
    ("value of another rank", reshaped("value", lambda t: (3, 1, *t.shape[1:])), "value"),
    ("value of another dtype", cast("value", torch.bfloat16), "value"),
    ("key, value of other heads", reshaped("key value", lambda t: (3, 3, DIM)), "key"),
    ("key's last dim strided", strided("key"), "key"),
    ("value's last dim strided", strided("value"), "value"),
    ("k_cache of rank 3", reshaped("k_cache", lambda t: t.shape[1:]), "k_cache"),
    ("k_cache of another dtype", cast("k_cache v_cache", torch.bfloat16), "k_cache"),
    ("v_cache of another dtype", cast("v_cache", torch.bfloat16), "v_cache"),
    ("k_cache expanded", expanded("k_cache"), "k_cache"),
    ("block_tables of rank 1", reshaped("block_tables", lambda t: t.shape[:1]), "block_tables"),
    ("block_tables int64", cast("block_tables", torch.int64), "block_tables"),
    ("block_tables strided", strided("block_tables"), "block_tables"),
    ("context_lens too long", reshaped("context_lens", lambda t: (4,)), "context_lens"),
    ("context_lens int64", cast("context_lens", torch.int64), "context_lens"),
    ("context_lens strided", strided("context_lens"), "context_lens"),
    *SCALES,
]

WRONG_RAGGED_APPEND: list[tuple[str, Mutation, str]] = [
    ("key of rank 4", reshaped("key", lambda t: (1, *t.shape)), "key"),
    ("cu_seqlens_q of B", reshaped("cu_seqlens_q", lambda t: (3,)), "cu_seqlens_q"),
    ("cu_seqlens_q int64", cast("cu_seqlens_q", torch.int64), "cu_seqlens_q"),
    ("cu_seqlens_q strided", strided("cu_seqlens_q"), "cu_seqlens_q"),
]

WRONG_APPEND_DECODE: list[tuple[str, Mutation, str]] = [
    ("q of rank 2", reshaped("q", lambda t: t.shape[:2]), "q"),
    ("q of another batch", reshaped("q", lambda t: (4, *t.shape[1:])), "q"),
    ("q of other heads", reshaped("q", lambda t: (3, 5, DIM)), "q"),
    ("q of another dtype", cast("q", torch.bfloat16), "k_cache"),
    ("q with a query dim", reshaped("q", lambda t: (3, 2, *t.shape[1:])), "key"),
    ("key with a query dim", reshaped("key value", lambda t: (3, 2, *t.shape[1:])), "key"),
    ("window 0", option("window", 0), "window"),
    ("softcap negative", option("softcap", -1.0), "softcap"),
    ("max_query_len negative", option("max_query_len", -1), "max_query_len"),
]


@table(WRONG_APPEND)
@pytest.mark.parametrize("op", ["append_kv", "append_decode"])
def test_wrong_append(draw: Draw, device: str, op: str, mutate: Mutation, argument: str) -> None:
    arguments = (append_arguments if op == "append_kv" else append_decode_arguments)(draw)
    getattr(ops, op)(**arguments)
    mutate(arguments)
    assert_refused(op, arguments, argument)


@table(WRONG_RAGGED_APPEND)
@pytest.mark.parametrize("op", ["append_kv", "append_decode"])
def test_wrong_ragged_append(
    draw: Draw, device: str, op: str, mutate: Mutation, argument: str
) -> None:
    build_arguments = append_arguments if op == "append_kv" else append_decode_arguments
    arguments = build_arguments(draw, [2, 1, 1])
    getattr(ops, op)(**arguments)
    mutate(arguments)
    assert_refused(op, arguments, argument)


@table(WRONG_APPEND_DECODE)
def test_wrong_append_decode(draw: Draw, device: str, mutate: Mutation, argument: str) -> None:
    arguments = append_decode_arguments(draw)
    mutate(arguments)
    assert_refused("append_decode", arguments, argument)


def test_ragged_q_and_key_of_different_tokens(draw: Draw, device: str) -> None:
    arguments = append_decode_arguments(draw, [2, 1, 1])
    reshaped("key value", lambda t: (6, *t.shape[1:]))(arguments)
    assert_refused("append_decode", arguments, "key")


@table([*WRONG_DECODE, *WRONG_OPTIONS])
def test_wrong_for_the_decode_half(
    draw: Draw, device: str, mutate: Mutation, argument: str
) -> None:
    """What decode refuses append_decode refuses, before it writes."""
    arguments = decode_arguments(draw, **ALL_OPTIONS)
    mutate(arguments)
    for output in ("out", "lse"):
        arguments.pop(output)
    key = draw.normal(3, 2, DIM, dtype=torch.float16)
    # Which of several arguments that no longer fit together is named may differ from decode.
    assert_refused("append_decode", {"key": key, "value": -key, **arguments}, rf"{argument}|key")
