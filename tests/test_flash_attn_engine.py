"""An engine in the manner of nano-vllm runs on FlashAttention's calls from here.

Its attention layer writes new keys and values through a slot mapping, then attends: prompts by
flash_attn_varlen_func, from a block table only where a prefix was cached, single tokens by
flash_attn_with_kvcache, padded to the batch that its CUDA graph was captured for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from accuracy import assert_near, one_thread
from attention_case import HALF_DTYPES, Draw
from flash_case import attention
from torch import Tensor

import paged_attn
from paged_attn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 50, 6, 2, 64
NUM_BLOCKS, BLOCK_SIZE, MAX_BATCH, MAX_BLOCKS = 96, 16, 8, 12
SCALE = 0.11


@dataclass
class Step:
    """What the engine tells its attention layers of a step."""

    slot_mapping: Tensor
    block_tables: Tensor | None
    context_lens: Tensor | None = None  # decode only
    cu_seqlens_q: Tensor | None = None  # prefill only, as all that follows
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


class AttentionLayer:
    """Of an engine, which gives it its caches after a first run without."""

    def __init__(self) -> None:
        self.k_cache = self.v_cache = torch.tensor([])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if self.k_cache.numel():
            paged_attn.reshape_and_cache(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        if step.context_lens is not None:
            return flash_attn_with_kvcache(
                q.unsqueeze(1),
                self.k_cache,
                self.v_cache,
                cache_seqlens=step.context_lens,
                block_table=step.block_tables,
                softmax_scale=SCALE,
                causal=True,
            ).squeeze(1)
        if step.block_tables is not None:
            k, v = self.k_cache, self.v_cache
        return flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=step.max_seqlen_q,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_k=step.max_seqlen_k,
            cu_seqlens_k=step.cu_seqlens_k,
            softmax_scale=SCALE,
            causal=True,
            block_table=step.block_tables,
        )


class Blocks:
    """Which block holds what; full blocks of prompts are found again by all tokens up to them."""

    def __init__(self, draw: Draw) -> None:
        self.free = draw.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.full: dict[tuple[int, ...], int] = {}
        self.tables: dict[int, list[int]] = {}

    def allocate(self, seq_id: int, prompt: list[int]) -> int:
        """Returns how many tokens are cached: never the last, for it is to run."""
        table = self.tables[seq_id] = []
        while (known := (len(table) + 1) * BLOCK_SIZE) < len(prompt):
            if (block := self.full.get(tuple(prompt[:known]))) is None:
                break
            table.append(block)
        cached = len(table) * BLOCK_SIZE
        self.grow(seq_id, len(prompt))
        return cached

    def grow(self, seq_id: int, num_tokens: int) -> None:
        table = self.tables[seq_id]
        while len(table) * BLOCK_SIZE < num_tokens:
            table.append(self.free.pop())

    def keep(self, seq_id: int, prompt: list[int]) -> None:
        for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
            block = self.tables[seq_id][end // BLOCK_SIZE - 1]
            self.full.setdefault(tuple(prompt[:end]), block)

    def release(self, seq_id: int) -> None:
        kept = {*self.full.values()}
        self.free += [block for block in self.tables.pop(seq_id) if block not in kept]

    def slots(self, seq_id: int, first: int, end: int) -> list[int]:
        table = self.tables[seq_id]
        return [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, end)]

    def padded(self, seq_ids: list[int]) -> list[list[int]]:
        width = max(len(self.tables[seq_id]) for seq_id in seq_ids)
        tables = [self.tables[seq_id] for seq_id in seq_ids]
        return [table + [-1] * (width - len(table)) for table in tables]


class Engine:
    """Runs one layer whose q, k and v depend on nothing but a token."""

    def __init__(self, draw: Draw, dtype: torch.dtype) -> None:
        self.device = draw.device
        self.weights = [
            draw.normal(VOCABULARY, heads, HEAD_DIM, dtype=dtype)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        ]
        self.layer = AttentionLayer()
        self.blocks = Blocks(draw)
        self.tokens: dict[int, list[int]] = {}
        self.inputs = torch.zeros(MAX_BATCH, dtype=torch.int64, device=draw.device)
        self.decode_slots = self.on_device([-1] * MAX_BATCH)
        self.decode_tables = self.on_device([[0] * MAX_BLOCKS] * MAX_BATCH)
        self.decode_lens = self.on_device([0] * MAX_BATCH)
        self.graph: Any = None
        self.outputs: Any = None

    def allocate_cache(self) -> None:
        like = self.weights[1]
        shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.layer.k_cache, self.layer.v_cache = like.new_full(shape, float("nan"))

    def model(self, inputs: Tensor, step: Step) -> Tensor:
        return self.layer.forward(*(weight[inputs] for weight in self.weights), step)

    def on_device(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def prefill(self, prompts: dict[int, list[int]]) -> list[int]:
        """Runs prompts and checks what comes out; returns how many tokens each had cached."""
        cached = [self.blocks.allocate(seq_id, prompt) for seq_id, prompt in prompts.items()]
        inputs: list[int] = []
        slots: list[int] = []
        ends_q, ends_k = [0], [0]
        for (seq_id, prompt), done in zip(prompts.items(), cached, strict=True):
            inputs += prompt[done:]
            slots += self.blocks.slots(seq_id, done, len(prompt))
            ends_q.append(len(inputs))
            ends_k.append(ends_k[-1] + len(prompt))
        lens = [end - begin for begin, end in pairwise(ends_q)]
        step = Step(
            slot_mapping=self.on_device(slots),
            block_tables=self.on_device(self.blocks.padded([*prompts])) if any(cached) else None,
            cu_seqlens_q=self.on_device(ends_q),
            cu_seqlens_k=self.on_device(ends_k),
            max_seqlen_q=max(lens),
            max_seqlen_k=max(len(prompt) for prompt in prompts.values()),
        )
        rows = self.model(torch.tensor(inputs, device=self.device), step).split(lens)
        for (seq_id, prompt), out in zip(prompts.items(), rows, strict=True):
            self.tokens[seq_id] = prompt
            self.blocks.keep(seq_id, prompt)
            self.check(out, prompt)
        return cached

    def decode(self, next_tokens: dict[int, int]) -> None:
        """A token for each sequence, in buffers whose further rows are stale."""
        batch = len(next_tokens)
        slots, lens = [], []
        for seq_id, token in next_tokens.items():
            self.tokens[seq_id] = [*self.tokens[seq_id], token]
            lens.append(len(self.tokens[seq_id]))
            self.blocks.grow(seq_id, lens[-1])
            slots += self.blocks.slots(seq_id, lens[-1] - 1, lens[-1])
        tables = self.on_device(self.blocks.padded([*next_tokens]))
        self.inputs[:batch] = torch.tensor([*next_tokens.values()], device=self.device)
        self.decode_slots.fill_(-1)
        self.decode_slots[:batch] = self.on_device(slots)
        self.decode_lens.zero_()
        self.decode_lens[:batch] = self.on_device(lens)
        self.decode_tables[:batch, : tables.shape[1]] = tables
        out = self.run_decode()
        for seq_id, row in zip(next_tokens, out, strict=False):
            self.check(row[None], self.tokens[seq_id])
        assert torch.equal(out[batch:], torch.zeros_like(out[batch:]))

    def release(self, seq_id: int) -> None:
        self.blocks.release(seq_id)
        del self.tokens[seq_id]

    def run_decode(self) -> Tensor:
        step = Step(self.decode_slots, self.decode_tables, self.decode_lens)
        if self.device == "cpu":
            return self.model(self.inputs, step)
        if self.graph is None:
            self.model(self.inputs, step)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.model(self.inputs, step)
        self.graph.replay()
        return self.outputs

    def check(self, out: Tensor, tokens: list[int]) -> None:
        """The last rows of dense attention over all of a sequence's tokens."""
        q, keys, values = (weight[tokens] for weight in self.weights)
        q = q[len(tokens) - len(out) :]
        options = {"causal": True, "softmax_scale": SCALE}
        with one_thread():
            expected, _ = attention(
                q.double(), keys.double(), values.double(), options, torch.float64
            )
            plain, _ = attention(q, keys, values, options, out.dtype)
        assert_near(out, expected, plain, float(values.abs().max()))


