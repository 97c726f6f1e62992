"""Nothing outside is read or written, whatever tables and lengths say; bad content is NaN rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import DTYPES, OPTION_SETS, Case, Draw, build, option_set

LENS = [40, 17, 0, 100, 1, 64]
QUERIES: list[Any] = [None, 3, [2, 1, 0, 4, 1, 9]]
INT_MAX = 2**31 - 1


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).clone()


@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", QUERIES)
def test_canaries_around_outputs(
    draw: Draw, device: str, query_len: Any, dtype: torch.dtype, name: str
) -> None:
    """out and lse are fully written, their surroundings and all inputs keep their bytes."""
    case = build(
        draw,
        LENS,
        query_len=query_len,
        num_heads=6,
        head_dim=72,
        dtype=dtype,
        **option_set(name, dtype),
    )
    expected, expected_lse = case.decode_with_lse()
    *rows, heads, dim = case.q.shape
    margin, canary = 16, 1234.0
    around = torch.full(
        (rows[0] + 2, *rows[1:], heads + 2, dim + 2 * margin), canary, dtype=dtype, device=device
    )
    out = around[1:-1, ..., 1:-1, margin:-margin]
    out.fill_(float("nan"))
    lse_around = torch.full((expected_lse.numel() + 128,), canary, device=device)
    lse = lse_around[64:-64].view(expected_lse.shape).fill_(float("nan"))
    inputs = [t for t in (*case.args, *case.options.values()) if isinstance(t, torch.Tensor)]
    before = [bits(t) for t in inputs]

    torch.ops.paged_attn.decode_with_lse.out(*case.args, **case.options, out=out, lse=lse)

    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    for tensor, old in zip(inputs, before, strict=True):
        assert torch.equal(bits(tensor), old)
    out.fill_(canary)
    lse.fill_(canary)
    assert bool((around == canary).all())
    assert bool((lse_around == canary).all())


def edit(case: Case, name: str, index: Any, value: int) -> Case:
    changed = getattr(case, name).clone()
    changed[index] = value
    return case.with_(**{name: changed})


BAD_IDS = [-1, -(2**31), INT_MAX, 2147480000]


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("column", [0, 3, 6])
@pytest.mark.parametrize("bad_id", [*BAD_IDS, "N"])
def test_bad_id_in_the_live_part(
    draw: Draw, device: str, bad_id: int | str, column: int, query_len: Any
) -> None:
    """Behind the pool lies what would give numbers, not NaN, if it were read."""
    case = build(draw, LENS, query_len=query_len, num_heads=6)
    caches = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        caches[name] = torch.cat([cache, torch.zeros_like(cache[:1])])[:-1]
    case = case.with_(**caches)
    bad_id = case.k_cache.shape[0] if isinstance(bad_id, str) else bad_id
    assert_only_one_is_nan(case, edit(case, "block_tables", (3, column), bad_id), 3)


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("name", ["window", "all", "all_noncausal"])
def test_bad_id_among_the_visible_under_options(
    draw: Draw, device: str, name: str, query_len: Any
) -> None:
    """With the window's first block bad too; the block before it may be."""
    case = build(draw, LENS, query_len=query_len, num_heads=6, **OPTION_SETS[name])
    blocks, _ = case.live_slots(3)
    columns = torch.isin(case.block_tables[3], blocks).nonzero()[:, 0].tolist()
    for column in (columns[0], columns[-1]):
        bad = edit(case, "block_tables", (3, column), draw.rng.choice((*BAD_IDS, 10**6)))
        assert_only_one_is_nan(case, bad, 3)
    if columns[0] > 0:
        expected = case.decode()
        hidden = edit(case, "block_tables", (3, columns[0] - 1), INT_MAX)
        assert_same_bits(hidden.decode(), expected)


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("past", [1, 16, 1000, INT_MAX])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_length_beyond_the_table(
    draw: Draw, device: str, window: int | None, past: int, query_len: Any
) -> None:
    case = build(draw, LENS, query_len=query_len, num_heads=6, padding=0, window=window)
    capacity = case.block_tables.shape[1] * 16
    bad = edit(case, "context_lens", 1, min(capacity + past, INT_MAX))
    assert_only_one_is_nan(case, bad, 1)


def assert_only_one_is_nan(case: Case, bad: Case, sequence: int) -> None:
    """The sequence's rows are NaN; the others are as if it held some valid length."""
    out, lse = bad.decode_with_lse()
    rows = bad.rows_of(sequence)
    assert bool(out[rows].isnan().all())
    assert bool(lse[rows].isnan().all())
    capacity = case.block_tables.shape[1] * case.k_cache.shape[1]
    candidates = []
    tables = case.block_tables.clamp(0, case.k_cache.shape[0] - 1)
    for length in (int(case.context_lens[sequence]), 0, capacity):
        valid = edit(case.with_(block_tables=tables), "context_lens", sequence, length)
        valid_out, valid_lse = valid.decode_with_lse()
        valid_out[rows] = float("nan")
        valid_lse[rows] = float("nan")
        candidates.append((valid_out, valid_lse))
    matches = [
        torch.equal(out.nan_to_num(7.0), other.nan_to_num(7.0))
        and torch.equal(lse.nan_to_num(7.0), other_lse.nan_to_num(7.0))
        for other, other_lse in candidates
    ]
    assert any(matches), "the other sequences changed"
    expected, expected_lse = candidates[0]
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())


