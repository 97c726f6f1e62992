"""decode equals the definition to the accuracy bar, and exactly where exactness can be had."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_lse, assert_same_bits, ulp
from attention_case import BLOCK_SIZES, DTYPES, RATIOS, Draw, build, ceil_div

from paged_attn import reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_head_ratio(draw: Draw, device: str, ratio: int, dtype: torch.dtype) -> None:
    case = build(draw, [70, 33, 1], num_heads=2 * ratio, head_dim=128, dtype=dtype)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(draw: Draw, device: str, head_dim: int, dtype: torch.dtype) -> None:
    case = build(draw, [40, 17], num_heads=12, num_kv_heads=4, head_dim=head_dim, dtype=dtype)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(draw: Draw, device: str, block_size: int, dtype: torch.dtype) -> None:
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 3]
    case = build(draw, lens, num_heads=8, head_dim=80, block_size=block_size, dtype=dtype)
    assert_accurate(case, *case.decode_with_lse())
    for b in range(len(lens)):
        alone = case.sequence(b)
        assert_accurate(alone, *alone.decode_with_lse())


@pytest.mark.parametrize("query_len", [1, 2, 3, 5, 9, 16, 17, 33, 64, [3, 0, 9], [70, 1, 40]])
@pytest.mark.parametrize("ratio", [1, 5, 8, 24])
def test_several_queries(draw: Draw, device: str, query_len: int | list[int], ratio: int) -> None:
    """Short contexts too: queries that lie before the first key see nothing."""
    dtype = draw.rng.choice(DTYPES)
    case = build(draw, [100, 2, 47], query_len=query_len, num_heads=2 * ratio, dtype=dtype)
    assert_accurate(case, *case.decode_with_lse())


def test_longer_contexts(draw: Draw, device: str) -> None:
    """Lengths at which kernels split the context, in batches that leave processors idle."""
    for lens in ([20000], [5000, 3, 0], [1500, 4097, 600, 2049]):
        case = build(draw, lens, num_heads=4, num_kv_heads=1, dtype=draw.rng.choice(DTYPES))
        assert_accurate(case, *case.decode_with_lse())


def test_growing_maximum(draw: Draw, device: str) -> None:
    """Logits that rise and fall along the context rescale the running sum in every tile.

    Short of being split: over several parts the last one's weight would hide what the first holds.
    """
    lens = [700, 150, *[500] * 140]
    for sign in (1.0, -1.0):
        case = build(draw, lens, head_dim=64, dtype=torch.float32)
        for b in range(len(lens)):
            blocks, offsets = case.live_slots(b)
            ramp = sign * torch.linspace(-6, 6, len(blocks), device=device)
            case.k_cache[blocks, offsets] = ramp[:, None, None].expand(-1, 2, 64)
        case.q.fill_(0.5)
        assert_accurate(case, *case.decode_with_lse())


def assert_exact(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise in 16 bits, within 4 ulp in fp32."""
    if out.dtype == torch.float32:
        units = (out.double() - expected.double()).abs() / ulp(expected, out.dtype)
        assert float(units.max()) <= 4.0
    else:
        assert_same_bits(out, expected.to(out.dtype))


EXACT_LENS = [1, 2, 5, 16, 17, 100, 333]


