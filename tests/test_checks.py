"""Checks mode: bad content raises before anything is written, and good content passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from attention_case import OPTION_SETS, Case, Draw, build
from test_safety import INT_MAX, LENS, QUERIES, edit

import paged_attn


def mentions(message: str, *numbers: int) -> bool:
    found = {int(n) for n in re.findall(r"-?\d+", message)}
    return all(number in found for number in numbers)


def bad_id(case: Case) -> tuple[Case, str, tuple[int, ...]]:
    limit = case.k_cache.shape[0]
    return edit(case, "block_tables", (3, 2), limit), "block_tables", (3, 2, limit)


def negative_id(case: Case) -> tuple[Case, str, tuple[int, ...]]:
    limit = case.k_cache.shape[0]
    return edit(case, "block_tables", (0, 1), -1), "block_tables", (0, 1, -1, limit)


def bad_last_id(case: Case) -> tuple[Case, str, tuple[int, ...]]:
    return edit(case, "block_tables", (3, 6), INT_MAX), "block_tables", (3, 6, INT_MAX)


def too_long(case: Case) -> tuple[Case, str, tuple[int, ...]]:
    capacity = case.block_tables.shape[1] * 16
    return edit(case, "context_lens", 4, capacity + 1), "context_lens", (4, capacity + 1, capacity)


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("spoil", [bad_id, negative_id, bad_last_id, too_long])
@pytest.mark.parametrize("op", ["decode", "decode_with_lse"])
def test_checks_raise_before_writing(
    draw: Draw,
    device: str,
    checks: None,
    op: str,
    spoil: Callable[[Case], tuple[Case, str, tuple[int, ...]]],
    query_len: Any,
) -> None:
    """IndexError names sequence, column, value and limit."""
    case, argument, numbers = spoil(build(draw, LENS, query_len=query_len))
    out = torch.full_like(case.q, 3.0)
    outputs = {"out": out}
    if op == "decode_with_lse":
        outputs["lse"] = torch.full(case.q.shape[:-1], 3.0, device=device)
    for call in (getattr(torch.ops.paged_attn, op), getattr(torch.ops.paged_attn, op).out):
        kwargs = outputs if call is not getattr(torch.ops.paged_attn, op) else {}
        with pytest.raises(IndexError) as caught:
            call(*case.args, **kwargs)
        message = str(caught.value)
        assert message.startswith(f"paged_attn.{op}: ")
        assert argument in message
        assert mentions(message, *numbers), message
    for tensor in outputs.values():
        assert bool((tensor == 3.0).all())


@pytest.mark.parametrize(
    ("cu", "numbers"),
    [
        ([0, 2, 1, 4, 6], (2, 1)),
        ([0, 2, -1, 4, 6], (2, -1)),
        ([0, 2, 4, 6, 9], (4, 9, 8)),
        ([-3, 2, 4, 6, 8], (0, -3)),
    ],
)
def test_checks_of_cu_seqlens(
    draw: Draw, device: str, checks: None, cu: list[int], numbers: tuple[int, ...]
) -> None:
    case = build(draw, [40, 17, 33, 20], query_len=[2, 2, 2, 0], outside_rows=(0, 2))
    bad = case.with_(cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device))
    out = torch.full_like(case.q, 3.0)
    with pytest.raises(IndexError, match="cu_seqlens_q") as caught:
        torch.ops.paged_attn.decode.out(*bad.args, out=out)
    assert mentions(str(caught.value), *numbers)
    assert bool((out == 3.0).all())
    with pytest.raises(IndexError, match="max_query_len") as caught:
        case.decode(max_query_len=1)
    assert mentions(str(caught.value), 0, 2, 1)


def test_checks_let_good_content_pass(draw: Draw, device: str, checks: None) -> None:
    """Dead entries, zero and negative lengths and rows of no sequence are not bad content."""
    for query_len in QUERIES:
        case = build(draw, LENS, query_len=query_len, padding=INT_MAX)
        assert_accurate(case, *case.decode_with_lse())
        case = build(draw, LENS, query_len=query_len, padding=INT_MAX, **OPTION_SETS["all"])
        assert_accurate(case, *case.decode_with_lse())
    case = build(draw, [0, -1, 5], padding=-1)
    assert_accurate(case, *case.decode_with_lse())


def test_checks_of_a_window(draw: Draw, device: str, checks: None) -> None:
    """The first block that any query sees is looked at, the one before it is not."""
    case = build(draw, [100], query_len=3, block_size=8, window=10, padding=-1)
    assert int((case.block_tables[0] >= 0).nonzero()[0]) == 88 // 8
    assert_accurate(case, *case.decode_with_lse())
    with pytest.raises(IndexError, match="block_tables") as caught:
        edit(case, "block_tables", (0, 11), INT_MAX).decode()
    assert mentions(str(caught.value), 0, 11, INT_MAX)
    with pytest.raises(IndexError, match="block_tables"):
        case.decode(window=13)


def test_set_checks_returns_the_previous_setting(draw: Draw, device: str) -> None:
    first = paged_attn.set_checks(True)
    try:
        assert paged_attn.set_checks(False) is True
        assert paged_attn.set_checks(False) is False
        case, *_ = bad_id(build(draw, LENS))
        assert bool(case.decode()[3].isnan().all())
    finally:
        paged_attn.set_checks(first)


PROGRAM = """
import torch, paged_attn
kv = torch.zeros(2, 4, 1, 8)
table = torch.tensor([[7]], dtype=torch.int32)
length = torch.tensor([3], dtype=torch.int32)
try:
    out = torch.ops.paged_attn.decode(torch.zeros(1, 1, 8), kv, kv, table, length)
    print("nan" if out.isnan().all() else "wrong")
except IndexError as error:
    print("IndexError", error)
print(paged_attn.set_checks(False))
"""


@pytest.mark.parametrize("value", ["1", "0", None])
def test_checks_from_the_environment(value: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PAGED_ATTN_CHECK"}
    if value is not None:
        environment["PAGED_ATTN_CHECK"] = value
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    first, second = run.stdout.splitlines()
    if value == "1":
        assert first.startswith("IndexError paged_attn.decode: ")
        assert second == "True"
    else:
        assert (first, second) == ("nan", "False")
