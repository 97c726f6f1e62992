"""vLLM's attention over this package's ops: the entry point that vLLM calls in each process.

`vllm.general_plugins` names `register`. It enters a backend for decoder attention in vLLM's
registry, by the name of its class: what that class needs of vLLM is imported when vLLM selects it.
docs/vllm.md tells how to select it and what it serves.
"""

from __future__ import annotations

import importlib
import logging
import os

CPU_VARIABLE = "PAGED_ATTN_VLLM_CPU"
_BACKENDS = f"{__package__}._vllm_backend"
_logger = logging.getLogger(__name__)


def register() -> None:
    """Enters the backends in vLLM's registry, as often as it is called.

    On CUDA the backend is CUSTOM: it serves who asks for it (`attention_backend="CUSTOM"`), unless
    another plugin has that place already. vLLM's CPU platform has one backend and looks at no
    other's name; with PAGED_ATTN_VLLM_CPU=1 this package's takes its place. Without vLLM, or with
    one that has no such registry, nothing happens.
    """
    for_cpu = os.environ.get(CPU_VARIABLE) == "1"
    try:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        backends, register_backend = registry.AttentionBackendEnum, registry.register_backend
        custom, cpu = backends.CUSTOM, backends.CPU_ATTN
    except (ImportError, AttributeError) as error:
        log = _logger.warning if for_cpu else _logger.debug
        log("paged_attn: no attention backend, because vLLM or its registry is another: %s", error)
        return
    ours = f"{_BACKENDS}.CustomBackend"
    if custom.is_overridden() and custom.get_path() != ours:
        _logger.warning("paged_attn: CUSTOM stays %s; VLLM_PLUGINS selects one", custom.get_path())
    else:
        register_backend(custom, ours)
    if for_cpu:
        register_backend(cpu, f"{_BACKENDS}.CpuBackend")
