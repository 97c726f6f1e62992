"""Writes docs/support.md, what is supported and by which kernels, from what the tests run.

Usage: python tests/support_table.py [--check]   (--check: only tell whether it is up to date)

Whether dtypes and options go together is tried on the CPU, against the definition. Which CUDA
kernel takes a shape is asked of the choice that every call makes (heuristics.h).
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import test_blocks
import test_cache
import test_configurations as configurations
import test_every_kernel as every_kernel
import test_heuristics as heuristics
import torch
from accuracy import assert_accurate
from attention_case import (
    BLOCK_SIZES,
    DTYPES,
    FP8_DTYPES,
    LAYOUTS,
    OPTION_SETS,
    Q_LAYOUTS,
    RATIOS,
    SCALE_SHAPES,
    Draw,
    build,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/support.md"
TESTED_ARCHITECTURE = "9.0"  # of the GPUs that the gpu tests have run on
# Each option alone, and those together that may be; caches' dtypes are rows of the table.
OPTIONS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in options.items() if key != "cache_dtype"}
    for name, options in {**OPTION_SETS, "batch_invariant": {"batch_invariant": True}}.items()
    if name not in ("e4m3", "e5m2")
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def is_accurate(dtype: torch.dtype, cache_dtype: torch.dtype, options: dict[str, Any]) -> bool:
    """Whether decode takes these; that it takes them and is wrong is an error."""
    case = build(Draw(0, "cpu"), [40, 17], dtype=dtype, cache_dtype=cache_dtype, **options)
    try:
        results = case.decode_with_lse()
    except ValueError:
        return False
    assert_accurate(case, *results)
    return True


def kernel_of(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> heuristics.Config:
    """The CUDA kernel for as many query rows as fill one."""
    element_bytes, cache_bytes = dtype.itemsize, cache_dtype.itemsize
    return heuristics.choose(
        heads=(71, 1), head_dim=head_dim, element_bytes=element_bytes, cache_bytes=cache_bytes
    )


def dtypes_and_options() -> str:
    rows, refused = [], []
    for dtype, cache_dtype in itertools.product(DTYPES, (*DTYPES, *FP8_DTYPES)):
        taken = {name: is_accurate(dtype, cache_dtype, o) for name, o in OPTIONS.items()}
        pair = (name_of(dtype), name_of(cache_dtype))
        if not any(taken.values()):
            refused.append(f"{pair[0]} with {pair[1]}")
            continue
        assert (dtype, cache_dtype) in every_kernel.DTYPE_PAIRS, "no CUDA kernel is tested"
        cells = ["yes" if is_taken else "no" for is_taken in taken.values()]
        rows.append([*pair, *cells])
    assert len(rows) == len(every_kernel.DTYPE_PAIRS)
    header = ["q", "cache", *(name.replace("_", " ") for name in OPTIONS)]
    return f"{table(header, rows)}\n\nRefused, with a `ValueError`: {', '.join(refused)}."


def cuda_kernels() -> str:
    """For each pair of dtypes, how each run of head dims is computed."""
    runs = []
    for chosen, run in itertools.groupby(
        configurations.HEAD_DIMS,
        lambda head_dim: {kernel_of(*pair, head_dim).head_dim for pair in every_kernel.DTYPE_PAIRS},
    ):
        (own,) = chosen
        assert own in every_kernel.HEAD_DIMS
        general = [head_dim for head_dim in run if head_dim != own]
        runs += [(f"{general[0]}, {general[0] + 8} … {general[-1]}", own, False)]
        runs += [(str(own), own, True)]
    rows = []
    for dtype, cache_dtype in every_kernel.DTYPE_PAIRS:
        is_tuned = dtype != torch.float32
        cells = []
        for _, own, is_own in runs:
            variant = "tuned" if is_tuned and is_own else "general"
            cells.append(variant if is_own else f"{variant}, as {own}")
        num_rows = 8 * kernel_of(dtype, cache_dtype, 128).row_tiles
        cores = "tensor cores" if is_tuned else "CUDA cores"
        rows.append([name_of(dtype), name_of(cache_dtype), *cells, cores, num_rows])
    header = ["q", "cache", *(f"D = {span}" for span, *_ in runs), "computed on", "rows a pass"]
    return table(header, rows)


def ranges() -> str:
    ratios = f"{listed(RATIOS)}, with {listed(sorted(set(configurations.KV_HEADS)))} KV heads"
    rows = [
        ("block size S", "any from 1", listed(BLOCK_SIZES)),
        ("query heads a KV head, H / G", "any", ratios),
        ("sequences", "any, 0 too", f"0 to {configurations.MOST_SEQUENCES}"),
        (
            "queries a sequence",
            "any, 0 too; uniform or ragged",
            f"0 to {configurations.MOST_QUERIES}",
        ),
        ("layout of K and V", "any strides but the last, which is 1", listed(LAYOUTS)),
        ("layout of q", "any strides but the last, which is 1", listed(Q_LAYOUTS)),
        ("shape of `k_scale`, `v_scale`", listed(SCALE_SHAPES), listed(SCALE_SHAPES)),
        ("table entries that are not used", "anything", listed(configurations.PADDINGS)),
    ]
    return table(["what", "supported", "values that random configurations draw"], rows)


def other_ops() -> str:
    same, fp8 = listed(map(name_of, DTYPES)), listed(map(name_of, test_cache.FP8))
    written = f"caches of key's dtype ({same}), or {fp8} with float16 or bfloat16"
    any_dtype = f"any; tested: {listed(map(name_of, test_blocks.ANY_DTYPE))}"
    rows = [
        ("reshape_and_cache", written, "CPU, CUDA"),
        ("append_kv", written, "CPU, CUDA"),
        ("append_decode", "decode's, with all of its options", "CPU, CUDA"),
        ("copy_blocks", any_dtype, "CPU, CUDA"),
        ("swap_blocks", any_dtype, "CPU, CUDA, and from one to another"),
        ("merge_states", same, "CPU, CUDA"),
    ]
    return table(["op", "dtypes", "devices"], [(f"`{op}`", *rest) for op, *rest in rows])


def architectures() -> str:
    tree = ast.parse((ROOT / "setup.py").read_text())
    (compiled,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALL_ARCHS"
    )
    rows = [
        (arch, "compiled, run by the tests" if arch == TESTED_ARCHITECTURE else "compiled, not run")
        for arch in compiled
    ]
    return table(["compute capability", "state"], rows)


def page() -> str:
    rows = 8 * kernel_of(torch.float16, torch.float16, 128).row_tiles
    fp32_rows = 8 * kernel_of(torch.float32, torch.float32, 128).row_tiles
    return f"""# What is supported

