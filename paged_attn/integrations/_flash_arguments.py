"""FlashAttention's arguments, checked and turned into those of this package's ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops


def bad(op: str, argument: str, expected: str, got: Any) -> ValueError:
    """The error for a wrong argument; tensors are told by dtype and shape."""
    return ValueError(f"paged_attn.{op}: {argument} must be {expected}, got {_told(got)}")


def refuse(op: str, argument: str, expected: str, got: Any) -> NotImplementedError:
    """The error for what FlashAttention has and the ops have not."""
    return NotImplementedError(
        f"paged_attn.{op}: {argument} must be {expected} here, got {_told(got)}"
    )


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} on {value.device}"
    return repr(value)


def refuse_given(op: str, **arguments: Any) -> None:
    """Raises for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise refuse(op, name, "None", value)


def refuse_unless_zero(op: str, **arguments: Any) -> None:
    """Raises for the first argument that is not 0."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value != 0:
            raise refuse(op, name, "0", value)


def expect_none(op: str, why: str, **arguments: Any) -> None:
    """Raises for the first argument that is not None; `why` says when it must be."""
    for name, value in arguments.items():
        if value is not None:
            raise bad(op, name, f"None {why}", value)


def expect_int32(
    op: str, name: str, tensor: Any, like: Tensor, rows: int | None, dim: int = 1
) -> Tensor:
    """Returns `tensor` if it is int32, on like's device, of `dim` dims, the first being `rows`."""
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype == torch.int32
        and tensor.dim() == dim
        and (rows is None or tensor.shape[0] == rows)
        and tensor.device == like.device
    ):
        return tensor
    shape = ", ".join(["any" if rows is None else str(rows), *["any"] * (dim - 1)])
    raise bad(op, name, f"int32 [{shape}] on {like.device}", tensor)


def count_sequences(op: str, q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """B, from q [B, Q, H, D], or from cu_seqlens_q with q [T, H, D]."""
    if cu_seqlens_q is None:
        if q.dim() != 4:
            raise bad(op, "q", "[B, Q, H, D], or [T, H, D] with cu_seqlens_q", q)
        return q.shape[0]
    expect_int32(op, "cu_seqlens_q", cu_seqlens_q, q, None)
    if cu_seqlens_q.shape[0] == 0:
        raise bad(op, "cu_seqlens_q", "[B + 1]", cu_seqlens_q)
    if q.dim() != 3:
        raise bad(op, "q", "[T, H, D] with cu_seqlens_q", q)
    return cu_seqlens_q.shape[0] - 1


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last dim is strided: FlashAttention takes such q, k and v."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def visible_keys(
    op: str,
    causal: bool,
    window_size: Sequence[int],
    max_queries: int | None,
    max_keys: int,
) -> tuple[bool, int]:
    """What causal and window_size are as decode's (causal, window).

    A query at position i sees the keys i - left to i + right, a negative side being open;
    `causal` closes the right side behind i.

    Args:
        op: For the error.
        causal: FlashAttention's.
        window_size: (left, right).
        max_queries: No sequence has more; None: unknown.
        max_keys: No sequence has more.
    """
    if not (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and isinstance(window_size[0], int)
        and isinstance(window_size[1], int)
    ):
        raise bad(op, "window_size", "a pair of integers (left, right)", window_size)
    left, right = window_size
    # A lone query is the last token: no key lies to its right.
    if causal or right == 0 or max_queries == 1:
        return True, left + 1 if left >= 0 else -1
    open_right = right < 0 or (max_queries is not None and right >= max_queries - 1)
    if open_right and (left < 0 or left >= max_keys - 1):
        return False, -1
    expected = "(-1, -1) or (left, 0) with causal=False and more than one query"
    raise refuse(op, "window_size", expected, tuple(window_size))


def per_head(op: str, name: str, values: Tensor | None, num_sequences: int) -> Tensor | None:
    """One number for each head, out of FlashAttention's one for each sequence and head.

    Args:
        op: For the error.
        name: The argument's.
        values: [B, heads], the rows being one and the same in memory (B = 1, or expanded), or what
            decode takes.
        num_sequences: B.
    """
    if values is None or values.dim() != 2:
        return values
    if values.shape[0] != num_sequences:
        raise bad(op, name, f"[{num_sequences}, heads] or [heads]", values)
    if num_sequences == 0:
        return None
    if num_sequences > 1 and values.stride(0) != 0:
        expected = "the same for all sequences ([heads], or [B, heads] expanded from it)"
        raise refuse(op, name, expected, values)
    return values[0]


def decode_options(
    op: str,
    num_sequences: int,
    visible: tuple[bool, int],
    *,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    **options: Any,
) -> dict[str, Any]:
    """The options of decode: FlashAttention's tensors as its own, `options` as they are.

    Args:
        op: For errors.
        num_sequences: B.
        visible: What `visible_keys` returned.
        alibi_slopes: [H] or [B, H].
        s_aux: [H].
        k_descale: [], [1], [G] or [B, G].
        v_descale: Like `k_descale`.
        options: decode's, by its names.
    """
    causal, window = visible
    if alibi_slopes is not None and not causal:
        expected = "None with causal=False and more than one query"
        raise refuse(op, "alibi_slopes", expected, alibi_slopes)
    slopes = per_head(op, "alibi_slopes", alibi_slopes, num_sequences)
    k_scale = per_head(op, "k_descale", k_descale, num_sequences)
    v_scale = per_head(op, "v_descale", v_descale, num_sequences)
    return {
        "alibi_slopes": None if slopes is None else slopes.contiguous(),
        "sinks": None if s_aux is None else s_aux.contiguous(),
        "k_scale": None if k_scale is None else _scale(k_scale),
        "v_scale": None if v_scale is None else _scale(v_scale),
        "causal": causal,
        "window": window,
        **options,
    }


def _scale(values: Tensor) -> Tensor:
    """Contiguous; one number expanded to all heads is one number."""
    if values.dim() == 1 and values.stride(0) == 0:
        return values[:1]
    return values.contiguous()


def attend(
    tensors: Sequence[Tensor | None],
    options: dict[str, Any],
    with_lse: bool,
    empty_lse_inf: bool,
) -> Any:
    """decode, and if asked for the logarithms in FlashAttention's layout.

    Args:
        tensors: decode's, up to cu_seqlens_q.
        options: decode's.
        with_lse: Whether to return the logarithms.
        empty_lse_inf: Whether they are +inf, not -inf, where a query sees no key.

    Returns:
        out, or (out, lse): lse is [B, H, Q] or, with ragged queries, [H, T].
    """
    if not with_lse:
        return ops.decode(*tensors, **options)  # type: ignore[arg-type]
    out, lse = ops.decode_with_lse(*tensors, **options)  # type: ignore[arg-type]
    if empty_lse_inf:
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    return out, lse.transpose(-1, -2).contiguous()
