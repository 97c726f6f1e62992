"""A session's seed decides what its tests draw, in one process and in several."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HAS_XDIST = importlib.util.find_spec("xdist") is not None


def session(*options: str, seed: str | None = None) -> tuple[str, set[str], set[str]]:
    """The seed that a session of a few random configurations prints, its draws, its summary."""
    environment = {k: v for k, v in os.environ.items() if k != "PAGED_ATTN_TEST_SEED"}
    environment["PAGED_ATTN_TEST_CONFIGS"] = "3"
    if seed is not None:
        environment["PAGED_ATTN_TEST_SEED"] = seed
    command = [sys.executable, "-m", "pytest", "-rP", "-m", "not gpu", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *options, "tests/test_configurations.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    printed = re.search(r"PAGED_ATTN_TEST_SEED=(\d+)", run.stdout)
    draws = re.findall(r"^{'lens': .*}$", run.stdout, re.MULTILINE)
    assert printed
    assert len(draws) == len(set(draws)) == 6
    summary = re.findall(r"worst of \d+ tests|^(?:largest|mean|lse): .*$", run.stdout, re.MULTILINE)
    assert len(summary) > 1
    return printed[1], set(draws), set(summary)


def test_the_seed_repeats_a_session() -> None:
    first = session()
    assert session(seed=first[0]) == first


@pytest.mark.skipif(not HAS_XDIST, reason="pytest-xdist is not installed")
def test_workers_draw_what_one_process_draws() -> None:
    """And the worst of their errors are found among all of them."""
    together = session("-n", "2")
    assert session(seed=together[0]) == together
