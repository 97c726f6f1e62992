"""The same model with a contiguous KV cache per sequence and SDPA: what paging must reproduce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.smollm2.model import SmolLM2, causal_attention


@dataclass
class Generation:
    """Greedy tokens of one prompt."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # best less second-best logit, per token


class _ContiguousCache:
    """K and V of some sequences, each in a tensor of its own with room for its longest."""

    def __init__(self, model: SmolLM2, capacities: Sequence[int]) -> None:
        # A block of `capacity` slots is a contiguous cache: [num_layers, 2, 1, capacity, G, D].
        self._caches = [model.new_cache(1, n)[:, :, 0] for n in capacities]
        self._lens = [0] * len(capacities)
        self._active: list[tuple[int, int]] = []  # (sequence, its new tokens), in the pass's order

    def begin(self, new_tokens: list[tuple[int, int]]) -> list[int]:
        """Takes the (sequence, number of tokens) pairs of the next pass; returns positions."""
        self._active = new_tokens
        positions: list[int] = []
        for sequence, count in new_tokens:
            start = self._lens[sequence]
            positions.extend(range(start, start + count))
            self._lens[sequence] += count
        return positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = [count for _, count in self._active]
        decoding = all(count == 1 for count in counts)
        outs = []
        split = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
        for (sequence, count), (q_one, k_one, v_one) in zip(self._active, split, strict=True):
            k_cache, v_cache = self._caches[sequence][layer]
            end = self._lens[sequence]
            k_cache[end - count : end] = k_one
            v_cache[end - count : end] = v_one
            if decoding:
                keys, values = (c[:end].transpose(0, 1)[None] for c in (k_cache, v_cache))
                out = F.scaled_dot_product_attention(
                    q_one.transpose(0, 1)[None], keys, values, enable_gqa=True
                )
                outs.append(out[0].transpose(0, 1))
        return torch.cat(outs) if decoding else causal_attention(q, k, v, counts)


@torch.inference_mode()
def generate(
    model: SmolLM2,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[Generation]:
    """Greedy generation for all `prompts` at once, no cache shared between sequences.

    Args:
        model: The weights.
        prompts: Token ids of each prompt, none empty.
        max_new_tokens: Tokens to generate for each.
        stop_ids: Token ids that end a sequence.

    Returns:
        A generation per prompt, in order.
    """
    cache = _ContiguousCache(model, [len(p) + max_new_tokens for p in prompts])
    results = [Generation() for _ in prompts]
    pending = {i: list(prompt) for i, prompt in enumerate(prompts)}
    while pending:
        positions = cache.begin([(i, len(tokens)) for i, tokens in pending.items()])
        token_ids = [token for tokens in pending.values() for token in tokens]
        hidden = model(
            torch.tensor(token_ids, device=model.device),
            torch.tensor(positions, device=model.device),
            cache.attend,
        )
        ends = torch.tensor([len(t) for t in pending.values()], device=model.device).cumsum(0) - 1
        best = model.logits(hidden[ends]).topk(2)
        tokens, gaps = best.indices[:, 0].tolist(), (-best.values.diff()).flatten().tolist()
        for i, token, gap in zip(list(pending), tokens, gaps, strict=True):
            results[i].tokens.append(token)
            results[i].gaps.append(gap)
            pending[i] = [token]
            if token in stop_ids or len(results[i].tokens) == max_new_tokens:
                del pending[i]
    return results
