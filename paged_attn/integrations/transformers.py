"""Hugging Face transformers: continuous batching on this package's ops.

    from paged_attn.integrations.transformers import register

    register(model)
    outputs = model.generate_batch(prompts)

transformers looks its attention functions up by name, and takes every name with "flash" in it for
a provider of FlashAttention's functions. `register` adds the name `NAME` and answers the look-up
with those of `paged_attn.integrations.flash_attn`; all else is transformers' own code.
docs/transformers.md tells versions tried and what is not covered.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ._flash_arguments import refuse, refuse_unless_zero
from .flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["NAME", "register"]

# With "flash", then "2": transformers decodes through block tables only where a name has both.
NAME = "paged_attn_flash_2"
PAGED_NAME = f"paged|{NAME}"  # the same within continuous batching, before transformers 5.19
HOOKS = {
    "modeling_flash_attention_utils": (
        "_lazy_imports",
        "_flash_attention_forward",
        "_flash_with_kvcache_fn",
        "_pad_input",
        "_unpad_input",
        "lazy_import_flash_attention",
    ),
    "modeling_utils": ("AttentionInterface",),
    "masking_utils": ("AttentionMaskInterface", "flash_attention_mask"),
    "integrations.flash_attention": ("flash_attention_forward",),
    "generation.continuous_batching": ("ContinuousMixin",),
}


def register(model: Any = None) -> None:
    """Makes this package's attention known to transformers, and has a model use it.

    Other models and the other implementations stay as they are. Calling it again changes nothing.
    A model goes back by its `set_attn_implementation`.

    Args:
        model: A transformers model; None: only the name is made known, for
            `from_pretrained(..., attn_implementation=NAME)` or `set_attn_implementation(NAME)`.

    Raises:
        ImportError: transformers is not installed, or lacks what this needs; says what.
        NotImplementedError: transformers does not run this model with FlashAttention either.
    """
    flash, modeling, masking, forward, _ = (_module(*needed) for needed in HOOKS.items())
    if not hasattr(flash._lazy_imports, "paged_attn"):
        flash._lazy_imports = _answer(flash)
    attend = forward.flash_attention_forward
    modeling.AttentionInterface.register(NAME, attend)
    masking.AttentionMaskInterface.register(NAME, masking.flash_attention_mask)
    if "k_cache" not in inspect.signature(flash._flash_attention_forward).parameters:
        modeling.AttentionInterface.register(PAGED_NAME, _paged_forward)
    if model is not None:
        functions, *_ = flash.lazy_import_flash_attention(NAME)
        if functions[1] is not flash_attn_varlen_func:
            raise _missing("attention that is looked up by modeling_flash_attention_utils")
        _allow(model)
        model.set_attn_implementation(NAME)
        if model.config.get_text_config()._attn_implementation != NAME:  # transformers only warns
            raise _refused(model)


def _module(name: str, hooks: Sequence[str]) -> Any:
    """A module of transformers that has all that is needed of it."""
    name = f"transformers.{name}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise _missing(name) from error
        raise
    for hook in hooks:
        if not hasattr(module, hook):
            raise _missing(f"{name}.{hook}")
    return module


def _missing(what: str) -> ImportError:
    version = importlib.import_module("transformers").__version__
    return ImportError(
        f"paged_attn.integrations.transformers: transformers must have {what}, as versions 5.17 to "
        f"5.24 have, got transformers {version}"
    )


def _answer(flash: Any) -> Callable[..., Any]:
    """`_lazy_imports` that knows our names too."""
    original = flash._lazy_imports

    @functools.wraps(original)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in (NAME, PAGED_NAME):
            return original(implementation, *args, **kwargs)
        return (
            _flash_attn_func,
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
            flash._pad_input,
            flash._unpad_input,
        )

    lazy_imports.paged_attn = True  # type: ignore[attr-defined]
    return lazy_imports


def _flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention without padding, which models have outside continuous batching."""
    refuse_unless_zero("flash_attn_func", dropout_p=dropout_p)
    return flash_attn_with_kvcache(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        s_aux=s_aux,
    )


def _paged_forward(
    module: Any,
    *args: Any,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Any:
    """Attention within continuous batching before transformers 5.19, where options get lost."""
    # It looks for the window in the module, where not every model has it.
    lost = sliding_window if sliding_window != getattr(module, "sliding_window", None) else None
    for name, value in (("softcap", softcap), ("sliding_window", lost)):
        if value:
            raise NotImplementedError(
                f"paged_attn.integrations.transformers: {name} must be None before transformers "
                f"5.19, whose continuous batching does not pass it on, got {value}"
            )
    paged = importlib.import_module("transformers.integrations.flash_paged")
    return paged.paged_attention_forward(module, *args, **kwargs)


def _allow(model: Any) -> None:
    """Adds NAME to those that a model and its parts are compatible with, where they have a list.

    They list what has sinks, as NAME has; to other models transformers gives whatever is asked for.
    """
    if not getattr(model, "_supports_flash_attn", False):
        raise _refused(model)
    for part in model.modules():
        listed = getattr(part, "_compatible_flash_implementations", None)
        if listed is not None and NAME not in listed and part._supports_flash_attn:
            part._compatible_flash_implementations = [*listed, NAME]


def _refused(model: Any) -> NotImplementedError:
    expected = "one that transformers runs FlashAttention with"
    return refuse("integrations.transformers.register", "model", expected, type(model).__name__)
