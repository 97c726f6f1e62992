"""What the CUDA launch heuristics' numbers should be on this card: measures, prints their entry.

The numbers are those of csrc/cuda/decode/tuning.h. One after the other each gets other values, and
decode is timed with every value that changes the launch beside the value so far, in turn in one
process, in the cells where it does; every result is compared with the exact one before. A value
that is faster in the geometric mean stays for the numbers that follow. In the end all that were
changed are measured beside the table's, and the entry for this card is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import decode, harness, report, tuning
from benchmarks.arguments import add_measurement, check_measurement
from benchmarks.cases import Cell
from benchmarks.problem import Problem, make_problem, why_too_large
from benchmarks.tuning import Config, Launch, Row, Trial
from benchmarks.variants import Ours, load_op

QUICK_REPEATS = 5

# Percent of a call's time: less is not told from chance.
LEAST_GAIN = 0.3

# The key of all changed numbers at once among candidates' values.
TOGETHER = -1


@contextmanager
def in_force(numbers: Sequence[int]) -> Iterator[None]:
    """The numbers instead of the table's for calls within; what is captured there keeps them."""
    torch.ops.paged_attn._set_tuning(list(numbers))
    try:
        yield
    finally:
        torch.ops.paged_attn._set_tuning([])


class Bench:
    """Times launches side by side, each only once beside the same other.

    Attributes:
        wrong: what went wrong, with the cell.
    """

    def __init__(self, options: argparse.Namespace):
        """Keeps nothing yet.

        Args:
            options: device, repeats and seed.
        """
        self.wrong: list[str] = []
        self._options = options
        self._problems: dict[Cell, Problem] = {}
        # By cell, variant and two configurations: the first one's seconds, and the second's.
        self._known: dict[tuple[Cell, str, Config, Config], tuple[float, float]] = {}

    def measure(self, trial: Trial, *, anew: bool = False) -> Row:
        """What the trial's others cost over its base, `anew` those too that were measured before.

        A launch with a wrong result costs infinitely much.
        """
        keys = {
            key: (trial.cell, trial.variant, trial.base.config, launch.config)
            for key, launch in trial.others.items()
        }
        new = {
            launch.config: launch
            for key, launch in trial.others.items()
            if anew or keys[key] not in self._known
        }
        if new:
            medians = self._medians(trial, [trial.base, *new.values()])
            base = medians[trial.base.config]
            for config in new:
                pair = base, medians[config]
                self._known[trial.cell, trial.variant, trial.base.config, config] = pair
        times = {key: self._known[known] for key, known in keys.items()}
        costs = {
            key: other / base if max(base, other) < math.inf else math.inf
            for key, (base, other) in times.items()
        }
        base = min(base for base, _ in times.values())
        return Row(f"{trial.cell.name} {trial.variant}".strip(), base * 1e6, costs)

    def _medians(self, trial: Trial, launches: list[Launch]) -> dict[Config, float]:
        """Seconds a call of each launch."""
        problem, peer = self._problem(trial.cell), Ours(trial.variant)
        graphs: dict[Any, Any] = {}
        for launch in launches:
            with in_force(launch.numbers):
                entry, timed = decode.prepare(peer, problem)
            if timed is None:
                where = f"{trial.cell.name} {trial.variant}".strip()
                self.wrong.append(f"{entry.problem} [{where}, numbers {list(launch.numbers)}]")
            else:
                graphs[launch.config] = timed
        medians: dict[Any, float] = {}
        if graphs:
            timings = harness.time_graphs(graphs, problem.layers, self._options.repeats)
            medians = {config: timing.median for config, timing in timings.items()}
        return {launch.config: medians.get(launch.config, math.inf) for launch in launches}

    def _problem(self, cell: Cell) -> Problem:
        """Problems are kept as long as there is room: to draw them takes longest of all."""
        if cell not in self._problems:
            device = self._options.device
            if device == "cuda":
                torch.cuda.empty_cache()  # what is left of the exact result's sums is free then
            if why_too_large(cell, device, None) is not None:
                self._problems.clear()
            self._problems[cell] = make_problem(cell, device, seed=self._options.seed)
        return self._problems[cell]


def descend(
    bench: Bench, options: argparse.Namespace, bar: Any, before: list[int]
) -> Iterator[tuple[str, list[Row], list[int]]]:
    """One pass of coordinate descent: each number's name and rows, and all numbers from then on."""
    numbers = before
    for name in options.numbers:
        others = tuning.find_candidates(name, numbers)
        rows = []
        for cell in options.chosen_cells:
            bar.set_postfix_str(f"{name}: {cell.name}")
            variant = tuning.variant_of(name)
            trial = tuning.find_trial(cell, variant, options.card, numbers, others)
            if trial is not None:
                rows.append(bench.measure(trial))
            bar.update(1)
        current = numbers[tuning.names().index(name)]
        chosen = tuning.best_value(rows, current, options.least_gain / 100)
        title = f"{name} {current}" + ("" if chosen == current else f", better: {chosen}")
        bar.write(tuning.table(title, rows) + "\n")
        numbers = tuning.changed(numbers, name, chosen)
        yield name, rows, numbers


