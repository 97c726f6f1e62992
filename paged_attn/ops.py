"""Typed fronts of `torch.ops.paged_attn.*`, their fake kernels and their (absent) gradients.

Symbols in the docstrings: B sequences, Q query tokens a sequence, T query tokens in all, H query
heads, G KV heads (H is a multiple of G), D head dim, N blocks in the pool, S slots a block, M
columns of the block table.

Every op raises ValueError for a bad argument, naming it, what was expected and what came, before
anything is written. With checks on (see `set_checks`) bad content raises IndexError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _library

_OPS = [
    "append_decode",
    "append_kv",
    "copy_blocks",
    "decode",
    "decode.out",
    "decode_with_lse",
    "decode_with_lse.out",
    "merge_states",
    "reshape_and_cache",
    "swap_blocks",
]

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
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes new tokens' keys and values into their slots of a paged cache.

    Args:
        key: [T', G, D] with T' >= T, the cache's dtype; last dim contiguous, other strides free.
        value: Like `key`.
        k_cache: [N, S, G, D], written in place; last dim contiguous, other strides free.
        v_cache: Like `k_cache`.
        slot_mapping: [T] int64 or int32: row t goes to slot block * S + offset. Slots below 0 and
            from N * S on are skipped. What two rows of one slot leave there is undefined.

    Raises:
        ValueError: An argument of the wrong rank, shape, dtype, device or stride.
        IndexError: With checks on: a slot from N * S on.
    """
    _ops.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)


def set_checks(enabled: bool) -> bool:
    """Switches checks mode, which looks for bad content before anything is written.

    Block ids, context lengths, `cu_seqlens_q` and slots that would give NaN rows or be skipped
    raise IndexError instead, naming sequence, column, value and limit. On CUDA every call then
    waits for the device. The environment variable PAGED_ATTN_CHECK=1 has it on from the start.

    Args:
        enabled: Whether checks are on from now on, in all threads.

    Returns:
        The previous setting.
    """
    previous: bool = _ops._set_checks(enabled)
    if _library.why_no_cuda is None:
        _ops._set_cuda_checks(enabled)
    return previous


_DECODE_ARGUMENTS = ["q", "k_cache", "v_cache", "block_tables", "context_lens", "cu_seqlens_q"]
_CACHE_ARGUMENTS = ["key", "value", "k_cache", "v_cache", "slot_mapping"]


def _expect_one_device(op: str, names: list[str], args: tuple[Any, ...], **outputs: Tensor) -> None:
    """Fake kernels also run for a meta tensor among real ones, where nothing else would object."""
    tensors = {**dict(zip(names, args, strict=False)), **outputs}
    first = args[0].device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != first:
            raise ValueError(
                f"paged_attn.{op}: {name} must be on {names[0]}'s device {first}, "
                f"got {tensor.device}"
            )


@torch.library.register_fake("paged_attn::decode")
def _(*args: Any, **_options: Any) -> Tensor:
    _expect_one_device("decode", _DECODE_ARGUMENTS, args)
    q: Tensor = args[0]
    return q.new_empty(q.shape)


@torch.library.register_fake("paged_attn::decode_with_lse")
def _(*args: Any, **_options: Any) -> tuple[Tensor, Tensor]:
    _expect_one_device("decode_with_lse", _DECODE_ARGUMENTS, args)
    q: Tensor = args[0]
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("paged_attn::decode.out")
def _(*args: Any, out: Tensor, **_options: Any) -> None:
    _expect_one_device("decode", _DECODE_ARGUMENTS, args, out=out)


@torch.library.register_fake("paged_attn::decode_with_lse.out")
def _(*args: Any, out: Tensor, lse: Tensor, **_options: Any) -> None:
    _expect_one_device("decode_with_lse", _DECODE_ARGUMENTS, args, out=out, lse=lse)


@torch.library.register_fake("paged_attn::reshape_and_cache")
def _(*args: Any, **_options: Any) -> None:
    _expect_one_device("reshape_and_cache", _CACHE_ARGUMENTS, args)


# Raising is an op of its own, so that torch.compile can trace through a backward that nobody may
# ever run.
_no_backward = torch.library.Library("paged_attn", "FRAGMENT")
_no_backward.define("_no_backward(Tensor gradient) -> Tensor")


def _raise_in_backward(_gradient: Tensor) -> Tensor:
    raise RuntimeError(
        "paged_attn.decode is forward only: it has no backward. Call it under "
        "torch.inference_mode() or torch.no_grad(), or detach its inputs"
    )


_no_backward.impl("_no_backward", _raise_in_backward, "CompositeExplicitAutograd")
torch.library.register_fake("paged_attn::_no_backward", torch.empty_like)


def _remember_inputs(ctx: Any, inputs: tuple[Any, ...], **_others: Any) -> None:
    ctx.num_inputs = len(inputs)


def _backward(ctx: Any, gradient: Tensor, *_others: Any) -> tuple[Tensor | None, ...]:
    return (_ops._no_backward(gradient), *[None] * (ctx.num_inputs - 1))


# NOTE: outside torch.inference_mode() this costs a call 8 us on the host, because torch enters
# Python for it; it is how a gradient that would silently stop at this op becomes an error.
for _name in ("decode", "decode_with_lse"):
    torch.library.register_autograd(
        f"paged_attn::{_name}", _backward, setup_context=_remember_inputs
    )


def _raise_without_cuda(*_args: Any, **_options: Any) -> Any:
    raise RuntimeError(
        f"paged_attn: the CUDA library is not loaded, because {_library.why_no_cuda}. "
        "`python -m paged_attn` tells more"
    )


if _library.why_no_cuda is not None:
    _cuda_registrations = torch.library.Library("paged_attn", "IMPL", "CUDA")
    for _name in _OPS:
        _cuda_registrations.impl(_name, _raise_without_cuda)
