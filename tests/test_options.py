"""Each option of decode where its effect can be told exactly, and at the ends of its range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_lse, assert_same_bits
from attention_case import (
    DTYPES,
    FP8_DTYPES,
    HALF_DTYPES,
    OPTION_SETS,
    SCALE_SHAPES,
    Case,
    Draw,
    build,
    read,
    write,
)

from paged_attn import reference

LENS = [1, 2, 5, 16, 17, 100, 333, 0]
# The first is split among processors where it is nearly alone.
LONG_LENS = [[20000], [3000, 5, 1500]]


def small_integers(draw: Draw, case: Case) -> None:
    """V of one sign a column and q of 0: sums are exact, and means never near half way."""
    slots = case.all_live_slots()
    *_, num_kv_heads, head_dim = case.v_cache.shape
    shape = (num_kv_heads, head_dim)
    signs = draw.integers(0, 1, *shape, dtype=torch.float32) * 2 - 1
    values = signs * draw.integers(1, 8, len(slots[0]), *shape, dtype=torch.float32)
    write(case.v_cache, slots, values)
    case.q.zero_()


def assert_means(case: Case, keys_of: Any, joined: float = 0.0) -> None:
    """Row (b, t) is the sum of its keys' V over their number and `joined`, exactly."""
    out, lse = case.decode_with_lse()
    group = case.q.shape[-2] // case.k_cache.shape[2]
    for b, length in enumerate(case.context_lens.tolist()):
        rows, lses = out[case.rows_of(b)], lse[case.rows_of(b)]
        queries = case.num_queries(b)
        values = read(case.v_cache, case.live_slots(b)).double().repeat_interleave(group, dim=1)
        first = length - len(values)
        rows = rows.reshape(queries, *case.q.shape[-2:])
        lses = lses.reshape(queries, case.q.shape[-2])
        for t in range(queries):
            begin, end = keys_of(length, length - queries + t)
            if begin >= end:
                assert bool((rows[t] == 0).all())
                expected = torch.full_like(lses[t], joined).double().log()
            else:
                seen = values[begin - first : end - first]
                mean = seen.sum(0) / (len(seen) + joined)
                torch.testing.assert_close(rows[t], mean.to(out.dtype), rtol=5e-7, atol=0)
                expected = torch.full_like(lses[t], len(seen) + joined).double().log()
            assert_lse(lses[t], expected)


@pytest.mark.parametrize("query_len", [None, 4, [1, 3, 0, 9, 2, 40, 5, 2]])
@pytest.mark.parametrize("window", [1, 2, 3, 16, 17, 99, 100, 101, 333, 2**31 - 1, 2**62])
def test_window_is_exactly_w_keys(draw: Draw, device: str, window: int, query_len: Any) -> None:
    dtype = draw.rng.choice(DTYPES)
    case = build(draw, LENS, query_len=query_len, num_heads=6, dtype=dtype, window=window)
    small_integers(draw, case)
    assert_means(case, lambda length, i: (max(0, i - window + 1), i + 1))


