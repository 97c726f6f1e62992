"""Packages that tests of integrations want, and that not every machine has."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def need(package: str) -> ModuleType:
    """The package, or else a skip that names it.

    `make test` installs all of them and sets PAGED_ATTN_TEST_COMPLETE: there it is a failure.
    """
    if os.environ.get("PAGED_ATTN_TEST_COMPLETE") == "1":
        return importlib.import_module(package)
    return pytest.importorskip(package)
