"""Typed fronts of the ops that attend; those that only move cache data are in cache_ops.py.

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
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest tokens to all of its tokens in a paged cache.

    Query t of a sequence's Q has the position i = context_len - Q + t. Over the keys j that it
    sees, s_j = scale * q . K_j and out = sum of softmax(s)_j * V_j, with softmax and accumulation
    in fp32. Query head h reads KV head h // (H // G). `paged_attn.reference` has the formula with
    all options, and defines this function in plain PyTorch.

    Args:
        q: [B, H, D], [B, Q, H, D] or, with `cu_seqlens_q`, [T, H, D]; float16, bfloat16 or
            float32; last dim contiguous, other strides free. D is a multiple of 8 up to 256.
        k_cache: [N, S, G, D]; q's dtype, or float8_e4m3fn or float8_e5m2 where q is float16 or
            bfloat16; last dim contiguous, other strides free.
        v_cache: Like `k_cache`, with strides of its own.
        block_tables: [B, M] int32; entry [b, c] is the block that holds the tokens
            c * S ... c * S + S - 1 of sequence b. Entries past a sequence's last token, or of
            blocks that the window hides, are not used. A used one outside [0, N) makes that
            sequence's rows NaN.
        context_lens: [B] int32: tokens in the cache, the Q query tokens included. 0 or less gives
            zeros; more than M * S gives NaN rows.
        cu_seqlens_q: [B + 1] int32: sequence b owns the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q. Rows of no sequence give zeros.
        alibi_slopes: [H] float32: slope * (j - i) is added to s_j, after `softcap`.
        sinks: [H] float32 or q's dtype: a logit that joins each softmax's denominator only.
        k_scale: [], [1] or [G] float32: K is what the cache holds times this. For every cache
            dtype.
        v_scale: Like `k_scale`, for V.
        scale: Factor on q . K_j; 1 / sqrt(D) by default.
        max_query_len: With `cu_seqlens_q`, an upper bound on a sequence's queries; 0: unknown. A
            sequence with more is NaN.
        causal: True: a query sees the keys j <= i. False: all of its sequence's keys; then
            `window` must be negative and `alibi_slopes` None.
        window: Number of keys that a query sees, i - window < j <= i; negative: all.
        softcap: c > 0 turns s_j into c * tanh(s_j / c), before `alibi_slopes`; 0: off.
        batch_invariant: True: a sequence's bits do not depend on the other sequences, its place
            in the batch, padding rows or the table's width.
        out: Where to write, of q's shape and dtype; a new tensor by default.

    Returns:
        q's shape and dtype (`out` if it was given). Rows that see no key are 0, as are rows whose
        scores are all -inf.

    Raises:
        ValueError: An argument of the wrong rank, shape, dtype, device, stride or alignment, or
            an impossible option.
        IndexError: With checks on: a bad block id, context length or `cu_seqlens_q` entry.
        RuntimeError: In backward: there is none. With CUDA tensors if the CUDA library is not
            loaded.
    """
    tensors = (q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q)
    features = (alibi_slopes, sinks, k_scale, v_scale)
    options = {
        "scale": scale,
        "max_query_len": max_query_len,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "batch_invariant": batch_invariant,
    }
    if out is None:
        result: Tensor = _ops.decode(*tensors, *features, **options)
        return result
    _ops.decode.out(*tensors, *features, **options, out=out)
    return out


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
        alibi_slopes: See `decode`.
        sinks: See `decode`. The denominator whose logarithm is returned includes them.
        k_scale: See `decode`.
        v_scale: See `decode`.
        scale: See `decode`.
        max_query_len: See `decode`.
        causal: See `decode`.
        window: See `decode`.
        softcap: See `decode`.
        batch_invariant: See `decode`.
        out: Where to write the rows. Give both or neither of `out` and `lse`.
        lse: Where to write the logarithms: out.shape[:-1], float32, contiguous.

    Returns:
        (out, lse). lse is q.shape[:-1] in float32. Rows that see no key, or only scores of -inf,
        have lse -inf, or their sink; rows of no sequence -inf, rows of bad sequences NaN.

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
    tensors = (q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q)
    features = (alibi_slopes, sinks, k_scale, v_scale)
    options = {
        "scale": scale,
        "max_query_len": max_query_len,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "batch_invariant": batch_invariant,
    }
    if out is None or lse is None:
        result: tuple[Tensor, Tensor] = _ops.decode_with_lse(*tensors, *features, **options)
        return result
    _ops.decode_with_lse.out(*tensors, *features, **options, out=out, lse=lse)
    return out, lse


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

    On CUDA the kernels overlap: old keys and values are read while the new ones are written (not
    with ragged queries). So a slot that is written must be a live one of its own sequence alone;
    what another sequence that has it too reads there is either the old content or the new.

    Args:
        q: As in `decode`, as all that is not named here.
        key: As in `append_kv`, of q's dtype and tokens.
        value: Like `key`.
        k_cache: As in `append_kv`.
        v_cache: As in `append_kv`.
        block_tables: As in `append_kv`.
        context_lens: As in `append_kv`.
        cu_seqlens_q: As in `append_kv`.
        alibi_slopes: See `decode`.
        sinks: See `decode`.
        k_scale: See `decode`.
        v_scale: See `decode`.
        scale: See `decode`.
        max_query_len: See `decode`.
        causal: See `decode`.
        window: See `decode`.
        softcap: See `decode`.
        batch_invariant: See `decode`.

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
    if isinstance(outs, (list, tuple)) and not outs:
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


def set_early_start(enabled: bool) -> bool:
    """Lets `decode` on CUDA begin while earlier kernels of its stream still run: a promise.

    The caller promises that whatever precedes a call of `decode` in its stream and may not have
    ended writes no block table, no context length, no scale, and no keys and values but those of
    the call's query tokens. q and the query tokens' keys and values may be written until the very
    kernel before: they are waited for. In a serving engine that is so where tables and lengths of
    a step are on the device before its first layer runs. A graph that is captured keeps what was
    set. Where the promise is broken results may be anything, from then on also in replays of the
    same graph, which has to be captured again, and a call of more than 64 sequences whose lengths
    change under it may not end.

    What is gained is the time in which a call finds its work and the first keys and values arrive,
    some microseconds where the kernel before is a `decode` as well. It concerns calls with the
    default options (scales of fp8 caches aside) and uniform queries, on devices of compute
    capability 9.0 on, where docs/support.md says that there is a kernel without options; others
    wait as always.

    Args:
        enabled: Whether the promise holds from now on, in all threads.

    Returns:
        The previous setting; False where there is no CUDA library.
    """
    if _library.why_no_cuda is not None:
        return False
    previous: bool = _ops._set_early_start(enabled)
    return previous