Written by `python tests/support_table.py` from what the tests run. The same bodies of tests hold
the CPU and CUDA to it; on CUDA they need a GPU (`make test-gpu`).

## decode: dtypes and options

The dtypes of q, which is out's too, and of K and V. Every cell holds on the CPU and on CUDA, for
all head dims, shapes and layouts below. "all" is every option together that goes with
`causal=True`, "all noncausal" with `causal=False`.

{dtypes_and_options()}

`causal=False` goes with neither `window` nor `alibi_slopes`. Scales are for caches of every dtype.

## decode: head dims

D is any multiple of 8 up to 256, the same for K and V. The CPU kernels treat all alike. On CUDA a
head dim has a kernel of its own, or runs in that of the next larger:

{cuda_kernels()}

## decode: shapes

{ranges()}

Rows of q, K and V start at multiples of 16 bytes, of 8 where a row's bytes are no multiple of 16.
Beside the random configurations, tests of their own take every head dim in every pair of dtypes,
every block size, contexts of a million tokens, pools beyond 2^31 elements and more than 65535
sequences.

## The other ops

{other_ops()}

## What is general rather than tuned

- Head dims without a CUDA kernel of their own: rows are padded with zeros in shared memory. Nothing
  more is read from the pool, but shared memory and arithmetic are those of the larger head dim.
- fp32 on CUDA is computed on CUDA cores, one product at a time.
- Rows are query tokens times H / G. Up to {rows} of a KV head ({fp32_rows} in fp32, and with
  `batch_invariant` where H / G is at most {fp32_rows}) share one reading of K and V on CUDA; more
  take several passes, each reading K and V again. Ragged calls without `max_query_len` are laid out
  for their mean.
- `batch_invariant` on CUDA adds up each sequence in chunks and cuts it between them only, where
  other calls cut wherever it suits the batch. That costs time, most where sequences are short or
  few: `python -m benchmarks.decode --variants invariant` measures how much. A sequence's chunks
  depend on its length (with a window its query tokens too), numbers of heads, head dim and dtypes,
  and the kind of GPU: bits are the same in all batches on one, not on all of them. On the CPU every
  call is batch invariant.
- `softcap`, `window`, ALiBi, sinks, scales and `causal=False` are branches of kernels that have all
  of them. There are smaller ones without options for 16-bit caches and, where blocks have as much
  shared memory as those of 9.0, for fp8 caches with their scales, for batches of one sequence, and
  for `batch_invariant` alone up to 128 head dims; the last two with 16-bit caches.
- fp8 caches have CUDA kernels of their own, which turn what is stored into fp16, exactly.
- Devices whose blocks may have less shared memory than those of 9.0 run variants with smaller ring
  buffers. These are tested on 9.0, under a limit of {min(every_kernel.LIMITS) // 1024} KB.

## GPU architectures

{architectures()}

The choice of a launch is tested for {listed(heuristics.SHARED_KB)} KB of shared memory a block:
what 8.9 and 12.0, 8.0, and 9.0 have.

## CPU instruction sets

AVX-512 with bf16, AVX-512, AVX2 and a generic one: all are compiled on x86-64, the best that the
processor has is chosen, and the tests run each that it has.
"""


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is not what the tests say: run {__file__}")
        return
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
