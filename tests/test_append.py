"""append_kv writes each sequence's newest tokens behind its older ones; append_decode reads too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, LAYOUTS, OPTION_SETS, Case, Draw, build, option_set
from test_cache import FP8, FP8_LAYOUTS, new_scale, whole_storage

from paged_attn import reference

ops = torch.ops.paged_attn
LENS = [33, 1, 70, 16, 0, 2]
QUERIES: list[Any] = [None, 3, [2, 0, 5, 1, 0, 4]]
INT_MAX = 2**31 - 1


def new_tokens(draw: Draw, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """key and value as slices of one packed projection."""
    num_kv_heads, head_dim = case.k_cache.shape[2:]
    packed = draw.normal(*case.q.shape[:-2], 3, num_kv_heads, head_dim, dtype=case.q.dtype)
    return packed[..., 1, :, :], packed[..., 2, :, :]


def twin(case: Case) -> Case:
    """The same bytes with the same strides in other storages."""

    def copy(cache: torch.Tensor) -> torch.Tensor:
        storage = whole_storage(cache).clone()
        return storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    return case.with_(k_cache=copy(case.k_cache), v_cache=copy(case.v_cache))


def with_cache_dtype(case: Case, dtype: torch.dtype) -> Case:
    def cast(cache: torch.Tensor) -> torch.Tensor:
        storage = whole_storage(cache).nan_to_num(1.0).to(dtype)
        return storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    return case.with_(k_cache=cast(case.k_cache), v_cache=cast(case.v_cache))


def assert_appended(draw: Draw, case: Case, *scales: torch.Tensor | None) -> Case:
    """Appends to a copy, whose storages must then be the reference's, what lies around included."""
    key, value = new_tokens(draw, case)
    expected = twin(case)
    ours = twin(case)
    rest = (*case.args[3:], *scales)
    assert ops.append_kv(key, value, ours.k_cache, ours.v_cache, *rest) is None
    reference.append_kv(key, value, expected.k_cache, expected.v_cache, *rest)
    for name in ("k_cache", "v_cache"):
        cache, wanted = getattr(ours, name), getattr(expected, name)
        assert_same_bits(whole_storage(cache), whole_storage(wanted))
    return ours


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout(
    draw: Draw, device: str, dtype: torch.dtype, layout: str, query_len: Any
) -> None:
    case = build(
        draw,
        LENS,
        query_len=query_len,
        num_heads=6,
        num_kv_heads=3,
        head_dim=draw.rng.choice((8, 64, 72)),
        block_size=draw.rng.choice((1, 3, 16)),
        dtype=dtype,
        layout=layout,
        outside_rows=(2, 3),
    )
    ours = assert_appended(draw, case)
    assert not torch.equal(ours.k_cache.nan_to_num(0.0), case.k_cache.nan_to_num(0.0))


@pytest.mark.parametrize("query_len", [1, 3, 40])
@pytest.mark.parametrize("source", ["apart", "shared", "of tokens", "tokens first"])
def test_rows_of_sequences_that_do_not_follow_on_each_other(
    draw: Draw, device: str, source: str, query_len: int
) -> None:
    case = build(draw, LENS, query_len=query_len, fill=0.0)
    count, heads, dim = len(LENS), *case.k_cache.shape[2:]
    wide = draw.normal(count + 2, query_len + 2, 2, heads, dim, dtype=case.q.dtype)
    key, value = {
        "apart": wide[1:-1, 1:-1].unbind(2),
        "shared": wide[:1, 1:-1].expand(count, -1, -1, -1, -1).unbind(2),
        "of tokens": wide[1:-1, :1].expand(-1, query_len, -1, -1, -1).unbind(2),
        "tokens first": wide.view(query_len + 2, count + 2, 2, heads, dim)
        .transpose(0, 1)[1:-1, 1:-1]
        .unbind(2),
    }[source]
    ours, expected = twin(case), twin(case)
    ops.append_kv(key, value, ours.k_cache, ours.v_cache, *case.args[3:])
    reference.append_kv(key, value, expected.k_cache, expected.v_cache, *case.args[3:])
    assert_same_bits(whole_storage(ours.k_cache), whole_storage(expected.k_cache))
    assert_same_bits(whole_storage(ours.v_cache), whole_storage(expected.v_cache))


@pytest.mark.parametrize("scale", [None, [], "heads"], ids=str)
@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("cache_dtype", FP8)
def test_fp8(draw: Draw, device: str, cache_dtype: torch.dtype, query_len: Any, scale: Any) -> None:
    dtype = draw.rng.choice((torch.float16, torch.bfloat16))
    layout = draw.rng.choice(FP8_LAYOUTS)
    case = build(draw, LENS, query_len=query_len, dtype=dtype, layout=layout)
    scales = new_scale(draw, scale, 2), new_scale(draw, scale, 2)
    assert_appended(draw, with_cache_dtype(case, cache_dtype), *scales)


