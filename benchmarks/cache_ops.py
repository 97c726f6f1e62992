"""The ops around decode beside a plain copy of as many bytes: what write, move and merge K and V.

Every op's result is compared with the definition's before its time counts; op and copy are timed in
turn over as many buffers as exceed the device's caches, like decode's table. Bytes are those read
and written. For append_decode beside a write and a decode apart there is
python -m benchmarks.decode --variants apart append.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, report
from benchmarks.arguments import add_measurement, check_measurement
from benchmarks.harness import Timing
from benchmarks.problem import choose_layers, reference
from benchmarks.variants import FP8_SCALE, load_op

KV_HEADS, HEAD_DIM, PAGE = 8, 128, 16
BLOCK_BYTES = PAGE * KV_HEADS * HEAD_DIM * 2
SEQUENCES = 64
MODEL_LAYERS = 8
MERGED_HEADS = 32
FP8 = torch.float8_e4m3fn
MEGABYTES = {"cuda": [1, 16, 64, 256], "cpu": [1, 16]}

# merge_states rounds to bf16 once; all else moves bits.
MERGE_TOLERANCE = 1e-2


@dataclass
class Work:
    """An op and its arguments.

    Attributes:
        name: the op's and what is special about the arguments.
        op: its name in torch.ops.paged_attn and in the definition.
        arguments: those of every layer, on tensors of its own.
        nbytes: read and written by a call.
        devices: where the bytes come from and where they go to.
    """

    name: str
    op: str
    arguments: list[tuple[Any, ...]]
    nbytes: int
    devices: tuple[str, str]


def writes(nbytes: int, device: str) -> Iterator[Work]:
    """reshape_and_cache into scattered slots, and append_kv behind 64 sequences."""
    for layout, dtype in (("NHD", torch.bfloat16), ("HND", torch.bfloat16), ("NHD", FP8)):
        token_bytes = 2 * KV_HEADS * HEAD_DIM * (2 + dtype.itemsize)
        per_sequence = -(-nbytes // (SEQUENCES * token_bytes))
        tokens = SEQUENCES * per_sequence
        width = -(-per_sequence // PAGE)
        blocks = 2 * SEQUENCES * width
        slots = torch.randperm(blocks * PAGE)[:tokens].to(device)
        tables = torch.randperm(blocks)[: SEQUENCES * width].view(SEQUENCES, width).int()
        lengths = torch.full((SEQUENCES,), per_sequence, dtype=torch.int32, device=device)
        scale = torch.full((1,), FP8_SCALE["e4m3"], device=device) if dtype == FP8 else None
        mapped, appended = [], []
        for _ in range(choose_layers(tokens * token_bytes, device)):
            key = torch.randn(tokens, KV_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
            caches = pools(blocks, layout, dtype, device)
            mapped.append((key, key.flip(0), *caches, slots, scale, scale))
            many = key.view(SEQUENCES, per_sequence, KV_HEADS, HEAD_DIM)
            at = (tables.to(device), lengths, None)
            appended.append((many, many.flip(0), *caches, *at, scale, scale))
        name = layout + (" e4m3" if dtype == FP8 else "")
        moved, where = tokens * token_bytes, (device, device)
        yield Work(f"reshape_and_cache {name}", "reshape_and_cache", mapped, moved, where)
        yield Work(f"append_kv {name}", "append_kv", appended, moved, where)


def pools(blocks: int, layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Zeroed K and V caches, [N, S, G, D] each, in that memory order."""
    hnd = layout == "HND"
    shape = (KV_HEADS, PAGE) if hnd else (PAGE, KV_HEADS)
    pool = torch.zeros(2, blocks, *shape, HEAD_DIM, dtype=dtype, device=device)
    k, v = (pool.transpose(2, 3) if hnd else pool).unbind(0)
    return k, v


