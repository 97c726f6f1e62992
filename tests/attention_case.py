"""Builds inputs of the ops: pools in every layout, shuffled block tables, ragged queries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("NHD", "HND", "mixed", "interleaved", "packed", "layers", "gaps")
Q_LAYOUTS = ("contiguous", "qkv", "heads_first")
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 71)  # query heads a KV head
BLOCK_SIZES = (1, 2, 3, 8, 16, 32, 64, 128, 256, 544)
SCALE_SHAPES = ("[]", "[1]", "[G]")
# Arguments of `build`: each of decode's options alone, and all together.
OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noncausal": {"causal": False},
    "window": {"window": 37},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": torch.float32},
    "scales": {"k_scale": "[G]", "v_scale": "[1]"},
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "e5m2": {"cache_dtype": torch.float8_e5m2},
    "all": {
        "window": 37,
        "softcap": 2.0,
        "alibi": True,
        "sinks": torch.float32,
        "k_scale": "[]",
        "v_scale": "[G]",
        "cache_dtype": torch.float8_e4m3fn,
    },
    "all_noncausal": {
        "causal": False,
        "softcap": 2.0,
        "sinks": torch.float32,
        "k_scale": "[G]",
        "v_scale": "[]",
        "cache_dtype": torch.float8_e5m2,
    },
}
HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (*HALF_DTYPES, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Draw:
    """A Python and a torch generator with one seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.seed = seed
        self.device = device
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    def again(self) -> Draw:
        """One that draws the same numbers from the start."""
        return Draw(self.seed, self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return values.to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform in low ... high, both included."""
        drawn = torch.randint(low, high + 1, shape, generator=self.generator, device=self.device)
        return drawn.to(dtype)


def read(cache: Tensor, slots: Any) -> Tensor:
    """cache[slots], which PyTorch has for bytes on every device, for fp8 not."""
    if cache.dtype in FP8_DTYPES:
        return cache.view(torch.uint8)[slots].view(cache.dtype)
    return cache[slots]


def write(cache: Tensor, slots: Any, values: Tensor | float) -> None:
    """cache[slots] = values, in the cache's dtype."""
    stored = torch.as_tensor(values, device=cache.device).to(cache.dtype)
    if cache.dtype in FP8_DTYPES:
        cache.view(torch.uint8)[slots] = stored.view(torch.uint8)
    else:
        cache[slots] = stored


@dataclass
class Case:
    """Arguments of one decode call, tensors among the options too."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            self.cu_seqlens_q,
        )

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def decode(self, **options: Any) -> Tensor:
        return torch.ops.paged_attn.decode(*self.args, **{**self.options, **options})

    def decode_with_lse(self, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.paged_attn.decode_with_lse(*self.args, **{**self.options, **options})

    def rows_of(self, sequence: int) -> slice | int:
        """What selects a sequence's rows in out and lse."""
        if self.cu_seqlens_q is None:
            return sequence
        return slice(int(self.cu_seqlens_q[sequence]), int(self.cu_seqlens_q[sequence + 1]))

    def num_queries(self, sequence: int) -> int:
        if self.cu_seqlens_q is not None:
            return int(self.cu_seqlens_q[sequence + 1]) - int(self.cu_seqlens_q[sequence])
        return self.q.shape[1] if self.q.dim() == 4 else 1

    def live_slots(self, sequence: int) -> tuple[Tensor, Tensor]:
        """(blocks, offsets) of the positions that a query sees: all, or those of the window."""
        block_size = self.k_cache.shape[1]
        length = max(0, int(self.context_lens[sequence]))
        window = self.options.get("window", -1)
        first = first_visible(length, self.num_queries(sequence), window)
        positions = torch.arange(first, length, device=self.q.device)
        columns = torch.div(positions, block_size, rounding_mode="floor")
        return self.block_tables[sequence][columns].long(), positions % block_size

    def all_live_slots(self) -> tuple[Tensor, Tensor]:
        slots = [self.live_slots(b) for b in range(self.block_tables.shape[0])]
        empty = torch.zeros(0, dtype=torch.long, device=self.q.device)
        blocks = torch.cat([empty, *(block for block, _ in slots)])
        return blocks, torch.cat([empty, *(offset for _, offset in slots)])

    def sequence(self, b: int) -> Case:
        """Sequence b alone, in a batch of one, over the same pool."""
        rows = self.rows_of(b)
        alone = self.with_(
            q=self.q[rows] if isinstance(rows, slice) else self.q[b : b + 1],
            block_tables=self.block_tables[b : b + 1],
            context_lens=self.context_lens[b : b + 1].clone(),
        )
        if isinstance(rows, slice):
            cu = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=self.q.device)
            alone = alone.with_(cu_seqlens_q=cu)
        return alone


