"""The cost of a call on the host is measured beside an op that can be compiled and called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host, native


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_command(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = tmp_path / "host.json"
    arguments = ["--device", "cpu", "--repeats", "2", "--burst", "3", "--json", str(path)]
    assert host.main(arguments) == 0
    calls = json.loads(path.read_text())["calls"]
    assert set(calls) == {"floor", "ours", "ours outside inference mode"}
    for call in calls.values():
        assert call["median_us"] > 0
        assert call["samples"] == 2
    assert "over the floor" in capsys.readouterr().out
    assert list((cache / "paged_attn").glob("host_floor_*.so"))

    # The floor takes what decode takes and gives what decode gives, but for the values.
    schemas = [
        str(getattr(torch.ops, name).decode.default._schema)
        for name in ("paged_attn", "paged_attn_floor")
    ]
    assert schemas[1].replace("paged_attn_floor", "paged_attn") == schemas[0]
    q = torch.randn(3, 2, 8)
    none = torch.zeros(1, 1, 1, 8)
    table = torch.zeros(3, 1, dtype=torch.int32)
    out = torch.ops.paged_attn_floor.decode(q, none, none, table, table[:, 0])
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\necho made > "$2"\n')
    compiler.chmod(0o755)
    source = tmp_path / "source.cpp"
    source.write_text("1")
    first = native.compiled(source, [str(compiler)])
    assert first.read_text() == "made\n"
    assert native.compiled(source, [str(compiler)]) == first
    assert (tmp_path / "runs").read_text() == "run\n"
    source.write_text("2")
    assert native.compiled(source, [str(compiler)]) != first
    assert native.compiled(source, [str(compiler)], ["-lm"]) != first
    assert (tmp_path / "runs").read_text() == "run\n" * 3


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nothing/there")
    monkeypatch.setattr(host, "load_floor", host.load_floor.__wrapped__)
    assert host.main(["--device", "cpu", "--no-json"]) == 1
    assert "/nothing/there" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "false")
    assert host.main(["--device", "cpu", "--no-json"]) == 1
    assert "false -shared" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--burst 0", "--repeats 0", "--threads 0"])
def test_degenerate_input(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        host.main(["--device", "cpu", *arguments.split()])
    assert exit_.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err
