"""With batch_invariant a sequence's bits are its own: neither its neighbours nor the batch show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, OPTION_SETS, Case, Draw, build, option_set

# One sequence is split among processors when it is alone, and is not in this batch.
LENS = [5000, 17, 0, 100, 1, 64, 1300, *[600] * 20]
QUERIES: list[Any] = [None, 3, [2, 1, 0, 4, 1, 40, 3, *[1, 2] * 10]]


# On CUDA two token lanes share a head of the last two in this batch, and all of them a sequence
# alone; the last leaves a pair of lanes without a head.
@pytest.fixture(params=[(6, 2), (8, 8), (9, 3)], ids=["6-2", "8-8", "9-3"])
def heads(request: pytest.FixtureRequest) -> tuple[int, int]:
    pair: tuple[int, int] = request.param
    return pair


@pytest.fixture(params=OPTION_SETS)
def case(
    draw: Draw, device: str, query_len: Any, heads: tuple[int, int], request: pytest.FixtureRequest
) -> Case:
    """A batch under each set of options, with batch_invariant."""
    dtype = draw.rng.choice(DTYPES)
    options = option_set(request.param, dtype)
    if "window" in options:
        options["window"] = draw.rng.choice((37, 1100))
    return build(
        draw,
        LENS,
        query_len=query_len,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        dtype=dtype,
        outside_rows=(2, 3),
        batch_invariant=True,
        **options,
    )


def assert_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("query_len", QUERIES)
def test_each_sequence_alone(case: Case) -> None:
    together = case.decode_with_lse()
    for b in range(len(LENS)):
        rows = case.rows_of(b)
        own = rows if isinstance(rows, slice) else slice(b, b + 1)
        assert_equal(case.sequence(b).decode_with_lse(), tuple(r[own] for r in together))


@pytest.mark.parametrize("query_len", [None, 3])
def test_order_padding_rows_and_width(draw: Draw, case: Case) -> None:
    """Another order of rows, some of length 0 among them, and a table 131072 tokens wide."""
    out, lse = case.decode_with_lse()
    order = torch.randperm(len(LENS), generator=draw.generator, device=draw.device)
    order = torch.cat([order[:5], order[:0].new_zeros(7), order[5:]])
    lens = case.context_lens[order].clone()
    lens[5:12] = draw.rng.choice((0, -1))
    wider = torch.full((len(order), 131072 // 16), -1, dtype=torch.int32, device=draw.device)
    wider[:, : case.block_tables.shape[1]] = case.block_tables[order]
    moved = case.with_(q=case.q[order].contiguous(), block_tables=wider, context_lens=lens)
    kept = torch.cat([torch.arange(5), torch.arange(12, len(order))]).to(draw.device)
    ours = tuple(r[kept] for r in moved.decode_with_lse())
    assert_equal(ours, (out[order[kept]], lse[order[kept]]))


@pytest.mark.parametrize("query_len", [QUERIES[1]])
def test_ragged_against_uniform(case: Case) -> None:
    """The same queries as [B, Q, H, D] and as ragged ones."""
    out, lse = case.decode_with_lse()
    batch, queries = out.shape[:2]
    cu = torch.arange(batch + 1, dtype=torch.int32, device=out.device) * queries
    ragged = case.with_(q=case.q.flatten(0, 1), cu_seqlens_q=cu)
    assert_equal(ragged.decode_with_lse(), (out.flatten(0, 1), lse.flatten(0, 1)))


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("query_len", QUERIES)
def test_cpu_is_always_batch_invariant(case: Case) -> None:
    """There the flag changes no bit, nor does the number of threads."""
    expected = case.decode_with_lse()
    assert_equal(case.decode_with_lse(batch_invariant=False), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            assert_equal(case.decode_with_lse(batch_invariant=False), expected)
    finally:
        torch.set_num_threads(threads)
