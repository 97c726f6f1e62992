"""A cell in memory: the tensors of a problem, one K/V pool a layer, and its exact result.

The layers together are larger than any cache of the device, so that every call finds its K and V
in memory, as each layer of a model's decode step does.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import DTYPES, Cell

# Bytes that the pools of all layers take together, at least: 30 times an H200's L2, and 8 times
# a large L3 of a CPU.
CUDA_POOL_BYTES = 1.5e9
CPU_POOL_BYTES = 256e6

# A graph of more calls gets unwieldy; only problems below 1.5 MB reach it.
MAX_LAYERS = 1024

# Tokens that a table of `wide_table` has room for, whatever the lengths are.
WIDE_TABLE_TOKENS = 131072

# Share of the free memory that the pools may take: peers keep copies in orders of their own, fp8
# variants their caches, and the exact result a sequence in fp64.
POOL_SHARE = 0.25


@dataclass
class Problem:
    """A cell in memory.

    Attributes:
        cell: the shape; `cell.batch` counts the sequences with tokens, not padding rows.
        q: [B, H, D]. B includes padding rows.
        pools: one flat tensor a layer, holding that layer's K and V, all with the same values.
        k: one [N, S, G, D] view a layer.
        v: as `k`.
        block_tables: [B, M], int32; entries past a sequence's blocks are 0.
        context_lens: [B], int32, on the device; 0 in padding rows.
        lens: the same on the host.
        seed: of every random draw.
        nbytes: bytes of K and V that one call must read.
    """

    cell: Cell
    q: Tensor
    pools: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    block_tables: Tensor
    context_lens: Tensor
    lens: list[int]
    seed: int
    nbytes: int

    @property
    def layers(self) -> int:
        """Number of K/V pools."""
        return len(self.pools)

    @property
    def layout(self) -> str:
        """Memory order of the pools, one of `LAYOUTS`."""
        return self.cell.layout

    @property
    def scale(self) -> float:
        """Factor of the scores, 1/sqrt(D)."""
        return 1 / math.sqrt(self.cell.head_dim)

    @property
    def num_blocks(self) -> list[int]:
        """Blocks that each row's tokens lie in."""
        return [-(-length // self.cell.page) for length in self.lens]

    @property
    def max_context(self) -> int:
        """Tokens that the table has room for, all that a launch without a plan may know."""
        return self.block_tables.shape[1] * self.cell.page

    @cached_property
    def exact(self) -> Tensor:
        """The exact result in fp64: [B, H, D]."""
        out: Tensor = reference().decode(
            self.q, self.k[0], self.v[0], self.block_tables, self.context_lens
        )
        return out

    def caches_as(self, layout: str) -> tuple[list[Tensor], list[Tensor]]:
        """K and V with memory order "NHD" or "HND": views where they have it, else copies.

        Returns:
            Two lists with a contiguous tensor a layer, [N, S, G, D] or [N, G, S, D].
        """
        if layout == "NHD":
            return [x.contiguous() for x in self.k], [x.contiguous() for x in self.v]
        return (
            [x.transpose(1, 2).contiguous() for x in self.k],
            [x.transpose(1, 2).contiguous() for x in self.v],
        )


def split_pool(pool: Tensor, cell: Cell) -> tuple[Tensor, Tensor]:
    """The logical [N, S, G, D] views of K and V in a flat pool."""
    page, kv_heads, head_dim = cell.page, cell.kv_heads, cell.head_dim
    if cell.layout == "NHD":
        k, v = pool.view(2, -1, page, kv_heads, head_dim).unbind(0)
    elif cell.layout == "HND":
        k, v = pool.view(2, -1, kv_heads, page, head_dim).transpose(2, 3).unbind(0)
    else:
        k, v = pool.view(-1, 2, page, kv_heads, head_dim).unbind(1)
    return k, v


@cache
def reference() -> Any:
    """The module that defines the ops, loaded by its path: the package need not be built for it."""
    path = Path(__file__).parents[1] / "paged_attn" / "reference.py"
    spec = importlib.util.spec_from_file_location("paged_attn_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choose_layers(nbytes: int, device: str) -> int:
    """As many layers of `nbytes` each as exceed the device's caches, 2 at least."""
    goal = CUDA_POOL_BYTES if device == "cuda" else CPU_POOL_BYTES
    return min(max(2, math.ceil(goal / nbytes)), MAX_LAYERS)


def available_bytes(device: str) -> int:
    """Free memory of the GPU, or memory that the system can give to this process."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def why_too_large(cell: Cell, device: str, layers: int | None) -> str | None:
    """Why a cell's pools cannot be had on this machine, None if they can."""
    each = cell.most_pool_bytes
    need = each * (layers or choose_layers(each, device))
    limit = POOL_SHARE * available_bytes(device)
    if need <= limit:
        return None
    return (
        f"its K/V pools take {need / 1e9:.1f} GB, of {limit / 1e9:.1f} GB that they may take here; "
        "fewer sequences, shorter contexts or fewer --layers would fit"
    )


def make_problem(
    cell: Cell,
    device: str,
    *,
    layers: int | None = None,
    wide_table: bool = False,
    padded: bool = False,
    pool_blocks: int | None = None,
    seed: int = 0,
) -> Problem:
    """Draws a problem: lengths, an order of the blocks, and normal q, K and V.

    Args:
        cell: the shape.
        device: "cuda" or "cpu".
        layers: number of pools; by default as many as exceed the device's caches.
        wide_table: tables with room for `WIDE_TABLE_TOKENS` whatever the lengths are.
        padded: as many rows of length 0 after the sequences as there are sequences, the way
            an engine fills a batch up to a captured graph's size.
        pool_blocks: blocks in a pool; by default exactly those that hold tokens.
        seed: of every random draw.

    Raises:
        ValueError: fewer than 1 layer, too few blocks.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[cell.dtype]
    if cell.lengths:
        lens = torch.tensor(cell.lengths)
    else:
        lens = torch.randint(*cell.context_range, (cell.batch,), generator=generator)
    blocks = (lens + cell.page - 1) // cell.page
    used = int(blocks.sum())
    total = used if pool_blocks is None else pool_blocks
    if total < used:
        raise ValueError(f"pool_blocks must be at least {used}, got {pool_blocks}")

    width = int(blocks.max())
    if wide_table:
        width = max(width, -(-WIDE_TABLE_TOKENS // cell.page))
    rows = 2 * cell.batch if padded else cell.batch
    tables = torch.zeros(rows, width, dtype=torch.int32)
    order = torch.randperm(total, generator=generator) if cell.scattered else torch.arange(total)
    start = 0
    for row, count in enumerate(blocks.tolist()):
        tables[row, :count] = order[start : start + count]
        start += count
    lens = torch.nn.functional.pad(lens, (0, rows - cell.batch))

    nbytes = int(lens.sum()) * cell.token_bytes
    if layers is None:
        layers = choose_layers(nbytes, device)

    torch.manual_seed(seed)
    q = torch.randn(rows, cell.heads, cell.head_dim, device=device, dtype=dtype)
    elements = 2 * total * cell.page * cell.kv_heads * cell.head_dim
    first = torch.randn(elements, device=device, dtype=dtype)
    pools = [first] + [first.clone() for _ in range(layers - 1)]
    views = [split_pool(x, cell) for x in pools]
    return Problem(
        cell=cell,
        q=q,
        pools=pools,
        k=[k for k, _ in views],
        v=[v for _, v in views],
        block_tables=tables.to(device),
        context_lens=lens.int().to(device),
        lens=lens.tolist(),
        seed=seed,
        nbytes=nbytes,
    )
