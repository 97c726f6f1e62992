"""The benchmarks measure what they say, and refuse what would measure nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, decode, read_limit, report
from benchmarks.cases import Problem
from benchmarks.harness import Call
from benchmarks.peers import OURS


def run_small(path: Path) -> dict[str, Any]:
    """Runs a cell of two sequences on the CPU; returns what the JSON file holds of it."""
    arguments = "--device cpu --shape 2,4,2,16,40-90 --layers 2 --repeats 1 --peers sdpa --json"
    status = decode.main([*arguments.split(), str(path)])
    cell: dict[str, Any] = json.loads(path.read_text())["cells"][0]
    return {"status": status, **cell}


def test_cpu_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = run_small(tmp_path / "table.json")
    assert cell["kernels"]["ours"]["median_us"] > 0
    assert cell["kernels"]["sdpa"]["median_us"] > 0
    assert "repeat with: python -m benchmarks.decode" in capsys.readouterr().out


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_wrong_result_is_not_timed(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind(p: Problem) -> Call:
        return lambda layer: torch.full_like(p.q, value)

    monkeypatch.setattr(OURS, "bind", bind)
    cell = run_small(tmp_path / "table.json")
    assert cell["status"] == 1
    assert cell["kernels"]["ours"]["problem"].startswith("WRONG")
    assert "median_us" not in cell["kernels"]["ours"]


@pytest.mark.parametrize(("dtype", "context"), [("fp16", 4096), ("bf16", 1024)])
def test_one_key_less_is_wrong(dtype: str, context: int) -> None:
    cell = cases.Cell("", 2, 4, 2, 64, context, dtype=dtype)
    problem = cases.make_problem(cell, "cpu", layers=1)
    exact = cases.reference(problem)
    assert decode.judge(problem, exact.to(problem.q.dtype), exact).problem is None
    problem.lens = [context - 1, context]
    less = cases.reference(problem).to(problem.q.dtype)
    assert decode.judge(problem, less, exact).problem is not None


@pytest.mark.parametrize(
    "arguments",
    [
        "--shape 0,4,2,16,40",
        "--shape 2,4,3,16,40",
        "--shape 2,4,2,16,0",
        "--shape 2,4,2,16,90-40",
        "--shape 2,4,2,16",
        "--cells nothing-like-it",
        "--repeats 0",
        "--layers 0",
        "--page 0",
        "--peers nobody",
    ],
)
def test_degenerate_input(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        decode.main(["--device", "cpu", *arguments.split()])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_reads_read_every_byte_once(layout: str, kv_heads: int) -> None:
    cell = cases.Cell("", 5, 8, kv_heads, 64, (1, 200))
    problem = cases.make_problem(cell, "cuda", layout=layout, layers=1)
    reads = read_limit.CudaReads(problem, read_limit.build_library())
    reads.check()
    for way in reads.ways().values():
        way(0)
    torch.cuda.synchronize()
    problem.pools[0].view(torch.int32)[0] += 1
    reads.check()


def test_result_files_keep_every_value() -> None:
    content = {"a": [1, {"b": None, "c": "x {y}  z"}], "d": {}, "e": [], "f": {"g": {"h": 0.1}}}
    assert json.loads(report.as_text(content)) == content
