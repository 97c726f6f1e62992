"""The few names of vLLM that the backend's module imports, where there is no vLLM.

The engine itself runs in tests/vllm_engine; with these the layers' class is held to the reference
on every device.
"""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
from torch import Tensor

T = TypeVar("T")


class AttentionImpl(Generic[T]):
    pass


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.speculated = vllm_config

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool) -> None:
        self.reorder_batch_threshold = threshold + self.speculated * supports_spec_as_decode


class AttentionBackend:
    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        return None


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class Platform:
    cuda = False

    def is_cuda(self) -> bool:
        return self.cuda


@dataclass
class Step:
    """As vLLM's CommonAttentionMetadata."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    block_table_tensor: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: Any = True
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


def install(monkeypatch: pytest.MonkeyPatch, **fa_utils: Any) -> Platform:
    """Puts them where imports find them; `fa_utils` are names of that module of vLLM's."""
    platform = Platform()
    graph_support = enum.Enum("AttentionCGSupport", ["NEVER", "UNIFORM_BATCH"])
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"canonicalize_singleton_dim_strides": lambda tensor: tensor},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": graph_support,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
            "MultipleOf": MultipleOf,
        },
        "vllm.v1.attention.backends": {"fa_utils": types.SimpleNamespace(**fa_utils)},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "paged_attn.integrations._vllm_backend", raising=False)
    return platform
