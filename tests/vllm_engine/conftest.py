"""Engines run each in a process of its own, in the Python of these tests (`make test-vllm`)."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine import Job, Result
from jobs import OURS, SEED, RunEngine

HERE = Path(__file__).parent
TIMEOUT = 900  # seconds


def pytest_report_header() -> str:
    return f"prompts: PAGED_ATTN_TEST_SEED={SEED}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> RunEngine:
    """Runs a job; its log is in the failure's message."""

    def run(job: Job) -> Result:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
        environment = {
            **{key: value for key, value in os.environ.items() if key not in OURS},
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": str(HERE),
            **job.environment,
        }
        command = [sys.executable, str(HERE / "engine.py"), "job.json", "result.json"]
        begin = time.perf_counter()
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
                check=False,
            )
        print(f"engine: {time.perf_counter() - begin:.0f} s, {job.options} {job.environment}")
        tail = (folder / "log").read_text()[-6000:]
        assert done.returncode == 0, tail
        return Result(**json.loads((folder / "result.json").read_text()))

    return run