@pytest.mark.parametrize("query_len", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_query_gives_the_mean(
    draw: Draw, device: str, dtype: torch.dtype, query_len: int | None
) -> None:
    """V of small integers of one sign: an exact sum, a mean never near half way between numbers."""
    case = build(draw, EXACT_LENS, query_len=query_len, num_heads=6, dtype=dtype)
    slots = case.all_live_slots()
    signs = draw.integers(0, 1, 2, 64, dtype=dtype) * 2 - 1
    case.v_cache[slots] = signs * draw.integers(1, 8, len(slots[0]), 2, 64, dtype=dtype)
    case.q.zero_()
    out, lse = case.decode_with_lse()
    queries = query_len or 1
    for b, length in enumerate(EXACT_LENS):
        values = case.v_cache[case.live_slots(b)].double()
        for t in range(queries):
            seen = length - queries + t + 1
            row, row_lse = (out[b, t], lse[b, t]) if query_len else (out[b], lse[b])
            if seen <= 0:
                assert_same_bits(row, torch.zeros_like(row))
                continue
            mean = values[:seen].sum(0) / seen
            assert_exact(row, mean.repeat_interleave(3, dim=0))
            assert_lse(row_lse, torch.full_like(row_lse, math.log(seen), dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logit_gives_its_value(draw: Draw, device: str, dtype: torch.dtype) -> None:
    case = build(draw, EXACT_LENS, num_heads=6, dtype=dtype, scale=1.0)
    case.k_cache[case.all_live_slots()] = 0
    case.q.fill_(8)
    expected = torch.empty_like(case.q)
    for b, length in enumerate(EXACT_LENS):
        blocks, offsets = case.live_slots(b)
        chosen = draw.rng.randrange(length)
        case.k_cache[blocks[chosen], offsets[chosen]] = 8
        expected[b] = case.v_cache[blocks[chosen], offsets[chosen]].repeat_interleave(3, dim=0)
    assert_exact(case.decode(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_values(draw: Draw, device: str, dtype: torch.dtype) -> None:
    # In fp32 the sum over n keys is itself off by about sqrt(n) / 2 ulp.
    lens = [1, 2, 3, 5, 8] if dtype == torch.float32 else EXACT_LENS
    case = build(draw, lens, num_heads=6, dtype=dtype)
    constant = draw.normal(2, 64, dtype=dtype)
    case.v_cache[case.all_live_slots()] = constant
    expected = constant.repeat_interleave(3, dim=0).expand_as(case.q)
    assert_exact(case.decode(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_length_one(draw: Draw, device: str, dtype: torch.dtype) -> None:
    case = build(draw, [1] * 9, num_heads=6, head_dim=96, dtype=dtype)
    out, lse = case.decode_with_lse()
    values = torch.stack([case.v_cache[case.live_slots(b)][0] for b in range(9)])
    assert_exact(out, values.repeat_interleave(3, dim=1))
    assert_lse(lse, reference.decode_with_lse(*case.args)[1])


@pytest.mark.parametrize("query_len", [None, 1, 4, []])
def test_empty_batch(draw: Draw, device: str, query_len: Any) -> None:
    case = build(draw, [], query_len=query_len)
    out, lse = case.decode_with_lse()
    assert out.shape == case.q.shape
    assert lse.shape == case.q.shape[:-1]
    assert case.decode().shape == case.q.shape


def test_no_query_tokens(draw: Draw, device: str) -> None:
    case = build(draw, [5, 20], query_len=[0, 0])
    assert case.q.shape[0] == 0
    assert case.decode().shape == case.q.shape


def test_rows_outside_every_sequence(draw: Draw, device: str) -> None:
    case = build(draw, [5, 20, 9], query_len=[2, 0, 3], outside_rows=(4, 2))
    out, lse = case.decode_with_lse()
    outside = torch.tensor([0, 1, 2, 3, 9, 10], device=device)
    assert_same_bits(out[outside], torch.zeros_like(out[outside]))
    assert bool((lse[outside] == -math.inf).all())
    assert_accurate(case, out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [None, 3])
def test_lengths_without_keys(
    draw: Draw, device: str, dtype: torch.dtype, query_len: int | None
) -> None:
    """Length 0, and the negative lengths that engines leave in padded rows."""
    case = build(draw, [0, 20, -1, 2, -(2**31)], query_len=query_len, dtype=dtype)
    out, lse = case.decode_with_lse()
    for b in (0, 2, 4):
        assert_same_bits(out[b], torch.zeros_like(out[b]))
        assert bool((lse[b] == -math.inf).all())
    assert_accurate(case, out, lse)


@pytest.mark.parametrize("query_len", [None, 2])
def test_many_lengths_without_keys(draw: Draw, device: str, query_len: int | None) -> None:
    """On CUDA more than 32 a block; good ones in between, and lengths past the table's end."""
    kinds = draw.rng.choices("-0b1", [4, 4, 2, 1], k=400 if device == "cpu" else 9000)
    lens = [draw.rng.randint(1, 40) if kind == "1" else 0 for kind in kinds]
    case = build(draw, lens, query_len=query_len, num_heads=3, num_kv_heads=1)
    beyond = case.block_tables.shape[1] * case.k_cache.shape[1] + 1
    for b, kind in enumerate(kinds):
        if kind in "-b":
            case.context_lens[b] = -1 if kind == "-" else beyond
    out, lse = case.decode_with_lse()
    empty = torch.tensor([b for b, kind in enumerate(kinds) if kind in "-0"], device=device)
    assert_same_bits(out[empty], torch.zeros_like(out[empty]))
    assert bool((lse[empty] == -math.inf).all())
    bad = torch.tensor([b for b, kind in enumerate(kinds) if kind == "b"], device=device)
    assert bool(out[bad].isnan().all())
    assert bool(lse[bad].isnan().all())
    good = [b for b, kind in enumerate(kinds) if kind == "1"]
    kept = {name: getattr(case, name)[good] for name in ("q", "block_tables", "context_lens")}
    assert_accurate(case.with_(**kept), out[good], lse[good])


def test_extreme_values(draw: Draw, device: str) -> None:
    """fp16's largest numbers in V come out; in q and K they overflow plain PyTorch, not us."""
    case = build(draw, [1, 16, 50], num_heads=4, dtype=torch.float16)
    slots = case.all_live_slots()
    case.v_cache[slots] = 65504.0
    assert_same_bits(case.decode(), torch.full_like(case.q, 65504.0))
    signs = draw.integers(0, 1, len(slots[0]), 2, 64, dtype=torch.float16) * 2 - 1
    case.v_cache[slots] = 65504.0 * signs
    assert_accurate(case, case.decode())

    case.k_cache[slots] = 0
    case.q.fill_(65504.0)
    for b in range(3):
        blocks, offsets = case.live_slots(b)
        case.k_cache[blocks[-1], offsets[-1]] = 65504.0
        case.k_cache[blocks[:-1], offsets[:-1]] = -65504.0
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_1e5(draw: Draw, device: str, dtype: torch.dtype, sign: int) -> None:
    """Logits that fp32 holds exactly, a few apart: no exponential may overflow or lose them."""
    case = build(draw, [3, 40, 200], num_heads=4, head_dim=64, dtype=dtype, scale=1.0)
    slots = case.all_live_slots()
    case.q.fill_(0)
    case.q[..., :2] = 1
    case.q[..., 0] = 256
    case.k_cache[slots] = 0
    case.k_cache[slots[0], slots[1], :, 0] = sign * 392.0
    case.k_cache[slots[0], slots[1], :, 1] = draw.integers(-5, 5, len(slots[0]), 2, dtype=dtype)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("query_len", [None, 3])
@pytest.mark.parametrize("sink", [None, 0.5, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_minus_infinity(
    draw: Draw, device: str, dtype: torch.dtype, sink: float | None, query_len: int | None
) -> None:
    """A row that has no others is 0, one that has is the others' mean, wherever the kernels cut."""
    lens = [3, 40, 700, 4097, 1000]
    sinks = None if sink is None else torch.float32
    case = build(draw, lens, query_len=query_len, num_heads=4, dtype=dtype, sinks=sinks)
    if sink is not None:
        case.options["sinks"].fill_(sink)
    case.q.abs_().add_(0.125)
    finite = draw.rng.randrange(980)
    for b in range(len(lens)):
        blocks, offsets = case.live_slots(b)
        if b == len(lens) - 1:
            blocks, offsets = (torch.cat([x[:finite], x[finite + 8 :]]) for x in (blocks, offsets))
        case.k_cache[blocks, offsets, 0, draw.rng.randrange(64)] = -math.inf
    out, lse = case.decode_with_lse()
    assert_accurate(case, out, lse)
    assert bool((out[:-1, ..., :2, :] == 0).all())
    assert bool((lse[:-1, ..., :2] == (-math.inf if sink is None else sink)).all())
    assert bool((out[-1, ..., 2:, :] != 0).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_below_the_range_of_fp32(draw: Draw, device: str, dtype: torch.dtype) -> None:
    case = build(draw, [1, 30, 700], num_heads=4, dtype=dtype)
    case.q.fill_(-1e30)
    case.k_cache[case.all_live_slots()] = 1e30
    out, lse = case.decode_with_lse()
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.25, -1.0, 3.0, 1e-30])
def test_scale(draw: Draw, device: str, dtype: torch.dtype, scale: float) -> None:
    case = build(draw, [1, 30, 129], num_heads=8, dtype=dtype, scale=scale)
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3e38, -3e38])
def test_scale_at_the_end_of_its_range(
    draw: Draw, device: str, dtype: torch.dtype, scale: float
) -> None:
    """Scores of 0 stay 0: every key has the same weight."""
    case = build(draw, [1, 30, 129], num_heads=8, dtype=dtype, scale=scale)
    case.q.zero_()
    assert_accurate(case, *case.decode_with_lse())


def test_default_scale_is_one_over_sqrt_head_dim(draw: Draw, device: str) -> None:
    case = build(draw, [60, 5], head_dim=72)
    assert_same_bits(case.decode(), case.decode(scale=1.0 / math.sqrt(72)))


@pytest.mark.parametrize("block_tables", [[[5], [12, 3]]])
def test_tutorial_case(draw: Draw, device: str, block_tables: list[list[int]]) -> None:
    """B 2, H 4, D 64, S 16, lengths 10 and 25 in blocks 5 and 12, 3: within 2e-3."""
    case = build(draw, [10, 25], num_heads=4, num_kv_heads=4, num_blocks=16, fill=0.0)
    k_cache, v_cache = (torch.zeros_like(cache) for cache in (case.k_cache, case.v_cache))
    case = case.with_(
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=torch.tensor([[5, -1], [12, 3]], dtype=torch.int32, device=device),
    )
    slots = case.all_live_slots()
    for cache in (k_cache, v_cache):
        cache[slots] = draw.normal(35, 4, 64, dtype=torch.float16)
    out = case.decode()
    torch.testing.assert_close(out.double(), reference.decode(*case.args), atol=2e-3, rtol=0)
    assert_accurate(case, out)


def test_contexts_of_whole_blocks(draw: Draw, device: str) -> None:
    """Lengths that end exactly at a block, in tables without a spare column."""
    for block_size in (1, 16, 48):
        lens = [block_size * n for n in (1, 2, 7)]
        case = build(draw, lens, block_size=block_size, spare_columns=0)
        assert case.block_tables.shape[1] == ceil_div(max(lens), block_size)
        assert_accurate(case, *case.decode_with_lse())