@pytest.mark.parametrize("query_len", [None, 2, 3, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_window_of_one_gives_its_own_value(
    draw: Draw, device: str, dtype: torch.dtype, query_len: int | None
) -> None:
    case = build(draw, LENS, query_len=query_len, num_heads=6, dtype=dtype, window=1)
    out = case.decode()
    for b, length in enumerate(LENS):
        queries = min(case.num_queries(b), length)
        if queries == 0:
            continue
        values = case.v_cache[case.live_slots(b)].repeat_interleave(3, dim=1)
        rows = out[b, -queries:] if query_len else out[b : b + 1]
        assert_same_bits(rows.contiguous(), values)


@pytest.mark.parametrize("query_len", [None, 4])
def test_windows_that_hide_nothing(draw: Draw, device: str, query_len: int | None) -> None:
    """Negative: all. At least the context: the same bits."""
    case = build(draw, LENS, query_len=query_len, num_heads=6)
    expected = case.decode_with_lse()
    for window in (-1, -7, -(2**40), 333, 334, 10**6, 2**40):
        for ours, theirs in zip(case.decode_with_lse(window=window), expected, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("query_len", [None, 4, 40, [1, 3, 0, 9, 2, 400, 5, 2]])
def test_noncausal_sees_all_keys(draw: Draw, device: str, query_len: Any) -> None:
    dtype = draw.rng.choice(DTYPES)
    case = build(draw, LENS, query_len=query_len, num_heads=6, dtype=dtype, causal=False)
    small_integers(draw, case)
    assert_means(case, lambda length, i: (0, length))


@pytest.mark.parametrize("lens", LONG_LENS)
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("query_len", [None, 5])
def test_split_contexts(
    draw: Draw, device: str, query_len: int | None, name: str, lens: list[int]
) -> None:
    """Windows whose begin falls among the parts, and sinks that are not counted in each."""
    arguments = dict(OPTION_SETS[name])
    if "window" in arguments:
        arguments["window"] = draw.rng.choice((700, 1037, 2999))
    dtype = draw.rng.choice(HALF_DTYPES)
    case = build(
        draw, lens, query_len=query_len, num_heads=5, num_kv_heads=1, dtype=dtype, **arguments
    )
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("name", ["window", "softcap", "alibi", "sinks", "all", "all_noncausal"])
@pytest.mark.parametrize("scale", [0.0, -0.25, -1.0, 1e-30])
def test_scale_beside_options(draw: Draw, device: str, scale: float, name: str) -> None:
    """Hidden keys stay hidden whatever the factor of their scores."""
    case = build(
        draw, [1, 30, 129, 700], query_len=5, num_heads=10, scale=scale, **OPTION_SETS[name]
    )
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("name", ["window", "all"])
def test_window_at_the_end_of_a_million_tokens(draw: Draw, device: str, name: str) -> None:
    """Only what is visible is there; distances stay exact."""
    for query_len in (None, 3):
        lens = [1000000, 999999, 17, 524288]
        case = build(draw, lens, query_len=query_len, num_heads=10, **OPTION_SETS[name])
        assert case.k_cache.shape[0] < 40
        assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1.0, 30.0, 1e4, 3e38])
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e5, 3e38])
def test_softcap_of_any_score(draw: Draw, device: str, size: float, softcap: float) -> None:
    """Scores of both signs whose exponentials overflow; and small ones, which keep their digits."""
    lens = [1, 3, 40, 700]
    case = build(draw, lens, head_dim=8, dtype=torch.float32, scale=1.0, softcap=softcap)
    slots = case.all_live_slots()
    case.q.zero_()
    case.q[..., 0] = size
    case.k_cache[slots] = 0
    case.k_cache[slots[0], slots[1], :, 0] = draw.integers(
        -8, 8, len(slots[0]), 2, dtype=torch.float32
    ).div(8)
    out, lse = case.decode_with_lse()
    assert bool(out.isfinite().all())
    assert_lse(lse, reference.decode_with_lse(*case.args, **case.options)[1])
    # From here on fp32 does not tell the scores apart.
    if min(size, softcap) <= 1e3:
        assert_accurate(case, out, lse)


def test_softcap_of_one_is_tanh(draw: Draw, device: str) -> None:
    """Over all sizes, to a few units in the last place: the lse of one key is its score."""
    case = build(draw, [1] * 4096, num_heads=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    case.q.zero_()
    sizes = torch.exp2(torch.linspace(-40, 40, 4096, device=device))
    case.q[:, 0, 0] = sizes * torch.where(draw.normal(4096) < 0, -1.0, 1.0)
    case.k_cache[case.all_live_slots()] = 1.0
    _, lse = case.decode_with_lse(scale=1.0, softcap=1.0)
    expected = case.q[:, 0, 0].double().tanh()
    torch.testing.assert_close(lse[:, 0].double(), expected, rtol=1e-6, atol=0)


def test_softcap_comes_after_scale_and_before_alibi(draw: Draw, device: str) -> None:
    """One key with a score of 100, capped at 1, at a distance of 2 from the query that sees it."""
    case = build(draw, [3], query_len=3, num_heads=2, num_kv_heads=1, head_dim=8, softcap=1.0)
    slots = case.live_slots(0)
    case.q.fill_(5.0)
    case.k_cache[slots] = 5.0
    case.k_cache[slots[0][1:], slots[1][1:]] = -65504.0
    slopes = torch.tensor([0.5, -4.0], device=device)
    _, lse = case.decode_with_lse(scale=0.5, alibi_slopes=slopes)
    assert_accurate(case.with_(options={**case.options, "scale": 0.5}), case.decode(scale=0.5))
    expected = torch.tensor([1.0 - 1.0, 1.0 + 8.0], dtype=torch.float64)
    others = torch.stack([-1.0 + slopes.cpu().double() * d for d in (-1, 0)])
    everything = torch.cat([expected[None], others]).logsumexp(0).to(device)
    assert_lse(lse[0, 2], everything)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [None, 4, [0, 1, 2, 3, 4, 5, 6, 7]])
