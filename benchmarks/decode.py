"""Decode beside its peers and the read limit: one command, one table.

Every kernel's result is compared with the exact one before its time counts; kernels and the read
limit are timed in turn in one process. See `harness` for how, `read_limit` for the denominator.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, harness, read_limit, report
from benchmarks.cases import DTYPES, LAYOUTS, Cell, Problem
from benchmarks.harness import Call, Captured, Timing
from benchmarks.peer import Peer, Unsupported
from benchmarks.peers import OURS, PEERS
from benchmarks.report import CellResult, Entry

# Relative error of a sequence's result (norm of the difference over the norm) that rounding
# explains; one key too many or too few shows above it up to some 100 thousand tokens in fp16.
TOLERANCE = {"fp16": 2e-3, "bf16": 1e-2, "fp32": 1e-4}

REPEATS = {"cuda": 20, "cpu": 15}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--cells", nargs="+", metavar="CELL", help="indices, or parts of names, of built-in cells")
    add("--shape", nargs="+", metavar="B,H,G,D,CONTEXT", default=[], help="cells of your own")
    add("--dtype", choices=tuple(DTYPES), help="instead of the cells' own")
    add("--page", type=int, help="tokens a block, instead of the cells' own")
    add("--layout", choices=LAYOUTS, default="NHD", help="memory order of the pools")
    add("--peers", nargs="*", metavar="PEER", help="keys of peers; none: only ours and read")
    add("--repeats", type=int, help=f"default {REPEATS['cuda']} on cuda, {REPEATS['cpu']} on cpu")
    add("--layers", type=int, help="K/V pools; default: as many as exceed the caches")
    add("--wide-table", action="store_true", help="tables 131072 tokens wide")
    add("--padded", action="store_true", help="as many rows of length 0 as sequences")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="CPU threads, default: torch's")
    add("--library", nargs="+", default=[], metavar="SO", help="load the op from these files")
    add("--json", type=Path, metavar="PATH", help="default: a new file in benchmarks/results")
    add("--no-json", action="store_true", help="write no file")
    add("--list", action="store_true", help="show cells and peers, measure nothing")
    add("--tutorial", action="store_true", help="the tutorial's own benchmark instead")
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    for name in ("repeats", "layers", "threads", "page"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    options.repeats = options.repeats or REPEATS[options.device]
    try:
        options.chosen_cells = choose_cells(options)
        options.chosen_peers = choose_peers(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def choose_cells(options: argparse.Namespace) -> list[Cell]:
    """The built-in cells asked for, all by default, and the user's own.

    Raises:
        ValueError: nothing matches, or a shape is refused.
    """
    known = cases.cells_for(options.device)
    chosen = [] if options.shape and options.cells is None else list(known)
    if options.cells is not None:
        chosen = []
        for wanted in options.cells:
            if wanted.isdigit():
                found = [known[int(wanted)]] if int(wanted) < len(known) else []
            else:
                found = [cell for cell in known if wanted.lower() in cell.name.lower()]
            if not found:
                raise ValueError(f"--cells: no cell matches {wanted!r}; --list shows them")
            chosen += [cell for cell in found if cell not in chosen]
    chosen += [cases.parse_shape(text, options.device) for text in options.shape]
    return [cell.changed(options.dtype, options.page) for cell in chosen]


def choose_peers(options: argparse.Namespace) -> list[Peer]:
    """The device's peers asked for, all by default.

    Raises:
        ValueError: an unknown key.
    """
    here = {peer.key: peer for peer in PEERS if options.device in peer.devices}
    for key in options.peers or []:
        if key not in here:
            raise ValueError(f"--peers must be of {', '.join(here)}, got {key}")
    return list(here.values()) if options.peers is None else [here[k] for k in options.peers]


def load_op(libraries: Iterable[str]) -> str | None:
    """Loads the op; why that failed, None if it did not."""
    try:
        for library in libraries:
            torch.ops.load_library(library)
        if not libraries:
            importlib.import_module("paged_attn")
    except Exception as error:  # an import or a linker may raise anything; peers can still run
        return str(error).strip().splitlines()[-1]
    return OURS.missing()


def worst_error(problem: Problem, result: Tensor, exact: Tensor) -> float:
    """The largest relative error of a sequence; NaN counts as infinite."""
    rows = [row for row, length in enumerate(problem.lens) if length > 0]
    difference = (result[rows].double() - exact[rows]).flatten(1).norm(dim=1)
    error = (difference / exact[rows].flatten(1).norm(dim=1)).max()
    return float(error.nan_to_num(nan=torch.inf))


def judge(problem: Problem, result: Tensor, exact: Tensor) -> Entry:
    """An entry that says whether a result is right, without times."""
    error = worst_error(problem, result, exact)
    limit = TOLERANCE[problem.cell.dtype]
    wrong = None if error <= limit else f"WRONG: relative error {error:.1e}, allowed {limit:.0e}"
    return Entry(error=error, problem=wrong)


def prepare(peer: Peer, problem: Problem, exact: Tensor) -> tuple[Entry, Call | Captured | None]:
    """Binds a peer to a problem and checks its result.

    Returns:
        The judgement, and what to time: a graph with a call per layer on CUDA, the call itself on
        the CPU, None if there is nothing right to time.
    """
    last = problem.layers - 1
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
            timed, result = call, call(last)
        entry = judge(problem, result, exact)
    except Unsupported as reason:
        return Entry(problem=f"unsupported: {reason}"), None
    except Exception as error:  # a peer's own failure must not end the table
        text = " ".join(str(error).split()).replace(str(Path.home()), "~")[-300:]
        return Entry(problem=f"failed: {type(error).__name__}: {text}"), None
    return entry, None if entry.problem else timed


def measure(
    problem: Problem, peers: list[Peer], options: argparse.Namespace, bar: Any
) -> CellResult:
    """One cell: check every kernel, then time the right ones and the read limit in turn."""
    result = report.empty_result(problem)
    exact = cases.reference(problem)
    runnable: dict[str, Any] = {}
    for peer in peers:
        bar.set_postfix_str(f"{problem.cell.name}: {peer.key}")
        result.entries[peer.key], timed = prepare(peer, problem, exact)
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
    """Prints the device's cells, and its peers with what they lack."""
    for index, cell in enumerate(cases.cells_for(options.device)):
        print(f"{index:3d}  {cell.name}  page {cell.page} {cell.dtype}")
    for peer in [OURS, *options.chosen_peers]:
        print(f"{peer.key:10s} {peer.title:20s} {peer.missing() or 'available'}")


