"""The benchmark of the ops around decode checks what it times, and counts what is moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_attn
from benchmarks import cache_ops, problem
from benchmarks.cache_ops import FAMILIES, Work

NBYTES = 100_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers."""
    monkeypatch.setattr(problem, "CPU_POOL_BYTES", 1)
    monkeypatch.setattr(problem, "CUDA_POOL_BYTES", 1)


def works(device: str = "cpu") -> list[Work]:
    return [work for family in FAMILIES.values() for work in family(NBYTES, device)]


def test_every_op_that_is_not_decode_is_there() -> None:
    measured = {work.op for work in works()}
    decoding = {"decode", "decode_with_lse", "append_decode"}
    others = {name for name in paged_attn.__all__ if hasattr(torch.ops.paged_attn, name)}
    assert measured == others - decoding


@pytest.mark.parametrize("family", FAMILIES)
def test_ops_are_right_and_move_what_they_say(family: str, device: str) -> None:
    for work in FAMILIES[family](NBYTES, device):
        assert NBYTES <= work.nbytes < 12 * NBYTES
        before = cache_ops.clone(work.arguments[0])
        if work.op == "merge_states":
            returned = torch.ops.paged_attn.merge_states.default(*before)
            moved = [*cache_ops.tensors(before), *cache_ops.tensors(returned)]
            assert work.nbytes == sum(tensor.nbytes for tensor in moved)
        else:
            # Some elements had their value before.
            share = written_bytes(work, before) / work.nbytes
            assert 0.9 < share * (3 if "e4m3" in work.name else 2) <= 1
        assert cache_ops.measure(work, device, 1)["kernels"]["ours"]["problem"] is None


def written_bytes(work: Work, arguments: tuple[Any, ...]) -> int:
    """Bytes of the elements that a call changes."""
    after = cache_ops.clone(arguments)
    getattr(torch.ops.paged_attn, work.op).default(*after)
    pairs = zip(cache_ops.tensors(arguments), cache_ops.tensors(after), strict=True)
    return sum(new[new.double() != old.double()].nbytes for old, new in pairs)


@pytest.mark.parametrize("op", ["reshape_and_cache", "copy_blocks", "merge_states"])
def test_wrong_op_is_not_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(problem.reference(), op)

    def off(*arguments: Any) -> Any:
        result = right(*arguments)
        first = next(iter(cache_ops.tensors(arguments if result is None else result)))
        first.flatten()[:1].add_(1)
        return result

    monkeypatch.setattr(problem.reference(), op, off)
    work = next(work for work in works() if work.op == op)
    cell = cache_ops.measure(work, "cpu", 1)
    assert cell["kernels"]["ours"]["problem"].startswith("WRONG")
    assert cell["read"] is None
    assert "WRONG" in cache_ops.line(cell)


def test_failing_op_does_not_end_the_table() -> None:
    work = next(work for work in works() if work.op == "reshape_and_cache")
    work.arguments = [(*arguments[:4], None) for arguments in work.arguments]
    assert cache_ops.measure(work, "cpu", 1)["kernels"]["ours"]["problem"].startswith("failed")


def test_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = f"--device cpu --repeats 1 --ops copy merge --megabytes 0.01 --plots {tmp_path}"
    assert cache_ops.main([*arguments.split(), "--json", f"{tmp_path}/ops.json"]) == 0
    cells = json.loads((tmp_path / "ops.json").read_text())["cells"]
    assert [cell["cell"].split(",")[0] for cell in cells] == [
        "copy_blocks 8 layers",
        "merge_states 2 parts",
        "merge_states 8 parts",
    ]
    out = capsys.readouterr().out
    for cell in cells:
        assert cell["cell"] in out
        assert cell["kernels"]["ours"]["median_us"] > 0
        assert cell["read"]["median_us"] > 0
    assert (tmp_path / "ops-ops.png").stat().st_size > 0


@pytest.mark.parametrize(
    "arguments",
    ["--megabytes 0", "--megabytes -1", "--megabytes nan", "--ops nothing", "--repeats 0"],
)
def test_degenerate_input(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cache_ops.main(["--device", "cpu", *arguments.split()])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err
