"""What torch has to know of the ops beside their kernels.

That is their fake kernels, their (absent) gradients, and what happens with CUDA tensors when the
CUDA library is not loaded.
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

_CACHE_ARGUMENTS = ["key", "value", "k_cache", "v_cache"]
_SEQUENCES = ["block_tables", "context_lens", "cu_seqlens_q"]
_SCALES = ["k_scale", "v_scale"]
_OPTIONS = ["alibi_slopes", "sinks", *_SCALES]
_DECODE_ARGUMENTS = ["q", "k_cache", "v_cache", *_SEQUENCES, *_OPTIONS]
_WRITE_ARGUMENTS = [*_CACHE_ARGUMENTS, "slot_mapping", *_SCALES]
_APPEND_ARGUMENTS = [*_CACHE_ARGUMENTS, *_SEQUENCES, *_SCALES]
_APPEND_DECODE_ARGUMENTS = ["q", *_CACHE_ARGUMENTS, *_SEQUENCES, *_OPTIONS]


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


def _expect_lists_on_one_device(op: str, lists: dict[str, list[Tensor]], **others: Tensor) -> None:
    named = {f"{name}[{i}]": t for name, tensors in lists.items() for i, t in enumerate(tensors)}
    named |= others
    if named:
        _expect_one_device(op, list(named), tuple(named.values()))


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
    _expect_one_device("reshape_and_cache", _WRITE_ARGUMENTS, args)


@torch.library.register_fake("paged_attn::append_kv")
def _(*args: Any, **_options: Any) -> None:
    _expect_one_device("append_kv", _APPEND_ARGUMENTS, args)


@torch.library.register_fake("paged_attn::append_decode")
def _(*args: Any, **_options: Any) -> Tensor:
    _expect_one_device("append_decode", _APPEND_DECODE_ARGUMENTS, args)
    q: Tensor = args[0]
    return q.new_empty(q.shape)


@torch.library.register_fake("paged_attn::copy_blocks")
def _(k_caches: list[Tensor], v_caches: list[Tensor], block_mapping: Tensor) -> None:
    lists = {"k_caches": k_caches, "v_caches": v_caches}
    _expect_lists_on_one_device("copy_blocks", lists, block_mapping=block_mapping)


@torch.library.register_fake("paged_attn::swap_blocks")
def _(srcs: list[Tensor], dsts: list[Tensor], block_mapping: Tensor) -> None:
    # Any mix of real devices is right, and so are meta tensors only.
    if any(tensor.device.type != "meta" for tensor in (*srcs, *dsts, block_mapping)):
        for name, tensors in (("srcs", srcs), ("dsts", dsts)):
            for i, tensor in enumerate(tensors):
                if tensor.device.type == "meta":
                    raise ValueError(
                        f"paged_attn.swap_blocks: {name}[{i}] must be on the CPU or a CUDA device, "
                        "got meta"
                    )
        if block_mapping.device.type != "cpu":
            raise ValueError(
                "paged_attn.swap_blocks: block_mapping must be on the CPU, "
                f"got {block_mapping.device}"
            )


@torch.library.register_fake("paged_attn::merge_states")
def _(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _expect_lists_on_one_device("merge_states", {"outs": outs, "lses": lses})
    shape = outs[0].shape
    return outs[0].new_empty(shape), outs[0].new_empty(shape[:-1], dtype=torch.float32)


# Raising is an op of its own, so that torch.compile can trace through a backward that nobody may
# ever run.
_no_backward = torch.library.Library("paged_attn", "FRAGMENT")
_no_backward.define("_no_backward(Tensor gradient) -> Tensor")


def _raise_in_backward(_gradient: Tensor) -> Tensor:
    raise RuntimeError(
        "paged_attn's ops are forward only: there is no backward. Call them under "
        "torch.inference_mode() or torch.no_grad(), or detach their inputs"
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


def _remember_lists(ctx: Any, inputs: tuple[list[Tensor], ...], **_others: Any) -> None:
    ctx.lengths = [len(tensors) for tensors in inputs]


def _backward_of_lists(ctx: Any, gradient: Tensor, *_others: Any) -> tuple[Any, ...]:
    first, *rest = ctx.lengths
    return ([_ops._no_backward(gradient)] * first, *([None] * length for length in rest))


torch.library.register_autograd(
    "paged_attn::merge_states", _backward_of_lists, setup_context=_remember_lists
)


class _ForwardOnly(torch.autograd.Function):
    """The identity, with a backward that raises: torch's own way is not for ops that write."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.num_inputs = len(inputs)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, *[_ops._no_backward(gradients[0])] * ctx.num_inputs)


def _append_decode_with_gradients(*args: Any, **options: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = _ops.append_decode(*args, **options)
    inputs = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    if inputs and torch.is_grad_enabled():
        out = _ForwardOnly.apply(out, *inputs)
    return out


_autograd_registrations = torch.library.Library("paged_attn", "IMPL", "Autograd")
_autograd_registrations.impl("append_decode", _append_decode_with_gradients)


def _raise_without_cuda(*_args: Any, **_options: Any) -> Any:
    raise RuntimeError(
        f"paged_attn: the CUDA library is not loaded, because {_library.why_no_cuda}. "
        "`python -m paged_attn` tells more"
    )


if _library.why_no_cuda is not None:
    _cuda_registrations = torch.library.Library("paged_attn", "IMPL", "CUDA")
    for _name in _OPS:
        _cuda_registrations.impl(_name, _raise_without_cuda)
