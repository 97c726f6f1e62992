"""Decode beside its peers and the read limit: one command, one table.

Every kernel's result is compared with the exact one before its time counts; kernels and the read
limit are timed in turn in one process. See `harness` for how, `read_limit` for the denominator,
`arguments` for what can be chosen.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import shlex
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, harness, read_limit, report, sweeps
from benchmarks.arguments import parse_arguments
from benchmarks.cases import Cell
from benchmarks.harness import Call, Captured, Timing
from benchmarks.peer import Peer, Unsupported
from benchmarks.problem import Problem, make_problem
from benchmarks.report import CellResult, Entry
from benchmarks.variants import OURS, Ours, load_op

# Relative error of a row's result (norm of the difference over the norm) that rounding explains;
# one key too many or too few shows above it up to some 100 thousand tokens in fp16.
TOLERANCE = {"fp16": 2e-3, "bf16": 1e-2, "fp32": 1e-4}


def worst_error(result: Tensor, exact: Tensor) -> float:
    """The largest relative error of a row, [H, D] each; NaN counts as infinite.

    Rows of sequences without tokens are 0 and do not count.
    """
    norm = exact.flatten(-2).norm(dim=-1)
    rows = norm > 0
    error = ((result.double() - exact).flatten(-2).norm(dim=-1)[rows] / norm[rows]).max()
    return float(error.nan_to_num(nan=torch.inf))


def judge(dtype: str, result: Tensor, exact: Tensor) -> Entry:
    """An entry that says whether a result of that dtype is right, without times."""
    error = worst_error(result, exact)
    limit = TOLERANCE[dtype]
    wrong = None if error <= limit else f"WRONG: relative error {error:.1e}, allowed {limit:.0e}"
    return Entry(error=error, problem=wrong)


def prepare(peer: Peer, problem: Problem) -> tuple[Entry, Call | Captured | None]:
    """Binds a peer to a problem and checks its result.

    Returns:
        The judgement, and what to time: a graph with a call per layer on CUDA, the call itself on
        the CPU, None if there is nothing right to time.
    """
    timed: Call | Captured
    try:
        call = peer.bind(problem)
        if problem.q.is_cuda:
            # The replay's result is judged, not an eager call's: it is the replay that is timed.
            timed = harness.capture(call, problem.layers)
            timed.replay()
            torch.cuda.synchronize()
            result = timed.result
        else:
            timed, result = call, call(problem.layers - 1)
        entry = judge(problem.cell.dtype, result, peer.exact(problem))
    except Unsupported as reason:
        return Entry(problem=f"unsupported: {reason}"), None
    except Exception as error:  # a peer's own failure must not end the table
        return Entry(problem=report.failure(error)), None
    return entry, None if entry.problem else timed


def measure(
    problem: Problem, peers: list[Peer], options: argparse.Namespace, bar: Any
) -> CellResult:
    """One cell: check every kernel, then time the right ones and the read limit in turn."""
    result = report.empty_result(problem)
    runnable: dict[str, Any] = {}
    for peer in peers:
        bar.set_postfix_str(f"{problem.cell.name}: {peer.key}")
        entry, timed = prepare(peer, problem)
        if isinstance(peer, Ours):
            entry.options = peer.variant.as_dict()
            entry.nbytes = peer.variant.read_bytes(problem)
        result.entries[peer.key] = entry
        if timed is not None:
            runnable[peer.key] = timed
    bar.set_postfix_str(f"{problem.cell.name}: timing")
    reads: dict[str, Any]
    if problem.q.is_cuda:
        library = options.read_library
        reads = read_limit.fastest_reads(problem, library) if library else {}
        time_all: Callable[..., dict[str, Timing]] = harness.time_graphs
    else:
        reads = read_limit.cpu_reads(problem)
        time_all = harness.time_calls
    timings = time_all(reads | runnable, problem.layers, options.repeats, lambda: bar.update(1))
    for name, timing in timings.items():
        if name not in reads:
            result.entries[name].timing = timing
        elif result.read is None or timing.median < result.read.median:
            result.read, result.read_way = timing, name
    return result


def progress(total: int) -> Any:
    """A tqdm bar on standard error, or something silent where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:

        class Silent:
            def update(self, _: int) -> None: ...
            def set_postfix_str(self, _: str) -> None: ...
            def write(self, text: str) -> None:
                print(text, flush=True)

            def close(self) -> None: ...

        return Silent()
    return tqdm(total=total, file=sys.stderr, disable=None, leave=False, dynamic_ncols=True)


