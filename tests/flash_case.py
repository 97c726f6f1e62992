"""FlashAttention's calls, and what its documentation says of them in plain PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accuracy import assert_lse, assert_near, assert_same_bits, one_thread, ulp, within
from attention_case import FP8_DTYPES, Case, Draw, build, read, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class FlashCase:
    """A call over `case`'s pool; its context_lens count the appended tokens too."""

    case: Case
    cached: list[int]  # keys of each sequence before any are appended
    new_lens: list[int]
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_k_new: Tensor | None
    options: dict[str, Any]  # under FlashAttention's names

    def with_options(self, **options: Any) -> FlashCase:
        changed = {**self.options, **options}
        return FlashCase(**{**vars(self), "options": changed})

    def expected_ops(self, with_lse: bool) -> dict[str, int]:
        """How often which op runs in a call."""
        if self.k is None:
            return {"decode_with_lse" if with_lse else "decode": 1}
        q = self.case.q
        of_q = self.cu_seqlens_k_new is self.case.cu_seqlens_q
        if with_lse:
            return {"append_kv": 1, "decode_with_lse": 1}
        if of_q and self.k.shape[:-2] == q.shape[:-2]:
            return {"append_decode": 1}
        return {"append_kv": 1, "decode": 1}

    def with_kvcache(self, *, contiguous: bool = False) -> dict[str, Any]:
        """Arguments of flash_attn_with_kvcache; `contiguous` takes a block as a whole cache."""
        case = self.case
        tables = case.block_tables
        tensor = torch.tensor(self.cached, dtype=torch.int32, device=case.q.device)
        arguments = {
            "q": case.q,
            "k_cache": case.k_cache,
            "v_cache": case.v_cache,
            "k": self.k,
            "v": self.v,
            "cache_seqlens": tensor,
            "cu_seqlens_q": case.cu_seqlens_q,
            "cu_seqlens_k_new": self.cu_seqlens_k_new,
            **self.options,
        }
        if contiguous:
            assert tables.shape[1] == 1
            return {**arguments, "cache_batch_idx": tables[:, 0].contiguous()}
        return {**arguments, "block_table": tables}

    def varlen(self, *, packed: bool = False) -> dict[str, Any]:
        """Arguments of flash_attn_varlen_func; `packed` gathers K and V out of the pool."""
        case = self.case
        assert self.k is None
        ends = [0, *itertools.accumulate(self.cached)]
        queries = [case.num_queries(b) for b in range(len(self.cached))]
        arguments = {
            "q": case.q,
            "k": case.k_cache,
            "v": case.v_cache,
            "cu_seqlens_q": case.cu_seqlens_q,
            "cu_seqlens_k": torch.tensor(ends, dtype=torch.int32, device=case.q.device),
            "max_seqlen_q": max(queries, default=0),
            "max_seqlen_k": max(self.cached, default=0),
            **self.options,
        }
        if packed:
            slots = case.all_live_slots()
            return {**arguments, "k": read(case.k_cache, slots), "v": read(case.v_cache, slots)}
        return {**arguments, "block_table": case.block_tables}


