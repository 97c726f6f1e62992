"""The list of mutants does not rot: each still fits the source that it changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mutant import Mutant
from mutants import MUTANTS, ROOT, mutated

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_mutant_fits(mutant: Mutant) -> None:
    """The original occurs exactly once and differs from its replacement."""
    assert mutated(mutant) != (ROOT / mutant.file).read_text()


@pytest.mark.parametrize(("device", "marker"), [("cpu", "not gpu"), ("cuda", "gpu")])
def test_the_tests_named_exist(device: str, marker: str) -> None:
    """For the mutant's device."""
    named = {test for m in MUTANTS if m.device == device for test in m.tests.split()}
    files = sorted({f"tests/{test.partition('::')[0]}" for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marker, *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ids = {line.removeprefix("tests/") for line in listed.splitlines() if "::" in line}
    ids |= {test.partition("[")[0] for test in ids}
    assert not named - ids


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_shapes_are_rows_of_the_table() -> None:
    table = (ROOT / "csrc/cuda/decode/heuristics.h").read_text()
    for shape in {mutant.shape for mutant in MUTANTS} - {""}:
        assert f"    {shape},\n" in table
