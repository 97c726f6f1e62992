"""The list of mutants does not rot: each still fits the source that it changes."""

from __future__ import annotations

import re

import pytest
from mutant import Mutant
from mutants import MUTANTS, ROOT, mutated

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_mutant_fits(mutant: Mutant) -> None:
    """The original occurs exactly once, differs from its replacement, and the tests exist."""
    assert mutated(mutant) != (ROOT / mutant.file).read_text()
    assert mutant.device in ("cpu", "cuda")
    for test in mutant.tests.split():
        file, function = re.fullmatch(r"(test_\w+\.py)::(test_\w+)(?:\[\S+\])?", test).groups()
        assert f"def {function}(" in (ROOT / "tests" / file).read_text()


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_shapes_are_rows_of_the_table() -> None:
    table = (ROOT / "csrc/cuda/decode/heuristics.h").read_text()
    for shape in {mutant.shape for mutant in MUTANTS} - {""}:
        assert f"    {shape},\n" in table
