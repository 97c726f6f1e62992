"""FlashAttention's calls for paged caches, served by this package's ops.

In place of `from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache`, or of FA3's
`from flash_attn_interface import ...`, import the same names from here. Arguments come in the order
of FlashAttention 2; those that only FlashAttention 3 or vLLM's fork have are keywords. What is
about speed only (num_splits, pack_gqa, ...) is taken and not used, for the ops choose themselves;
what the ops do not do raises NotImplementedError naming the argument. docs/flash_attn.md tells the
differences.

Symbols: B sequences, Q query tokens a sequence, T query tokens in all, H query heads, G KV heads,
D head dim, N blocks in the pool, S slots a block, M columns of the block table. Neither function
waits for the device, and both can be captured in CUDA graphs and compiled. Forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import cache_ops, ops
from ._flash_arguments import (
    attend,
    bad,
    count_sequences,
    decode_options,
    expect_int32,
    expect_none,
    refuse_given,
    refuse_unless_zero,
    unit_stride,
    visible_keys,
)
from ._rotary import rotate, token_positions

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    s_aux: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    empty_lse_inf: bool = False,
) -> Any:
    """Attention of queries to a KV cache, to which new keys and values may be appended first.

    Query t of a sequence with L keys, those appended included, has the position i = L - Q + t.

    Args:
        q: [B, Q, H, D] or, with `cu_seqlens_q`, [T, H, D]; float16, bfloat16 or float32.
        k_cache: [N, S, G, D], any block size S, with a block table; else [Bc, S, G, D], a cache of
            S slots for each of Bc sequences. q's dtype, or float8_e4m3fn or float8_e5m2 with
            float16 or bfloat16 q. Only the last dim has to be contiguous.
        v_cache: Like `k_cache`, with strides of its own.
        k: [B, Qn, G, D], or with `cu_seqlens_k_new` [Tn, G, D]: keys to write into the cache at
            the positions from cache_seqlens on, before attention.
        v: Like `k`.
        rotary_cos: [P, R / 2], any floating dtype: rotates the first R elements of each head of k
            (before it is written) and q. Token t has the angles of row cache_seqlens + t; but
            queries that all see the same keys, with neither `causal` nor a window, have those of
            row cache_seqlens. P is at least the cache's M * S or S.
        rotary_sin: Like `rotary_cos`.
        cache_seqlens: [B] int32, or one number for all: keys in the cache, without those in `k`.
            None: the cache is full, M * S or S.
        cache_batch_idx: [B] int32, without a block table: which of the Bc sequences each is; by
            default the first B.
        cache_leftpad: Not supported.
        block_table: [B, M] int32; as `block_tables` of `paged_attn.decode`.
        softmax_scale: Factor on q . k; 1 / sqrt(D) by default.
        causal: Whether a query sees only keys up to its own position.
        window_size: (left, right): a query sees the keys i - left to i + right; negative: all on
            that side. With causal=False and more than one query right must be 0, or both sides
            wide enough for all keys.
        softcap: c > 0 turns a logit s into c * tanh(s / c); 0: off.
        rotary_interleaved: True: elements 2 j and 2 j + 1 of a head rotate together; False: j and
            j + R / 2.
        alibi_slopes: [H] float32, or [B, H] expanded from it: adds -slope * |i - j|. Not with
            causal=False and more than one query.
        num_splits: Not used.
        return_softmax_lse: Whether to return the logarithms of the softmax denominators too.
        page_table: FlashAttention 3's name of `block_table`; give one of them.
        cu_seqlens_q: [B + 1] int32: sequence b owns the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q.
        cu_seqlens_k_new: [B + 1] int32, likewise for k and v.
        max_seqlen_q: With `cu_seqlens_q`, an upper bound on a sequence's queries (a sequence with
            more is NaN); None: unknown.
        rotary_seqlens: [B] int32: the row of rotary_cos that token 0 has; cache_seqlens by
            default.
        qv: Not supported.
        q_descale: Not supported.
        k_descale: float32, [], [1], [G] or expanded from these to [B, G]: K is what the cache
            holds times this. For every cache dtype; what is appended is divided by it.
        v_descale: Like `k_descale`, for V.
        s_aux: [H], float32 or q's dtype: a logit that joins each softmax's denominator only.
        attention_chunk: Not supported, must be 0.
        scheduler_metadata: Not used.
        pack_gqa: Not used.
        sm_margin: Not used.
        empty_lse_inf: Not FlashAttention's: True gives +inf, as FlashAttention 2 does, instead of
            -inf as the logarithm of queries that see no key.

    Returns:
        out of q's shape and dtype, 0 where a query sees no key; with `return_softmax_lse` (out,
        lse), lse float32 [B, H, Q] or, with `cu_seqlens_q`, [H, T].

    Raises:
        NotImplementedError: An argument, or a use of it, that is not supported.
        ValueError: An argument of the wrong shape, dtype or device, or an impossible option.
        IndexError: With checks on, as `paged_attn.decode`.
    """
    op = "flash_attn_with_kvcache"
    refuse_given(op, cache_leftpad=cache_leftpad, qv=qv, q_descale=q_descale)
    refuse_unless_zero(op, attention_chunk=attention_chunk)
    num_sequences = count_sequences(op, q, cu_seqlens_q)
    tables = _block_tables(op, q, k_cache, num_sequences, block_table, page_table, cache_batch_idx)
    capacity = tables.shape[1] * k_cache.shape[1]
    lens = _cached_lens(op, q, cache_seqlens, num_sequences, capacity, appending=k is not None)
    max_queries = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    options = decode_options(
        op,
        num_sequences,
        visible_keys(op, causal, window_size, max_queries, capacity),
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
        scale=softmax_scale,
        softcap=softcap,
        max_query_len=0 if cu_seqlens_q is None else max_seqlen_q or 0,
    )
    q = unit_stride(q)
    if k is None or v is None:
        appended = {"k": k, "v": v, "cu_seqlens_k_new": cu_seqlens_k_new}
        expect_none(op, "without both k and v", **appended)
        expect_none(op, "without k and v", rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        tensors = (q, k_cache, v_cache, tables, lens, cu_seqlens_q)
        return attend(tensors, options, return_softmax_lse, empty_lse_inf)

    key, value = unit_stride(k), unit_stride(v)
    if cu_seqlens_k_new is not None:
        expect_int32(op, "cu_seqlens_k_new", cu_seqlens_k_new, q, num_sequences + 1)
    if key.dim() != (4 if cu_seqlens_k_new is None else 3):
        raise bad(op, "k", "[B, Qn, G, D], or [Tn, G, D] with cu_seqlens_k_new", k)
    if rotary_cos is not None or rotary_sin is not None:
        cos, sin = _angles(op, q, capacity, rotary_cos, rotary_sin)
        first = lens
        if rotary_seqlens is not None:
            expect_int32(op, "rotary_seqlens", rotary_seqlens, q, num_sequences)
            first = rotary_seqlens
        positions = token_positions(first, key.shape[-3], cu_seqlens_k_new)
        key = rotate(key, cos, sin, positions, rotary_interleaved)
        # Queries that all see the same keys have no order: all count as the first.
        step = 1 if options["causal"] else 0
        positions = token_positions(first, q.shape[-3], cu_seqlens_q, step)
        q = rotate(q, cos, sin, positions, rotary_interleaved)
    new = key.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    lens = lens + new
    tensors = (q, k_cache, v_cache, tables, lens, cu_seqlens_q)
    if (
        not return_softmax_lse
        and cu_seqlens_k_new is cu_seqlens_q
        and key.shape[:-2] == q.shape[:-2]
    ):
        return ops.append_decode(q, key, value, *tensors[1:], **options)
    scales = (options["k_scale"], options["v_scale"])
    cache_ops.append_kv(key, value, k_cache, v_cache, tables, lens, cu_seqlens_k_new, *scales)
    return attend(tensors, options, return_softmax_lse, empty_lse_inf)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    s_aux: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    empty_lse_inf: bool = False,
) -> Any:
    """Attention of ragged queries to a paged cache, or to ragged keys and values.

    Query t of a sequence with Q queries and L keys has the position i = L - Q + t.

    Without a block table k and v are read as a pool of blocks of one token, through a table that
    is made from cu_seqlens_k: B * max_seqlen_k * 4 bytes, and one entry looked up a token.

    Args:
        q: [T, H, D]; float16, bfloat16 or float32.
        k: [N, S, G, D], any block size S, with `block_table`; else [Tk, G, D]. Dtypes and strides
            as in `flash_attn_with_kvcache`.
        v: Like `k`.
        cu_seqlens_q: [B + 1] int32: sequence b owns the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q. Rows of no sequence give 0.
        cu_seqlens_k: [B + 1] int32: likewise for k and v; with `block_table` only the differences
            count: a sequence's keys. Not needed with both `block_table` and `seqused_k`.
        max_seqlen_q: An upper bound on a sequence's queries (a sequence with more is NaN); None:
            unknown.
        max_seqlen_k: Without `block_table`, an upper bound on a sequence's keys (likewise). Else
            not used.
        dropout_p: Must be 0.
        softmax_scale: As in `flash_attn_with_kvcache`, as all that is not named here.
        causal: See `flash_attn_with_kvcache`.
        window_size: See `flash_attn_with_kvcache`.
        softcap: See `flash_attn_with_kvcache`.
        alibi_slopes: See `flash_attn_with_kvcache`.
        deterministic: Not used: the same inputs always give the same bits.
        return_attn_probs: Whether to return three results, as FlashAttention 2 does; the
            probabilities are empty, as there without dropout.
        block_table: [B, M] int32; as `block_tables` of `paged_attn.decode`.
        seqused_q: Not supported.
        seqused_k: [B] int32: a sequence's keys, where they are fewer than cu_seqlens_k says.
        qv: Not supported.
        q_descale: Not supported.
        k_descale: See `flash_attn_with_kvcache`.
        v_descale: See `flash_attn_with_kvcache`.
        s_aux: See `flash_attn_with_kvcache`.
        attention_chunk: Not supported, must be 0.
        num_splits: Not used.
        pack_gqa: Not used.
        sm_margin: Not used.
        return_softmax_lse: Whether to return two results, as vLLM's fork does.
        empty_lse_inf: See `flash_attn_with_kvcache`.

    Returns:
        out of q's shape and dtype; with `return_softmax_lse` (out, lse), with `return_attn_probs`
        (out, lse, an empty tensor). lse is float32 [H, T].

    Raises:
        NotImplementedError: An argument, or a use of it, that is not supported.
        ValueError: An argument of the wrong shape, dtype or device, or an impossible option.
        IndexError: With checks on, as `paged_attn.decode`.
    """
    op = "flash_attn_varlen_func"
    refuse_given(op, seqused_q=seqused_q, qv=qv, q_descale=q_descale)
    refuse_unless_zero(op, dropout_p=dropout_p, attention_chunk=attention_chunk)
    num_sequences = count_sequences(op, q, cu_seqlens_q)
    if cu_seqlens_k is not None:
        expect_int32(op, "cu_seqlens_k", cu_seqlens_k, q, num_sequences + 1)
    if block_table is not None:
        expect_int32(op, "block_table", block_table, q, num_sequences, dim=2)
        pool, tables = (k, v), unit_stride(block_table)
    else:
        if cu_seqlens_k is None or max_seqlen_k is None:
            name = "max_seqlen_k" if max_seqlen_k is None else "cu_seqlens_k"
            raise bad(op, name, "given without block_table", None)
        if k.dim() != 3 or v.dim() != 3:
            name, packed = ("k", k) if k.dim() != 3 else ("v", v)
            raise bad(op, name, "[Tk, G, D] without block_table", packed)
        tokens = torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
        pool = (unit_stride(k)[:, None], unit_stride(v)[:, None])
        tables = cu_seqlens_k[:-1, None] + tokens
    if seqused_k is not None:
        expect_int32(op, "seqused_k", seqused_k, q, num_sequences)
        lens = seqused_k.contiguous()
    elif cu_seqlens_k is not None:
        lens = cu_seqlens_k.diff()
    else:
        raise bad(op, "cu_seqlens_k", "given without seqused_k", None)
    options = decode_options(
        op,
        num_sequences,
        visible_keys(op, causal, window_size, max_seqlen_q, tables.shape[1] * pool[0].shape[1]),
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
        scale=softmax_scale,
        softcap=softcap,
        max_query_len=max_seqlen_q or 0,
    )
    q = unit_stride(q)
    tensors = (q, *pool, tables, lens, cu_seqlens_q)
    result = attend(tensors, options, return_softmax_lse or return_attn_probs, empty_lse_inf)
    return (*result, q.new_empty(0)) if return_attn_probs else result


def _block_tables(
    op: str,
    q: Tensor,
    k_cache: Tensor,
    num_sequences: int,
    block_table: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> Tensor:
    """The table given, or one that takes a contiguous cache as one block a sequence."""
    if k_cache.dim() != 4:
        raise bad(op, "k_cache", "[N, S, G, D]", k_cache)
    if block_table is not None or page_table is not None:
        name = "page_table" if block_table is None else "block_table"
        table = page_table if block_table is None else block_table
        if block_table is not None:
            expect_none(op, "with block_table", page_table=page_table)
        expect_none(op, f"with {name}", cache_batch_idx=cache_batch_idx)
        return unit_stride(expect_int32(op, name, table, q, num_sequences, dim=2))
    if cache_batch_idx is not None:
        return expect_int32(op, "cache_batch_idx", cache_batch_idx, q, num_sequences)[:, None]
    if num_sequences > k_cache.shape[0]:
        raise bad(op, "k_cache", f"of at least {num_sequences} sequences", k_cache)
    return torch.arange(num_sequences, dtype=torch.int32, device=q.device)[:, None]


def _cached_lens(
    op: str,
    q: Tensor,
    cache_seqlens: int | Tensor | None,
    num_sequences: int,
    capacity: int,
    *,
    appending: bool,
) -> Tensor:
    """[B] int32: the keys in the cache before any are appended."""
    if cache_seqlens is None and appending:
        raise bad(op, "cache_seqlens", "given with k and v", None)
    if cache_seqlens is not None and not isinstance(cache_seqlens, int):
        return expect_int32(op, "cache_seqlens", cache_seqlens, q, num_sequences).contiguous()
    length = capacity if cache_seqlens is None else cache_seqlens
    return torch.full((num_sequences,), length, dtype=torch.int32, device=q.device)


def _angles(
    op: str, q: Tensor, capacity: int, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """rotary_cos and rotary_sin, checked."""
    if cos is None or sin is None:
        name, other = ("rotary_sin", "rotary_cos") if sin is None else ("rotary_cos", "rotary_sin")
        raise bad(op, name, f"given with {other}", None)
    if (
        cos.dim() != 2
        or cos.shape[0] < max(capacity, 1)
        or 2 * cos.shape[1] > q.shape[-1]
        or not cos.is_floating_point()
        or cos.device != q.device
    ):
        shape = f"[at least {max(capacity, 1)}, at most {q.shape[-1] // 2}]"
        raise bad(op, "rotary_cos", f"floating {shape} on {q.device}", cos)
    if (sin.shape, sin.dtype, sin.device) != (cos.shape, cos.dtype, cos.device):
        raise bad(op, "rotary_sin", "like rotary_cos", sin)
    return cos, sin
