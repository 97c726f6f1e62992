"""Prefill on CUDA by the FlashAttention that vLLM brings, where it takes what a layer needs.

`decode` reads K and V again for every 16 rows; a prompt has thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._vllm_batch import FP8_CACHES, Part

if TYPE_CHECKING:
    from ._vllm_backend import PagedAttnImpl

_PAGE = 16


@dataclass(frozen=True)
class FlashPrefill:
    """One layer's call of `flash_attn_varlen_func`."""

    function: Callable[..., Any]
    version: int
    scale: float
    window: int
    softcap: float

    @classmethod
    def of(cls, impl: PagedAttnImpl) -> FlashPrefill | None:
        """The call for a layer, None where there is no FlashAttention or it does not serve it."""
        if impl.alibi_slopes is not None or impl.sinks is not None:
            return None
        if impl.kv_cache_dtype in FP8_CACHES:
            return None
        try:
            from vllm.v1.attention.backends import fa_utils

            function = fa_utils.flash_attn_varlen_func
            version = fa_utils.get_flash_attn_version(head_size=impl.head_size)
        except (ImportError, AttributeError):
            return None
        if version is None:
            return None
        return cls(function, version, impl.scale, impl.sliding_window, impl.logits_soft_cap)

    def takes(self, k_cache: Tensor) -> bool:
        """Whether it reads pages of this size and dtype."""
        halves = (torch.float16, torch.bfloat16)
        return k_cache.shape[1] % _PAGE == 0 and k_cache.dtype in halves

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        part: Part,
        max_context_len: int,
        out: Tensor,
    ) -> None:
        """Attention of a part's rows, into the same rows of `out`; arguments as of `attend`."""
        from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

        window = [self.window - 1, 0] if self.window > 0 else [-1, -1]
        self.function(
            q=q[part.rows],
            # TMA looks at the strides of dims of size 1 too.
            k=canonicalize_singleton_dim_strides(k_cache),
            v=canonicalize_singleton_dim_strides(v_cache),
            out=out[part.rows],
            cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=part.max_query_len,
            seqused_k=part.context_lens,
            max_seqlen_k=max_context_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=window,
            softcap=self.softcap,
            block_table=part.block_tables,
            fa_version=self.version,
        )
