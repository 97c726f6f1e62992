"""What the tests ask in vLLM's worker process; vLLM mixes `Probe` into its worker."""

from __future__ import annotations

from typing import Any

import torch


class Probe:
    def attention_layers(self) -> list[dict[str, Any]]:
        """Of each layer: its classes, and its cache's shape and strides."""
        config = self.model_runner.vllm_config  # type: ignore[attr-defined]
        layers = config.compilation_config.static_forward_context.values()
        return [
            {
                "impl": f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}",
                "backend": layer.attn_backend.__qualname__,
                "shape": list(layer.kv_cache.shape),
                "strides": list(layer.kv_cache.stride()),
                "dtype": str(layer.kv_cache.dtype),
                "address": layer.kv_cache.data_ptr(),
                "layout": config.cache_config.kv_cache_layout,
            }
            for layer in layers
            if hasattr(layer, "attn_backend")
        ]

    def watch(self, count_calls: bool) -> None:
        """From now on keeps each step's query lengths and, if asked for, counts calls of ops."""
        from paged_attn.integrations import _vllm_batch

        steps: list[dict[str, list[int]]] = []
        split = _vllm_batch.split

        def lengths(part: Any) -> list[int]:
            if part is None:
                return []
            if part.cu_seqlens_q is None:
                return [1] * part.context_lens.shape[0]
            return torch.diff(part.cu_seqlens_q).tolist()

        def kept(*args: Any, **options: Any) -> Any:
            batch = split(*args, **options)
            steps.append({"decodes": lengths(batch.decodes), "prefills": lengths(batch.prefills)})
            return batch

        _vllm_batch.split = kept
        self.probe_steps = steps
        self.probe_restore = lambda: setattr(_vllm_batch, "split", split)
        self.probe_profile = None
        if count_calls:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self.probe_profile = torch.profiler.profile(activities=activities)
            self.probe_profile.__enter__()

    def seen(self) -> dict[str, Any]:
        """What was kept since `watch`."""
        self.probe_restore()
        calls: dict[str, int] = {}
        if self.probe_profile is not None:
            self.probe_profile.__exit__(None, None, None)
            events = self.probe_profile.key_averages()
            calls = {e.key: e.count for e in events if e.key.startswith(("paged_attn::", "_C::"))}
        return {"steps": self.probe_steps, "calls": calls}