def build_flash(
    draw: Draw,
    cached: Sequence[int],
    *,
    query_len: int | list[int] = 1,
    new_len: int | list[int] | None = None,
    rotary_dim: int = 0,
    alibi: bool = False,
    sinks: torch.dtype | None = None,
    descale: bool = False,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> FlashCase:
    """Random inputs.

    Args:
        cached: Keys of each sequence before any are appended.
        query_len: An int for q [B, Q, H, D], a list for ragged q.
        new_len: An int for k and v [B, Qn, G, D], a list for ragged ones, None for none. Where
            they go the cache holds NaN.
        rotary_dim: How much of a head rotates; 0: no rotary.
        options: FlashAttention's that are no tensors.
        how: Further arguments of `build`.
    """
    batch = len(cached)
    new_lens = new_len if isinstance(new_len, list) else [new_len or 0] * batch
    total = [old + new for old, new in zip(cached, new_lens, strict=True)]
    if descale:
        how |= {"k_scale": "[G]", "v_scale": "[1]"}
    case = build(draw, total, query_len=query_len, alibi=alibi, sinks=sinks, **how)
    num_kv_heads, head_dim = case.k_cache.shape[2:]
    dtype = case.q.dtype
    tensors: dict[str, Any] = {}
    if alibi:
        tensors["alibi_slopes"] = case.options.pop("alibi_slopes")
    if sinks is not None:
        tensors["s_aux"] = case.options.pop("sinks")
    if descale:
        for name in ("k", "v"):
            one = case.options.pop(f"{name}_scale")
            tensors[f"{name}_descale"] = one.expand(batch, num_kv_heads)
    k = v = cu_seqlens_k_new = None
    if new_len is not None:
        shape = (sum(new_len),) if isinstance(new_len, list) else (batch, new_len)
        k, v = (draw.normal(*shape, num_kv_heads, head_dim, dtype=dtype) for _ in "kv")
        if isinstance(new_len, list):
            if new_len == query_len:
                cu_seqlens_k_new = case.cu_seqlens_q
            else:
                ends = [0, *itertools.accumulate(new_len)]
                cu_seqlens_k_new = torch.tensor(ends, dtype=torch.int32, device=draw.device)
        for b in range(batch):
            blocks, offsets = case.live_slots(b)
            for cache in (case.k_cache, case.v_cache):
                write(cache, (blocks[cached[b] :], offsets[cached[b] :]), math.nan)
    if rotary_dim:
        # As many as the cache has slots, and enough for queries behind the last key.
        rows = case.block_tables.shape[1] * case.k_cache.shape[1] + case.q.shape[-3]
        angles = 10 * draw.normal(rows, rotary_dim // 2)
        tensors["rotary_cos"], tensors["rotary_sin"] = (
            angles.cos().to(dtype),
            angles.sin().to(dtype),
        )
    flash = {**(options or {}), **tensors}
    return FlashCase(case, list(cached), new_lens, k, v, cu_seqlens_k_new, flash)


def rotated(
    x: Tensor, options: dict[str, Any], positions: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """x [tokens, heads, D] turned by rotary_cos and rotary_sin if there are any.

    Computed in `dtype`, then rounded to x's, which is what the cache holds; returned in `dtype`.
    """
    held, x = x.dtype, x.to(dtype)
    if "rotary_cos" not in options:
        return x
    cos, sin = (options[f"rotary_{name}"][list(positions)].to(dtype) for name in ("cos", "sin"))
    half = cos.shape[1]
    interleaved = options.get("rotary_interleaved", True)
    first = torch.arange(half, device=x.device) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    a, b, cos, sin = x[..., first], x[..., second], cos[:, None], sin[:, None]
    out = x.clone()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out.to(held).to(dtype)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One sequence: q [Q, H, D] over keys and values [L, G, D], all in `dtype`.

    Returns:
        (out [Q, H, D], lse [H, Q]); softmax is at least in fp32.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    keys, values = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (keys, values))
    scale = options.get("softmax_scale") or head_dim**-0.5
    scores = (q.transpose(0, 1) @ keys.permute(1, 2, 0)) * scale
    if softcap := options.get("softcap", 0.0):
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(dtype, torch.float32))
    row = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
    column = torch.arange(num_keys, device=q.device)
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (row - column).abs()
    left, right = options.get("window_size", (-1, -1))
    if options.get("causal", False):
        right = 0
    if left >= 0:
        scores = scores.masked_fill(column < row - left, -math.inf)
    if right >= 0:
        scores = scores.masked_fill(column > row + right, -math.inf)
    sees_none = (scores == -math.inf).all(-1)
    if (sinks := options.get("s_aux")) is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(num_heads, num_queries, 1)
        scores = torch.cat((scores, sink), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys].to(dtype)
    out = (weights @ values.transpose(0, 1)).masked_fill(sees_none[..., None], 0)
    return out.transpose(0, 1), lse


def documented(flash: FlashCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """(out, lse, largest |V|) of a call before it is made, computed in `dtype`."""
    case, options = flash.case, flash.options
    num_heads, head_dim = case.q.shape[-2:]
    out = torch.zeros(*case.q.shape, dtype=dtype, device=case.q.device)
    rows = out.view(-1, num_heads, head_dim)
    queries = case.q.reshape(rows.shape)
    lse = torch.full((num_heads, len(rows)), -math.inf, dtype=torch.float64, device=case.q.device)
    largest = 0.0
    new_end = 0
    for b, cached in enumerate(flash.cached):
        select = case.rows_of(b)
        if isinstance(select, int):
            select = slice(b * case.q.shape[1], (b + 1) * case.q.shape[1])
        new_begin, new_end = new_end, new_end + flash.new_lens[b]
        slots = tuple(index[:cached] for index in case.live_slots(b))
        keys = dequantised(read(case.k_cache, slots), options.get("k_descale"), dtype)
        values = dequantised(read(case.v_cache, slots), options.get("v_descale"), dtype)
        if flash.k is not None and flash.v is not None:
            new = range(cached, cached + flash.new_lens[b])
            key, value = (
                x.reshape(-1, *x.shape[-2:])[new_begin:new_end] for x in (flash.k, flash.v)
            )
            key = stored(rotated(key, options, new, dtype), case, options.get("k_descale"))
            value = stored(value.to(dtype), case, options.get("v_descale"))
            keys, values = torch.cat((keys, key)), torch.cat((values, value))
        ordered = options.get("causal", False) or max(options.get("window_size", (-1,))) >= 0
        positions = [cached + t * ordered for t in range(select.stop - select.start)]
        q = rotated(queries[select], options, positions, dtype)
        if len(keys):
            rows[select], lse[:, select] = attention(q, keys, values, options, dtype)
            largest = max(largest, float(values.abs().max()))
        elif (sinks := options.get("s_aux")) is not None:
            lse[:, select] = sinks.double()[:, None]
    if case.cu_seqlens_q is None:
        lse = lse.unflatten(1, case.q.shape[:2]).transpose(0, 1)
    return out, lse, largest


def dequantised(content: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a cache holds [tokens, G, D], in `dtype`; `descale` is [B, G], its rows alike."""
    if descale is None:
        return content.to(dtype)
    wide = content.to(torch.promote_types(dtype, torch.float32))
    return (wide * descale[0][:, None]).to(dtype)


def stored(new: Tensor, case: Case, descale: Tensor | None) -> Tensor:
    """New keys or values [tokens, G, D] after their way through the cache, where it rounds."""
    if case.k_cache.dtype not in FP8_DTYPES and descale is None:
        return new
    held = new.float() if descale is None else new.float() / descale[0][:, None]
    if case.k_cache.dtype in FP8_DTYPES:
        limit = torch.finfo(case.k_cache.dtype).max
        held = held.clamp(-limit, limit)
    return dequantised(held.to(case.k_cache.dtype), descale, new.dtype)


class CountOps(TorchDispatchMode):
    """Counts this package's ops that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "paged_attn":
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def expect_ops(**counts: int) -> Iterator[None]:
    with CountOps() as mode:
        yield
    assert mode.counts == counts


def assert_as_documented(
    flash: FlashCase, call: Callable[..., Any], arguments: dict[str, Any], with_lse: bool = False
) -> None:
    """Makes the call and holds out, lse and what is in the cache to FlashAttention's semantics."""
    case = flash.case
    with one_thread():
        expected, expected_lse, largest = documented(flash, torch.float64)
        plain, plain_lse, _ = documented(flash, case.q.dtype)
        contents = expected_contents(flash)
    with expect_ops(**flash.expected_ops(with_lse)):
        result = call(**arguments, **({"return_softmax_lse": True} if with_lse else {}))
    out = result[0] if with_lse else result
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    assert_near(out, expected, plain, largest)
    rotary = "rotary_cos" in flash.options
    if with_lse:
        lse = result[1]
        assert lse.is_contiguous()
        if rotary:
            assert_lse_near(lse, expected_lse, plain_lse, out.dtype)
        else:
            assert_lse(lse, expected_lse)
    assert_holds(case.k_cache, contents[0], rotary=rotary)
    assert_holds(case.v_cache, contents[1])


def assert_lse_near(lse: Tensor, expected: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """Rotated elements that lie half between two numbers may be rounded to either."""
    finite = expected.isfinite()
    assert torch.equal(lse[~finite].double(), expected[~finite])
    magnitude = expected.abs().clamp(min=1.0)
    errors = [((x.double() - expected).abs() / magnitude)[finite] for x in (lse, plain)]
    if errors[0].numel():
        bar = max(float(errors[1].max()), torch.finfo(dtype).eps) + 1e-5
        assert within("lse after rotary", float(errors[0].max()), bar)


def expected_contents(flash: FlashCase) -> tuple[Tensor, Tensor]:
    """K and V caches in fp64 as they shall be after the call, before rounding."""
    case = flash.case
    contents = []
    for cache, new in ((case.k_cache, flash.k), (case.v_cache, flash.v)):
        content = cache.to(torch.float64)
        end = 0
        for b, cached in enumerate(flash.cached if new is not None else []):
            begin, end = end, end + flash.new_lens[b]
            tokens = new.reshape(-1, *new.shape[-2:])[begin:end]
            if new is flash.k:
                places = range(cached, cached + flash.new_lens[b])
                tokens = rotated(tokens, flash.options, places, torch.float64)
            name = "k_descale" if new is flash.k else "v_descale"
            if (descale := flash.options.get(name)) is not None:
                tokens = tokens / descale[0][:, None]
            if cache.dtype in FP8_DTYPES:
                limit = torch.finfo(cache.dtype).max
                tokens = tokens.clamp(-limit, limit)
            blocks, offsets = case.live_slots(b)
            content[blocks[cached:], offsets[cached:]] = tokens.double()
        contents.append(content)
    return contents[0], contents[1]


def assert_holds(cache: Tensor, content: Tensor, *, rotary: bool = False) -> None:
    """`rotary` allows for the rounding of rotated keys: one ulp, and fp32's of their terms."""
    if not rotary:
        assert_same_bits(cache.clone(), content.to(torch.float32).to(cache.dtype))
        return
    assert torch.equal(cache.isnan(), content.isnan())
    content, held = content.nan_to_num(), cache.double().nan_to_num()
    allowed = ulp(content, cache.dtype) + 2**-22 * content.abs().max()
    assert bool(((held - content).abs() <= allowed).all())
