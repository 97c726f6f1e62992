"""Typed fronts of the ops that move cache data. Symbols and errors are those of ops.py."""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.paged_attn


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
