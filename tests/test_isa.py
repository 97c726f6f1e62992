"""Every instruction set that this processor has runs the CPU kernels, and passes their tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
PROBE = """
import torch, paged_attn
q = torch.zeros(1, 1, 8)
cache = torch.zeros(1, 1, 1, 8)
one = torch.ones(1, dtype=torch.int32)
torch.ops.paged_attn.decode(q, cache, cache, torch.zeros(1, 1, dtype=torch.int32), one)
"""
SUBSET = [
    "test_numerics.py::test_every_head_dim",
    "test_numerics.py::test_every_head_ratio",
    "test_numerics.py::test_several_queries",
    "test_numerics.py::test_longer_contexts",
    "test_numerics.py::test_zero_query_gives_the_mean",
    "test_numerics.py::test_huge_logit_gives_its_value",
    "test_numerics.py::test_constant_values",
    "test_numerics.py::test_length_one",
    "test_numerics.py::test_extreme_values",
    "test_numerics.py::test_logits_of_1e5",
    "test_masking.py::test_later_tokens",
    "test_options.py",
    "test_fp8.py",
    "test_cache.py::test_values_over_their_scales",
    "test_cache.py::test_every_value_in_fp8",
    "test_merge_states.py",
]


def run(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PAGED_ATTN_CPU_ISA": isa}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )


@pytest.fixture(scope="module")
def supported() -> list[str]:
    """What the error for an unknown name lists, best first."""
    result = run("no-such-isa", "-c", PROBE)
    assert result.returncode == 1
    assert "got no-such-isa" in result.stderr
    for arguments in ([], ["--json"]):
        told = run("no-such-isa", "-m", "paged_attn", *arguments)
        assert told.returncode == 0, told.stderr
        assert "got no-such-isa" in told.stdout
    listed = re.search(r"PAGED_ATTN_CPU_ISA must be one of ([\w, ]+)", result.stderr)
    assert listed, result.stderr
    return [name.strip() for name in listed[1].split(",")]


def test_generic_kernels_are_always_there(supported: list[str]) -> None:
    assert supported[-1] == "generic"


def test_instruction_set_the_processor_lacks_is_refused(supported: list[str]) -> None:
    """A clear error, never an illegal instruction."""
    lacking = [name for name in ("avx512_bf16", "avx512", "avx2") if name not in supported]
    for name in lacking or ["AVX2"]:
        result = run(name, "-c", PROBE)
        assert result.returncode == 1
        assert f"got {name}" in result.stderr


def test_best_is_the_default(supported: list[str]) -> None:
    expected = os.environ.get("PAGED_ATTN_CPU_ISA") or supported[0]
    assert torch.ops.paged_attn._cpu_isa() == expected


def test_every_instruction_set_is_accurate(supported: list[str]) -> None:
    """Those that this process does not use, in a process each: the choice is made once."""
    for name in supported:
        if name == torch.ops.paged_attn._cpu_isa():
            continue
        report = run(name, "-m", "paged_attn", "--json")
        assert json.loads(report.stdout)["backends"]["cpu"]["isa"] == name
        result = run(
            name,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"),
            *(str(TESTS / node) for node in SUBSET),
        )
        if result.returncode != 0:
            pytest.fail(f"{name}:\n{result.stdout[-4000:]}\n{result.stderr[-2000:]}")
        assert re.search(r"\d\d\d passed", result.stdout)
        assert "skipped" not in result.stdout
