"""Typed fronts of `torch.ops.paged_attn.*`.

Symbols in the docstrings: B sequences, Q query tokens a sequence, T query tokens in all, H query
heads, G KV heads (H is a multiple of G), D head dim, N blocks in the pool, S slots a block, M
columns of the block table.

Every op raises ValueError for a bad argument, naming it, what was expected and what came, before
anything is written. With checks on (see `set_checks`) bad content raises IndexError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library

_ops = torch.ops.paged_attn


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    scale: float | None = None,
    max_query_len: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest tokens to all of its tokens in a paged cache.

    Row t of a sequence's Q queries sits at position i = context_len - Q + t and sees the keys
    j <= i: out = softmax(scale * q @ K[: i + 1].T) @ V[: i + 1], with softmax and accumulation in
    fp32. Query head h reads KV head h // (H // G). `paged_attn.reference.decode` is the same in
    plain PyTorch.

    Args:
        q: [B, H, D], [B, Q, H, D] or, with `cu_seqlens_q`, [T, H, D]; float16, bfloat16 or
            float32; last dim contiguous, other strides free. D is a multiple of 8 up to 256.
        k_cache: [N, S, G, D], q's dtype; last dim contiguous, other strides free.
        v_cache: Like `k_cache`, with strides of its own.
        block_tables: [B, M] int32; entry [b, c] is the block that holds the tokens
            c * S ... c * S + S - 1 of sequence b. Entries past a sequence's last token are not
            read. A live entry outside [0, N) makes that sequence's rows NaN.
        context_lens: [B] int32: tokens in the cache, the Q query tokens included. 0 or less gives
            zeros; more than M * S gives NaN rows.
        cu_seqlens_q: [B + 1] int32: sequence b owns the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q. Rows of no sequence give zeros.
        scale: Factor on the logits; 1 / sqrt(D) by default.
        max_query_len: With `cu_seqlens_q`, an upper bound on a sequence's queries; 0: unknown.
        out: Where to write, of q's shape and dtype; a new tensor by default.

    Returns:
        q's shape and dtype (`out` if it was given).

    Raises:
        ValueError: An argument of the wrong rank, shape, dtype, device, stride or alignment.
        IndexError: With checks on: a bad block id, context length or `cu_seqlens_q` entry.
        RuntimeError: In backward: there is none. With CUDA tensors if the CUDA library is not
            loaded.
    """
    arguments = (q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q)
    if out is None:
        result: Tensor = _ops.decode(*arguments, scale=scale, max_query_len=max_query_len)
        return result
    _ops.decode.out(*arguments, scale=scale, max_query_len=max_query_len, out=out)
    return out