def test_every_sequence_is_bad(draw: Draw, device: str) -> None:
    case = build(draw, [40, 17, 1], num_heads=6)
    bad = case.with_(block_tables=torch.full_like(case.block_tables, INT_MAX))
    out, lse = bad.decode_with_lse()
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@pytest.mark.parametrize("query_len", [None, 2, [1, 0, 3]])
def test_table_without_columns(draw: Draw, device: str, query_len: Any) -> None:
    case = build(draw, [0, 5, 1], query_len=query_len)
    case = case.with_(block_tables=case.block_tables[:, :0])
    out, lse = case.decode_with_lse()
    assert_accurate_of_nothing(case, out, lse, bad=[1, 2])


@pytest.mark.parametrize("query_len", [None, 2, [1, 0, 3]])
def test_pool_without_blocks(draw: Draw, device: str, query_len: Any) -> None:
    case = build(draw, [0, 5, 1], query_len=query_len)
    case = case.with_(k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    out, lse = case.decode_with_lse()
    assert_accurate_of_nothing(case, out, lse, bad=[1, 2])


def assert_accurate_of_nothing(
    case: Case, out: torch.Tensor, lse: torch.Tensor, bad: list[int]
) -> None:
    for b in range(3):
        rows = case.rows_of(b)
        if b in bad:
            assert bool(out[rows].isnan().all())
            assert bool(lse[rows].isnan().all())
        else:
            assert bool((out[rows] == 0).all())
            assert bool((lse[rows] == float("-inf")).all())


# cu_seqlens_q over 8 rows; the rows that must be NaN, and the sequences that must not change.
BAD_CU = [
    ([0, 2, 1, 4, 6], [2, 3], [0, 3]),
    ([0, 2, -1, 4, 6], [2, 3], [0, 3]),
    ([0, 2, -(2**31), 4, 6], [2, 3], [0, 3]),
    ([0, 2, 99, 4, 6], [2, 3, 4, 5, 6, 7], [0]),
    ([0, 2, 4, 6, INT_MAX], [6, 7], [0, 1, 2]),
    ([0, 2, 4, 6, 9], [6, 7], [0, 1, 2]),
    ([-3, 2, 4, 6, 8], [0, 1], [1, 2, 3]),
    ([0, 2, 4, 6, 5], [], [0, 1, 2]),
]


@pytest.mark.parametrize(("cu", "nan_rows", "unchanged"), BAD_CU)
def test_bad_cu_seqlens(
    draw: Draw, device: str, cu: list[int], nan_rows: list[int], unchanged: list[int]
) -> None:
    case = build(draw, [40, 17, 33, 20], query_len=[2, 2, 2, 0], outside_rows=(0, 2))
    around = torch.full((12, 4, 64), 5.0, dtype=torch.float16, device=device)
    lse_around = torch.full((12, 4), 5.0, device=device)
    out, lse = around[2:10], lse_around[2:10]
    bad = case.with_(cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device))
    torch.ops.paged_attn.decode_with_lse.out(*bad.args, out=out, lse=lse)
    assert out[nan_rows].isnan().all()
    assert lse[nan_rows].isnan().all()
    for b in unchanged:
        alone = case.sequence(b)
        rows = slice(cu[b], cu[b + 1])
        alone = alone.with_(
            q=case.q[rows],
            cu_seqlens_q=torch.tensor([0, cu[b + 1] - cu[b]], dtype=torch.int32, device=device),
        )
        assert_accurate(alone, out[rows], lse[rows])
    edges = torch.tensor([0, 1, 10, 11], device=device)
    assert bool((around[edges] == 5.0).all())
    assert bool((lse_around[edges] == 5.0).all())


def test_bad_id_behind_thousands_of_short_sequences(draw: Draw, device: str) -> None:
    """The one bad sequence is NaN and no other, however far ahead its blocks are looked up."""
    count = 12000
    case = build(draw, [5] * count + [20], num_heads=3, num_kv_heads=3)
    expected, expected_lse = case.decode_with_lse()
    case.block_tables[count, 1] = -1
    out, lse = case.decode_with_lse()
    assert out[count].isnan().all()
    assert lse[count].isnan().all()
    assert_same_bits(out[:count], expected[:count])
    assert_same_bits(lse[:count], expected_lse[:count])


@pytest.mark.parametrize(
    "cu",
    [
        [0, 10, 2, 4, 12],
        [100, 3, 6, 8, 12],
        [3, 3, 9, 1, 12],
        [5, 0, 0, 7, 11],
        [0, 99, 5, 6, 12],
        [12, 0, 3, 6, 9],
    ],
)
def test_rows_never_have_two_owners(draw: Draw, device: str, cu: list[int]) -> None:
    """Whatever the entries are, each row comes out as the definition says."""
    case = build(draw, [40, 17, 33, 20], query_len=[3, 3, 3, 3])
    bad = case.with_(cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device))
    assert_accurate(bad, *bad.decode_with_lse())


def test_more_queries_than_promised(draw: Draw, device: str) -> None:
    case = build(draw, [40, 17, 33], query_len=[2, 5, 3])
    expected = case.decode()
    out, lse = case.decode_with_lse(max_query_len=3)
    assert bool(out[2:7].isnan().all())
    assert bool(lse[2:7].isnan().all())
    good = torch.tensor([0, 1, 7, 8, 9], device=device)
    torch.testing.assert_close(out[good], expected[good], atol=1e-3, rtol=1e-3)
    assert_accurate(case, *case.decode_with_lse(max_query_len=5))
    assert_accurate(case, *case.decode_with_lse(max_query_len=INT_MAX))
