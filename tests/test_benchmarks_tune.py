"""Tuning measures what a number decides, once, and prints an entry that the table takes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness, tune, tuning
from benchmarks.cases import Cell
from benchmarks.harness import Timing
from benchmarks.tuning import Card, Row

ROOT = Path(__file__).parents[1]
ops = torch.ops.paged_attn

H200 = Card("NVIDIA H200", 90, 132, 227 * 1024)
DEFAULTS = ops._table_tuning(0, 0)
NAMES = tuning.names()
# Where a test tunes from: equal parts always, so that whatever the default, less is to be found.
START = tuning.changed(DEFAULTS, "equal_parts_most_idle", 10000)


def small(batch: int, kv_heads: int = 8) -> Cell:
    return Cell(f"B{batch} {kv_heads}", batch, kv_heads, kv_heads, 64, (20, 40))


def trial_of(name: str, cell: Cell, numbers: list[int] = DEFAULTS) -> tuning.Trial | None:
    others = tuning.find_candidates(name, numbers)
    return tuning.find_trial(cell, tuning.variant_of(name), H200, numbers, others)


def test_every_number_has_candidates_and_cells_where_it_decides() -> None:
    assert list(tuning.CANDIDATES) == NAMES
    for name, default in zip(NAMES, DEFAULTS, strict=True):
        assert default in tuning.CANDIDATES[name]
        trials = [trial_of(name, cell) for cell in tuning.all_cells()]
        assert len([trial for trial in trials if trial is not None]) >= 2


def test_cells_are_no_twice_the_same_and_half_as_many_when_quick() -> None:
    cells = tuning.all_cells()
    assert {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64} <= {
        cell.batch for cell in cells if cell.context == 8192 and cell.kv_heads == 8
    }
    shapes = [(c.batch, c.heads, c.kv_heads, c.head_dim, c.context) for c in cells]
    assert len(set(shapes)) == len(shapes)
    assert tuning.all_cells(quick=True) == cells[::2]


def test_candidates_that_change_no_launch_are_left_out() -> None:
    trial = trial_of("equal_parts_most_idle", small(3), START)
    assert trial is not None
    assert set(trial.others) == {0, 500}  # 12 of 132 processors are idle
    assert trial.others[0].config == trial.others[500].config != trial.base.config
    assert trial.others[500].numbers == tuple(tuning.changed(START, "equal_parts_most_idle", 500))
    assert trial_of("equal_parts_most_idle", small(1), START) is None
    assert trial_of("invariant_unit_cost", small(1)) is None


def test_costs_are_geometric_means_over_all_cells() -> None:
    rows = [Row("a", 1.0, {1: 0.5, 2: 1.0}), Row("b", 1.0, {2: 0.9})]
    assert tuning.mean_cost(rows, 1) == pytest.approx(math.sqrt(0.5))
    assert tuning.best_value(rows, 0, 0.01) == 1
    assert tuning.best_value(rows, 0, 0.3) == 0
    assert tuning.best_value([Row("a", 1.0, {1: math.inf}), *rows], 0, 0.01) == 2
    assert tuning.best_value([], 7, 0.0) == 7


def test_the_table_shows_what_each_candidate_costs() -> None:
    lines = tuning.table("x 0", [Row("a", 12.34, {1: 0.5}), Row("b", 1, {2: math.inf})])
    assert lines.splitlines()[0] == "x 0"
    columns = [line.split()[-3:] for line in lines.splitlines()[1:]]
    assert columns[0] == ["µs", "1", "2"]
    assert columns[1] == ["12.3", "0.500", "="]
    assert columns[2] == ["1.0", "=", "WRONG"]
    assert columns[3] == ["mean", "0.707", "WRONG"]
    assert "no candidate" in tuning.table("x 0", [])


class Fake:
    """A card on which a launch takes as long as `seconds` says, run by the kernels of the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.timed: list[list[Any]] = []
        self.numbers: list[int] = []
        monkeypatch.setattr(harness, "time_graphs", self.time_graphs)
        monkeypatch.setattr(tuning, "this_card", lambda: H200)
        monkeypatch.setattr(tune, "numbers_here", lambda: START)
        monkeypatch.setattr(tuning, "all_cells", lambda quick: [small(1), small(3), small(12)])
        monkeypatch.setattr(ops, "_set_tuning", self.set_tuning, raising=False)
        real = tune.check_measurement

        def check_measurement(*arguments: Any) -> None:
            """Lets a machine without a GPU pass for one with."""
            real(*arguments)
            arguments[1].device = "cuda"

        monkeypatch.setattr(tune, "check_measurement", check_measurement)
        parse = tune.parse_arguments

        def parse_arguments(arguments: list[str]) -> Any:
            options = parse(arguments)
            options.device = "cpu"
            return options

        monkeypatch.setattr(tune, "parse_arguments", parse_arguments)
        monkeypatch.setattr(tune, "why_too_large", lambda *arguments: None)
        monkeypatch.setattr("benchmarks.problem.CPU_POOL_BYTES", 1)

    def set_tuning(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def time_graphs(self, graphs: dict[Any, Any], layers: int, repeats: int) -> dict[Any, Timing]:
        """A grid of all processors is faster, by a tenth."""
        assert not self.numbers
        self.timed.append(list(graphs))
        return {config: Timing([0.9 if config[7] == 132 else 1.0]) for config in graphs}


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A faster number is found, each launch is timed once, and all is measured again at the end."""
    fake = Fake(monkeypatch)
    path = tmp_path / "tune.json"
    names = ["equal_parts_most_idle", "many_sequences"]
    assert tune.main(["--numbers", *names, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["before"] == dict(zip(NAMES, START, strict=True))
    assert content["after"] == {**content["before"], "equal_parts_most_idle": 0}
    rows = content["numbers"]["equal_parts_most_idle"]
    assert [row["cell"] for row in rows] == ["B3 8", "B12 8"]
    assert rows[0]["ratios"] == pytest.approx({"0": 0.9, "500": 0.9})
    assert content["cost"] == pytest.approx(0.9)
    # B3 has one other launch, B12 one for all candidates, and many_sequences one of 500 for B12.
    assert [len(graphs) for graphs in fake.timed] == [2, 2, 2, 2, 2]
    assert "10.00 % faster in the 2 cells that change" in out
    assert "/*equal_parts_most_idle=*/0," in out
    assert f"repeat with: python -m benchmarks.tune --numbers {' '.join(names)}" in out


def test_nothing_better_leaves_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fake(monkeypatch)
    arguments = "--numbers equal_parts_most_idle --least-gain 20 --no-json"
    assert tune.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "nothing better found" in out
    assert "/*equal_parts_most_idle=*/10000," in out


def test_what_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    bench = tune.Bench(tune.parse_arguments(["--no-json"]))
    trial = trial_of("equal_parts_most_idle", small(3), START)
    assert trial is not None
    first = bench.measure(trial)
    assert bench.measure(trial) == first
    assert len(fake.timed) == 1
    assert bench.measure(trial, anew=True) == first
    assert len(fake.timed) == 2


def test_a_wrong_result_is_told_and_never_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake(monkeypatch)
    prepare = tune.decode.prepare

    def wrong_on_all_processors(peer: Any, problem: Any) -> Any:
        if fake.numbers[NAMES.index("equal_parts_most_idle")] == 10000:
            return prepare(peer, problem)
        return tune.decode.Entry(problem="WRONG: by a test"), None

    monkeypatch.setattr(tune.decode, "prepare", wrong_on_all_processors)
    assert tune.main(["--numbers", "equal_parts_most_idle", "--no-json"]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"WRONG: by a test \[B3 8, numbers \[{START[0]}, ", out)
    assert "nothing better found" in out


def test_the_entry_is_one_that_the_table_takes(tmp_path: Path) -> None:
    """Pasted, it compiles, it is found, and every number is in its own place."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    numbers = [
        v + i for i, v in enumerate([100] * 4 + [10] * 3 + [100, 1] + [90] * 3 + [20, -10, -9, 300])
    ]
    header = (ROOT / "csrc/cuda/decode/tuning.h").read_text()
    table = "kTunings[] = {\n"
    assert header.count(table) == 1
    entry = tuning.cpp_entry(Card("A card", 120, 188, 0), numbers, "of a test.")
    (tmp_path / "tuning.h").write_text(header.replace(table, f"{table}{entry}\n"))
    (tmp_path / "main.cpp").write_text("""
#include <cstdio>
#include "tuning.h"
using namespace paged_attn::cuda;
static_assert(&tuning_of(120, 188) == &kTunings[0].tuning, "");
static_assert(&tuning_of(120, 187) == &std::end(kTunings)[-1].tuning, "");
int main() {
  const Tuning& tuning = tuning_of(120, 188);
  if (to_list(to_tuning(to_list(tuning))) != to_list(tuning)) return 1;
  for (const int64_t value : to_list(tuning)) std::printf("%d ", static_cast<int>(value));
}
""")
    program = tmp_path / "main"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, tmp_path / "main.cpp", "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert [int(value) for value in printed.split()] == numbers


def test_help_and_list_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        tune.main(["--help"])
    assert exit_.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    assert tune.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == NAMES


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--numbers nothing-like-it", "--numbers must be of head_lanes_least_segments, "),
        ("--least-gain -1", "--least-gain must be from 0 to less than 100, got -1"),
        ("--least-gain nan", "got nan"),
        ("--repeats 0", "--repeats must be at least 1"),
        ("--device cpu", "measured on a GPU; --list needs none"),
        ("--library nothing-there.so", "nothing can be measured"),
    ],
)
def test_degenerate_input(arguments: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        tune.main(arguments.split())
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real launches, of small cells; what a process had set before is not what counts after."""
    monkeypatch.setattr(tuning, "all_cells", lambda quick: [small(3), small(12), small(64)])
    monkeypatch.setattr("benchmarks.problem.CUDA_POOL_BYTES", 1)
    path = tmp_path / "tune.json"
    before = ops._tuning(torch.cuda.current_device())
    assert tune.main(["--repeats", "2", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert set(content["numbers"]) == set(NAMES)
    assert any(content["numbers"].values())
    assert not content["wrong"]
    assert ops._tuning(torch.cuda.current_device()) == before
