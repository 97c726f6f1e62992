"""What is drawn of a result file: which figures, with which series and values, as valid PNGs."""

from __future__ import annotations

import copy
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import decode, figures, plot

RESULTS = sorted((Path(plot.__file__).parent / "results").glob("*.json"))


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG whose chunks are whole and have the right checksums."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    position, kinds = 8, []
    while position < len(content):
        (length,) = struct.unpack(">I", content[position : position + 4])
        body = content[position + 4 : position + 8 + length]
        (checksum,) = struct.unpack(">I", content[position + 8 + length : position + 12 + length])
        assert zlib.crc32(body) == checksum
        kinds.append(body[:4])
        position += 12 + length
    assert kinds[-1] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def cell(sweep: str, series: str, x: int | str, **times: float) -> dict[str, Any]:
    """A cell of a result file; times in µs by kernel, `read` among them."""
    read = times.pop("read", None)
    variants = {key: {"queries": (1, int(key[1:]))} for key in times if key[1:].isdigit()}
    variants |= {"invariant": {"invariant": True}}
    return {
        "cell": f"{sweep} {series} {x}",
        "shape": {"sweep": sweep, "series": series, "x": x, "batch": 2, "heads": 8, "lengths": []},
        "bytes": 1_000_000,
        "valid": True,
        "read": None if read is None else {"median_us": read},
        "kernels": {
            key: {"median_us": time, "options": variants.get(key, {} if key == "ours" else None)}
            for key, time in times.items()
        },
    }


def content(*cells: dict[str, Any], cuda: str | None = "13.0") -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "device": "Some GPU",
        "torch": "2.0",
        "cuda": cuda,
        "command": "python -m benchmarks.decode --some thing",
        "cells": list(cells),
    }


