"""Loads the libraries of ops and knows what was loaded, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent


def _find(name: str) -> Path | None:
    return next(iter(sorted(_FOLDER.glob(f"{name}.*so"))), None)


def build_info() -> dict[str, Any]:
    """What setup.py wrote: torch and CUDA versions built with, architectures, why no CUDA."""
    path = _FOLDER / "_build_info.json"
    if not path.is_file():
        return {}
    info: dict[str, Any] = json.loads(path.read_text())
    return info


def _load_cpu() -> None:
    path = _find("_C_cpu")
    if path is None:
        raise ImportError(
            f"paged_attn: no _C_cpu library in {_FOLDER}: the package was not built here. If it is "
            "installed elsewhere, this is its source folder, which hides it: change to another "
            "folder. Else run `make build` or `pip install --no-build-isolation -e .` here."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"paged_attn: {path.name}, built with torch {build_info().get('torch')}, does not load "
            f"under torch {torch.__version__} (2.10 or newer is needed): {error}"
        ) from error


def _load_cuda() -> str | None:
    """Loads the CUDA library; returns why that was not possible, and what to do."""
    path = _find("_C_cuda")
    reason = build_info().get("why_no_cuda")
    if path is None or reason is not None:
        return (
            f"it was not built: {reason or 'the library is missing'}. To have it, change that and "
            "rebuild with `pip install --no-build-isolation .`; PAGED_ATTN_BUILD_CUDA=1 makes a "
            "build fail that would leave it out"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA support. Install a CUDA build of torch"
    built, running = build_info().get("cuda"), torch.version.cuda
    if built and built.split(".")[0] != running.split(".")[0]:
        return (
            f"it was built for CUDA {built}, torch has CUDA {running}. Rebuild it with "
            "`pip install --no-build-isolation .`"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path.name} does not load: {error}. Rebuild it for this torch"
    return None


_load_cpu()
why_no_cuda = _load_cuda()
