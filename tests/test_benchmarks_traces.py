"""Decode steps of a request trace: what is read, refused, simulated and sampled."""

from __future__ import annotations

import itertools
import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from attention_case import Draw

from benchmarks import decode, traces
from benchmarks.traces import Trace

Request = tuple[int, int]

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def draw_requests(draw: Draw, count: int, longest: int = 30) -> list[Request]:
    return [(draw.rng.randint(1, 500), draw.rng.randint(0, longest)) for _ in range(count)]


def csv_file(path: Path, requests: list[Request]) -> Path:
    lines = [f"2023-11-16 18:17:0{i % 10}.9799600,{a},{b}" for i, (a, b) in enumerate(requests)]
    path.write_text("\n".join([HEADER, *lines]))
    return path


def json_file(path: Path, requests: list[Request]) -> Path:
    rows = (
        {"timestamp": i, "input_length": a, "output_length": b, "hash_ids": [i]}
        for i, (a, b) in enumerate(requests)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step_by_step(requests: list[Request], batch: int) -> list[list[int]]:
    """The engine's loop as one would write it: every step's contexts while the batch is full."""
    waiting = deque((tokens, generated) for tokens, generated in requests if generated > 1)
    running: list[list[int]] = []
    steps = []
    while len(running) + len(waiting) >= batch:
        while len(running) < batch:
            tokens, generated = waiting.popleft()
            running.append([tokens, generated - 1])
        for sequence in running:
            sequence[0] += 1
            sequence[1] -= 1
        steps.append(sorted(sequence[0] for sequence in running))
        running = [sequence for sequence in running if sequence[1] > 0]
    return steps


@pytest.mark.parametrize("write", [csv_file, json_file])
def test_requests_that_decode_are_read(write: object, tmp_path: Path, draw: Draw) -> None:
    requests = [*draw_requests(draw, 20), (7, 0), (7, 1), (9, 2)]
    trace = traces.read_trace(write(tmp_path / "trace", requests))  # type: ignore[operator]
    expected = [(tokens, generated - 1) for tokens, generated in requests if generated > 1]
    assert list(zip(trace.inputs.tolist(), trace.steps.tolist(), strict=True)) == expected


def test_columns_of_csv_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("GeneratedTokens,x,ContextTokens\n5,9,100\n\n6,9,200\n\n")
    trace = traces.read_trace(path)
    assert trace.inputs.tolist() == [100, 200]
    assert trace.steps.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{HEADER}\nt,5,10\nt,five,10\n", 3),
        (f"{HEADER}\nt,5\n", 2),
        (f"{HEADER}\nt,5,10,3\n", 2),
        (f"{HEADER}\nt,0,10\n", 2),
        (f"{HEADER}\nt,5,-1\n", 2),
        (f"{HEADER}\nt,5,1.5\n", 2),
        (f"{HEADER}\nt,5,99999999999999\n", 2),
        ("TIMESTAMP,Tokens\nt,5\n", 1),
        ("", 1),
        ('{"input_length": 5, "output_length": 3}\n{"input_length": 5}\n', 2),
        ('{"input_length": 5, "output_length": 3}\n\n{"input_length"\n', 3),
        ('{"input_length": 5, "output_length": true}\n', 1),
        ('{"input_length": 5, "output_length": null}\n', 1),
        ('{"input_length": 5.5, "output_length": 3}\n', 1),
        ('{"input_length": 5, "output_length": 3}\n[1, 2]\n', 2),
    ],
)
def test_malformed_line_is_refused(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}:{line}: "):
        traces.read_trace(path)


def test_trace_without_decode_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no request with a decode step"):
        traces.read_trace(csv_file(tmp_path / "trace.csv", [(5, 0), (6, 1)]))


def test_not_a_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="not a text file"):
        traces.read_trace(path)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_steps_are_those_of_an_engine(batch: int, tmp_path: Path, draw: Draw) -> None:
    requests = draw_requests(draw, 80)
    trace = traces.read_trace(csv_file(tmp_path / "trace.csv", requests))
    expected = step_by_step(requests, batch)
    _, low, high = traces.first_steps(trace, batch)
    assert high == len(expected)
    assert low == max(trace.steps[:batch])
    sampled = traces.sample_steps(trace, batch, 7, draw.rng.randint(0, 1000))
    assert all(low <= step < high for step, _ in sampled)
    for step, lengths in sampled:
        assert sorted(lengths) == expected[step]