def tokens_of(draw: Draw, count: int) -> list[int]:
    return [draw.rng.randrange(VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_an_engine(draw: Draw, device: str, dtype: torch.dtype) -> None:
    engine = Engine(draw, dtype)
    # A first run, to see how much memory is needed, before there are caches.
    engine.prefill({6: tokens_of(draw, 90), 7: tokens_of(draw, 90)})
    engine = Engine(draw, dtype)
    engine.allocate_cache()

    prompt = tokens_of(draw, 70)
    prompts = {0: prompt, 1: tokens_of(draw, 1), 2: tokens_of(draw, 32)}
    assert engine.prefill(prompts) == [0, 0, 0]
    for _ in range(18):  # over the end of a block
        engine.decode({seq_id: draw.rng.randrange(VOCABULARY) for seq_id in engine.tokens})
    # Prompts of which all but the last block, some, and nothing is in the cache.
    late = {3: prompt, 4: prompt[:40] + tokens_of(draw, 20), 5: tokens_of(draw, 25)}
    assert engine.prefill(late) == [64, 32, 0]
    for step in range(20):
        if step == 7:  # a smaller batch: the rows behind it keep their tables
            for seq_id in (1, 3, 4):
                engine.release(seq_id)
        engine.decode({seq_id: draw.rng.randrange(VOCABULARY) for seq_id in engine.tokens})