def show_list(options: argparse.Namespace) -> None:
    """Prints the device's cells, the sweeps, and its peers with what they lack."""
    for index, cell in enumerate(cases.cells_for(options.device)):
        print(f"{index:3d}  {cell.name}  page {cell.page} {cell.dtype}")
    for name, sweep in sweeps.SWEEPS.items():
        print(f"--sweep {name:9s} {sweep.title}")
    for peer in [OURS, *options.chosen_peers]:
        print(f"{peer.key:10s} {peer.title:20s} {peer.missing() or 'available'}")


def run_part(
    cells: list[Cell],
    peers: list[Peer],
    options: argparse.Namespace,
    bar: Any,
    keep: Callable[[CellResult], None],
) -> None:
    """Measures cells with the same kernels and prints their part of the table.

    `keep` is told of each result as soon as it is there.
    """
    table = report.Table(options.device, peers, [cell.name for cell in cells])
    bar.write(table.header())
    results = []
    for cell in cells:
        problem = make_problem(
            cell,
            options.device,
            layers=options.layers,
            wide_table=options.wide_table,
            padded=options.padded,
            seed=options.seed,
        )
        results.append(measure(problem, peers, options, bar))
        bar.write(table.row(results[-1]))
        keep(results[-1])
        del problem
        if options.device == "cuda":
            torch.cuda.empty_cache()
    for line in table.summary(results):
        bar.write(line)


def run_table(options: argparse.Namespace, command: str) -> int:
    """Measures the chosen cells and prints the table, a part for each sweep.

    The result file is written anew after each cell: a run that is broken off has lost nothing.

    Returns:
        The exit status: 1 if ours is wrong anywhere or anything beat the read limit.
    """
    bar = progress(len(options.chosen_cells) * options.repeats)
    path = report.result_path("decode", options)
    results: list[CellResult] = []
    content = {
        **report.environment(options.device, command),
        "device_type": options.device,
        "dtype": options.dtype,
        "layout": options.layout,
        "page": options.page,
        "wide_table": options.wide_table,
        "padded": options.padded,
        "missing": {p.key: p.missing() for p in options.chosen_peers if p.missing()},
        "left_out": options.left_out,
        "cells": [],
    }

    def keep(result: CellResult) -> None:
        results.append(result)
        content["cells"].append(result.as_dict())
        if path is not None:
            report.save(content, path)

    for name, cells in itertools.groupby(options.chosen_cells, lambda cell: cell.sweep):
        variants = list(options.chosen_variants)
        if name in sweeps.SWEEPS:
            variants += [Ours(text) for text in sweeps.SWEEPS[name].variants]
        by_key = {peer.key: peer for peer in [OURS, *variants, *options.chosen_peers]}
        present = [peer for peer in by_key.values() if peer.missing() is None]
        run_part(list(cells), present, options, bar, keep)
    bar.close()
    for note in report.notes(results):
        print(note)
    report.leave(content, "decode", options, path)
    wrong = any(r.ours_went_wrong() for r in results)
    return int(wrong or any(r.faster_than_read() for r in results))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    command = shlex.join(["python", "-m", "benchmarks.decode", *given])
    if options.threads:
        torch.set_num_threads(options.threads)
    unloaded = load_op(options.library)
    if options.list:
        show_list(options)
        return 0
    print(f"{report.device_name(options.device)}, torch {torch.__version__}")
    if unloaded is not None:
        print(f"ours is not measured: {unloaded}")
    for name, reason in options.left_out.items():
        print(f"{name} is left out: {reason}")
    for peer in options.chosen_peers:
        if (absent := peer.missing()) is not None:
            print(f"{peer.title} is not measured: {absent}")
    if options.tutorial:
        # torch's timer drags in its extension builder, which warns on machines without a GPU.
        status = importlib.import_module("benchmarks.tutorial").run(options, command)
    else:
        options.read_library = None
        if options.device == "cuda":
            try:
                options.read_library = read_limit.build_library()
            except (RuntimeError, OSError) as error:
                print(f"the read limit is not measured: {error}")
        status = run_table(options, command)
    print(f"repeat with: {command}")
    return status


if __name__ == "__main__":
    sys.exit(main())
