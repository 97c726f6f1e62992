"""Every wrong argument of the ops that move cache data is named, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_case import Draw, build
from test_arguments import (
    DIM,
    Arguments,
    Mutation,
    cast,
    change,
    contiguous_as,
    option,
    reshaped,
    strided,
    table,
)

import paged_attn

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


def copy_arguments(draw: Draw) -> Arguments:
    caches = [draw.normal(5, 4, 2, 8, dtype=torch.float16) for _ in range(4)]
    mapping = torch.tensor([[0, 1], [2, 3]], device=draw.device)
    return {"k_caches": caches[:2], "v_caches": caches[2:], "block_mapping": mapping}


def item(name: str, index: int, how: Any) -> Mutation:
    """Changes one tensor of a list."""
    return lambda a: a[name].__setitem__(index, how(a[name][index]))


def zeros(*shape: int) -> Any:
    return lambda t: contiguous_as(t, shape)


def every_other(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


MAPPINGS: list[tuple[str, Mutation, str]] = [
    ("block_mapping int32", cast("block_mapping", torch.int32), "block_mapping"),
    ("block_mapping of rank 1", reshaped("block_mapping", lambda t: (4,)), "block_mapping"),
    ("block_mapping of triples", reshaped("block_mapping", lambda t: (2, 3)), "block_mapping"),
    ("block_mapping of rank 3", reshaped("block_mapping", lambda t: (1, 2, 2)), "block_mapping"),
    (
        "block_mapping strided",
        change("block_mapping", lambda t: t.t().contiguous().t()),
        "block_mapping",
    ),
]

WRONG_COPY: list[tuple[str, Mutation, str]] = [
    ("fewer v_caches", lambda a: a["v_caches"].pop(), "v_caches"),
    ("no v_caches", lambda a: a["v_caches"].clear(), "v_caches"),
    ("k_caches of rank 3", item("k_caches", 0, lambda t: t[0]), r"k_caches\[0\]"),
    ("k_caches of another pool", item("k_caches", 1, zeros(6, 4, 2, 8)), r"k_caches\[1\]"),
    ("v_caches of another D", item("v_caches", 1, zeros(5, 4, 2, 16)), r"v_caches\[1\]"),
    ("v_caches of another dtype", item("v_caches", 0, torch.Tensor.float), r"v_caches\[0\]"),
    ("k_caches expanded", item("k_caches", 1, lambda t: t[:1].expand_as(t)), r"k_caches\[1\]"),
    ("v_caches strided", item("v_caches", 1, every_other), r"v_caches\[1\]"),
    *MAPPINGS,
]


@table(WRONG_COPY)
def test_wrong_copy_blocks(draw: Draw, device: str, mutate: Mutation, argument: str) -> None:
    arguments = copy_arguments(draw)
    ops.copy_blocks(**arguments)
    mutate(arguments)
    assert_refused("copy_blocks", arguments, argument)


def swap_arguments(draw: Draw) -> Arguments:
    tensors = [draw.normal(blocks, 4, 2, 8) for blocks in (5, 5, 7, 7)]
    mapping = torch.tensor([[0, 1], [2, 6]])
    return {"srcs": tensors[:2], "dsts": tensors[2:], "block_mapping": mapping}


WRONG_SWAP: list[tuple[str, Mutation, str]] = [
    ("fewer dsts", lambda a: a["dsts"].pop(), "dsts"),
    ("srcs a scalar", item("srcs", 0, lambda t: t[0, 0, 0, 0]), r"srcs\[0\]"),
    ("dsts of another rank", item("dsts", 0, lambda t: t[0]), r"dsts\[0\]"),
    ("srcs of other numbers of blocks", item("srcs", 1, zeros(6, 4, 2, 8)), r"srcs\[1\]"),
    ("dsts of other numbers of blocks", item("dsts", 1, zeros(6, 4, 2, 8)), r"dsts\[1\]"),
    ("dsts of other blocks", item("dsts", 0, zeros(7, 4, 2, 9)), r"dsts\[0\]"),
    ("dsts of another dtype", item("dsts", 1, torch.Tensor.half), r"dsts\[1\]"),
    ("srcs of another dtype", item("srcs", 1, torch.Tensor.half), r"srcs\[1\]"),
    ("blocks with gaps", item("srcs", 0, every_other), r"srcs\[0\]"),
    (
        "blocks of other strides",
        item("dsts", 1, lambda t: t.transpose(1, 3).contiguous().transpose(1, 3)),
        r"dsts\[1\]",
    ),
    ("dsts expanded", item("dsts", 1, lambda t: t[:1].expand_as(t)), r"dsts\[1\]"),
    *MAPPINGS,
]


@table(WRONG_SWAP)
def test_wrong_swap_blocks(draw: Draw, device: str, mutate: Mutation, argument: str) -> None:
    arguments = swap_arguments(draw)
    ops.swap_blocks(**arguments)
    mutate(arguments)
    assert_refused("swap_blocks", arguments, argument)


def merge_arguments(draw: Draw) -> Arguments:
    return {
        "outs": [draw.normal(5, 4, 64, dtype=torch.float16) for _ in range(3)],
        "lses": [draw.normal(5, 4) for _ in range(3)],
    }


WRONG_MERGE: list[tuple[str, Mutation, str]] = [
    ("fewer lses", lambda a: a["lses"].pop(), "lses"),
    ("no lses", lambda a: a["lses"].clear(), "lses"),
    ("outs of rank 1", item("outs", 0, lambda t: t[0, 0]), r"outs\[0\]"),
    ("outs of another shape", item("outs", 2, zeros(5, 4, 72)), r"outs\[2\]"),
    ("outs of another rank", item("outs", 1, zeros(1, 5, 4, 64)), r"outs\[1\]"),
    ("outs of another dtype", item("outs", 1, torch.Tensor.bfloat16), r"outs\[1\]"),
    ("outs float64", item("outs", 0, torch.Tensor.double), r"outs\[0\]"),
    ("outs strided", item("outs", 2, every_other), r"outs\[2\]"),
    ("outs of head dim 0", lambda a: a.update(outs=[t[..., :0] for t in a["outs"]]), r"outs\[0\]"),
    ("lses of another shape", item("lses", 2, zeros(4, 5)), r"lses\[2\]"),
    ("lses with a last dim", item("lses", 0, zeros(5, 4, 1)), r"lses\[0\]"),
    ("lses float16", item("lses", 1, torch.Tensor.half), r"lses\[1\]"),
]


@table(WRONG_MERGE)
def test_wrong_merge_states(draw: Draw, device: str, mutate: Mutation, argument: str) -> None:
    arguments = merge_arguments(draw)
    ops.merge_states(**arguments)
    mutate(arguments)
    assert_refused("merge_states", arguments, argument)


def test_leading_dims_that_are_not_as_one(draw: Draw, device: str) -> None:
    outs = [draw.normal(3, 2, 4, 8).transpose(0, 1)]
    lses = [draw.normal(2, 3, 4)]
    assert_refused("merge_states", {"outs": outs, "lses": lses}, r"outs\[0\]")
    assert_refused(
        "merge_states",
        {"outs": [outs[0].contiguous()], "lses": [draw.normal(3, 2, 4).transpose(0, 1)]},
        r"lses\[0\]",
    )


def test_no_states(device: str) -> None:
    with pytest.raises(ValueError, match=r"^paged_attn\.merge_states: outs must be .+, got 0"):
        paged_attn.merge_states([], [])


@pytest.mark.parametrize(
    ("op", "build_arguments"),
    [
        ("append_kv", append_arguments),
        ("append_decode", append_decode_arguments),
        ("copy_blocks", copy_arguments),
        ("merge_states", merge_arguments),
        ("swap_blocks", swap_arguments),
    ],
)
def test_a_meta_tensor_among_real_ones(
    draw: Draw, device: str, op: str, build_arguments: Any
) -> None:
    count = len(tensors_of(build_arguments(draw)))
    for i in range(1, count):
        arguments = build_arguments(draw)
        position = 0
        for name, value in arguments.items():
            values = value if isinstance(value, list) else [value]
            for j, tensor in enumerate(values):
                if tensor is None:
                    continue
                if position == i:
                    values[j] = tensor.to("meta")
                position += 1
            arguments[name] = values if isinstance(value, list) else values[0]
        with pytest.raises(ValueError, match=rf"^paged_attn\.{op}: .+ must be .+, got .*"):
            getattr(ops, op)(**arguments)


@pytest.mark.parametrize("op", ["append_kv", "copy_blocks", "swap_blocks", "merge_states"])
def test_none_for_a_tensor(draw: Draw, device: str, op: str) -> None:
    arguments = {
        "append_kv": append_arguments,
        "copy_blocks": copy_arguments,
        "swap_blocks": swap_arguments,
        "merge_states": merge_arguments,
    }[op](draw)
    name = {"append_kv": "value", "merge_states": "lses"}.get(op, "block_mapping")
    arguments[name] = [None] * 3 if op == "merge_states" else None
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        getattr(ops, op)(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["append_kv", "append_decode", "copy_blocks", "merge_states"])
def test_tensors_on_two_devices(draw: Draw, op: str) -> None:
    build_arguments = {
        "append_kv": append_arguments,
        "append_decode": append_decode_arguments,
        "copy_blocks": copy_arguments,
        "merge_states": merge_arguments,
    }[op]
    for name, value in build_arguments(draw).items():
        if value is None:
            continue
        arguments = build_arguments(draw)
        if isinstance(value, list):
            arguments[name] = [*value[:-1], value[-1].cpu()]
        else:
            arguments[name] = value.cpu()
        with pytest.raises(ValueError, match=rf"^paged_attn\.{op}: .+ must be on .+, got .+"):
            getattr(ops, op)(**arguments)


@pytest.mark.gpu
def test_a_block_mapping_of_swap_blocks_on_the_device(draw: Draw) -> None:
    arguments = swap_arguments(draw)
    arguments["block_mapping"] = arguments["block_mapping"].cuda()
    assert_refused("swap_blocks", arguments, "block_mapping")
