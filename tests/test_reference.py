"""The definition, against the contract's formulas written with Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import Case, Draw, build

from paged_attn import reference

INF = math.inf


def by_hand(case: Case, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """out and lse of every row that a sequence owns, one multiplication at a time."""
    num_heads, dim = case.q.shape[-2:]
    num_blocks, block_size, num_kv_heads, _ = case.k_cache.shape
    scale = options.get("scale") or 1 / math.sqrt(dim)
    window, softcap = options.get("window", -1), options.get("softcap", 0.0)
    k_scale, v_scale = (tensors.get(name) for name in ("k_scale", "v_scale"))
    q = case.q.reshape(-1, num_heads, dim).double().tolist()
    k_pool, v_pool = case.k_cache.double().tolist(), case.v_cache.double().tolist()
    rows = {}
    for b, length in enumerate(case.context_lens.tolist()):
        if case.cu_seqlens_q is not None:
            begin, end = case.cu_seqlens_q[b : b + 2].tolist()
        else:
            count = case.q.shape[1] if case.q.dim() == 4 else 1
            begin, end = b * count, (b + 1) * count
        for row in range(begin, end):
            i = length - (end - begin) + (row - begin)
            for head in range(num_heads):
                g = head // (num_heads // num_kv_heads)
                logits, values = [], []
                for j in range(max(0, length)):
                    hidden = j > i or (window > 0 and j <= i - window)
                    if options.get("causal", True) and hidden:
                        continue
                    block = int(case.block_tables[b, j // block_size])
                    assert 0 <= block < num_blocks
                    key = k_pool[block][j % block_size][g]
                    s = scale * sum(x * y for x, y in zip(q[row][head], key, strict=True))
                    s *= 1.0 if k_scale is None else k_scale.expand(num_kv_heads)[g].item()
                    if softcap > 0:
                        s = softcap * math.tanh(s / softcap)
                    if tensors.get("alibi_slopes") is not None:
                        s += tensors["alibi_slopes"][head].item() * (j - i)
                    logits.append(s)
                    factor = 1.0 if v_scale is None else v_scale.expand(num_kv_heads)[g].item()
                    values.append([factor * x for x in v_pool[block][j % block_size][g]])
                sink = tensors["sinks"][head].item() if tensors.get("sinks") is not None else -INF
                largest = max([sink, *logits])
                if largest == -INF:
                    rows[row, head] = [0.0] * dim, -INF
                    continue
                weights = [math.exp(s - largest) for s in logits]
                total = sum(weights) + math.exp(sink - largest)
                out = [
                    sum(w * v[d] for w, v in zip(weights, values, strict=True)) / total
                    for d in range(dim)
                ]
                rows[row, head] = out, largest + math.log(total)
    return rows


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": -0.7},
    {"causal": False},
    {"window": 1},
    {"window": 3},
    {"softcap": 1.5},
    {"softcap": 0.8, "window": 4},
]
EXTRAS = [(), ("alibi_slopes",), ("sinks",), ("k_scale", "v_scale"), ("sinks", "alibi_slopes")]


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("query_len", [None, 3, [2, 0, 4, 1]])
def test_every_option(
    draw: Draw, query_len: Any, options: dict[str, Any], extras: tuple[str, ...]
) -> None:
    if options.get("causal") is False and "alibi_slopes" in extras:
        extras = ()
    case = build(
        draw,
        [7, 2, 9, 0],
        query_len=query_len,
        num_heads=4,
        head_dim=8,
        block_size=3,
        outside_rows=(1, 1) if isinstance(query_len, list) else (0, 0),
    )
    cache_dtype = draw.rng.choice((torch.float16, torch.float8_e4m3fn, torch.float8_e5m2))
    case = case.with_(k_cache=case.k_cache.to(cache_dtype), v_cache=case.v_cache.to(cache_dtype))
    made = {
        "alibi_slopes": draw.normal(4),
        "sinks": draw.normal(4),
        "k_scale": draw.rng.choice((draw.normal(2).abs(), torch.tensor([0.3]))),
        "v_scale": draw.rng.choice((draw.normal(2).abs(), torch.tensor(0.7))),
    }
    tensors = {name: made[name] for name in extras}
    out, lse = reference.decode_with_lse(*case.args, **tensors, **options)
    assert out.dtype == lse.dtype == torch.float64
    assert_same_bits(
        reference.decode(*case.args, **tensors, **options, dtype=torch.float32),
        reference.decode_with_lse(*case.args, **tensors, **options, dtype=torch.float32)[0],
    )
    rows = by_hand(case, tensors, options)
    out, lse = out.reshape(-1, 4, 8), lse.reshape(-1, 4)
    for row in range(out.shape[0]):
        for head in range(4):
            expected, expected_lse = rows.get((row, head), ([0.0] * 8, -INF))
            assert out[row, head].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)
            assert float(lse[row, head]) == pytest.approx(expected_lse, rel=1e-11, abs=1e-11)


def test_against_pytorch(draw: Draw) -> None:
    case = build(draw, [40], query_len=5, num_heads=6, head_dim=16, block_size=7)
    keys, values = (
        cache[case.live_slots(0)].double().repeat_interleave(3, 1).transpose(0, 1)
        for cache in (case.k_cache, case.v_cache)
    )
    mask = torch.ones(5, 40, dtype=torch.bool).tril(35)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q[0].double().transpose(0, 1), keys, values, attn_mask=mask
    )
    torch.testing.assert_close(reference.decode(*case.args)[0].transpose(0, 1), expected)


def test_window_hides_dead_blocks(draw: Draw) -> None:
    """Entries of blocks that the window hides from every query are never used."""
    case = build(draw, [40, 33], query_len=2, block_size=4)
    tables = case.block_tables.clone()
    expected = reference.decode(*case.args, window=6)
    tables[0, :8] = -1  # the first query, at 38, sees 33 ... 38
    assert_same_bits(
        reference.decode(*case.with_(block_tables=tables).args, window=6).float(),
        expected.float(),
    )
    tables[0, 8] = -1
    assert reference.decode(*case.with_(block_tables=tables).args, window=6)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_writes_saturate(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    key = torch.tensor([[[0.5, -3.0, 1e5, -1e5, 0.0, 7.0, 448.0, float("nan")]]])
    caches = [torch.zeros(1, 2, 1, 8, dtype=dtype) for _ in range(2)]
    half = torch.tensor(0.5)
    reference.reshape_and_cache(key, key, *caches, torch.tensor([1]), half, half)
    stored = caches[0][0, 1, 0].float().tolist()
    assert stored[:6] == [1.0, -6.0, limit, -limit, 0.0, 14.0]
    assert stored[6] == min(limit, 896.0)
    assert math.isnan(stored[7])
    assert not caches[1][0, 0].float().any()