def pools(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    fill: float | None = float("nan"),
) -> tuple[Tensor, Tensor]:
    """K and V caches of logical shape [N, S, G, D] in one of `LAYOUTS`; None leaves them unset."""
    n, s, g, d = num_blocks, block_size, num_kv_heads, head_dim

    def new(*shape: int) -> Tensor:
        if fill is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.full(shape, fill, device=device).to(dtype)

    if layout == "NHD":
        return new(n, s, g, d), new(n, s, g, d)
    if layout == "HND":
        return new(n, g, s, d).transpose(1, 2), new(n, g, s, d).transpose(1, 2)
    if layout == "mixed":
        return new(n, s, g, d), new(n, g, s, d).transpose(1, 2)
    if layout == "interleaved":
        k_cache, v_cache = new(n, 2, s, g, d).unbind(1)
        return k_cache, v_cache
    if layout == "packed":
        pool = new(n, g, s, 2 * d).transpose(1, 2)
        return pool[..., :d], pool[..., d:]
    if layout == "layers":
        pool = new(n, 3, 2, s, g, d)[:, 1]
        return pool[:, 0], pool[:, 1]
    if layout == "gaps":
        return new(n, s + 1, g + 2, d + 16)[:, :s, 1 : g + 1, :d], new(n, s, g, d + 16)[..., :d]
    raise ValueError(layout)


def queries(
    layout: str, shape: Sequence[int], num_kv_heads: int, draw: Draw, dtype: torch.dtype
) -> Tensor:
    """Random q of a shape [..., H, D] in one of `Q_LAYOUTS`, NaN between its rows."""
    values = draw.normal(*shape, dtype=dtype)
    if layout == "contiguous":
        return values
    *rows, num_heads, head_dim = shape
    if layout == "qkv":
        width = (num_heads + 2 * num_kv_heads) * head_dim
        packed = torch.full((*rows, width), float("nan"), dtype=dtype, device=draw.device)
        q = packed[..., : num_heads * head_dim].unflatten(-1, (num_heads, head_dim))
    elif layout == "heads_first":
        packed = torch.full(
            (num_heads, *rows, head_dim + 8), float("nan"), dtype=dtype, device=draw.device
        )
        q = packed.movedim(0, -2)[..., :head_dim]
    else:
        raise ValueError(layout)
    q.copy_(values)
    return q


