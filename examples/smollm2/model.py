"""A Llama-architecture transformer whose attention reads and writes a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paged_attn
from examples.smollm2.weights import Config

# (layer, q [T, H, D], k [T, G, D], v [T, G, D]) -> attention output [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class PagedBatch:
    """Tokens of one forward pass and where their sequences live in the pool.

    A decode step has one token a sequence. A prefill has all tokens of each sequence, one after
    the other.
    """

    kv_cache: Tensor  # [num_layers, 2 (K, V), num_blocks, block_size, G, D]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    block_tables: Tensor  # [B, width] int32
    context_lens: Tensor  # [B] int32, the new tokens included
    slot_mapping: Tensor  # [T] int64
    prompt_lens: list[int] | None  # prefill: the B lengths; decode: None
    queries: list[Tensor] = field(default_factory=list)  # decode: [B, H, D] per layer, kept

    @classmethod
    def prefill(
        cls,
        manager: paged_attn.BlockManager,
        kv_cache: Tensor,
        seq_ids: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> PagedBatch:
        """All `tokens` of freshly allocated sequences."""
        lens = [len(t) for t in tokens]
        positions = np.concatenate([np.arange(n) for n in lens])
        return cls._build(manager, kv_cache, seq_ids, np.concatenate(tokens), positions, lens)

    @classmethod
    def decode(
        cls,
        manager: paged_attn.BlockManager,
        kv_cache: Tensor,
        seq_ids: Sequence[int],
        tokens: Sequence[int],
    ) -> PagedBatch:
        """The last token of each sequence; its slot has been appended already."""
        return cls._build(manager, kv_cache, seq_ids, np.asarray(tokens), None, None)

    @classmethod
    def _build(
        cls,
        manager: paged_attn.BlockManager,
        kv_cache: Tensor,
        seq_ids: Sequence[int],
        token_ids: np.ndarray,
        positions: np.ndarray | None,
        lens: list[int] | None,
    ) -> PagedBatch:
        query_lens = 1 if lens is None else lens
        tables, context_lens, slots, _ = manager.step_inputs(list(seq_ids), query_lens=query_lens)
        if positions is None:
            positions = context_lens - 1

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(kv_cache.device, non_blocking=True)

        return cls(
            kv_cache=kv_cache,
            token_ids=to_device(token_ids.astype(np.int64)),
            positions=to_device(positions.astype(np.int64)),
            block_tables=to_device(tables),
            context_lens=to_device(context_lens),
            slot_mapping=to_device(slots),
            prompt_lens=lens,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k and v into the pool, then attends; see `Attend`."""
        k_cache, v_cache = self.kv_cache[layer].unbind(0)
        torch.ops.paged_attn.reshape_and_cache(k, v, k_cache, v_cache, self.slot_mapping)
        if self.prompt_lens is not None:
            return causal_attention(q, k, v, self.prompt_lens)
        self.queries.append(q)
        return torch.ops.paged_attn.decode(
            q, k_cache, v_cache, self.block_tables, self.context_lens
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int]) -> Tensor:
    """Causal SDPA over sequences laid one after the other.

    Args:
        q: [T, H, D].
        k: [T, G, D].
        v: [T, G, D].
        lens: Tokens of each sequence, together T.

    Returns:
        [T, H, D].
    """
    heads_first = (x.transpose(0, 1)[None].split(list(lens), dim=2) for x in (q, k, v))
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        for q, k, v in zip(*heads_first, strict=True)
    ]
    return torch.cat(outs)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over pairs of neighbouring elements.

    GGUF files of Llama models store the rows of the q and k projections in the order that makes
    the pairs neighbours (2i, 2i + 1); checkpoints of other origin pair i with i + D/2.

    Args:
        x: [T, heads, D].
        cos: [T, 1, D/2] fp32.
        sin: [T, 1, D/2] fp32.

    Returns:
        [T, heads, D] in x's dtype.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention; where K and V live is the business of `attend`."""

    def __init__(self, config: Config, layer: int) -> None:
        """Parameters of layer number `layer`."""
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, q_size + 2 * kv_size, bias=False)
        self.output = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, hidden_size] to the same; cos and sin as in `rotate`."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(qk, cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
        return self.output(attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        """Parameters of one layer."""
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: Config, layer: int) -> None:
        """Parameters of layer number `layer`."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, hidden_size] to the same; cos and sin as in `rotate`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class SmolLM2(nn.Module):
    """The whole model, without a cache of its own."""

    def __init__(self, config: Config) -> None:
        """Parameters of the whole model, not yet those of a file."""
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def from_weights(
        cls,
        config: Config,
        weights: dict[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SmolLM2:
        """The model with `weights` (see `weights.load`) in `dtype` on `device`.

        The head stays in fp32: of 49152 logits in 16 bits the best two are often equal.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(weights, assign=True)
        model.to(device=device, dtype=dtype)
        model.head.weight = nn.Parameter(weights["head.weight"].to(device, torch.float32))
        return model.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of the cache."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights, and so of the cache."""
        return self.embed.weight.device

    def new_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """One pool for all layers: [num_layers, 2 (K, V), num_blocks, block_size, G, D]."""
        c = self.config
        shape = (c.num_layers, 2, num_blocks, block_size, c.num_kv_heads, c.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] of token_ids [T] at positions [T], final norm applied."""
        pair = torch.arange(0, self.config.head_dim, 2, device=positions.device)
        frequencies = self.config.rope_theta ** (-pair.float() / self.config.head_dim)
        angles = (positions[:, None].float() * frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] of hidden [rows, hidden_size]."""
        return self.head(hidden.to(self.head.weight.dtype)).float()