def run_table(options: argparse.Namespace, command: str) -> int:
    """Measures the chosen cells and prints the table.

    Returns:
        The exit status: 1 if ours is wrong anywhere or anything beat the read limit.
    """
    present = [peer for peer in options.chosen_peers if peer.missing() is None]
    peers = ([OURS] if OURS.missing() is None else []) + present
    cells = options.chosen_cells
    titles = {peer.key: peer.title for peer in present}
    table = report.Table(options.device, titles, [cell.name for cell in cells])
    bar = progress(len(cells) * options.repeats)
    bar.write(table.header())
    results = []
    for cell in cells:
        problem = cases.make_problem(
            cell,
            options.device,
            layout=options.layout,
            layers=options.layers,
            wide_table=options.wide_table,
            padded=options.padded,
            seed=options.seed,
        )
        results.append(measure(problem, peers, options, bar))
        bar.write(table.row(results[-1]))
        del problem
        if options.device == "cuda":
            torch.cuda.empty_cache()
    bar.close()
    print(table.means(results))
    for note in report.notes(results):
        print(note)
    content = {
        **report.environment(options.device, command),
        "dtype": options.dtype,
        "layout": options.layout,
        "page": options.page,
        "wide_table": options.wide_table,
        "padded": options.padded,
        "missing": {p.key: p.missing() for p in options.chosen_peers if p.missing()},
        "cells": [result.as_dict() for result in results],
    }
    if not options.no_json:
        report.write_json(options.json or report.default_path("decode", options.device), content)
    wrong = any((r.entries.get("ours") or Entry()).problem for r in results)
    return int(wrong or any(r.faster_than_read() for r in results))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    command = shlex.join(["python", "-m", "benchmarks.decode", *given])
    if options.threads:
        torch.set_num_threads(options.threads)
    reason = load_op(options.library)
    if options.list:
        show_list(options)
        return 0
    print(f"{report.device_name(options.device)}, torch {torch.__version__}")
    if reason is not None:
        print(f"ours is not measured: {reason}")
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
