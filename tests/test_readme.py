"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_there_are_snippets() -> None:
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(snippet: str) -> None:
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})  # fails by raising
    assert "paged_attn" in snippet
