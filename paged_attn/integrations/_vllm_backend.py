"""vLLM's classes for a backend of decoder attention: `CustomBackend` on CUDA, `CpuBackend`.

Imported by vLLM, by the names that `vllm.register` entered. Symbols as in _vllm_batch.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from .. import _library, cache_ops
from . import _vllm_batch
from ._vllm_flash_prefill import FlashPrefill

if not hasattr(AttentionBackend, "supported_kv_cache_layouts"):
    raise ImportError(
        "paged_attn.integrations.vllm: vLLM must be one whose caches are [N, G, S, 2 * D] in any "
        "memory order (0.32.0 is), got one whose backends have no supported_kv_cache_layouts"
    )

_NAME = "paged_attn.integrations.vllm"
_CACHE_DTYPES = ("auto", "float16", "bfloat16", *_vllm_batch.FP8_CACHES)
_MAX_HEAD_SIZE = 256


class PagedAttnBuilder(AttentionMetadataBuilder[_vllm_batch.Batch]):
    """Makes a `Batch` of what vLLM knows of a step."""

    # A captured call serves other lengths and tables, not another number of queries.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """Asks vLLM to put decodes first, those with speculated tokens too."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> _vllm_batch.Batch:
        """The step as two calls of `decode` see it; nothing waits for the device."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(f"{_NAME}: causal must be True, got {common.causal!r}")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            given = getattr(common, name, None)
            if given is not None and len(given):
                raise NotImplementedError(f"{_NAME}: {name} must be None, got one")
        num_reqs = common.num_reqs
        return _vllm_batch.split(
            common.query_start_loc[: num_reqs + 1],
            common.query_start_loc_cpu[: num_reqs + 1],
            common.block_table_tensor[:num_reqs],
            common.seq_lens[:num_reqs],
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_context_len=common.max_seq_len,
            decode_query_len=self.reorder_batch_threshold,
        )


class PagedAttnImpl(AttentionImpl[_vllm_batch.Batch]):
    """A layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Takes what vLLM's layers give.

        Raises:
            NotImplementedError: What is not served, where vLLM's platform has not asked before.
        """
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{_NAME}: attn_type must be decoder, got {attn_type}")
        if not PagedAttnBackend.supports_head_size(head_size):
            raise NotImplementedError(
                f"{_NAME}: head_size must be a multiple of 8 up to {_MAX_HEAD_SIZE}, "
                f"got {head_size}"
            )
        if kv_cache_dtype not in _CACHE_DTYPES:
            raise NotImplementedError(
                f"{_NAME}: kv_cache_dtype must be one of {_CACHE_DTYPES}, got {kv_cache_dtype!r}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.flash_prefill = FlashPrefill.of(self) if current_platform.is_cuda() else None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: _vllm_batch.Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's tokens to all that is in the cache.

        Args:
            layer: With the scales `_k_scale` and `_v_scale`, read if the cache is fp8.
            query: [T, H, D], any strides but the last, which is 1.
            key: In the cache already.
            value: In the cache already.
            kv_cache: [N, G, S, 2 * D].
            attn_metadata: The step; None in a run that only measures memory.
            output: [T, H, D], written.
            output_scale: None.
            output_block_scale: None.

        Returns:
            `output`.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{_NAME}: output_scale must be None, got one")
        if attn_metadata is None:
            return output.zero_()
        k_cache, v_cache = _vllm_batch.caches(kv_cache, self.head_size, self.kv_cache_dtype)
        batch = attn_metadata
        options = {
            "alibi_slopes": self.alibi_slopes,
            "sinks": self._sinks_for(query.dtype),
            **self._scales(layer),
            "scale": self.scale,
            "window": self.sliding_window,
            "softcap": self.logits_soft_cap,
        }
        if batch.decodes is not None:
            _vllm_batch.attend(query, k_cache, v_cache, batch.decodes, output, **options)
        if batch.prefills is not None:
            flash = self.flash_prefill
            if flash is not None and flash.takes(k_cache):
                longest = batch.max_context_len
                flash(query, k_cache, v_cache, batch.prefills, longest, output)
            else:
                _vllm_batch.attend(query, k_cache, v_cache, batch.prefills, output, **options)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes a step's keys and values, [T, G, D], into their slots."""
        k_cache, v_cache = _vllm_batch.caches(kv_cache, self.head_size, self.kv_cache_dtype)
        cache_ops.reshape_and_cache(
            key, value, k_cache, v_cache, slot_mapping, **self._scales(layer)
        )

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        """As vLLM's own backends: a cache of the model's dtype holds what came, unscaled."""
        if self.kv_cache_dtype not in _vllm_batch.FP8_CACHES:
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}

    def _sinks_for(self, dtype: torch.dtype) -> Tensor | None:
        if self.sinks is None or self.sinks.dtype in (torch.float32, dtype):
            return self.sinks
        return self.sinks.float()


class PagedAttnBackend(AttentionBackend):
    """What vLLM asks of a backend before it chooses it, as far as both devices agree."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(_CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[PagedAttnImpl]:
        """The layers' class."""
        return PagedAttnImpl

    @staticmethod
    def get_builder_cls() -> type[PagedAttnBuilder]:
        """The class that makes a step's metadata."""
        return PagedAttnBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any."""
        del kv_cache_spec
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """What `decode` takes."""
        return head_size % 8 == 0 and 0 < head_size <= _MAX_HEAD_SIZE

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """True."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **more: Any
    ) -> str | None:
        """Why caches of `kv_cache_dtype` do not go with queries of `dtype`, or None."""
        del head_size, args, more
        if kv_cache_dtype in _vllm_batch.FP8_CACHES and dtype == torch.float32:
            return f"{kv_cache_dtype} caches need float16 or bfloat16 queries"
        if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
            return f"{kv_cache_dtype} caches need queries of that dtype"
        return None


class CustomBackend(PagedAttnBackend):
    """On CUDA, where `attention_backend="CUSTOM"` asks for it."""

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry that leads here."""
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """8.0 and newer."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **more: Any
    ) -> str | None:
        """As all, and why the CUDA kernels are not loaded."""
        if _library.why_no_cuda is not None:
            return f"paged_attn's CUDA kernels are not loaded: {_library.why_no_cuda}"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **more)


class CpuBackend(PagedAttnBackend):
    """On the CPU, in the place of vLLM's own."""

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry that leads here."""
        return "CPU_ATTN"
