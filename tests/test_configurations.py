"""decode over the whole contract: random configurations of shapes, layouts and all options."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import (
    BLOCK_SIZES,
    DTYPES,
    FP8_DTYPES,
    LAYOUTS,
    Q_LAYOUTS,
    RATIOS,
    SCALE_SHAPES,
    Draw,
    build,
)

NUM_CONFIGS = int(os.environ.get("PAGED_ATTN_TEST_CONFIGS", "1000"))
PADDINGS = (0, -1, 2**31 - 1, 2147480000)
HEAD_DIMS = range(8, 257, 8)
KV_HEADS = (1, 1, 2, 3, 4, 8)
MOST_SEQUENCES = 300
MOST_QUERIES = 9


def random_arguments(draw: Draw) -> dict[str, Any]:
    """Arguments of `build`, options apart, anywhere in the contract that fits the device."""
    rng = draw.rng
    budget = 2**20 if draw.device == "cpu" else 2**24
    head_dim = rng.choice(HEAD_DIMS)
    num_kv_heads = rng.choice(KV_HEADS)
    ratio = rng.choice(RATIOS)
    block_size = rng.choice(BLOCK_SIZES)
    batch = rng.choice((0, 1, 2, rng.randint(3, 16), rng.randint(17, MOST_SEQUENCES)))
    query_kind = rng.choice(("single", "several", "ragged"))
    most_queries = 1 if query_kind == "single" else MOST_QUERIES

    token_size = num_kv_heads * head_dim
    work_per_token = token_size * (1 + ratio * most_queries // 4)
    batch = min(batch, max(1, budget // (token_size * block_size)))
    tokens = max(batch, budget // work_per_token)
    lens = [rng.choice((0, 1, rng.randint(1, 2 * tokens // batch))) for _ in range(batch)]
    if batch and rng.random() < 0.5:
        around = rng.randint(0, max(0, tokens // batch // block_size)) * block_size
        lens = [max(0, around + rng.randint(-1, 1)) for _ in range(batch)]
    if batch and rng.random() < 0.3:
        lens[rng.randrange(batch)] = tokens

    query_len: int | list[int] | None = None
    outside_rows = (0, 0)
    if query_kind == "several":
        query_len = rng.randint(1, MOST_QUERIES)
    elif query_kind == "ragged":
        query_len = [rng.choice((0, 1, rng.randint(0, MOST_QUERIES))) for _ in lens]
        outside_rows = (rng.randint(0, 3), rng.randint(0, 3))
    return {
        "lens": lens,
        "query_len": query_len,
        "num_heads": num_kv_heads * ratio,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "dtype": rng.choice(DTYPES),
        "layout": rng.choice(LAYOUTS),
        "q_layout": rng.choice(Q_LAYOUTS),
        "spare_columns": rng.choice((0, 1, 40)),
        "padding": rng.choice(PADDINGS),
        "outside_rows": outside_rows,
        "scale": rng.choice((None, rng.uniform(-0.3, 0.3), 1.0)),
    }


def random_options(draw: Draw, arguments: dict[str, Any]) -> dict[str, Any]:
    """Further arguments of `build`: any of decode's options beside each other."""
    rng = draw.rng
    dtype = arguments["dtype"]
    options: dict[str, Any] = {"batch_invariant": rng.random() < 0.3}
    if rng.random() < 0.2:
        options["causal"] = False
    else:
        longest = max(arguments["lens"], default=0)
        near = arguments["block_size"] * rng.randint(1, 4) + rng.randint(-1, 1)
        windows = (None, None, 1, rng.randint(1, 40), max(1, near), max(1, longest - 1), 10**9)
        options["window"] = rng.choice(windows)
        options["alibi"] = rng.random() < 0.3
    options["softcap"] = rng.choice((None, None, rng.uniform(0.1, 5.0), 30.0, 1000.0))
    options["sinks"] = rng.choice((None, dtype, torch.float32))
    options["k_scale"] = rng.choice((None, None, *SCALE_SHAPES))
    options["v_scale"] = rng.choice((None, None, *SCALE_SHAPES))
    if dtype != torch.float32:
        options["cache_dtype"] = rng.choice((None, None, *FP8_DTYPES))
    return options


@pytest.mark.parametrize("with_options", [False, True])
@pytest.mark.parametrize("config", range(NUM_CONFIGS))
def test_random_configuration(draw: Draw, device: str, config: int, with_options: bool) -> None:
    """PAGED_ATTN_TEST_CONFIGS draws that many; a failure prints the command that repeats it."""
    arguments = random_arguments(draw)
    if with_options:
        arguments.update(random_options(draw, arguments))
    print(arguments)
    case = build(draw, **arguments)
    out, lse = case.decode_with_lse()
    assert_accurate(case, out, lse)
    assert_same_bits(case.decode(), out)
