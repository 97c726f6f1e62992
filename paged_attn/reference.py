"""The definition of the ops: gather, then softmax, in plain PyTorch.

For one query row r = (sequence b, query t of Q_b, head h) at position i = L_b - Q_b + t, with
L_b = context_lens[b] and g = h // (H / G):

    s_j   = scale * <q_r, K_bj,g>           K_bj,g = k_scale_g * k_cache[table[b, j // S], j % S, g]
    s_j   = softcap * tanh(s_j / softcap)   if softcap > 0
    s_j   = s_j + slope_h * (j - i)         if alibi_slopes
    lse_r = log(sum_j exp(s_j) [+ exp(sink_h)])
    out_r = sum_j exp(s_j - lse_r) * V_bj,g

over the keys j that the row sees: 0 <= j < L_b, and if causal j <= i, and if window > 0
j > i - window. A row that sees no key is 0, its lse -inf (or sink_h). So is a row whose scores are
all -inf, as where q . K falls below the range of fp32, in which the ops compute: its weights are 0,
not the NaN of a plain softmax. PyTorch's and FlashAttention's attention agree, and merge_states
takes such a part for what it is, one without weight.

Everything is computed in the dtype that the caller names, one row at a time: meant to be read and
compared with, not to be fast.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "append_decode",
    "append_kv",
    "copy_blocks",
    "decode",
    "decode_with_lse",
    "merge_states",
    "reshape_and_cache",
    "swap_blocks",
]


def decode(*args: Any, **options: Any) -> Tensor:
    """`decode_with_lse`'s first result alone; takes its arguments.

    Returns:
        q's shape, in `dtype`.
    """
    return decode_with_lse(*args, **options)[0]


def decode_with_lse(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float | None = None,
    max_query_len: int = 0,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    batch_invariant: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's newest tokens over its paged K and V, and the log-sum-exp.

    Args:
        q: [B, H, D], [B, Q, H, D], or with `cu_seqlens_q` [T, H, D].
        k_cache: [N, S, G, D], any strides; q's dtype or fp8.
        v_cache: Like `k_cache`.
        block_tables: [B, M] int32; entry [b, c] is the block that holds positions
            c * S ... (c + 1) * S - 1 of sequence b.
        context_lens: [B] int32, tokens in the cache, the query tokens included.
        cu_seqlens_q: [B + 1] int32; sequence b owns rows cu[b] ... cu[b + 1] of q.
        alibi_slopes: [H] fp32; adds slope * (j - i).
        sinks: [H]; a logit that joins the softmax denominator only.
        k_scale: [], [1] or [G] fp32; K = stored * scale.
        v_scale: Like `k_scale`, for V.
        scale: Factor of q . k; 1 / sqrt(D) when None.
        max_query_len: Upper bound on a ragged sequence's queries, 0 when unknown; a sequence with
            more is NaN.
        causal: Whether a query sees only keys up to its own position.
        window: Keys a query sees, itself included; negative for all.
        softcap: 0 for none.
        batch_invariant: Changes no value here.
        dtype: Of all arithmetic and of both results.

    Returns:
        (out, lse): q's shape and q's shape without D, both in `dtype`; lse is a natural logarithm.
        A sequence with a live block id outside [0, N), a length beyond M * S, a bad entry in
        `cu_seqlens_q` or too many queries is NaN in both. Rows outside every sequence are 0 and
        -inf.
    """
    del batch_invariant
    num_heads, head_dim = q.shape[-2:]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    rows = q.reshape(-1, num_heads, head_dim).to(dtype)
    out = torch.zeros_like(rows)
    lse = torch.full(rows.shape[:-1], -math.inf, dtype=dtype, device=q.device)

    query_len = q.shape[1] if q.dim() == 4 else 1
    owned = _owned_rows(block_tables, query_len, cu_seqlens_q, rows)
    if cu_seqlens_q is not None and int(cu_seqlens_q[0]) > rows.shape[0]:
        # A bad first entry may hide where sequences begin.
        out[:] = math.nan
        lse[:] = math.nan

    for b, (begin, end, good) in enumerate(owned):
        num_queries = end - begin
        if num_queries == 0:
            continue
        context_len = int(context_lens[b])
        if cu_seqlens_q is not None and 0 < max_query_len < num_queries:
            good = False
        spans = [
            _visible_keys(context_len - num_queries + t, context_len, causal, window)
            for t in range(num_queries)
        ]
        first = min((lo for lo, hi in spans if lo < hi), default=0)
        last = max((hi for lo, hi in spans if lo < hi), default=0)
        keys = _gather(k_cache, block_tables[b], first, last, k_scale, dtype)
        values = _gather(v_cache, block_tables[b], first, last, v_scale, dtype)
        if not good or keys is None or values is None:
            out[begin:end] = math.nan
            lse[begin:end] = math.nan
            continue
        for t, (lo, hi) in enumerate(spans):
            position = context_len - num_queries + t
            seen = slice(lo - first, max(lo, hi) - first)
            distance = torch.arange(lo, max(lo, hi), device=q.device) - position
            row = begin + t
            out[row], lse[row] = _attend(
                rows[row], keys[seen], values[seen], distance, scale, softcap, alibi_slopes, sinks
            )
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes token t's K and V to slot_mapping[t] = block * S + offset, in place.

    Args:
        key: [T, G, D] with T >= the length of `slot_mapping`; further rows are ignored.
        value: Like `key`.
        k_cache: [N, S, G, D], any strides, key's dtype or fp8; stores K / k_scale, in fp8
            saturated at the largest finite value.
        v_cache: Like `k_cache`.
        slot_mapping: [T] int64 or int32; slots outside [0, N * S) are skipped.
        k_scale: [], [1] or [G] fp32.
        v_scale: Like `k_scale`.
    """
    num_blocks, block_size = k_cache.shape[:2]
    slots = slot_mapping.long()
    tokens = torch.nonzero((slots >= 0) & (slots < num_blocks * block_size)).squeeze(1)
    blocks = torch.div(slots[tokens], block_size, rounding_mode="floor")
    offsets = slots[tokens] % block_size
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        stored = source[tokens]
        if scale is not None:
            stored = stored.float() / scale.reshape(-1, 1)
        if _is_fp8(cache.dtype):
            limit = torch.finfo(cache.dtype).max
            # Indexed writes exist for bytes on every device, for fp8 not.
            stored = stored.float().clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[blocks, offsets] = stored.to(cache.dtype)


def append_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes token t of a sequence's Q at position context_len - Q + t of its block table.

    Args:
        key: [B, G, D], [B, Q, G, D], or with `cu_seqlens_q` [T, G, D].
        value: Like `key`.
        k_cache: See `reshape_and_cache`.
        v_cache: See `reshape_and_cache`.
        block_tables: [B, M] int32.
        context_lens: [B] int32, the new tokens included.
        cu_seqlens_q: [B + 1] int32; a sequence with a bad entry writes nothing.
        k_scale: See `reshape_and_cache`.
        v_scale: See `reshape_and_cache`.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    keys = key.reshape(-1, num_kv_heads, head_dim)
    values = value.reshape(-1, num_kv_heads, head_dim)
    slots = torch.full((keys.shape[0],), -1, dtype=torch.int64, device=key.device)
    query_len = key.shape[1] if key.dim() == 4 else 1
    for b, (begin, end, good) in enumerate(
        _owned_rows(block_tables, query_len, cu_seqlens_q, keys)
    ):
        for row in range(begin, end if good else begin):
            position = int(context_lens[b]) - end + row
            column = position // block_size
            if 0 <= column < block_tables.shape[1]:
                block = int(block_tables[b, column])
                if 0 <= block < num_blocks:
                    slots[row] = block * block_size + position % block_size
    reshape_and_cache(keys, values, k_cache, v_cache, slots, k_scale, v_scale)


def append_decode(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`append_kv`, then `decode`.

    Returns:
        q's shape, in the dtype that `options` names.
    """
    where = (block_tables, context_lens, cu_seqlens_q)
    append_kv(key, value, k_cache, v_cache, *where, k_scale, v_scale)
    return decode(q, k_cache, v_cache, *where, alibi_slopes, sinks, k_scale, v_scale, **options)


