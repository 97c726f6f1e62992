"""The command line of `benchmarks.decode`, checked before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import cases, sweeps, traces
from benchmarks.cases import DTYPES, LAYOUTS, Cell
from benchmarks.peer import Peer
from benchmarks.peers import PEERS
from benchmarks.plot import why_not
from benchmarks.problem import why_too_large
from benchmarks.variants import SYNTAX, Ours

REPEATS = {"cuda": 20, "cpu": 15}
TRACE_BATCH = {"cuda": 64, "cpu": 8}

DESCRIPTION = """Decode beside its peers and the read limit: one command, one table.

Every kernel's result is compared with the exact one before its time counts; kernels and the read
limit are timed in turn in one process."""


def parser_of_decode() -> argparse.ArgumentParser:
    """The options, in groups."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        usage="%(prog)s [options]",
        description=DESCRIPTION,
        epilog=f"A variant is {SYNTAX}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="show cells, sweeps and peers, measure nothing")

    add = parser.add_argument_group("cells, the built-in ones if none are chosen").add_argument
    add("--cells", nargs="+", metavar="CELL", help="indices, or parts of names, of built-in cells")
    add("--shape", nargs="+", metavar="B,H,G,D,CONTEXT", default=[], help="cells of your own")
    add("--sweep", nargs="+", metavar="NAME", default=[], help=", ".join(sweeps.SWEEPS))
    add(
        "--trace",
        nargs="+",
        metavar="TRACE",
        default=[],
        help=f"decode steps of a trace: a file, or {', '.join(traces.built_in())}",
    )
    add("--tutorial", action="store_true", help="the tutorial's own benchmark instead")

    add = parser.add_argument_group("shapes").add_argument
    add("--dtype", choices=tuple(DTYPES), help="of q, K and V, instead of the cells' own")
    add("--page", type=int, help="tokens a block, instead of the cells' own")
    add("--layout", choices=LAYOUTS, help="memory order of the pools, default NHD")
    add("--wide-table", action="store_true", help="tables 131072 tokens wide")
    add("--padded", action="store_true", help="as many rows of length 0 as sequences")
    add("--heads", metavar="H,G,D", help="of sweeps and traces, default 32,8,128")
    add("--sweep-base", metavar="B,CONTEXT", help="what sweeps vary, default 16,8192; cpu 2,2048")
    add("--trace-batch", type=int, metavar="N", help="sequences a step, default 64; cpu 8")
    add("--steps", type=int, default=5, metavar="K", help="steps of a trace, default 5")

    add = parser.add_argument_group("kernels").add_argument
    add("--variants", nargs="+", metavar="V", default=[], help="of ours, as columns; see below")
    add("--peers", nargs="*", metavar="PEER", help="keys of peers, default all; none: only ours")
    add("--layers", type=int, help="K/V pools; default: as many as exceed the caches")
    add_measurement(parser)
    return parser


def add_measurement(parser: argparse.ArgumentParser, *, plots: bool = True) -> None:
    """The options that every benchmark has, and `--plots` where there is something to draw."""
    parser.set_defaults(plots=None)
    add = parser.add_argument_group("measurement").add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--repeats", type=int, help=f"default {REPEATS['cuda']} on cuda, {REPEATS['cpu']} on cpu")
    add("--threads", type=int, help="CPU threads, default: torch's")
    add("--seed", type=int, default=0, help="of every random draw")
    add("--library", nargs="+", default=[], metavar="SO", help="load the ops from these files")

    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="PATH", help="default: a new file in benchmarks/runs")
    add("--no-json", action="store_true", help="write no file")
    if plots:
        add("--plots", type=Path, metavar="FOLDER", help="draw the results there")


def check_measurement(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in defaults of `add_measurement`; ends the program where an option makes no sense."""
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    check_positive(parser, options, "repeats", "threads")
    options.repeats = options.repeats or REPEATS[options.device]
    if options.plots is not None and (reason := why_not()) is not None:
        parser.error(f"--plots: {reason}")


def check_positive(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str
) -> None:
    """Ends the program where one of the options was given and is below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; further ones say what was chosen by them.

    Beside the command line's: chosen_cells, left_out (why cells do not fit), chosen_peers and
    chosen_variants. Degenerate input ends the program with a message and status 2.
    """
    parser = parser_of_decode()
    options = parser.parse_args(arguments)
    check_measurement(parser, options)
    check_positive(parser, options, "layers", "page", "trace_batch", "steps")
    if options.tutorial and options.plots is not None:
        parser.error("--plots: nothing is drawn of the tutorial's benchmark")
    options.trace_batch = options.trace_batch or TRACE_BATCH[options.device]
    try:
        cells = choose_cells(options)
        options.chosen_peers = choose_peers(options)
        options.chosen_variants = [Ours(text) for text in dict.fromkeys(options.variants)]
    except ValueError as error:
        parser.error(str(error))
    reasons = {cell: why_too_large(cell, options.device, options.layers) for cell in cells}
    options.chosen_cells = [cell for cell, reason in reasons.items() if reason is None]
    options.left_out = {cell.name: reason for cell, reason in reasons.items() if reason}
    if not options.chosen_cells:
        name, reason = next(iter(options.left_out.items()))
        parser.error(f"no cell fits; {name}: {reason}")
    return options


def choose_cells(options: argparse.Namespace) -> list[Cell]:
    """The built-in cells asked for, all by default, and those of shapes, sweeps and traces.

    Raises:
        ValueError: nothing matches, or a shape or a trace is refused.
    """
    known = cases.cells_for(options.device)
    others = options.shape or options.sweep or options.trace
    chosen = [] if others and options.cells is None else list(known)
    if options.cells is not None:
        chosen = []
        for wanted in options.cells:
            if wanted.isdigit():
                found = [known[int(wanted)]] if int(wanted) < len(known) else []
            else:
                found = [cell for cell in known if wanted.lower() in cell.name.lower()]
            if not found:
                raise ValueError(f"--cells: no cell matches {wanted!r}; --list shows them")
            chosen += found
    chosen += [cases.parse_shape(text, options.device) for text in options.shape]
    changes = options.dtype, options.page, options.layout
    chosen = [cell.changed(*changes) for cell in chosen]

    heads = numbers("--heads", options.heads, 3)
    shape = numbers("--sweep-base", options.sweep_base, 2)
    base = sweeps.base_cell(options.device, heads, shape).changed(*changes)
    for name in options.sweep:
        if name not in sweeps.SWEEPS:
            raise ValueError(f"--sweep must be of {', '.join(sweeps.SWEEPS)}, got {name}")
        chosen += sweeps.sweep_cells(name, base)
    for source in options.trace:
        chosen += sweeps.trace_cells(source, base, options.trace_batch, options.steps, options.seed)
    return list(dict.fromkeys(chosen))


def numbers(option: str, text: str | None, count: int) -> tuple[int, ...] | None:
    """`count` whole numbers separated by commas, None for no text.

    Raises:
        ValueError: anything else.
    """
    if text is None:
        return None
    try:
        values = tuple(int(field) for field in text.split(","))
    except ValueError:
        values = ()
    if len(values) != count:
        raise ValueError(f"{option} must be {count} numbers separated by commas, got {text!r}")
    return values


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