def drawn(book: dict[str, Any], name: str) -> list[dict[str, tuple[list[float], list[float]]]]:
    """x and y of each named line of each panel of a figure."""
    figure = plot.Book(book).figures()[name]
    return [
        {
            str(line.get_label()): (list(line.get_xdata()), [round(y, 9) for y in line.get_ydata()])
            for line in axis.get_lines()
            if not str(line.get_label()).startswith("_")
        }
        for axis in figure.axes
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_results_can_be_drawn(path: Path, tmp_path: Path) -> None:
    assert plot.main([str(path), "--out", str(tmp_path)]) == 0
    files = list(tmp_path.iterdir())
    assert files
    for file in files:
        assert file.name.startswith(path.stem)
        assert min(png_size(file)) > 300


def test_run_draws_its_sweeps_and_traces(tmp_path: Path) -> None:
    names = ["options", "ragged", "page"]
    arguments = f"--sweep {' '.join(names)} --trace azure_conv --shape 2,4,2,16,30"
    arguments += " --heads 4,2,16 --sweep-base 2,64 --trace-batch 2 --steps 2 --layers 2"
    arguments += f" --device cpu --repeats 1 --peers --plots {tmp_path} --json {tmp_path}/run.json"
    decode.main(arguments.split())
    files = {file.name for file in tmp_path.glob("*.png")}
    assert files == {f"run-{name}.png" for name in [*names, "trace", "cells"]}
    for name in files:
        assert min(png_size(tmp_path / name)) > 300
    again = tmp_path / "again"
    assert plot.main([str(tmp_path / "run.json"), "--out", str(again)]) == 0
    assert {file.name for file in again.iterdir()} == files


@pytest.mark.parametrize(("cuda", "rate"), [("13.0", 0.1), (None, 100.0)])
def test_context_is_drawn_as_bandwidth(cuda: str | None, rate: float) -> None:
    cells = [
        cell("context", series, x, ours=10.0, fi_tc=20.0, read=5.0)
        for series in ("batch 1", "batch 8")
        for x in (1024, 2048)
    ]
    panels = drawn(content(*cells, cuda=cuda), "context")
    assert len(panels) == 2
    for lines in panels:
        assert lines == {
            "paged_attn": ([1024, 2048], [rate, rate]),
            "FlashInfer tensor": ([1024, 2048], [rate / 2, rate / 2]),
            "read limit": ([1024, 2048], [2 * rate, 2 * rate]),
        }


def test_kernel_that_was_not_timed_has_a_gap() -> None:
    cells = [
        cell("batch", "context 8k", 1, ours=10.0, fi_tc=20.0),
        cell("batch", "context 8k", 2, ours=11.0),
        cell("batch", "context 8k", 4, ours=12.0, fi_tc=21.0),
    ]
    (lines,) = drawn(content(*cells), "batch")
    assert lines["paged_attn"] == ([1, 2, 4], [10, 11, 12])
    assert lines["FlashInfer tensor"] == ([1, 4], [20, 21])


def test_pages_are_drawn_over_16_tokens() -> None:
    times = {1: 30.0, 8: 12.0, 16: 10.0, 64: 9.0}
    cells = [cell("page", "batch 1", x, ours=time, read=time / 2) for x, time in times.items()]
    (lines,) = drawn(content(*cells), "page")
    assert lines["paged_attn"] == ([1, 8, 16, 64], [3.0, 1.2, 1.0, 0.9])


def test_queries_are_drawn_of_ours_alone() -> None:
    cells = [
        cell("query", f"group {x}", x, ours=10.0, q2=11.0, q16=30.0, sdpa=99.0, read=8.0)
        for x in (1, 4)
    ]
    panels = drawn(content(*cells), "query")
    assert len(panels) == 2
    for lines in panels:
        assert lines == {
            "paged_attn": ([1, 2, 16], [10, 11, 30]),
            "read limit": ([1, 2, 16], [8, 8, 8]),
        }


def test_trace_is_drawn_as_median_and_worst() -> None:
    cells = [
        cell("trace", "mooncake", i, ours=time, xqa_nhd=2 * time, read=10.0)
        for i, time in enumerate([11.0, 12.0, 19.0])
    ]
    figure = plot.Book(content(*cells)).figures()["trace"]
    (axis,) = figure.axes[:1]
    assert [patch.get_width() for patch in axis.patches] == [1.2]
    ends = [list(line.get_xdata()) for line in axis.get_lines()]
    assert [1.2, 1.9] in ends
    assert [label.get_text() for label in axis.get_yticklabels()] == ["mooncake"]


def test_far_values_are_in_a_panel_of_their_own() -> None:
    near = cell("", "", 0, ours=11.0, fi_tc=12.0, read=10.0)
    far = cell("", "", 0, ours=11.0, fi_tc=12.0, sdpa=500.0, read=10.0)
    assert len(plot.Book(content(near)).figures()["cells"].axes) == 1
    left, right = plot.Book(content(far)).figures()["cells"].axes
    assert right.get_xlim()[0] == left.get_xlim()[1]
    assert [50.0] in [list(line.get_xdata()) for line in right.get_lines()]
    assert [50.0] not in [list(line.get_xdata()) for line in left.get_lines()]


def test_variants_are_drawn_over_ours() -> None:
    cells = [cell("", "", 0, ours=10.0, invariant=time, read=9.0) for time in (10.5, 11.0, 12.0)]
    made = plot.Book(content(*cells)).figures()
    assert set(made) == {"cells", "options"}
    (axis,) = made["options"].axes
    assert [patch.get_width() for patch in axis.patches] == [1.1]
    assert not made["cells"].legends


def test_every_figure_says_where_it_comes_from() -> None:
    invalid = cell("layout", "scattered", "NHD", ours=9.0, read=10.0)
    invalid["valid"] = False
    figure = plot.Book(content(invalid)).figures()["layout"]
    text = " ".join(" ".join(t.get_text() for t in figure.texts).split())
    for part in ("2026-01-02 03:04", "Some GPU", "python -m benchmarks.decode --some thing"):
        assert part in text
    assert "beat the read limit: 1" in text
    assert "batch 2, 8 query heads" in text


def test_looks_differ() -> None:
    together = [*figures.OTHER_LOOKS, figures.LOOKS["ours"]]
    assert len(set(together)) == len(together)
    gpu = [look for key, look in figures.LOOKS.items() if key not in ("read", "vllm")]
    assert len(set(gpu)) == len(gpu)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"cells": []}', json.dumps(content()), json.dumps(content(cell("", "", 0)))],
)
def test_file_without_results_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        plot.main([str(path), "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_missing_file_and_missing_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    for command in (plot.main, decode.main):
        arguments = ["x.json"] if command is plot.main else ["--device", "cpu", "--plots", "x"]
        with pytest.raises(SystemExit):
            command(arguments)
        assert "pip install matplotlib" in capsys.readouterr().err


def test_drawing_changes_no_content() -> None:
    before = content(cell("page", "batch 1", 16, ours=1.0, read=1.0))
    after = copy.deepcopy(before)
    plot.Book(after).figures()
    assert after == before
