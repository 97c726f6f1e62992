"""Fixtures that every test shares: the device, fresh and repeatable random inputs, checks mode."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator

import accuracy
import pytest
import torch
from attention_case import Draw

import paged_attn

# Runs in an environment of its own: make test-vllm.
collect_ignore = ["vllm_engine"]
# In the environment because workers that this process starts (pytest-xdist) must have the same one.
SESSION_SEED = int(os.environ.setdefault("PAGED_ATTN_TEST_SEED", str(secrets.randbelow(2**31))))


def pytest_configure() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    # As on a card whose blocks have fewer bytes of shared memory than this one's.
    if cap := os.environ.get("PAGED_ATTN_TEST_SHARED_MEMORY"):
        torch.ops.paged_attn._set_shared_memory_cap(int(cap))


def pytest_report_header() -> str:
    return f"paged_attn inputs: PAGED_ATTN_TEST_SEED={SESSION_SEED}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if accuracy.ratios:
        report.user_properties.append(("error_over_bar", dict(accuracy.ratios)))
        accuracy.ratios.clear()
    if report.failed:
        command = f"PAGED_ATTN_TEST_SEED={SESSION_SEED} pytest '{item.nodeid}'"
        report.sections.append(("repeat with", command))


worst: dict[str, tuple[float, str]] = {}
judged = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also in the process that collects what others ran."""
    global judged
    for name, ratios in report.user_properties:
        if name != "error_over_bar" or report.when != "call":
            continue
        judged += 1
        for kind, ratio in ratios.items():
            worst[kind] = max(worst.get(kind, (0.0, "")), (ratio, report.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if judged:
        terminalreporter.section(f"errors over what is allowed, worst of {judged} tests")
    for kind, (ratio, test) in worst.items():
        terminalreporter.write_line(f"{kind}: {ratio:.3f} in {test}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every test that takes it runs on the CPU and, where there is one, on the GPU."""
    return request.param


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    """Random numbers of this test in this session: other ones next time, the same for one seed."""
    seed = (SESSION_SEED + zlib.crc32(request.node.name.encode())) % 2**31
    params = getattr(request.node, "callspec", None)
    device = params.params.get("device", "cpu") if params else "cpu"
    if request.node.get_closest_marker("gpu"):
        device = "cuda"
    return Draw(seed, device)


@pytest.fixture
def checks() -> Iterator[None]:
    """Checks mode for the length of a test."""
    previous = paged_attn.set_checks(True)
    yield
    paged_attn.set_checks(previous)