@pytest.mark.parametrize("repetition", range(30))
def test_bad_content_is_skipped(draw: Draw, device: str, repetition: int) -> None:
    """Bad ids, lengths and cu_seqlens_q: what is bad writes nothing, the rest is written."""
    rng = draw.rng
    lens = [rng.choice((0, 1, 5, 17, 40)) for _ in range(rng.choice((1, 4, 9)))]
    query_len = rng.choice((None, 3, [rng.choice((0, 1, 2, 7)) for _ in lens]))
    case = build(
        draw,
        lens,
        query_len=query_len,
        block_size=rng.choice((1, 4, 7)),
        layout=rng.choice(LAYOUTS),
        outside_rows=(rng.choice((0, 2)), rng.choice((0, 2))),
    )
    limit = case.k_cache.shape[0]
    for _ in range(rng.randint(0, 3)):
        row, column = rng.randrange(len(lens)), rng.randrange(case.block_tables.shape[1])
        case.block_tables[row, column] = rng.choice((-1, limit, INT_MAX, -(2**31)))
    for _ in range(rng.randint(0, 2)):
        capacity = case.block_tables.shape[1] * case.k_cache.shape[1]
        bad = rng.choice((-1, capacity + 1, capacity + 5, INT_MAX, -(2**31)))
        case.context_lens[rng.randrange(len(lens))] = bad
    if case.cu_seqlens_q is not None:
        for _ in range(rng.randint(0, 2)):
            bad = rng.choice((-1, 0, case.q.shape[0], case.q.shape[0] + 1, INT_MAX, -(2**31)))
            case.cu_seqlens_q[rng.randrange(len(lens) + 1)] = bad
    assert_appended(draw, case)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("block_tables", (2, 4), -1, r"block_tables\[2, 4\] must be in \[0, \d+\), got -1"),
        ("context_lens", 0, 113, r"context_lens\[0\] must be at most 112 .*, got 113"),
        ("cu_seqlens_q", 3, 1, r"cu_seqlens_q\[3\] must be in \[2, 12\], got 1"),
        ("cu_seqlens_q", 6, 13, r"cu_seqlens_q\[6\] must be in \[8, 12\], got 13"),
    ],
)
@pytest.mark.parametrize("op", ["append_kv", "append_decode"])
def test_checks(
    draw: Draw, device: str, checks: None, op: str, name: str, index: Any, value: int, message: str
) -> None:
    """Bad content raises before anything is written, in both halves of append_decode."""
    case = build(draw, LENS, query_len=QUERIES[2], fill=0.0)
    key, _ = new_tokens(draw, case)
    first = () if op == "append_kv" else (case.q,)
    getattr(ops, op)(*first, key, key, *twin(case).args[1:])
    case = case.with_(**{name: getattr(case, name).clone()})
    getattr(case, name)[index] = value
    before = whole_storage(case.k_cache).clone(), whole_storage(case.v_cache).clone()
    with pytest.raises(IndexError, match=rf"^paged_attn\.{op}: {message}"):
        getattr(ops, op)(*first, key, key, *case.args[1:])
    assert_same_bits(whole_storage(case.k_cache), before[0])
    assert_same_bits(whole_storage(case.v_cache), before[1])


def test_checks_of_what_only_decode_reads(draw: Draw, device: str, checks: None) -> None:
    """append_kv does not look at blocks of old tokens, append_decode does."""
    case = build(draw, LENS, fill=0.0)
    key, _ = new_tokens(draw, case)
    case.block_tables[2, 0] = -1
    ops.append_kv(key, key, *twin(case).args[1:])
    before = case.k_cache.clone()
    with pytest.raises(IndexError, match=r"^paged_attn\.append_decode: block_tables\[2, 0\]"):
        ops.append_decode(case.q, key, key, *case.args[1:])
    assert_same_bits(case.k_cache, before)


def test_positions_before_the_first(draw: Draw, device: str) -> None:
    """Of three tokens of a sequence of length 1 the last is position 0."""
    case = build(draw, [1, 0, 2], query_len=3, fill=0.0)
    key, value = new_tokens(draw, case)
    ours = assert_appended(draw.again(), case)
    changed = (ours.k_cache != case.k_cache).any(-1).any(-1)
    assert int(changed.sum()) == 3
    ops.append_kv(key, value, case.k_cache, case.v_cache, *case.args[3:])
    assert_same_bits(case.k_cache[int(case.block_tables[0, 0]), 0], key[0, 2])


