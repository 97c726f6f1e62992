"""Every wrong argument of the ops that take lists is named, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_case import Draw
from test_arguments import (
    OTHER_DEVICES,
    Arguments,
    Mutation,
    cast,
    change,
    contiguous_as,
    every_other,
    reshaped,
    table,
)
from test_cache_arguments import (
    append_arguments,
    append_decode_arguments,
    assert_refused,
    cache_arguments,
    tensors_of,
)

import paged_attn

ops = torch.ops.paged_attn


def copy_arguments(draw: Draw) -> Arguments:
    caches = [draw.normal(5, 4, 2, 8, dtype=torch.float16) for _ in range(4)]
    mapping = torch.tensor([[0, 1], [2, 3]], device=draw.device)
    return {"k_caches": caches[:2], "v_caches": caches[2:], "block_mapping": mapping}


def item(name: str, index: int, how: Any) -> Mutation:
    """Changes one tensor of a list."""
    return lambda a: a[name].__setitem__(index, how(a[name][index]))


def zeros(*shape: int) -> Any:
    return lambda t: contiguous_as(t, shape)


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
@pytest.mark.parametrize("other", OTHER_DEVICES)
@pytest.mark.parametrize(
    ("op", "build_arguments"),
    [
        ("reshape_and_cache", cache_arguments),
        ("append_kv", append_arguments),
        ("append_decode", append_decode_arguments),
        ("copy_blocks", copy_arguments),
        ("merge_states", merge_arguments),
    ],
)
def test_tensors_on_two_devices(draw: Draw, op: str, build_arguments: Any, other: str) -> None:
    for name, value in build_arguments(draw).items():
        if value is None:
            continue
        arguments = build_arguments(draw)
        if isinstance(value, list):
            arguments[name] = [*value[:-1], value[-1].to(other)]
        else:
            arguments[name] = value.to(other)
        with pytest.raises(ValueError, match=rf"^paged_attn\.{op}: .+ must be on .+, got .+"):
            getattr(ops, op)(**arguments)


@pytest.mark.gpu
def test_a_block_mapping_of_swap_blocks_on_the_device(draw: Draw) -> None:
    arguments = swap_arguments(draw)
    arguments["block_mapping"] = arguments["block_mapping"].cuda()
    assert_refused("swap_blocks", arguments, "block_mapping")
