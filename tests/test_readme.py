"""The ops have the arguments that the README says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import paged_attn

README = (Path(__file__).parents[1] / "README.md").read_text()
SIGNATURES = re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", README, re.M)


def test_every_op_is_listed() -> None:
    classes = {"BlockManager", "OutOfBlocks", "UnknownSequence"}
    settings = {"set_checks", "set_early_start"}
    names = {*paged_attn.__all__} - classes - settings - {"reference"}
    assert {name for name, _ in SIGNATURES} == names
    assert all(f"`paged_attn.{name}(True)`" in README for name in settings)


@pytest.mark.parametrize(("name", "arguments"), SIGNATURES)
def test_signature(name: str, arguments: str) -> None:
    """Up to an ellipsis; outputs are told in words."""
    front = inspect.signature(getattr(paged_attn, name))
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in front.parameters.values()
        if parameter.name not in ("out", "lse")
    ]
    signature = str(inspect.Signature(parameters))[1:-1]
    told, ellipsis, _ = arguments.partition("…")
    assert signature.startswith(told) if ellipsis else signature == told