def test_steps_are_spread_and_repeat_by_seed(tmp_path: Path, draw: Draw) -> None:
    path = csv_file(tmp_path / "trace.csv", draw_requests(draw, 200))
    first, again, other = (traces.step_lengths(str(path), 4, 5, seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    _, low, high = traces.first_steps(traces.read_trace(path), 4)
    bounds = np.linspace(low, high, 6)
    for (step, _), (left, right) in zip(first, itertools.pairwise(bounds), strict=True):
        assert left - 1 < step < right + 1


@pytest.mark.parametrize("batch", [2, 5, 6])
def test_trace_too_short_for_its_batch_is_refused(batch: int) -> None:
    trace = Trace(np.full(5, 10), np.full(5, 7 if batch > 2 else 20))
    trace.steps[0] = 100
    with pytest.raises(ValueError, match="choose a smaller batch"):
        traces.first_steps(trace, batch)


def test_quantiles_count_every_step(tmp_path: Path, draw: Draw) -> None:
    requests = [*draw_requests(draw, 50), (5, 2)]
    trace = traces.read_trace(csv_file(tmp_path / "trace.csv", requests))
    contexts = sorted(
        tokens + step for tokens, generated in requests for step in range(1, generated)
    )
    quantiles = traces.step_quantiles(trace)
    assert len(quantiles) == traces.NUM_QUANTILES
    ranks = np.linspace(0, len(contexts) - 1, traces.NUM_QUANTILES).round().astype(int)
    assert quantiles == [contexts[rank] for rank in ranks]


def test_command_prints_the_quantiles(
    tmp_path: Path, draw: Draw, capsys: pytest.CaptureFixture[str]
) -> None:
    path = json_file(tmp_path / "mine.jsonl", [*draw_requests(draw, 10), (5, 2)])
    expected = traces.step_quantiles(traces.read_trace(path))
    assert traces.main([f"other={path}", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"other": expected, "mine": expected}


@pytest.mark.parametrize("argument", [[], ["nothing-there.csv"], ["name=nothing-there.csv"]])
def test_command_refuses(argument: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert traces.main(argument) == 2
    assert capsys.readouterr().err


def test_built_in_quantiles_are_lengths() -> None:
    assert set(traces.built_in()) == {"azure_code", "azure_conv", "mooncake"}
    for trace in traces.built_in().values():
        quantiles = trace["quantiles"]
        assert len(quantiles) == traces.NUM_QUANTILES
        assert quantiles == sorted(quantiles)
        assert quantiles[0] >= 2


def test_draws_follow_the_quantiles() -> None:
    quantiles = traces.built_in()["mooncake"]["quantiles"]
    lengths = sorted(traces.draw_lengths("mooncake", 20000, 1))
    for share in (0.1, 0.5, 0.9):
        below = np.mean(np.array(lengths) <= quantiles[int(share * 100)])
        assert abs(below - share) < 0.02
    assert traces.draw_lengths("mooncake", 9, 1) == traces.draw_lengths("mooncake", 9, 1)


@pytest.mark.parametrize("named", ["azure_conv", "file"])
def test_table_of_a_trace(
    named: str, tmp_path: Path, draw: Draw, capsys: pytest.CaptureFixture[str]
) -> None:
    file = csv_file(tmp_path / "mine.csv", draw_requests(draw, 60))
    source = str(file) if named == "file" else named
    path = tmp_path / "table.json"
    arguments = "--device cpu --heads 4,2,16 --trace-batch 3 --steps 2 --layers 2 --repeats 1"
    decode.main([*arguments.split(), "--peers", "--trace", source, "--json", str(path)])
    cells = json.loads(path.read_text())["cells"]
    assert all(cell["kernels"]["ours"]["median_us"] > 0 for cell in cells)
    lengths = [cell["shape"]["lengths"] for cell in cells]
    expected = traces.step_lengths(source, 3, 2, 0)
    assert lengths == [step for _, step in expected]
    assert [cell["shape"]["x"] for cell in cells] == [number for number, _ in expected]
    name = file.name if named == "file" else named
    assert f"{name}, 2 cells, median (worst): ours/read" in capsys.readouterr().out
