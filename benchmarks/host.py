"""What a call of decode costs on the host, beside the least that such a call can cost.

The least is an op with the same arguments, registered the same way, that allocates the same output
and launches one empty kernel (on the CPU: none), from host_floor.cpp. Both are called in turn, in
bursts, on one sequence of one token, under torch.inference_mode(); on CUDA the device is waited
for between bursts, outside the time. Ours is called outside inference mode too, where torch enters
Python because the ops have no backward.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.arguments import add_measurement, check_measurement, check_positive
from benchmarks.cases import Cell
from benchmarks.harness import Timing
from benchmarks.native import compiled, find_nvcc
from benchmarks.problem import make_problem
from benchmarks.variants import load_op

CELL = Cell("host", 1, 1, 1, 8, 1, page=1)


@cache
def load_floor(device: str) -> None:
    """Compiles and loads torch.ops.paged_attn_floor.decode for a device type.

    Raises:
        RuntimeError: no nvcc, or the compiler fails.
        OSError: no compiler, or the library does not load.
    """
    root = Path(__file__).parents[1]
    include = Path(torch.__file__).parent / "include"
    libraries = ["-L", str(Path(torch.__file__).parent / "lib"), "-ltorch_cpu"]
    flags = ["-shared", "-O2", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += ["-I", str(root / "csrc" / "torch"), "-isystem", str(include)]
    flags += ["-isystem", str(include / "torch" / "csrc" / "api" / "include")]
    host_flags = ["-fPIC", "-fvisibility=hidden"]
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        nvcc = find_nvcc("the least cost of a call")
        through = ["-Xcompiler", ",".join(host_flags), "-DUSE_CUDA", f"-arch=sm_{major}{minor}"]
        libraries.append("-ltorch_cuda")
        command = [nvcc, "-x", "cu", *flags, *through]
    else:
        command = [os.environ.get("CXX", "c++"), *flags, *host_flags]
    torch.ops.load_library(compiled(Path(__file__).with_name("host_floor.cpp"), command, libraries))


def time_bursts(
    calls: dict[str, Callable[[], Any]], burst: int, repeats: int, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds a call in each burst, the kernels in turn, after one burst each to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(burst):
                call()
            elapsed = (time.perf_counter() - begin) / burst
            if round_ > 0:
                samples[name].append(elapsed)
    wait()
    return samples


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host",
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--burst", type=int, default=200, help="calls in a row, default 200")
    add_measurement(parser, plots=False)
    options = parser.parse_args(arguments)
    check_measurement(parser, options)
    check_positive(parser, options, "burst")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if there is nothing to measure."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    command = shlex.join(["python", "-m", "benchmarks.host", *given])
    if options.threads:
        torch.set_num_threads(options.threads)
    reason = load_op(options.library)
    try:
        load_floor(options.device)
    except (RuntimeError, OSError) as error:
        reason = reason or str(error)
    if reason is not None:
        print(f"nothing can be measured: {reason}")
        return 1
    p = make_problem(CELL, options.device, layers=1, seed=options.seed)
    inputs = p.q, p.k[0], p.v[0], p.block_tables, p.context_lens
    ours, floor = (
        getattr(torch.ops, name).decode.default for name in ("paged_attn", "paged_attn_floor")
    )

    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    with torch.inference_mode():
        calls = {"floor": lambda: floor(*inputs), "ours": lambda: ours(*inputs)}
        samples = time_bursts(calls, options.burst, options.repeats, wait)
    outside = {"ours outside inference mode": lambda: ours(*inputs)}
    samples |= time_bursts(outside, options.burst, options.repeats, wait)
    content = {
        **report.environment(options.device, command),
        "burst": options.burst,
        "calls": {name: Timing(times).as_dict() for name, times in samples.items()},
    }
    report.leave(content, "host", options)
    print(f"{report.device_name(options.device)}, torch {torch.__version__}")
    medians = {name: Timing(times).median * 1e6 for name, times in samples.items()}
    for name, median in medians.items():
        print(
            f"{name:30s} {median:7.2f} µs a call, {median - medians['floor']:+7.2f} over the floor"
        )
    print(f"repeat with: {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
