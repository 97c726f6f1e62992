"""How near to the definition a result must be."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from attention_case import Case, read
from torch import Tensor

from paged_attn import reference

# Below this many elements a mean error says little about rounding.
MEAN_ELEMENTS = 4096

# The running test's errors over what is allowed, the largest of each kind, for conftest.py.
ratios: dict[str, float] = {}


def within(kind: str, error: float, bar: float) -> bool:
    """Whether an error is allowed; notes how much of its bar it takes."""
    ratios[kind] = max(ratios.get(kind, 0.0), error / bar if bar > 0 else 0.0)
    return error <= bar


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Many small operations: waking a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at |values|."""
    info = torch.finfo(dtype)
    magnitude = values.double().abs().clamp(min=info.smallest_normal)
    return info.eps * torch.exp2(torch.floor(torch.log2(magnitude)))


def plain_pytorch(case: Case) -> Tensor:
    """Gather, then softmax, as one writes it in PyTorch: the storage dtype, a softmax in fp32."""
    options = case.options
    num_heads, head_dim = case.q.shape[-2:]
    scale = options.get("scale", 1.0 / math.sqrt(head_dim))
    num_kv_heads = case.k_cache.shape[2]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(case.q, memory_format=torch.contiguous_format)
    for b in range(case.block_tables.shape[0]):
        select = case.rows_of(b)
        q = case.q[select].reshape(-1, num_heads, head_dim)
        context_len = int(case.context_lens[b])
        if context_len <= 0 or q.shape[0] == 0:
            continue
        slots = case.live_slots(b)
        keys = dequantised(case.k_cache, slots, options.get("k_scale"), q.dtype)
        values = dequantised(case.v_cache, slots, options.get("v_scale"), q.dtype)
        grouped = q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        scores = (grouped.flatten(1, 2) @ keys.permute(1, 2, 0)) * scale
        scores = scores.unflatten(1, (group, -1)).flatten(0, 1)  # [H, queries, keys]
        if (softcap := options.get("softcap", 0.0)) > 0:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(q.shape[0], device=q.device)[:, None] + context_len - q.shape[0]
        key = torch.arange(context_len - keys.shape[0], context_len, device=q.device)
        scores = scores.float()
        if (slopes := options.get("alibi_slopes")) is not None:
            scores = scores + slopes[:, None, None] * (key - position)
        if options.get("causal", True):
            scores = scores.masked_fill(key > position, -math.inf)
        if (window := options.get("window", -1)) > 0:
            scores = scores.masked_fill(key <= position - window, -math.inf)
        if (sinks := options.get("sinks")) is not None:
            sink = sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[0]].to(q.dtype)
        weights = weights.unflatten(0, (num_kv_heads, group)).flatten(1, 2)
        rows = (weights @ values.transpose(0, 1)).unflatten(1, (group, -1)).permute(2, 0, 1, 3)
        rows = rows.flatten(1, 2)
        if options.get("causal", True):
            rows[position[:, 0] < 0] = 0
        out[select] = rows.reshape(out[select].shape)
    return out


def dequantised(cache: Tensor, slots: Any, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """K or V at some slots, [tokens, G, D], in q's dtype."""
    stored = read(cache, slots)
    if scale is None:
        return stored.to(dtype)
    return (stored.float() * scale.reshape(-1, 1)).to(dtype)


def largest_value(case: Case) -> float:
    """Largest |V| that a query may see."""
    values = dequantised(
        case.v_cache, case.all_live_slots(), case.options.get("v_scale"), torch.float32
    )
    return float(values.abs().max()) if values.numel() else 0.0


def assert_accurate(case: Case, out: Tensor, lse: Tensor | None = None) -> None:
    """Holds out, and lse if given, to the accuracy bar."""
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    with one_thread():
        expected, expected_lse = reference.decode_with_lse(*case.args, **case.options)
        plain = plain_pytorch(case)
    assert_near(out, expected, plain, largest_value(case))
    if lse is not None:
        assert_lse(lse, expected_lse)


def assert_near(out: Tensor, expected: Tensor, plain: Tensor, largest: float) -> None:
    """Holds out to the accuracy bar.

    Largest error at most max(plain PyTorch's, one ulp at the largest |out|) + 1e-5 * largest |V|;
    mean error at most plain PyTorch's + 1e-5 * largest |V|; where plain PyTorch overflows, two ulp
    at the largest |out|.

    Args:
        out: What is judged.
        expected: In fp64.
        plain: Plain PyTorch's in out's dtype.
        largest: The largest |V| that a query may see.
    """
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), torch.zeros_like(out, dtype=torch.bool))
    error = (out.double() - expected).abs()
    overflowed = ~plain.isfinite() & expected.isfinite()
    judged = plain.isfinite() & expected.isfinite()
    if bool(overflowed.any()):
        units = float(error[overflowed].max() / ulp(expected[overflowed].abs().max(), out.dtype))
        assert units <= 2.0, f"{units:.3g} ulp where plain PyTorch overflows"
    if bool(judged.any()):
        plain_error = (plain.double() - expected).abs()[judged]
        slack = 1e-5 * largest
        unit = ulp(expected[judged].abs().max(), out.dtype)
        bar = max(float(plain_error.max()), float(unit)) + slack
        worst = float(error[judged].max())
        assert within("largest", worst, bar), f"largest error {worst:.3g}, allowed {bar:.3g}"
        if int(judged.sum()) >= MEAN_ELEMENTS:
            bar = float(plain_error.mean()) + slack
            mean = float(error[judged].mean())
            assert within("mean", mean, bar), f"mean error {mean:.4g}, allowed {bar:.4g}"


def assert_lse(lse: Tensor, expected: Tensor) -> None:
    assert lse.shape == expected.shape
    assert lse.dtype == torch.float32
    finite = expected.isfinite()
    same = (lse.double() == expected) | (lse.isnan() & expected.isnan())
    assert bool(same[~finite].all()), "an infinite or NaN lse differs"
    error = (lse.double() - expected).abs()[finite] / expected.abs().clamp(min=1.0)[finite]
    if error.numel():
        worst = float(error.max())
        assert within("lse", worst, 1e-5), f"lse error {worst:.3g}, allowed 1e-5"


def assert_same_bits(first: Tensor, second: Tensor) -> None:
    """Bitwise equality, NaN payloads aside."""
    assert first.shape == second.shape
    assert first.dtype == second.dtype
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    a, b = first.contiguous().view(size), second.contiguous().view(size)
    differ = (a != b) & ~(first.isnan() & second.isnan())
    assert not bool(differ.any()), f"{int(differ.sum())} of {a.numel()} elements differ"
