"""python -m paged_attn tells what was built, what was loaded, and why not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import paged_attn


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "paged_attn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_json() -> None:
    report = json.loads(run("--json"))
    assert report["paged_attn"] == paged_attn.__version__
    assert report["torch"]["running"] == torch.__version__
    assert report["torch"]["built_with"]
    assert report["cuda"]["running"] == torch.version.cuda
    assert report["backends"]["cpu"]["loaded"] is True
    assert report["backends"]["cpu"]["isa"]
    cuda = report["backends"]["cuda"]
    assert cuda["loaded"] is True or cuda["why_not"]
    assert len(report["gpus"]) == torch.cuda.device_count()


def test_text() -> None:
    report = json.loads(run("--json"))
    text = run()
    assert report["paged_attn"] in text
    assert torch.__version__ in text
    assert report["backends"]["cpu"]["isa"] in text
    if not report["backends"]["cuda"]["loaded"]:
        assert report["backends"]["cuda"]["why_not"] in text


@pytest.mark.gpu
def test_the_gpu_is_named_and_its_library_loaded() -> None:
    report = json.loads(run("--json"))
    assert report["backends"]["cuda"] == {"loaded": True, "why_not": None}
    assert report["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert report["cuda"]["built_with"]


def test_unknown_option() -> None:
    command = [sys.executable, "-m", "paged_attn", "--no-such-option"]
    assert subprocess.run(command, capture_output=True).returncode == 2
