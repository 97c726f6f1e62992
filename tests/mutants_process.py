"""Builds and tests in processes that are forked from one which has imported torch already.

For a build or a test of seconds, starting Python and importing torch would take as long again.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

WRONG_PACKAGE = 90  # exit status: not the tree's own package was imported


def forks() -> ForkServerContext:
    """Where the processes come from. What is imported here must not read the environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "hypothesis"])
    return context


def enter(tree: Path, environment: dict[str, str], log: Path) -> None:
    """Makes this process one of the tree's, its output going to `log`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))


def build(tree: Path, environment: dict[str, str], log: Path) -> None:
    enter(tree, environment, log)
    sys.argv = ["setup.py", "-q", "build_ext", "--inplace"]
    runpy.run_path("setup.py", run_name="__main__")


def test(tree: Path, environment: dict[str, str], log: Path, *arguments: str) -> None:
    enter(tree, environment, log)
    import pytest

    import paged_attn

    if not Path(paged_attn.__file__).is_relative_to(tree):
        print(f"imported {paged_attn.__file__} instead of {tree}'s")
        sys.exit(WRONG_PACKAGE)
    sys.exit(pytest.main(list(arguments)))


def exit_status(process: multiprocessing.process.BaseProcess, seconds: int) -> int | None:
    """Runs it; negative: the signal that ended it; None after a time-out."""
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode
