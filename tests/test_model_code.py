"""The ops as model code uses them: compiled models, packed pools, heads split over ranks."""

from __future__ import annotations

import math
import re

import pytest
import torch
from accuracy import assert_accurate
from attention_case import Draw, build
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from paged_attn import BlockManager

ops = torch.ops.paged_attn

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
BLOCKS, BLOCK_SIZE, MOST_BLOCKS = 40, 4, 8


class Attention(nn.Module):
    """As vLLM lays it out: one packed pool [N, G, S, 2 D], split where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        pool = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
        self.register_buffer("pool", pool)

    def forward(self, x: Tensor, slots: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        k_cache, v_cache = self.pool.transpose(1, 2).split(HEAD_DIM, dim=-1)
        ops.reshape_and_cache(key, value, k_cache, v_cache, slots)
        attended = ops.decode(query, k_cache, v_cache, tables, lens)
        return self.out(attended.flatten(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, slots: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(torch.nn.functional.rms_norm(x, (HIDDEN,)), slots, tables, lens)
        return x


def dense(model: Model, tokens: list[Tensor]) -> Tensor:
    """The last token's result of each sequence, with attention over whole sequences."""
    results = []
    for x in tokens:
        for layer in model.layers:
            heads = layer.qkv(torch.nn.functional.rms_norm(x, (HIDDEN,)))
            heads = heads.unflatten(-1, (HEADS + 2 * KV_HEADS, HEAD_DIM)).transpose(0, 1)
            query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS])
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            x = x + layer.out(attended.transpose(0, 1).flatten(1))
        results.append(x[-1])
    return torch.stack(results)


@pytest.fixture
def model(draw: Draw, device: str) -> Model:
    torch.manual_seed(draw.seed)
    return Model().to(device).eval()


def serve(
    draw: Draw, device: str, batches: list[int]
) -> list[tuple[tuple[Tensor, ...], list[Tensor]]]:
    """A step for each batch size: its inputs, and every sequence's tokens up to it."""
    manager = BlockManager(BLOCKS, BLOCK_SIZE)
    tokens = [torch.empty(0, HIDDEN, device=device) for _ in range(max(batches))]
    steps = []
    for batch in batches:
        for row in range(batch):
            if len(tokens[row]):
                manager.append(row, num_tokens=1)
            else:
                manager.allocate(row, num_tokens=1)
            newest = draw.normal(1, HIDDEN, dtype=torch.float32)
            tokens[row] = torch.cat([tokens[row], newest])
        tables, lens, slots, _ = manager.step_inputs(list(range(batch)), width=MOST_BLOCKS)
        x = torch.stack([t[-1] for t in tokens[:batch]])
        inputs = (x, *(torch.from_numpy(a).to(device) for a in (slots, tables, lens)))
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        steps.append((inputs, tokens[:batch]))
    return steps


def test_compiled_model(draw: Draw, device: str, model: Model) -> None:
    """Batches come and go without a recompile; CUDA graphs hold the step, its writes included."""
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for inputs, tokens in serve(draw, device, [3, 5, 5, 5, 2, 5, 3, 5, 5, 2]):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*inputs)
            torch.testing.assert_close(out, dense(model, tokens), atol=1e-4, rtol=1e-4)
    if device == "cuda":
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped


def test_compiled_model_does_not_copy_its_pools(draw: Draw, device: str, model: Model) -> None:
    """Neither where the packed pool is split nor where it is written."""
    ((inputs, _),) = serve(draw, device, [3])
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        _, sources = run_and_get_code(compiled, *inputs)
    assert "paged_attn.reshape_and_cache" in sources[0]
    shapes = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", sources[0])
    sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]
    assert max(sizes, default=0) < BLOCKS * KV_HEADS * BLOCK_SIZE * HEAD_DIM
    assert "clone" not in sources[0]


@pytest.mark.parametrize("ranks", [2, 8])
def test_heads_split_over_ranks(draw: Draw, device: str, ranks: int) -> None:
    """Each rank has its KV heads' caches and their query heads, a slice of the model's queries."""
    case = build(
        draw, [300, 5, 77, 0, 1000], num_heads=32, num_kv_heads=8, layout="packed", q_layout="qkv"
    )
    parts = []
    for q, k_cache, v_cache in zip(
        case.q.chunk(ranks, dim=1),
        case.k_cache.chunk(ranks, dim=2),
        case.v_cache.chunk(ranks, dim=2),
        strict=True,
    ):
        rank = case.with_(q=q, k_cache=k_cache, v_cache=v_cache)
        assert rank.q.shape[1] // rank.k_cache.shape[2] == 4
        parts.append(rank.decode_with_lse())
    out, lse = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    assert_accurate(case, out, lse)