def copy_blocks(k_caches: list[Tensor], v_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copies block source to block destination in every cache, for every pair in turn.

    Args:
        k_caches: One [N, ...] a layer.
        v_caches: Like `k_caches`.
        block_mapping: [n, 2] int64; pairs with an id outside [0, N) are skipped.
    """
    for cache in (*k_caches, *v_caches):
        swap_blocks([cache], [cache], block_mapping)


def swap_blocks(srcs: list[Tensor], dsts: list[Tensor], block_mapping: Tensor) -> None:
    """Copies block source of srcs[i] to block destination of dsts[i], for every pair in turn.

    Args:
        srcs: Tensors [N, ...].
        dsts: Tensors [N', ...].
        block_mapping: [n, 2] int64; pairs with an id that does not exist are skipped.
    """
    for src, dst in zip(srcs, dsts, strict=True):
        for source, destination in block_mapping.tolist():
            if 0 <= source < src.shape[0] and 0 <= destination < dst.shape[0]:
                dst[destination].copy_(src[source])


def merge_states(
    outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint sets of them.

    Args:
        outs: Parts [..., H, D].
        lses: Parts [..., H]; where -inf, the part does not count.
        dtype: Of all arithmetic and of both results.

    Returns:
        (out, lse), in `dtype`; 0 and -inf where no part counts.
    """
    logarithms = torch.stack(lses).to(dtype)
    parts = torch.stack(outs).to(dtype)
    nothing = logarithms == -math.inf
    lse = torch.logsumexp(logarithms, dim=0)
    weights = torch.exp(logarithms - lse).masked_fill(nothing, 0)
    parts = parts.masked_fill(nothing[..., None], 0)
    return (weights[..., None] * parts).sum(0), lse


def _visible_keys(position: int, context_len: int, causal: bool, window: int) -> tuple[int, int]:
    """The half-open range of keys that the query at `position` sees; empty when begin >= end."""
    begin, end = 0, context_len
    if causal:
        end = min(end, position + 1)
        if window > 0:
            begin = max(begin, position - window + 1)
    return begin, end


def _owned_rows(
    block_tables: Tensor, query_len: int, cu_seqlens_q: Tensor | None, rows: Tensor
) -> list[tuple[int, int, bool]]:
    """First row, past the last row, and whether its entries are good, of each sequence.

    A ragged bound is the greatest entry so far, each clamped to [0, number of rows]: the entry
    itself unless it lies outside or below one before it, which is what makes an entry bad.
    """
    num_sequences = block_tables.shape[0]
    if cu_seqlens_q is None:
        return [(b * query_len, (b + 1) * query_len, True) for b in range(num_sequences)]
    entries = cu_seqlens_q.tolist()
    bounds = list(itertools.accumulate((min(max(e, 0), rows.shape[0]) for e in entries), max))
    good = [entry == bound for entry, bound in zip(entries, bounds, strict=True)]
    return [(bounds[b], bounds[b + 1], good[b] and good[b + 1]) for b in range(num_sequences)]


def _gather(
    cache: Tensor, table: Tensor, first: int, last: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Positions first ... last - 1 of one sequence, [last - first, G, D]; None where a table fails.

    A table fails when it is too short for `last` positions or when a block that holds one of the
    positions is not in the pool.
    """
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    if last > table.shape[0] * block_size:
        return None
    first_block = first // block_size
    blocks = table[first_block : (last + block_size - 1) // block_size].long()
    if bool(((blocks < 0) | (blocks >= num_blocks)).any()):
        return None
    if _is_fp8(cache.dtype):
        slots = cache.view(torch.uint8)[blocks].view(cache.dtype)
    else:
        slots = cache[blocks]
    skipped = first_block * block_size
    tokens = slots.reshape(-1, num_kv_heads, head_dim)[first - skipped : last - skipped].to(dtype)
    return tokens if scale is None else tokens * scale.to(dtype).reshape(-1, 1)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    distance: Tensor,
    scale: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One query row's (out [H, D], lse [H]) from q [H, D] and the n keys it sees, [n, G, D].

    `distance` [n] is j - i. Query head h reads KV head h // (H / G).
    """
    num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_kv_heads, group, head_dim)
    scores = scale * (grouped @ keys.permute(1, 2, 0)).reshape(num_heads, num_keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None] * distance
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf)[:, None], 0)
    weights = weights[:, :num_keys].reshape(num_kv_heads, group, num_keys)
    return (weights @ values.transpose(0, 1)).reshape(num_heads, head_dim), lse


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
