"""The Python in README.md and in the guides runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from optional import need

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(page.name, snippet, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


def test_there_are_snippets() -> None:
    assert {"README.md", "flash_attn.md", "transformers.md"} <= {
        snippet.values[0] for snippet in SNIPPETS
    }


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_snippet(page: str, snippet: str) -> None:
    for package in re.findall(r"^from (transformers) import", snippet, re.M):
        need(package)
    exec(compile(snippet, page, "exec"), {"__name__": page})  # fails by raising
    assert "paged_attn" in snippet
