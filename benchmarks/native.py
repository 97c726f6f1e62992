"""Small native helpers, compiled when they are first needed and kept for later runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def find_nvcc(purpose: str) -> str:
    """The nvcc on PATH, else CUDA_HOME's.

    Raises:
        RuntimeError: there is none, which `purpose` needs.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        nvcc = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
        if not os.path.exists(nvcc):
            raise RuntimeError(f"{purpose} needs nvcc, which is neither on PATH nor in CUDA_HOME")
    return nvcc


def compiled(source: Path, command: list[str], libraries: Sequence[str] = ()) -> Path:
    """The shared library that `command` makes of the source; kept in ~/.cache.

    Args:
        source: a file that the result depends on, beside the command.
        command: the compiler and its flags.
        libraries: flags that name what to link with.

    Raises:
        RuntimeError: the compiler fails; with its words.
        OSError: there is no such compiler, or nowhere to write to.
    """
    digest = hashlib.sha256(
        source.read_bytes() + " ".join([*command, *libraries]).encode()
    ).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(cache) / "paged_attn"
    library = folder / f"{source.stem}_{digest[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            whole = [*command, "-o", str(built), str(source), *libraries]
            result = subprocess.run(whole, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(f"{' '.join(whole)} failed:\n{result.stderr[-2000:]}")
            built.replace(library)
    return library
