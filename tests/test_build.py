"""What the build made: CUDA kernels wherever they can be compiled, and files of a readable size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paged_attn import _library

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "paged_attn"


def test_cuda_kernels_are_compiled() -> None:
    """Warnings and spilled registers are errors of that build."""
    info = _library.build_info()
    if info["why_no_cuda"] is not None:
        pytest.skip(f"CUDA kernels were not compiled: {info['why_no_cuda']}")
    assert info["archs"]
    assert list(Path(_library.__file__).parent.glob("_C_cuda*.so"))


def test_settings_of_the_cuda_library_work_without_a_gpu() -> None:
    if _library.why_no_cuda is not None:
        pytest.skip(f"the CUDA library is not loaded: {_library.why_no_cuda}")
    for name, value in (("_set_cuda_checks", True), ("_set_shared_memory_cap", 99 * 1024)):
        switch = getattr(torch.ops.paged_attn, name)
        before = switch(value)
        assert switch(before) == value
        assert switch(before) == before


def test_libraries_of_ops_depend_on_no_python() -> None:
    """One binary serves every Python: its name says so, and it needs no library of Python's."""
    libraries = sorted(Path(_library.__file__).parent.glob("_C_*.so"))
    assert libraries
    for library in libraries:
        assert library.name.endswith(".abi3.so")
        assert b"libtorch_python" not in library.read_bytes()


def test_setup_py_stays_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 150


def test_every_package_is_installed() -> None:
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py")}
    listed = re.search(r"^packages = \[(.+)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert listed
    names = {name.strip(' "') for name in listed[1].split(",")}
    assert names == {".".join(folder.parts) for folder in folders}
