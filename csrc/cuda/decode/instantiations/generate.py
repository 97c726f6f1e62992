"""Writes a source file for each of heuristics.h's kKernelShapes: they compile in parallel.

Usage: python generate.py [--check]   (--check: only tell whether the files are up to date)
"""

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
DTYPES = {2: {"fp16": "__half", "bf16": "__nv_bfloat16"}, 4: {"fp32": "float"}}
FP8_DTYPES = {"e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2"}
TEMPLATE = """// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {{
template cudaError_t launch_decode<{arguments}>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}}
"""


def files() -> dict[str, str]:
    """File names and their contents."""
    text = (FOLDER.parent / "heuristics.h").read_text()
    begin = text.index("kKernelShapes[] = {")
    table = text[begin : text.index("};", begin)]
    contents = {}
    row = r"\{" + ", ".join([r"(\d+)"] * 6) + r"\}"
    for fields in re.findall(row, table):
        head_dim, element_bytes, cache_bytes, rings, row_tiles, stages = map(int, fields)
        for dtype, cpp_type in DTYPES[element_bytes].items():
            caches = {dtype: cpp_type} if cache_bytes == element_bytes else FP8_DTYPES
            for cache, cache_type in caches.items():
                prefix = dtype if cache == dtype else f"{dtype}_{cache}"
                shape = f"d{head_dim}_rings{rings}_rows{8 * row_tiles}_stages{stages}"
                arguments = f"{cpp_type}, {cache_type}, {head_dim}, {rings}, {row_tiles}, {stages}"
                contents[f"{prefix}_{shape}.cu"] = TEMPLATE.format(arguments=arguments)
    return contents


def main() -> None:
    """Writes or checks the files."""
    wanted = files()
    present = {path.name: path.read_text() for path in FOLDER.glob("*.cu")}
    if "--check" in sys.argv[1:]:
        if present != wanted:
            changed = sorted(n for n in present | wanted if present.get(n) != wanted.get(n))
            sys.exit(f"instantiations differ from kKernelShapes, run {__file__}: {changed}")
        return
    for name in present.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, content in wanted.items():
        if present.get(name) != content:
            (FOLDER / name).write_text(content)


if __name__ == "__main__":
    main()
