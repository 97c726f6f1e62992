"""No op touches what lies beyond its tensors: see guard_pages.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from attention_case import Draw

TESTS = Path(__file__).parent


def run(device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, TESTS / "guard_pages.py", device, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_unmapped_neighbours(draw: Draw, device: str) -> None:
    """Pools, tables and all other tensors begin or end at an unmapped page."""
    result = run(device, str(draw.seed), "20" if device == "cpu" else "60")
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.endswith("ok\n")


def test_unmapped_neighbours_would_be_noticed(device: str) -> None:
    result = run(device, "--prove")
    assert result.stdout.startswith("True")
    assert result.returncode != 0
    assert device == "cpu" or "CUDA" in result.stderr