def decode_with_lse(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    scale: float | None = None,
    max_query_len: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`decode`, and the natural logarithm of each row's softmax denominator.

    Args:
        q: See `decode`, as for all that is not named here.
        k_cache: See `decode`.
        v_cache: See `decode`.
        block_tables: See `decode`.
        context_lens: See `decode`.
        cu_seqlens_q: See `decode`.
        scale: See `decode`.
        max_query_len: See `decode`.
        out: Where to write the rows. Give both or neither of `out` and `lse`.
        lse: Where to write the logarithms: out.shape[:-1], float32, contiguous.

    Returns:
        (out, lse). Rows that see no key have lse -inf, rows of bad sequences NaN.

    Raises:
        ValueError: As `decode`; or only one of `out` and `lse` was given.
        IndexError: As `decode`.
        RuntimeError: As `decode`.
    """
    if (out is None) != (lse is None):
        raise ValueError(
            "paged_attn.decode_with_lse: out and lse must be given together, got only "
            + ("lse" if out is None else "out")
        )
    arguments = (q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q)
    if out is None or lse is None:
        result: tuple[Tensor, Tensor] = _ops.decode_with_lse(
            *arguments, scale=scale, max_query_len=max_query_len
        )
        return result
    _ops.decode_with_lse.out(*arguments, scale=scale, max_query_len=max_query_len, out=out, lse=lse)
    return out, lse


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new tokens' keys and values into their slots of a paged cache.

    Args:
        key: [T', G, D] with T' >= T; float16, bfloat16 or float32; last dim contiguous, other
            strides free.
        value: Like `key`.
        k_cache: [N, S, G, D], written in place; key's dtype, or float8_e4m3fn or float8_e5m2 with
            float16 or bfloat16 keys; last dim contiguous, other strides free.
        v_cache: Like `k_cache`, with strides of its own.
        slot_mapping: [T] int64 or int32: row t goes to slot block * S + offset. Slots below 0 and
            from N * S on are skipped. What two rows of one slot leave there is undefined.
        k_scale: [], [1] or [G] float32: the cache stores key / k_scale, rounded to the nearest,
            ties to even; in float8 saturated at the largest finite value, and NaN stays NaN.
        v_scale: Like `k_scale`, for `value`.

    Raises:
        ValueError: An argument of the wrong rank, shape, dtype, device or stride.
        IndexError: With checks on: a slot from N * S on.
    """
    _ops.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


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
    """Writes each sequence's newest tokens behind its older ones, through its block table.

    Token t of a sequence's Q goes to position context_len - Q + t. Positions below 0 or past M * S,
    positions in a block outside [0, N) and sequences with a bad `cu_seqlens_q` are skipped.

    Args:
        key: [B, G, D], [B, Q, G, D] or, with `cu_seqlens_q`, [T, G, D]; else as in
            `reshape_and_cache`.
        value: Like `key`.
        k_cache: As in `reshape_and_cache`.
        v_cache: As in `reshape_and_cache`.
        block_tables: [B, M] int32, as in `decode`. No two sequences may share a block that new
            tokens go to: what they leave there is undefined.
        context_lens: [B] int32: tokens in the cache, the new ones included.
        cu_seqlens_q: [B + 1] int32: sequence b owns the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of key and value. Rows of no sequence are skipped.
        k_scale: As in `reshape_and_cache`.
        v_scale: As in `reshape_and_cache`.

    Raises:
        ValueError: An argument of the wrong rank, shape, dtype, device or stride.
        IndexError: With checks on: a context length beyond M * S, a bad block id where a token
            goes, or a bad `cu_seqlens_q` entry.
    """
    _ops.append_kv(
        key,
        value,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        k_scale,
        v_scale,
    )


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
    *,
    scale: float | None = None,
    max_query_len: int = 0,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    batch_invariant: bool = False,
) -> Tensor:
    """`append_kv`, then `decode`, as one op.

    Args:
        q: As in `decode`, as all that is not named here.
        key: As in `append_kv`, of q's dtype and tokens.
        value: Like `key`.
        k_cache: As in `append_kv`.
        v_cache: As in `append_kv`.
        block_tables: As in `append_kv`.
        context_lens: As in `append_kv`.
        cu_seqlens_q: As in `append_kv`.
        alibi_slopes: [H] float32: slope * (j - i) is added to the logit of key j for the query at
            position i.
        sinks: [H] float32 or q's dtype: a logit that joins each softmax's denominator only.
        k_scale: [], [1] or [G] float32: K is what the cache holds times this.
        v_scale: Like `k_scale`, for V.
        scale: See `decode`.
        max_query_len: See `decode`.
        causal: False: every query sees all of its sequence's keys.
        window: Keys that a query sees, itself included; negative: all.
        softcap: c > 0 turns a logit s into c * tanh(s / c); 0: off.
        batch_invariant: Whether a sequence's result must be the same bits in every batch.

    Returns:
        q's shape and dtype.

    Raises:
        ValueError: As `append_kv` and `decode`; nothing is written then.
        IndexError: As `append_kv` and `decode`; nothing is written then.
        RuntimeError: As `decode`.
    """
    result: Tensor = _ops.append_decode(
        q,
        key,
        value,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        scale=scale,
        max_query_len=max_query_len,
        causal=causal,
        window=window,
        softcap=softcap,
        batch_invariant=batch_invariant,
    )
    return result