def compare(
    bench: Bench, options: argparse.Namespace, bar: Any, before: list[int], after: list[int]
) -> list[Row]:
    """What the new numbers cost in every cell whose launch they change, measured anew."""
    rows = []
    for cell in options.chosen_cells:
        bar.set_postfix_str(f"all together: {cell.name}")
        for variant in ("", "invariant"):
            trial = tuning.find_trial(cell, variant, options.card, before, {TOGETHER: after})
            if trial is not None:
                rows.append(bench.measure(trial, anew=True))
        bar.update(1)
    return rows


def run(options: argparse.Namespace, command: str) -> int:
    """Tunes the numbers and prints the entry; returns 1 if a result is wrong anywhere."""
    before: list[int] = options.before
    bench = Bench(options)
    bar = decode.progress((len(options.numbers) + 1) * len(options.chosen_cells))
    path = report.result_path("tune", options)
    content: dict[str, Any] = {
        **report.environment(options.device, command),
        "card": dataclasses.asdict(options.card),
        "left_out": options.left_out,
        "before": dict(zip(tuning.names(), before, strict=True)),
        "numbers": {},
    }
    after = before
    for name, rows, numbers in descend(bench, options, bar, before):
        after = numbers
        content["numbers"][name] = [row.as_dict() for row in rows]
        if path is not None:
            report.save(content, path)
    rows = compare(bench, options, bar, before, after)
    bar.close()
    cost = tuning.mean_cost(rows, TOGETHER)
    if rows:
        print(tuning.table("all changes together, measured anew", rows))
    if cost < 1:
        found = f"{100 * (1 - cost):.2f} % faster in the {len(rows)} cells that change"
    else:
        after, found = before, "nothing better found"
    entry = tuning.cpp_entry(options.card, after, f"{datetime.date.today()}, {found}.")
    print(f"{found}; the entry for kTunings in csrc/cuda/decode/tuning.h:\n{entry}")
    for line in bench.wrong:
        print(line)
    content |= {
        "together": [row.as_dict() for row in rows],
        "after": dict(zip(tuning.names(), after, strict=True)),
        "cost": cost,
        "entry": entry,
        "wrong": bench.wrong,
    }
    report.leave(content, "tune", options, path)
    return int(bool(bench.wrong))


def show_list(names: list[str]) -> None:
    """Prints the numbers, their values in force here, and the candidates."""
    print(f"{'number':36s} {'value':>6s}  candidates")
    values = dict(zip(tuning.names(), numbers_here(), strict=True))
    for name in names:
        print(f"{name:36s} {values[name]:6d}  {' '.join(map(str, tuning.CANDIDATES[name]))}")


def numbers_here() -> list[int]:
    """The table's for this machine's card; without one, those of cards that have no entry."""
    if torch.cuda.is_available() and hasattr(torch.ops.paged_attn, "_tuning"):
        return torch.ops.paged_attn._tuning(torch.cuda.current_device())
    return torch.ops.paged_attn._table_tuning(0, 0)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line; chosen_cells and left_out are what `--quick` and the memory leave.

    Degenerate input, and a machine without a GPU, end the program with a message and status 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="show numbers, values and candidates; needs no GPU")
    add("--numbers", nargs="+", metavar="NAME", help="only these, in this order; default: all")
    add(
        "--least-gain",
        type=float,
        default=LEAST_GAIN,
        metavar="PERCENT",
        help=f"a candidate must be so much faster, default {LEAST_GAIN}",
    )
    add("--quick", action="store_true", help=f"every other cell, {QUICK_REPEATS} repeats")
    add_measurement(parser, plots=False)
    options = parser.parse_args(arguments)
    if not 0 <= options.least_gain < 100:
        parser.error(f"--least-gain must be from 0 to less than 100, got {options.least_gain}")
    if options.quick and options.repeats is None:
        options.repeats = QUICK_REPEATS
    if (reason := load_op(options.library)) is not None:
        parser.error(f"nothing can be measured: {reason}")
    known = tuning.names()
    options.numbers = list(dict.fromkeys(options.numbers or known))
    for name in options.numbers:
        if name not in known:
            parser.error(f"--numbers must be of {', '.join(known)}, got {name}")
    if options.list:
        return options
    check_measurement(parser, options)
    if options.device != "cuda":
        parser.error("the numbers are those of CUDA kernels, measured on a GPU; --list needs none")
    if not hasattr(torch.ops.paged_attn, "_set_tuning"):
        parser.error("the CUDA kernels are not loaded; python -m paged_attn says why")
    options.card = tuning.this_card()
    options.before = numbers_here()
    cells = tuning.all_cells(options.quick)
    reasons = {cell: why_too_large(cell, options.device, None) for cell in cells}
    options.chosen_cells = [cell for cell, reason in reasons.items() if reason is None]
    options.left_out = {cell.name: reason for cell, reason in reasons.items() if reason}
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    if options.list:
        show_list(options.numbers)
        return 0
    print(f"{report.device_name(options.device)}, torch {torch.__version__}")
    for name, reason in options.left_out.items():
        print(f"{name} is left out: {reason}")
    if options.threads:
        torch.set_num_threads(options.threads)
    command = shlex.join(["python", "-m", "benchmarks.tune", *given])
    status = run(options, command)
    print(f"repeat with: {command}")
    return status


if __name__ == "__main__":
    sys.exit(main())
