"""The sanitizers' subset reaches every CUDA kernel that is compiled."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import test_every_kernel as every_kernel
import test_heuristics as heuristics
import torch
from attention_case import DTYPES

import paged_attn

LIBRARIES = list(Path(paged_attn.__file__).parent.glob("_C_cuda*.so"))
TYPES = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
    torch.float8_e5m2: "__nv_fp8_e5m2",
}
PIECES = {
    16: "uint4",
    8: "uint2",
    4: "unsigned int",
    2: "unsigned short",
    1: "unsigned char",
}
# Of `build`'s arguments those that are options: see choose_variant in heuristics.h.
OPTIONS = {"causal", "window", "softcap", "alibi", "sinks", "k_scale", "v_scale", "batch_invariant"}


def decode_kernels() -> set[str]:
    names = set()
    for shape, (dtype, cache_dtype), head_dim, rows, limit in itertools.product(
        every_kernel.SHAPES,
        every_kernel.DTYPE_PAIRS,
        every_kernel.HEAD_DIMS,
        every_kernel.ROWS,
        every_kernel.LIMITS,
    ):
        lens, _, heads, options = shape
        is_ragged = rows == 1 and len(lens) > 1
        assert options.keys() <= OPTIONS
        no_options = {"batch_invariant"} | (
            {"k_scale", "v_scale"} if cache_dtype.itemsize == 1 else set()
        )
        config = heuristics.choose(
            len(lens),
            heads,
            head_dim,
            query_len=rows,
            ragged_tokens=sum(every_kernel.short_queries(len(lens))) if is_ragged else None,
            element_bytes=dtype.itemsize,
            cache_bytes=cache_dtype.itemsize,
            batch_invariant="batch_invariant" in options,
            has_options=not options.keys() <= no_options,
            shared_kb=min(limit // 1024, max(heuristics.SHARED_KB)),
        )
        numbers = (config.head_dim, config.rings, config.row_tiles, config.stages)
        types = [TYPES[dtype], TYPES[cache_dtype]]
        arguments = [*types, *map(str, numbers), f"(Variant){config.variant}"]
        names.add(f"decode_kernel<{', '.join(arguments)}>")
    return names


def other_kernels() -> set[str]:
    names = {f"prepare_kernel<{TYPES[dtype]}>" for dtype in DTYPES}
    for (dtype, cache_dtype, has_scales), is_aligned in itertools.product(
        every_kernel.WRITES, [True, False]
    ):
        as_bytes = dtype == cache_dtype and not has_scales
        types = [PIECES[dtype.itemsize]] * 2 if as_bytes else [TYPES[dtype], TYPES[cache_dtype]]
        names.add(
            f"write_kv_kernel<{', '.join(types)}, {16 // dtype.itemsize if is_aligned else 1}>"
        )
    for piece, pools in itertools.product(every_kernel.PIECES, every_kernel.POOLS):
        names.add(f"copy_blocks_kernel<{PIECES[piece]}, {pools}>")
    for dtype, states in itertools.product(DTYPES, every_kernel.STATES):
        for elements in (16 // dtype.itemsize, 1):
            names.add(f"merge_states_kernel<{TYPES[dtype]}, {elements}, {states}>")
    return names


@pytest.mark.skipif(not LIBRARIES, reason="the CUDA kernels were not built")
def test_every_kernel_of_the_library_is_reached() -> None:
    (library,) = LIBRARIES
    symbols = subprocess.run(
        ["nm", "--demangle", library], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r"\b(\w+_kernel<.*?>)\(paged_attn::", symbols)
    compiled = {name.replace("(paged_attn::cuda::Variant)", "(Variant)") for name in names}
    assert decode_kernels() | other_kernels() == compiled