def option_set(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of one of `OPTION_SETS`; with q in fp32 without fp8."""
    options = dict(OPTION_SETS[name])
    if dtype == torch.float32:
        options.pop("cache_dtype", None)
    return options


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def first_visible(length: int, queries: int, window: int) -> int:
    """The first key that any of a sequence's queries sees."""
    return max(0, length - queries - window + 1) if window > 0 else 0


def alibi_slopes(draw: Draw, num_heads: int) -> Tensor:
    """Falling powers of two as models have them, a few of the other sign."""
    slopes = torch.exp2(-8 * torch.arange(1, num_heads + 1) / num_heads).to(draw.device)
    return torch.where(draw.normal(num_heads) < -1.5, -0.1 * slopes, slopes)


def cache_scale(draw: Draw, shape: str, num_kv_heads: int) -> Tensor:
    """In one of `SCALE_SHAPES`: of either sign, 0.1 to 1 in size, so that fp32 can sum scores."""
    size = {"[]": (), "[1]": (1,), "[G]": (num_kv_heads,)}[shape]
    sizes = 0.1 + 0.9 * torch.sigmoid(draw.normal(*size))
    return torch.where(draw.normal(*size) < 0, -sizes, sizes)


def build(
    draw: Draw,
    lens: Sequence[int],
    *,
    query_len: int | Sequence[int] | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    layout: str = "NHD",
    q_layout: str = "contiguous",
    num_blocks: int | None = None,
    spare_columns: int = 2,
    padding: int = -1,
    outside_rows: tuple[int, int] = (0, 0),
    fill: float | None = float("nan"),
    cache_dtype: torch.dtype | None = None,
    alibi: bool = False,
    sinks: torch.dtype | None = None,
    k_scale: str | None = None,
    v_scale: str | None = None,
    **options: Any,
) -> Case:
    """A decode call over normal K, V and q.

    Args:
        lens: Context length of each sequence.
        query_len: None for q [B, H, D], an int for [B, Q, H, D], a list for ragged q [T, H, D].
        num_blocks: Blocks of the pool; by default three more than the sequences need.
        padding: Value of the table entries past each sequence's live part, and of those that the
            window hides.
        outside_rows: Rows of ragged q before the first and after the last sequence.
        fill: What every slot that no query sees holds; None leaves them as allocated.
        cache_dtype: fp8, or None for q's dtype.
        alibi: Whether to draw slopes.
        sinks: The dtype to draw sinks in.
        k_scale: The shape to draw a scale in, one of `SCALE_SHAPES`.
        v_scale: Likewise.
        options: decode's, those that are None left out.
    """
    device = draw.device
    options = {name: value for name, value in options.items() if value is not None}
    window = options.get("window", -1)
    hidden = []
    for b, length in enumerate(lens):
        queries_of = query_len[b] if isinstance(query_len, Sequence) else query_len or 1
        hidden.append(first_visible(max(length, 0), queries_of, window) // block_size)
    columns = [ceil_div(max(length, 0), block_size) for length in lens]
    needed = [count - first for count, first in zip(columns, hidden, strict=True)]
    if num_blocks is None:
        num_blocks = sum(needed) + 3
    order = draw.rng.sample(range(num_blocks), sum(needed))
    width = max(columns, default=0) + spare_columns
    rows = []
    for count, first in zip(needed, hidden, strict=True):
        after = width - first - count
        rows.append([padding] * first + order[:count] + [padding] * after)
        order = order[count:]
    tables = torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(lens), width)

    cu_seqlens_q = None
    if query_len is None:
        shape: tuple[int, ...] = (len(lens), num_heads, head_dim)
    elif isinstance(query_len, int):
        shape = (len(lens), query_len, num_heads, head_dim)
    else:
        ends = [outside_rows[0]]
        for length in query_len:
            ends.append(ends[-1] + length)
        cu_seqlens_q = torch.tensor(ends, dtype=torch.int32, device=device)
        shape = (ends[-1] + outside_rows[1], num_heads, head_dim)

    k_cache, v_cache = pools(
        layout, num_blocks, block_size, num_kv_heads, head_dim, cache_dtype or dtype, device, fill
    )
    case = Case(
        q=queries(q_layout, shape, num_kv_heads, draw, dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        context_lens=torch.tensor(list(lens), dtype=torch.int32, device=device),
        cu_seqlens_q=cu_seqlens_q,
        options=options,
    )
    slots = case.all_live_slots()
    for cache in (k_cache, v_cache):
        write(cache, slots, draw.normal(slots[0].numel(), num_kv_heads, head_dim, dtype=dtype))
    if alibi:
        options["alibi_slopes"] = alibi_slopes(draw, num_heads)
    if sinks is not None:
        options["sinks"] = (3 * draw.normal(num_heads)).to(sinks)
    for name, shape in (("k_scale", k_scale), ("v_scale", v_scale)):
        if shape is not None:
            options[name] = cache_scale(draw, shape, num_kv_heads)
    return case