def test_nothing_to_append(draw: Draw, device: str) -> None:
    for lens, query_len in (([], None), ([], []), ([5, 3], [0, 0]), ([5, 3], 0)):
        case = build(draw, lens, query_len=query_len, fill=2.0)
        assert_appended(draw, case)
        out = ops.append_decode(case.q, *new_tokens(draw, case), *case.args[1:])
        assert out.shape == case.q.shape
    case = build(draw, [5, 3])
    assert_appended(draw, case.with_(k_cache=case.k_cache[:0], v_cache=case.v_cache[:0]))
    assert_appended(draw, case.with_(block_tables=case.block_tables[:, :0]))


def test_table_rows_wider_than_the_table(draw: Draw, device: str) -> None:
    case = build(draw, LENS)
    rows, width = case.block_tables.shape
    wide = torch.full((rows, width + 9), INT_MAX, dtype=torch.int32, device=device)
    wide[:, 5 : 5 + width] = case.block_tables
    assert_appended(draw, case.with_(block_tables=wide[:, 5 : 5 + width]))


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_decode_is_both(draw: Draw, device: str, dtype: torch.dtype, query_len: Any) -> None:
    layout = draw.rng.choice(LAYOUTS)
    case = build(draw, LENS, query_len=query_len, dtype=dtype, layout=layout)
    key, value = new_tokens(draw, case)
    one, two = twin(case), twin(case)
    options = {"scale": 0.3, "max_query_len": 9}
    out = ops.append_decode(case.q, key, value, *one.args[1:], **options)
    ops.append_kv(key, value, two.k_cache, two.v_cache, *case.args[3:])
    assert_same_bits(out, ops.decode(*two.args, **options))
    assert_same_bits(whole_storage(one.k_cache), whole_storage(two.k_cache))
    assert_same_bits(whole_storage(one.v_cache), whole_storage(two.v_cache))
    assert not out.isnan().any()


@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("name", OPTION_SETS)
def test_append_decode_under_options(draw: Draw, device: str, name: str, query_len: Any) -> None:
    """Both halves have the scales, the second has the rest."""
    dtype = draw.rng.choice(DTYPES)
    options = option_set(name, dtype)
    case = build(draw, LENS, query_len=query_len, dtype=dtype, fill=0.0, **options)
    key, value = new_tokens(draw, case)
    one, two = twin(case), twin(case)
    out = ops.append_decode(case.q, key, value, *one.args[1:], **case.options)
    scales = {name: case.options.get(name) for name in ("k_scale", "v_scale")}
    ops.append_kv(key, value, two.k_cache, two.v_cache, *case.args[3:], **scales)
    assert_same_bits(out, two.decode())
    assert_same_bits(whole_storage(one.k_cache), whole_storage(two.k_cache))
    assert_same_bits(whole_storage(one.v_cache), whole_storage(two.v_cache))


def test_token_by_token(draw: Draw, device: str) -> None:
    """A sequence that only append_decode wrote attends as dense attention does."""
    length = 11
    case = build(draw, [length], head_dim=64, block_size=4, dtype=torch.float32, fill=float("nan"))
    case.k_cache.fill_(float("nan"))
    case.v_cache.fill_(float("nan"))
    key, value = draw.normal(length, 2, 64), draw.normal(length, 2, 64)
    for position in range(length):
        lens = torch.tensor([position + 1], dtype=torch.int32, device=device)
        token = slice(position, position + 1)
        caches = case.k_cache, case.v_cache
        out = ops.append_decode(case.q, key[token], value[token], *caches, case.block_tables, lens)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.view(4, 1, 64),
        key.repeat_interleave(2, 1).transpose(0, 1),
        value.repeat_interleave(2, 1).transpose(0, 1),
    )
    torch.testing.assert_close(out[0], expected[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn])
def test_offsets_beyond_32_bits(draw: Draw, device: str, cache_dtype: torch.dtype) -> None:
    """The last of three blocks begins past 2^31 elements and 2^32 bytes."""
    stride = 2**31 // cache_dtype.itemsize + 64
    shape, strides = (3, 4, 2, 8), (stride, 16, 8, 1)
    pool = torch.empty(2 * stride + 64, dtype=cache_dtype, device=device)
    k_cache = pool.as_strided(shape, strides)
    v_cache = torch.zeros(shape, dtype=cache_dtype, device=device)
    table = torch.tensor([[2]], dtype=torch.int32, device=device)
    lens = torch.tensor([3], dtype=torch.int32, device=device)
    key = draw.normal(1, 2, 8, dtype=torch.float16)
    ops.append_kv(key, key, k_cache, v_cache, table, lens)
    assert_same_bits(k_cache[2, 2], v_cache[2, 2])
    assert_same_bits(v_cache[2, 2], key[0].to(cache_dtype))
