"""The benchmarks measure what they say, and refuse what would measure nothing."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, decode, read_limit, report, sweeps
from benchmarks import problem as problem_module
from benchmarks.arguments import parse_arguments
from benchmarks.harness import Call
from benchmarks.problem import Problem, make_problem
from benchmarks.variants import OURS, Ours

DOCUMENTATION = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main(arguments: str, path: Path, device: str = "cpu") -> int:
    """Runs a command; returns its status, which is 1 too where a read was disturbed."""
    return decode.main([*f"--device {device} --repeats 1 {arguments} --json".split(), str(path)])


def run_small(path: Path) -> dict[str, Any]:
    """Runs a cell of two sequences on the CPU; returns what the JSON file holds of it."""
    status = main("--shape 2,4,2,16,40-90 --layers 2 --peers sdpa", path)
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
    problem = make_problem(cell, "cpu", layers=1)
    assert decode.judge(dtype, problem.exact.to(problem.q.dtype), problem.exact).problem is None
    less = replace(problem, context_lens=problem.context_lens - torch.tensor([1, 0]).int())
    assert decode.judge(dtype, less.exact.to(problem.q.dtype), problem.exact).problem is not None


VARIANTS = (
    "invariant",
    "e4m3",
    "e5m2",
    "window=20",
    "softcap=5",
    "alibi",
    "sinks",
    "q4",
    "q1-4",
    "append",
    "apart",
    "e4m3+append+q1-3+window=30+alibi+sinks+softcap=9+invariant",
    "e5m2+apart+q2",
)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_variants_are_right(dtype: str, layout: str, device: str, tmp_path: Path) -> None:
    """Each against the definition with its option, on one problem and with padding rows."""
    path = tmp_path / "table.json"
    arguments = f"--shape 3,4,2,16,40-90 --padded --layers 2 --dtype {dtype} --layout {layout}"
    variants = (*VARIANTS, "early", "e4m3+apart+early") if device == "cuda" else VARIANTS
    main(f"{arguments} --peers --variants {' '.join(variants)}", path, device)
    kernels = json.loads(path.read_text())["cells"][0]["kernels"]
    for text in variants:
        assert kernels[text]["problem"] is None
        assert kernels[text]["median_us"] > 0
    assert kernels["e4m3"]["bytes"] == kernels["ours"]["bytes"] / 2
    assert kernels["e4m3"]["over_read"] is None
    assert kernels["window=20"]["bytes"] < kernels["ours"]["bytes"]


@pytest.mark.parametrize("text", ["e4m3", "e5m2", "window=20", "softcap=5", "alibi", "sinks"])
def test_option_ignored_is_wrong(text: str, device: str) -> None:
    problem = make_problem(cases.Cell("", 3, 4, 2, 16, 90), device, layers=1)
    ignored = OURS.bind(problem)(0)
    assert decode.judge("fp16", ignored, Ours(text).exact(problem)).problem is not None


@pytest.mark.parametrize("text", ["append", "apart", "append+q1-4", "apart+q3"])
def test_variant_that_writes_leaves_the_cache_as_it_was(text: str, device: str) -> None:
    problem = make_problem(cases.Cell("", 3, 4, 2, 16, (40, 90)), device, layers=2, padded=True)
    before = problem.pools[1].clone()
    call = Ours(text).bind(problem)
    for row, length in enumerate(problem.lens[: problem.cell.batch]):
        block = problem.block_tables[row, (length - 1) // problem.cell.page]
        problem.k[1][block, (length - 1) % problem.cell.page] = torch.nan
    assert problem.pools[1].isnan().any()
    call(1)
    assert torch.equal(problem.pools[1], before)


@pytest.mark.parametrize(
    ("shape", "variant", "reason"),
    [
        ("2,4,2,16,3 --dtype fp16", "q4", "shorter than its 4 queries"),
        ("2,4,2,16,9 --dtype fp32", "e4m3", "16-bit queries"),
        ("2,4,2,16,9", "early", "on CUDA"),
    ],
)
def test_variant_without_sense_is_unsupported(
    shape: str, variant: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    main(f"--shape {shape} --layers 2 --peers --variants {variant}", path)
    problem = json.loads(path.read_text())["cells"][0]["kernels"][variant]["problem"]
    assert problem.startswith("unsupported")
    assert reason in problem


def test_what_is_measured_is_kept_when_a_run_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    problems = iter([make_problem])

    def make(*args: Any, **kwargs: Any) -> Problem:
        try:
            return next(problems)(*args, **kwargs)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(decode, "make_problem", make)
    with pytest.raises(KeyboardInterrupt):
        main("--shape 2,4,2,16,9 2,4,2,16,20 --layers 2 --peers", path)
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["kernels"]["ours"]["median_us"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_sweep(name: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    main(f"--sweep {name} --heads 4,2,16 --sweep-base 2,64 --layers 2 --peers", path, device)
    cells = json.loads(path.read_text())["cells"]
    points = {(c["shape"]["series"], c["shape"]["x"]) for c in cells}
    assert len(points) == len(cells)
    assert {c["shape"]["sweep"] for c in cells} == {name}
    for cell in cells:
        for key in ("ours", *sweeps.SWEEPS[name].variants):
            kernel = cell["kernels"][key]
            few = (kernel["problem"] or "").startswith("unsupported")
            assert few or kernel["median_us"] > 0


def test_ragged_sweep_is_of_equal_bytes() -> None:
    cells = sweeps.sweep_cells("ragged", sweeps.base_cell("cuda", None, None))
    assert {sum(cell.lengths) for cell in cells} == {16 * 8192}
    assert all(min(cell.lengths) >= 1 for cell in cells)
    assert len(set(cells[0].lengths)) == 1
    assert len({cell.x for cell in cells}) == len(cells) == 5


def test_sweeps_leave_out_what_is_far_larger_than_their_base() -> None:
    base = sweeps.base_cell("cuda", None, None)
    for name in sweeps.SWEEPS:
        most = max(cell.most_pool_bytes for cell in sweeps.sweep_cells(name, base))
        assert base.most_pool_bytes <= most <= sweeps.MOST_BYTES * base.most_pool_bytes


def test_cells_that_do_not_fit_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(problem_module, "available_bytes", lambda device: 10**6)
    path = tmp_path / "table.json"
    main("--shape 2,4,2,16,40 2,4,2,16,400000 --layers 2 --peers", path)
    content = json.loads(path.read_text())
    assert len(content["cells"]) == 1
    assert "fewer sequences" in content["left_out"]["B2 4/2 d16 400000"]
    assert "is left out" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main("--trace mooncake --layers 2", path)
    assert "no cell fits" in capsys.readouterr().err


def test_contiguous_blocks_follow_one_another() -> None:
    cell = cases.Cell("", 3, 4, 2, 16, 100, scattered=False)
    tables = make_problem(cell, "cpu", layers=1).block_tables
    assert torch.equal(tables.flatten(), torch.arange(tables.numel(), dtype=torch.int32))


def test_help_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        decode.main(["--help"])
    assert exit_.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    assert decode.main(["--list", "--device", "cpu"]) == 0
    listed = capsys.readouterr().out
    assert all(f"--sweep {name}" in listed for name in sweeps.SWEEPS)


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
        "--seed -1",
        "--steps 0",
        "--tutorial --plots folder",
        "--trace-batch 0",
        "--trace nothing-there.csv",
        "--trace azure_code --heads 4,3,16",
        "--sweep nothing-like-it",
        "--sweep context --heads 4,2",
        "--sweep context --sweep-base 0,64",
        "--sweep context --sweep-base 2,x",
        "--variants window",
        "--variants window=0",
        "--variants softcap=nan",
        "--variants softcap=-1",
        "--variants q0",
        "--variants q4-1",
        "--variants q",
        "--variants e4m3+e5m2",
        "--variants invariant+invariant",
        "--variants append+early",
        "--variants +",
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
    problem = make_problem(replace(cell, layout=layout), "cuda", layers=1)
    reads = read_limit.CudaReads(problem, read_limit.build_library())
    reads.check()
    for way in reads.ways().values():
        way(0)
    torch.cuda.synchronize()
    problem.pools[0].view(torch.int32)[0] += 1
    reads.check()


def test_result_files_keep_every_value() -> None:
    content = {"a": [1, {"b": None, "c": "x {y}  z"}], "d": {}, "e": [], "f": {"g": {"h": 0.1}}}
    for value in (content, [content, 1, [content]], {"all": content, "list": [[content], {}]}):
        assert json.loads(report.as_text(value)) == value


def test_result_files_have_few_lines() -> None:
    kernels = {"ours": {"median_us": 1.5, "options": {"queries": [1, 2]}}, "read": {"way": "x"}}
    cell = {"cell": "a", "shape": {"batch": 1, "lengths": [5, 7]}, "bytes": 3, "kernels": kernels}
    lines = report.as_text({"date": "now", "cells": [cell, cell]}).splitlines()
    assert [line.strip()[:8] for line in lines].count('"ours": ') == 2
    assert len(lines) == 3 + 2 * (3 + len(kernels)) + 2


COMMANDS = re.findall(r"python -m benchmarks\.decode([^`\n#|]*)", DOCUMENTATION.read_text())


@pytest.mark.parametrize("arguments", sorted({command.strip() for command in COMMANDS}))
def test_documented_commands_can_be_given(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = "\n".join(f"t,{100 + i},20" for i in range(200))
    (tmp_path / "TRACE.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{requests}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(problem_module, "available_bytes", lambda device: 10**12)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if arguments == "--help":
        return
    options = parse_arguments(["--device", "cuda", *shlex.split(arguments)])
    assert options.chosen_cells
    assert not options.left_out


def test_failures_are_told_without_folders() -> None:
    error = RuntimeError("no\n  kernel (at /home/someone/cache/kernel.cu:3) " + "x" * 400)
    assert report.failure(RuntimeError("no\n  kernel at /a/b c/d.cu:3")) == (
        "failed: RuntimeError: no kernel at …/b c/d.cu:3"
    )
    assert report.failure(error) == "failed: RuntimeError: " + "x" * 300
