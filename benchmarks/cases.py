"""What is measured: the cells as data. `problem` makes tensors of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = ("NHD", "HND", "interleaved")


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
        layout: memory order of the pools, one of `LAYOUTS`.
        scattered: whether a sequence's blocks lie anywhere in the pool, or one after the other.
        lengths: tokens of each sequence, drawn beforehand; then `context` says nothing.
        sweep: the sweep, or "trace", that this cell is a point of; empty for none.
        series: the line or group of the sweep's plot that the cell belongs to.
        x: its place in the series.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int | tuple[int, int] = 1
    page: int = 16
    dtype: str = "fp16"
    layout: str = "NHD"
    scattered: bool = True
    lengths: tuple[int, ...] = ()
    sweep: str = ""
    series: str = ""
    x: int | str = 0

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
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout}")
        if self.lengths and (len(self.lengths) != self.batch or min(self.lengths) < 1):
            raise ValueError(f"lengths must be {self.batch} of at least 1, got {self.lengths}")
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

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def most_pool_bytes(self) -> int:
        """Bytes that one layer's K and V take with the longest lengths that can be drawn."""
        lengths = self.lengths or (self.context_range[1] - 1,) * self.batch
        return sum(-(-n // self.page) for n in lengths) * self.page * self.token_bytes

    def changed(self, dtype: str | None, page: int | None, layout: str | None) -> Cell:
        """This cell with another dtype, page size or layout where one is named."""
        return replace(
            self,
            dtype=dtype or self.dtype,
            page=self.page if page is None else page,
            layout=layout or self.layout,
        )


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
    return Cell(name, batch, heads, kv_heads, head_dim, context, **usual(device))


def usual(device: str) -> dict[str, Any]:
    """Page size and dtype of cells that are not built in."""
    return {"page": 16, "dtype": "fp16"} if device == "cuda" else {"page": 32, "dtype": "bf16"}