def test_steep_slopes_choose_one_key(
    draw: Draw, device: str, query_len: Any, dtype: torch.dtype
) -> None:
    """A steep slope leaves the query's own key, a steep negative one the first that it sees."""
    window = draw.rng.choice((None, 7, 16))
    case = build(draw, LENS, query_len=query_len, num_heads=4, dtype=dtype, window=window)
    slopes = torch.tensor([1000.0, -1000.0, 1000.0, -1000.0], device=device)
    case.options["alibi_slopes"] = slopes
    case.q.zero_()
    out, lse = case.decode_with_lse()
    for b, length in enumerate(LENS):
        queries = case.num_queries(b)
        values = case.v_cache[case.live_slots(b)]
        first = length - len(values)
        rows = out[case.rows_of(b)].reshape(queries, 4, 64)
        for t in range(queries):
            i = length - queries + t
            if i < 0:
                assert bool((rows[t] == 0).all())
                continue
            oldest = max(0, i - window + 1) if window else 0
            assert_same_bits(rows[t, ::2], values[i - first])
            assert_same_bits(rows[t, 1::2], values[oldest - first])
    assert_accurate(case, out, lse)


@pytest.mark.parametrize("sink_dtype", ["q", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_of_zero_is_one_more_key_without_a_value(
    draw: Draw, device: str, dtype: torch.dtype, sink_dtype: str
) -> None:
    for query_len in (None, 3, [1, 3, 0, 9, 2, 40, 5, 2]):
        case = build(draw, LENS, query_len=query_len, num_heads=6, dtype=dtype)
        small_integers(draw, case)
        kind = dtype if sink_dtype == "q" else torch.float32
        case.options["sinks"] = torch.zeros(6, dtype=kind, device=device)
        assert_means(case, lambda length, i: (0, i + 1), joined=1.0)


def test_sinks_join_once_when_split(draw: Draw, device: str) -> None:
    """Weights of the sink and of all keys that are equal: one more or less would show."""
    num_keys = 20000
    case = build(draw, [num_keys], num_heads=3, num_kv_heads=1)
    write(case.v_cache, case.live_slots(0), 1.0)
    case.q.zero_()
    case.options["sinks"] = torch.full((3,), math.log(num_keys), device=device)
    out, lse = case.decode_with_lse()
    assert_same_bits(out, torch.full_like(out, 0.5))
    assert_lse(lse, torch.full_like(lse, 2.0 * num_keys).double().log())


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_sinks(draw: Draw, device: str, dtype: torch.dtype) -> None:
    """-inf is none; one far above all scores leaves nothing, one far below changes nothing."""
    case = build(draw, LENS, query_len=2, num_heads=6, dtype=dtype)
    expected, expected_lse = case.decode_with_lse()
    for low in (float("-inf"), -6e4):
        sinks = torch.full((6,), low, dtype=dtype, device=device)
        out, lse = case.decode_with_lse(sinks=sinks)
        seen = expected_lse > -math.inf
        assert_same_bits(out, expected)
        assert_same_bits(lse[seen], expected_lse[seen])
        assert bool((lse[~seen] == sinks[0].float()).all())
    sinks = torch.full((6,), 6e4, dtype=dtype, device=device)
    out, lse = case.decode_with_lse(sinks=sinks)
    assert bool((out == 0).all())
    assert bool((lse == sinks[0].float()).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_sink(draw: Draw, device: str, dtype: torch.dtype) -> None:
    """Rows of its head that see a key are NaN, no other head's."""
    case = build(draw, LENS, query_len=2, num_heads=6, dtype=dtype)
    expected, expected_lse = case.decode_with_lse()
    sinks = torch.full((6,), -math.inf, dtype=dtype, device=device)
    sinks[4] = math.nan
    out, lse = case.decode_with_lse(sinks=sinks)
    sees_keys = expected_lse[..., 4] > -math.inf
    assert bool(out[..., 4, :][sees_keys].isnan().all())
    assert bool((out[..., 4, :][~sees_keys] == 0).all())
    assert bool(lse[..., 4].isnan().all())
    others = [h for h in range(6) if h != 4]
    assert_same_bits(out[..., others, :], expected[..., others, :])
    assert_same_bits(lse[..., others], expected_lse[..., others])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_kind_of_16_bit_sink(draw: Draw, device: str, dtype: torch.dtype) -> None:
    """Subnormal, infinite and NaN ones too come out where there is nothing beside them."""
    case = build(draw, [0], num_heads=8192, num_kv_heads=512, head_dim=8, dtype=dtype)
    patterns = torch.arange(-(2**15), 2**15, 8, device=device) + draw.rng.randrange(8)
    sinks = patterns.to(torch.int16).view(dtype)
    _, lse = case.decode_with_lse(sinks=sinks)
    assert_same_bits(lse[0], sinks.float())


@pytest.mark.parametrize("num_kv_heads", [2, 6])
@pytest.mark.parametrize("query_len", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_have_their_sink(
    draw: Draw, device: str, dtype: torch.dtype, query_len: int | None, num_kv_heads: int
) -> None:
    """Lengths of 0 and below and queries before the first key; rows of no sequence have none."""
    sinks = draw.normal(6, dtype=dtype)
    shape: dict[str, Any] = {"num_heads": 6, "num_kv_heads": num_kv_heads, "dtype": dtype}
    for causal in (True, False):
        case = build(draw, [0, 20, -1, 2, -(2**31)], query_len=query_len, **shape)
        case.options.update(sinks=sinks, causal=causal)
        out, lse = case.decode_with_lse()
        for b in (0, 2, 4):
            assert_same_bits(out[b], torch.zeros_like(out[b]))
            assert_same_bits(lse[b], sinks.float().expand_as(lse[b]).contiguous())
        assert_accurate(case, out, lse)
    case = build(draw, [5, 0, 9], query_len=[7, 1, 3], outside_rows=(4, 2), **shape)
    case.options["sinks"] = sinks
    out, lse = case.decode_with_lse()
    outside = torch.tensor([0, 1, 2, 3, 15, 16], device=device)
    assert_same_bits(out[outside], torch.zeros_like(out[outside]))
    assert bool((lse[outside] == -math.inf).all())
    assert_accurate(case, out, lse)


@pytest.mark.parametrize("shape", SCALE_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_are_powers_of_two(
    draw: Draw, device: str, dtype: torch.dtype, shape: str
) -> None:
    """As if the caches held the scaled numbers, to the bit."""
    case = build(draw, [70, 1, 0, 333], query_len=2, num_heads=6, dtype=dtype)
    slots = case.all_live_slots()
    for cache in (case.k_cache, case.v_cache):  # far from subnormal numbers
        values = draw.integers(-64, 64, len(slots[0]), 2, 64, dtype=torch.float32)
        write(cache, slots, values / 32)
    size = {"[]": (), "[1]": (1,), "[G]": (2,)}[shape]
    scales = [torch.exp2(draw.integers(-3, 3, *size, dtype=torch.float32)) for _ in range(2)]
    out, lse = case.decode_with_lse(k_scale=scales[0], v_scale=-scales[1])
    k_cache = case.k_cache * scales[0].reshape(-1, 1).to(dtype)
    v_cache = case.v_cache * -scales[1].reshape(-1, 1).to(dtype)
    expected, expected_lse = case.with_(k_cache=k_cache, v_cache=v_cache).decode_with_lse()
    assert_same_bits(out + 0, expected + 0)  # either zero
    assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES])
def test_scales_of_zero(draw: Draw, device: str, cache_dtype: torch.dtype | None) -> None:
    """K of 0 gives the mean, V of 0 gives 0."""
    case = build(draw, LENS, num_heads=6, cache_dtype=cache_dtype)
    zero, one = torch.zeros(1, device=device), torch.ones(2, device=device)
    case.options.update(k_scale=zero, v_scale=one)
    assert_accurate(case, *case.decode_with_lse())
    q = case.q.clone()
    small_integers(draw, case)
    case.q.copy_(q)
    assert_means(case, lambda length, i: (0, i + 1))
    assert bool((case.decode(v_scale=zero) == 0).all())


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_scales_are_of_the_kv_head(draw: Draw, device: str, which: str) -> None:
    """A NaN in one KV head's scale reaches its query heads and no others.

    Whether heads are computed one by one, as where there is much to do, or together.
    """
    for lens in ([40, 700], [3]):
        case = build(draw, lens, num_heads=15, num_kv_heads=3)
        scale = torch.ones(3, device=device)
        expected = case.decode(**{which: scale})
        scale[1] = float("nan")
        out = case.decode(**{which: scale})
        assert bool(out[:, 5:10].isnan().all())
        assert_same_bits(out[:, :5], expected[:, :5])
        assert_same_bits(out[:, 10:], expected[:, 10:])