def copies(nbytes: int, device: str) -> Iterator[Work]:
    """copy_blocks within the caches of a model's layers, in one call."""
    pair_bytes = 2 * 2 * MODEL_LAYERS * BLOCK_BYTES
    pairs = -(-nbytes // pair_bytes)
    mapping = torch.randperm(2 * pairs).view(-1, 2).to(device)
    arguments = []
    for _ in range(choose_layers(pairs * pair_bytes, device)):
        caches = [pools(2 * pairs, "NHD", torch.bfloat16, device) for _ in range(MODEL_LAYERS)]
        arguments.append(
            ([k.normal_() for k, _ in caches], [v.normal_() for _, v in caches], mapping)
        )
    name = f"copy_blocks {MODEL_LAYERS} layers"
    yield Work(name, "copy_blocks", arguments, pairs * pair_bytes, (device, device))


def swaps(nbytes: int, device: str) -> Iterator[Work]:
    """swap_blocks, out to pinned host memory and in; on the CPU from host to host."""
    ways = {"out": ("cuda", "cpu"), "in": ("cpu", "cuda")}
    if device == "cpu":
        ways = {"within the host": ("cpu", "cpu")}
    blocks = -(-nbytes // (2 * BLOCK_BYTES))
    moved = 2 * blocks * BLOCK_BYTES
    shape = (blocks, PAGE, KV_HEADS, HEAD_DIM)
    for way, devices in ways.items():
        for order, to in (("one run", torch.arange(blocks)), ("scattered", torch.randperm(blocks))):
            mapping = torch.stack([torch.arange(blocks), to], dim=1)
            arguments: list[tuple[Any, ...]] = []
            for _ in range(choose_layers(moved, device)):
                pair = [on(where, device, math.prod(shape), torch.bfloat16) for where in devices]
                arguments.append(([pair[0].view(shape)], [pair[1].view(shape)], mapping))
            yield Work(f"swap_blocks {way}, {order}", "swap_blocks", arguments, moved, devices)


def merges(nbytes: int, device: str) -> Iterator[Work]:
    """merge_states of 2 and of 8 parts in bf16."""
    for parts in (2, 8):
        row_bytes = MERGED_HEADS * ((parts + 1) * (HEAD_DIM * 2 + 4))
        rows = -(-nbytes // row_bytes)
        arguments = []
        for _ in range(choose_layers(rows * row_bytes, device)):
            outs = torch.randn(parts, rows, MERGED_HEADS, HEAD_DIM, device=device)
            lses = torch.randn(parts, rows, MERGED_HEADS, device=device)
            arguments.append((list(outs.to(torch.bfloat16)), list(lses)))
        name = f"merge_states {parts} parts"
        yield Work(name, "merge_states", arguments, rows * row_bytes, (device, device))


FAMILIES = {"write": writes, "copy": copies, "swap": swaps, "merge": merges}


def on(where: str, device: str, elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor of noise there; host memory is pinned where a GPU copies from it."""
    pinned = where == "cpu" and device == "cuda"
    noise = torch.randn(elements, device=where).to(dtype)
    return noise.pin_memory() if pinned else noise


def clone(value: Any) -> Any:
    """A deep copy of arguments, strides included."""
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(clone, value)) if isinstance(value, tuple | list) else value


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def why_wrong(work: Work) -> str | None:
    """How the op's results, in its arguments or returned, differ from the definition's."""
    expected, actual = clone(work.arguments[0]), clone(work.arguments[0])
    defined = getattr(reference(), work.op)(*expected)
    returned = getattr(torch.ops.paged_attn, work.op).default(*actual)
    for written, right in zip(tensors(actual), tensors(expected), strict=True):
        if not torch.equal(
            written.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
        ):
            return "WRONG: what is written differs from the definition's"
    for result, right in zip(tensors(returned), tensors(defined), strict=True):
        if not torch.allclose(result.double(), right, rtol=MERGE_TOLERANCE, atol=MERGE_TOLERANCE):
            return "WRONG: the result differs from the definition's"
    return None


def calls(work: Work, device: str) -> dict[str, Callable[[int], Any]]:
    """The op, and copies of half its bytes each from other buffers to others."""
    op = getattr(torch.ops.paged_attn, work.op).default
    source, destination = work.devices
    elements = work.nbytes // 16
    pairs = [
        (on(source, device, elements, torch.int64), on(destination, device, elements, torch.int64))
        for _ in work.arguments
    ]
    return {
        "ours": lambda i: op(*work.arguments[i]),
        "copy": lambda i: pairs[i][1].copy_(pairs[i][0], non_blocking=True),
    }


def measure(work: Work, device: str, repeats: int) -> dict[str, Any]:
    """What the JSON file holds of an op: checked, then timed beside the copy."""
    entry: dict[str, Any] = {"problem": None}
    timings: dict[str, Timing] = {}
    layers = len(work.arguments)
    try:
        entry["problem"] = why_wrong(work)
        if entry["problem"] is None and device == "cuda":
            graphs = {
                name: harness.capture(call, layers) for name, call in calls(work, device).items()
            }
            timings = harness.time_graphs(graphs, layers, repeats)
        elif entry["problem"] is None:
            timings = harness.time_calls(calls(work, device), layers, repeats)
    except Exception as error:  # one op's failure must not end the table
        entry["problem"] = report.failure(error)
    if timings:
        entry |= timings["ours"].as_dict()
    return {
        "cell": f"{work.name}, {work.nbytes / 1e6:.0f} MB",
        "shape": {"sweep": "ops"},
        "bytes": work.nbytes,
        "layers": layers,
        "valid": True,
        "read": {"way": "copy", **timings["copy"].as_dict()} if timings else None,
        "kernels": {"ours": entry},
    }


def line(cell: dict[str, Any]) -> str:
    """A row of the table."""
    ours, copy = cell["kernels"]["ours"], cell["read"]
    if copy is None:
        return f"{cell['cell']:46s} {ours['problem']}"
    time, limit = ours["median_us"], copy["median_us"]
    rates = [cell["bytes"] / t * 1e-3 for t in (time, limit)]
    noisy = "  NOISY" if ours["noisy"] or copy["noisy"] else ""
    return (
        f"{cell['cell']:46s} {time:10.1f} {rates[0]:8.1f} {limit:10.1f} {rates[1]:8.1f} "
        f"{100 * limit / time:7.1f}%{noisy}"
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_ops",
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ops", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES), help="default: all")
    add(
        "--megabytes",
        nargs="+",
        type=float,
        metavar="MB",
        help=f"moved by a call, default on cuda {MEGABYTES['cuda']}, on cpu {MEGABYTES['cpu']}",
    )
    add_measurement(parser)
    options = parser.parse_args(arguments)
    check_measurement(parser, options)
    options.megabytes = options.megabytes or MEGABYTES[options.device]
    if not all(0 < size < 1e5 for size in options.megabytes):
        parser.error(f"--megabytes must be more than 0, less than 100000, got {options.megabytes}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if an op is wrong or fails."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    command = shlex.join(["python", "-m", "benchmarks.cache_ops", *given])
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if (reason := load_op(options.library)) is not None:
        print(f"nothing can be measured: {reason}")
        return 1
    print(f"{report.device_name(options.device)}, torch {torch.__version__}")
    titles = f"{'µs':>10s} {'GB/s':>8s} {'copy µs':>10s} {'GB/s':>8s} of copy"
    print(f"{'op, bytes read and written':46s} {titles}")
    cells = []
    for family in options.ops:
        for size in options.megabytes:
            for work in FAMILIES[family](round(size * 1e6), options.device):
                cells.append(measure(work, options.device, options.repeats))
                print(line(cells[-1]), flush=True)
    content = {**report.environment(options.device, command), "cells": cells}
    report.leave(content, "cache_ops", options)
    print(f"repeat with: {command}")
    return int(any(cell["kernels"]["ours"]["problem"] for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
