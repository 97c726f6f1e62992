"""docs/support.md is what the tests' own parameters give."""

from __future__ import annotations

import support_table


def test_the_page_is_up_to_date() -> None:
    """`python tests/support_table.py` writes it."""
    assert support_table.PAGE.read_text() == support_table.page()