def copy_blocks(k_caches: list[Tensor], v_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copies blocks inside every cache, as copy-on-write asks for: one launch for all layers.

    Args:
        k_caches: One [N, S, G, D] a layer, all of one shape, dtype (any) and device; last dim
            contiguous, other strides free, each cache's its own.
        v_caches: As many, of the same shape, dtype and device.
        block_mapping: [n, 2] int64 on the caches' device: pairs of source and destination. A pair
            with an id outside [0, N) is skipped. What a block holds that is the destination of two
            pairs, or source and destination, is undefined.

    Raises:
        ValueError: An argument of the wrong length, rank, shape, dtype, device or stride.
        IndexError: With checks on: an id outside [0, N).
    """
    _ops.copy_blocks(k_caches, v_caches, block_mapping)


def swap_blocks(srcs: list[Tensor], dsts: list[Tensor], block_mapping: Tensor) -> None:
    """Copies blocks from tensor to tensor: between devices, host and device, or within one.

    On CUDA the copies are queued on the current stream. Those from or to pinned host memory do not
    wait: keep it alive and untouched until the stream has passed them.

    Args:
        srcs: Tensors of one shape and dtype (any), on the CPU or a CUDA device. Their first
            dimension counts blocks, its stride is free; a block is dense in memory.
        dsts: As many; dsts[i]'s blocks have the shape and strides of those of srcs[i], its number
            of blocks may differ.
        block_mapping: [n, 2] int64 on the CPU: pairs of a block in srcs and one in dsts;
            neighbouring blocks are copied at once. A pair with an id that does not exist is
            skipped. What a block holds that is the destination of two pairs, or source and
            destination, is undefined.

    Raises:
        ValueError: An argument of the wrong length, rank, shape, dtype, device or stride.
        IndexError: With checks on: an id that does not exist.
    """
    _ops.swap_blocks(srcs, dsts, block_mapping)


def merge_states(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over disjoint sets of them.

    With weights w_p = exp(lse_p - log(sum of exp(lse_p))), out is the sum of w_p * out_p, in fp32.
    A part whose lse is -inf saw no key: it does not count, whatever its out holds.

    Args:
        outs: From 1 to 512 parts [..., H, D] of one shape, float16, bfloat16 or float32; last dim
            contiguous, those before H viewable as one.
        lses: As many natural logarithms of softmax denominators, [..., H] float32, those before H
            viewable as one. Give `sinks` to one part only, or the sink counts more than once.

    Returns:
        (out, lse): outs[0]'s shape and dtype, lses[0]'s shape in float32; 0 and -inf where all
        parts have -inf. With one part, that part.

    Raises:
        ValueError: An argument of the wrong length, rank, shape, dtype, device or stride.
        RuntimeError: In backward: there is none.
    """
    if not outs:
        # Without a tensor there is no device, and the dispatcher does not know what to call.
        raise ValueError("paged_attn.merge_states: outs must be from 1 to 512 tensors, got 0")
    result: tuple[Tensor, Tensor] = _ops.merge_states(outs, lses)
    return result


def set_checks(enabled: bool) -> bool:
    """Switches checks mode, which looks for bad content before anything is written.

    Block ids, context lengths, `cu_seqlens_q`, slots and block mappings that would give NaN rows
    or be skipped raise IndexError instead, naming entry, value and limit. On CUDA every call that
    takes one of them from the device then waits for it. The environment variable
    PAGED_ATTN_CHECK=1 has it on from the start.

    Args:
        enabled: Whether checks are on from now on, in all threads.

    Returns:
        The previous setting.
    """
    previous: bool = _ops._set_checks(enabled)
    if _library.why_no_cuda is None:
        _ops._set_cuda_checks(enabled)
    return previous
