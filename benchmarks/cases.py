"""What is measured: the cells as data, and the tensors that make a problem of one of them.

A cell is a shape; a `Problem` is that shape in memory, with one K/V pool a layer. The layers
together are larger than any cache of the device, so that every call finds its K and V in memory,
as each layer of a model's decode step does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = ("NHD", "HND", "interleaved")

# Bytes that the pools of all layers take together, at least: 30 times an H200's L2, and 8 times
# a large L3 of a CPU.
CUDA_POOL_BYTES = 1.5e9
CPU_POOL_BYTES = 256e6

# A graph of more calls gets unwieldy; only problems below 1.5 MB reach it.
MAX_LAYERS = 1024

# Tokens that a table of `wide_table` has room for, whatever the lengths are.
WIDE_TABLE_TOKENS = 131072


@dataclass(frozen=True)
class Cell:
    """One decode shape.

    Attributes:
        name: how the table calls it.
        batch: sequences.
        heads: query heads.
        kv_heads: KV heads; divides `heads`.
        head_dim: elements a head.
        context: tokens of every sequence, or (low, high): drawn evenly from low to high - 1.
        page: tokens a block.
        dtype: key of `DTYPES`.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int | tuple[int, int]
    page: int = 16
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        """Refuses shapes that would measure nothing.

        Raises:
            ValueError: a size below 1, heads that kv_heads does not divide, an empty range.
        """
        for field in ("batch", "heads", "kv_heads", "head_dim", "page"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        low, high = self.context_range
        if low < 1 or high <= low:
            raise ValueError(
                f"context must be at least 1 and its range not empty, got {self.context}"
            )

    @property
    def context_range(self) -> tuple[int, int]:
        """The half-open range that lengths are drawn from."""
        if isinstance(self.context, tuple):
            return self.context
        return self.context, self.context + 1

    def changed(self, dtype: str | None, page: int | None) -> Cell:
        """This cell with another dtype or page size where one is named."""
        return replace(self, dtype=dtype or self.dtype, page=self.page if page is None else page)


CUDA_CELLS = (
    Cell("tutorial B32 32/32 d128 100-1000", 32, 32, 32, 128, (100, 1000)),
    Cell("B64 32/32 d128 4k", 64, 32, 32, 128, 4096),
    Cell("B32 32/8 d128 100-1000", 32, 32, 8, 128, (100, 1000)),
    Cell("B64 32/8 d128 4k", 64, 32, 8, 128, 4096),
    Cell("B256 32/8 d128 512-4k", 256, 32, 8, 128, (512, 4096)),
    Cell("B64 64/8 d128 4k", 64, 64, 8, 128, 4096),
    Cell("B128 8/1 d128 2k-8k", 128, 8, 1, 128, (2048, 8192)),
    Cell("B1 32/8 d128 512", 1, 32, 8, 128, 512),
    Cell("B1 32/8 d128 8k", 1, 32, 8, 128, 8192),
    Cell("B1 32/8 d128 128k", 1, 32, 8, 128, 131072),
    Cell("B8 32/8 d128 1k-32k", 8, 32, 8, 128, (1024, 32768)),
    Cell("B16 64/8 d64 8k", 16, 64, 8, 64, 8192),
    Cell("B32 16/1 d256 4k", 32, 16, 1, 256, 4096),
)

CPU_CELLS = (
    Cell("B8 32/8 d128 1k bf16", 8, 32, 8, 128, 1024, page=32, dtype="bf16"),
    Cell("B1 32/8 d128 8k bf16", 1, 32, 8, 128, 8192, page=32, dtype="bf16"),
    Cell("B32 9/3 d64 100-1000 bf16", 32, 9, 3, 64, (100, 1000), page=32, dtype="bf16"),
    Cell("B8 32/8 d128 1k fp32", 8, 32, 8, 128, 1024, page=32, dtype="fp32"),
    Cell("B4 32/32 d128 1k bf16", 4, 32, 32, 128, 1024, page=32, dtype="bf16"),
)


def cells_for(device: str) -> tuple[Cell, ...]:
    """The built-in cells of a device type, "cuda" or "cpu"."""
    return CUDA_CELLS if device == "cuda" else CPU_CELLS


def parse_shape(text: str, device: str) -> Cell:
    """A cell of the user's own from "B,H,G,D,CONTEXT", CONTEXT a number or LOW-HIGH.

    Raises:
        ValueError: not five fields, not numbers, or a shape that `Cell` refuses.
    """
    fields = text.split(",")
    if len(fields) != 5:
        raise ValueError(f"shape must be B,H,G,D,CONTEXT, got {text!r}")
    try:
        batch, heads, kv_heads, head_dim = (int(field) for field in fields[:4])
        bounds = [int(bound) for bound in fields[4].split("-")]
    except ValueError:
        raise ValueError(f"shape must hold whole numbers, got {text!r}") from None
    if len(bounds) > 2:
        raise ValueError(f"context must be N or LOW-HIGH, got {fields[4]!r}")
    context = bounds[0] if len(bounds) == 1 else (bounds[0], bounds[1])
    name = f"B{batch} {heads}/{kv_heads} d{head_dim} {fields[4]}"
    page, dtype = (16, "fp16") if device == "cuda" else (32, "bf16")
    return Cell(name, batch, heads, kv_heads, head_dim, context, page, dtype)


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
        layout: one of `LAYOUTS`.
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
    layout: str
    nbytes: int

    @property
    def layers(self) -> int:
        """Number of K/V pools."""
        return len(self.pools)

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


def split_pool(
    pool: Tensor, layout: str, page: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """The logical [N, S, G, D] views of K and V in a flat pool."""
    if layout == "NHD":
        k, v = pool.view(2, -1, page, kv_heads, head_dim).unbind(0)
    elif layout == "HND":
        k, v = pool.view(2, -1, kv_heads, page, head_dim).transpose(2, 3).unbind(0)
    elif layout == "interleaved":
        k, v = pool.view(-1, 2, page, kv_heads, head_dim).unbind(1)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout}")
    return k, v


def make_problem(
    cell: Cell,
    device: str,
    *,
    layout: str = "NHD",
    layers: int | None = None,
    wide_table: bool = False,
    padded: bool = False,
    pool_blocks: int | None = None,
    seed: int = 0,
) -> Problem:
    """Draws a problem: lengths, a random order of the blocks, and normal q, K and V.

    Args:
        cell: the shape.
        device: "cuda" or "cpu".
        layout: memory order of the pools, one of `LAYOUTS`.
        layers: number of pools; by default as many as exceed the device's caches.
        wide_table: tables with room for `WIDE_TABLE_TOKENS` whatever the lengths are.
        padded: as many rows of length 0 after the sequences as there are sequences, the way
            an engine fills a batch up to a captured graph's size.
        pool_blocks: blocks in a pool; by default exactly those that hold tokens.
        seed: of every random draw.

    Raises:
        ValueError: an unknown layout, fewer than 1 layer, too few blocks.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[cell.dtype]
    if isinstance(cell.context, tuple):
        lens = torch.randint(*cell.context, (cell.batch,), generator=generator)
    else:
        lens = torch.full((cell.batch,), cell.context)
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
    order = torch.randperm(total, generator=generator).int()
    start = 0
    for row, count in enumerate(blocks.tolist()):
        tables[row, :count] = order[start : start + count]
        start += count
    lens = torch.nn.functional.pad(lens, (0, rows - cell.batch))

    token_bytes = 2 * cell.kv_heads * cell.head_dim * dtype.itemsize
    nbytes = int(lens.sum()) * token_bytes
    if layers is None:
        goal = CUDA_POOL_BYTES if device == "cuda" else CPU_POOL_BYTES
        layers = min(max(2, math.ceil(goal / nbytes)), MAX_LAYERS)

    torch.manual_seed(seed)
    q = torch.randn(rows, cell.heads, cell.head_dim, device=device, dtype=dtype)
    elements = 2 * total * cell.page * cell.kv_heads * cell.head_dim
    first = torch.randn(elements, device=device, dtype=dtype)
    pools = [first] + [first.clone() for _ in range(layers - 1)]
    views = [split_pool(x, layout, cell.page, cell.kv_heads, cell.head_dim) for x in pools]
    return Problem(
        cell=cell,
        q=q,
        pools=pools,
        k=[k for k, _ in views],
        v=[v for _, v in views],
        block_tables=tables.to(device),
        context_lens=lens.int().to(device),
        lens=lens.tolist(),
        layout=layout,
        nbytes=nbytes,
    )


def reference(problem: Problem) -> Tensor:
    """The exact result, gathered and computed in fp64 sequence by sequence: [B, H, D], fp64."""
    p, cell = problem, problem.cell
    out = torch.zeros(p.q.shape, dtype=torch.float64, device=p.q.device)
    for row, (length, count) in enumerate(zip(p.lens, p.num_blocks, strict=True)):
        if length == 0:
            continue
        ids = p.block_tables[row, :count].long()
        k, v = (x[0][ids].flatten(0, 1)[:length].double() for x in (p.k, p.v))
        q = p.q[row].double().view(cell.kv_heads, -1, cell.head_dim)
        scores = torch.einsum("grd,ngd->grn", q, k) * p.scale
        out[row] = torch.einsum("grn,ngd->grd", scores.softmax(-1), v).reshape(cell.heads, -1)
    return out
