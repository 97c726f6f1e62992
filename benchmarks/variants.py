"""This package's decode, plain and with options, each a column of one interleaved run.

A variant attends over the problem's own tables, lengths and values. One with an fp8 cache keeps
those values in fp8; one with several queries a sequence draws that many.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.peer import Peer, Unsupported
from benchmarks.problem import Problem, reference, split_pool

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

# What a stored 1 stands for: normal values up to 7 deviations use all of the range.
FP8_SCALE = {"e4m3": 2.0**-6, "e5m2": 2.0**-13}

WRITES = ("append", "apart")

SYNTAX = """parts joined by +:
  invariant      batch_invariant=True
  e4m3, e5m2     an fp8 cache with scales
  window=W       sliding window of W tokens
  softcap=C      logits capped at C
  alibi, sinks   slopes; a sink a head
  qN, qLOW-HIGH  N queries a sequence, or ragged
  append         append_decode: the newest tokens written, then decode, in one call
  apart          reshape_and_cache, then decode, in two calls
  early          under the promise of set_early_start"""


@dataclass(frozen=True)
class Variant:
    """Options of a decode; the defaults are the op's own.

    Attributes:
        cache: key of `FP8`, empty for q's dtype.
        queries: fewest and most queries of a sequence.
        window: tokens that a query sees, negative for all.
        softcap: 0 for none.
        alibi: whether slopes are given.
        sinks: whether sinks are given.
        invariant: batch_invariant.
        write: one of `WRITES`, empty where nothing is written.
        early: whether `set_early_start` is on.
    """

    cache: str = ""
    queries: tuple[int, int] = (1, 1)
    window: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    invariant: bool = False
    write: str = ""
    early: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The options that are not the op's defaults."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}

    def read_bytes(self, p: Problem) -> int:
        """Bytes of K and V that one call must read."""
        tokens = sum(p.lens)
        if self.window > 0:
            tokens = sum(min(n, self.window + self.queries[1] - 1) for n in p.lens)
        token_bytes = p.cell.token_bytes
        return tokens * (token_bytes // p.q.element_size() if self.cache else token_bytes)


def parse_variant(text: str) -> Variant:
    """A variant from its `SYNTAX`.

    Raises:
        ValueError: an unknown part, a bad number, the same option twice, or early with append.
    """
    options: dict[str, Any] = {}
    for part in text.split("+"):
        name, value = _parse_part(part, text)
        if name in options:
            raise ValueError(f"variant {text!r} sets {name} twice")
        options[name] = value
    variant = Variant(**options)
    if variant.early and variant.write == "append":
        raise ValueError(f"variant {text!r}: append starts early without the promise")
    return variant


def _parse_part(part: str, text: str) -> tuple[str, Any]:
    if part in FP8:
        return "cache", part
    if part in WRITES:
        return "write", part
    if part in ("alibi", "sinks", "invariant", "early"):
        return part, True
    name, _, number = part.partition("=")
    try:
        if name == "window" and int(number) >= 1:
            return name, int(number)
        if name == "softcap" and 0 < float(number) < float("inf"):
            return name, float(number)
        if part.startswith("q"):
            low, _, high = part[1:].partition("-")
            if 1 <= int(low) <= int(high or low):
                return "queries", (int(low), int(high or low))
    except ValueError:
        pass
    raise ValueError(f"variant {text!r}: no such part: {part!r}. A variant is {SYNTAX}")


@dataclass
class Inputs:
    """What a variant hands the ops on a problem; the caches of the layers apart.

    Attributes:
        q: [B, H, D], [B, Q, H, D] or ragged [T, H, D].
        starts: [B + 1] int32, where q is ragged.
        counts: queries of each sequence.
        extra: decode's arguments after the lengths, by name.
        options: the same, keyword-only.
    """

    q: Tensor
    starts: Tensor | None
    counts: list[int]
    extra: dict[str, Tensor | None]
    options: dict[str, Any]


class Ours(Peer):
    """torch.ops.paged_attn.decode, or append_decode."""

    devices = ("cuda", "cpu")

    def __init__(self, text: str = ""):
        """Parses a variant; none is the plain op.

        Raises:
            ValueError: see `parse_variant`.
        """
        self.variant = parse_variant(text) if text else Variant()
        self.key = self.title = text or "ours"

    def missing(self) -> str | None:
        """The op must have been loaded, by importing paged_attn or with --library."""
        try:
            _ = torch.ops.paged_attn.decode.default
        except AttributeError:
            return "torch.ops.paged_attn.decode is not loaded"
        return None

    def bind(self, p: Problem) -> Call:
        """Converts the caches where they are fp8; nothing else to prepare."""
        call = self._bind(p)
        if not self.variant.early:
            return call
        if p.q.device.type != "cuda":
            raise Unsupported("only kernels on CUDA start early")
        set_early_start = torch.ops.paged_attn._set_early_start

        def early(i: int) -> Tensor:
            previous = set_early_start(True)
            try:
                return call(i)
            finally:
                set_early_start(previous)

        return early

    def _bind(self, p: Problem) -> Call:
        inputs = self._inputs(p)
        caches = [self._caches(p, layer) for layer in range(p.layers)]
        where = (p.block_tables, p.context_lens, inputs.starts)
        q, extra, options = inputs.q, inputs.extra, inputs.options
        ops = torch.ops.paged_attn
        decode: Callable[..., Tensor] = ops.decode.default
        if not self.variant.write:
            return lambda i: decode(q, *caches[i], *where, **extra, **options)
        key, value, slots = self._newest(p, inputs)
        if self.variant.write == "append":
            append_decode = ops.append_decode.default
            shape = (*q.shape[:-2], *key.shape[-2:])
            key, value = key.view(shape), value.view(shape)
            return lambda i: append_decode(q, key, value, *caches[i], *where, **extra, **options)
        write = ops.reshape_and_cache.default
        scales = {name: extra[name] for name in ("k_scale", "v_scale")}

        def apart(i: int) -> Tensor:
            write(key, value, *caches[i], slots, **scales)
            return decode(q, *caches[i], *where, **extra, **options)

        return apart

    def exact(self, p: Problem) -> Tensor:
        """The definition's result over what this variant's caches hold."""
        if self.variant.as_dict().keys() <= {"write", "invariant", "early"}:
            return p.exact
        inputs = self._inputs(p)
        where = (p.block_tables, p.context_lens, inputs.starts)
        out: Tensor = reference().decode(
            inputs.q, *self._caches(p, 0), *where, **inputs.extra, **inputs.options
        )
        return out

    def _inputs(self, p: Problem) -> Inputs:
        """The same at every call, for they are drawn from the problem's seed."""
        variant, (rows, heads, dim) = self.variant, p.q.shape
        low, high = variant.queries
        if min(n for n in p.lens if n) < high:
            raise Unsupported(f"a sequence is shorter than its {high} queries")
        generator = torch.Generator().manual_seed(p.seed)
        counts, starts, q = [low] * rows, None, p.q
        if low < high:
            drawn = torch.randint(low, high + 1, (rows,), generator=generator)
            drawn[torch.tensor(p.lens) == 0] = 0
            counts = drawn.tolist()
            starts = torch.nn.functional.pad(drawn.cumsum(0), (1, 0)).int().to(q.device)
        if high > 1:
            shape = (rows, low, heads, dim) if low == high else (sum(counts), heads, dim)
            q = torch.randn(shape, generator=generator).to(q.device, q.dtype)
        scale = None
        if variant.cache:
            scale = torch.full((1,), FP8_SCALE[variant.cache], device=q.device)
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        sinks = torch.randn(heads, generator=generator)
        extra = {
            "alibi_slopes": slopes.to(q.device) if variant.alibi else None,
            "sinks": sinks.to(q.device) if variant.sinks else None,
            "k_scale": scale,
            "v_scale": scale,
        }
        options = {
            "max_query_len": high if starts is not None else 0,
            "window": variant.window,
            "softcap": variant.softcap,
            "batch_invariant": variant.invariant,
        }
        return Inputs(q, starts, counts, extra, options)

    def _caches(self, p: Problem, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's K and V as this variant stores them, [N, S, G, D] each."""
        if not self.variant.cache:
            return p.k[layer], p.v[layer]
        if p.q.dtype == torch.float32:
            raise Unsupported("an fp8 cache goes with 16-bit queries")
        dtype = FP8[self.variant.cache]
        most = torch.finfo(dtype).max
        stored = p.pools[layer] / FP8_SCALE[self.variant.cache]
        return split_pool(stored.clamp_(-most, most).to(dtype), p.cell)

    def _newest(self, p: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of the query tokens, [T, G, D], as the cache has them already, and their slots.

        Written again they change nothing, so that other kernels' results stay right.
        """
        page, slots = p.cell.page, []
        tables = p.block_tables.cpu()
        for row, (length, count) in enumerate(zip(p.lens, inputs.counts, strict=True)):
            for position in range(length - count, length):
                block = int(tables[row, position // page]) if position >= 0 else -1
                slots.append(block * page + position % page if block >= 0 else -1)
        mapping = torch.tensor(slots, dtype=torch.int64, device=p.q.device)
        found = mapping.clamp(min=0)
        key, value = (x[0][found // page, found % page] for x in (p.k, p.v))
        return key, value, mapping


OURS = Ours()


def load_op(libraries: Iterable[str]) -> str | None:
    """Loads the op; why that failed, None if it did not."""
    try:
        for library in libraries:
            torch.ops.load_library(library)
        if not libraries:
            importlib.import_module("paged_attn")
    except Exception as error:  # an import or a linker may raise anything; peers can still run
        return str(error).strip().splitlines()[-1]
    return OURS.missing()
