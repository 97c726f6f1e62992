"""Times the decode op against gathering blocks and calling SDPA, on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.smollm2.model import PagedBatch


@dataclass
class Timing:
    """One decode step's attention, all layers together."""

    paged_seconds: float
    gather_seconds: float
    largest_difference: float  # between the two outputs


def gather_then_sdpa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: list[int]
) -> Tensor:
    """Decode attention without a paged kernel: copies each sequence's blocks together first.

    Args:
        q: [B, H, D].
        k_cache: [num_blocks, block_size, G, D].
        v_cache: [num_blocks, block_size, G, D].
        block_tables: [B, width] int32.
        context_lens: B lengths, on the host, so that no device synchronises for them.

    Returns:
        [B, H, D].
    """
    block_size = k_cache.shape[1]
    out = torch.empty_like(q)
    for b, length in enumerate(context_lens):
        blocks = block_tables[b, : -(-length // block_size)]
        k, v = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None]
            for cache in (k_cache, v_cache)
        )
        out[b] = F.scaled_dot_product_attention(q[b, None, :, None], k, v, enable_gqa=True)[0, :, 0]
    return out


@torch.inference_mode()
def time_decode(batch: PagedBatch) -> Timing:
    """Repeats the attention of a decode pass that has just run, both ways, over all layers."""
    context_lens = batch.context_lens.tolist()
    layers = [cache.unbind(0) for cache in batch.kv_cache]

    def paged() -> list[Tensor]:
        return [
            torch.ops.paged_attn.decode(q, k, v, batch.block_tables, batch.context_lens)
            for q, (k, v) in zip(batch.queries, layers, strict=True)
        ]

    def gather() -> list[Tensor]:
        return [
            gather_then_sdpa(q, k, v, batch.block_tables, context_lens)
            for q, (k, v) in zip(batch.queries, layers, strict=True)
        ]

    paged_seconds, paged_outs = _timed(paged, batch.kv_cache.device)
    gather_seconds, gather_outs = _timed(gather, batch.kv_cache.device)
    differences = torch.stack(paged_outs) - torch.stack(gather_outs)
    return Timing(paged_seconds, gather_seconds, differences.abs().max().item())


def _timed(
    function: Callable[[], list[Tensor]], device: torch.device
) -> tuple[float, list[Tensor]]:
    """Seconds that `function` takes, the device's work included, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result
