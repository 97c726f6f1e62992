"""What attention over vLLM's caches is, in tensors: nothing in here needs vLLM.

Symbols as in paged_attn.ops; R requests, the first of them decodes: at most as many queries as
the engine decodes in a step, several with speculation. vLLM's caches are [N, G, S, 2 * D] in any
memory order: a token's K, then its V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops

# What vLLM calls the caches that it hands over as bytes.
FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Part:
    """Neighbouring requests that one call of `decode` serves."""

    rows: slice
    """Their tokens among those of the batch."""
    block_tables: Tensor
    """[R, M] int32."""
    context_lens: Tensor
    """[R] int32, the tokens of this step included."""
    cu_seqlens_q: Tensor | None
    """[R + 1] int32, counted from the part's first row; None: a query a request."""
    max_query_len: int
    """An upper bound on a request's queries."""


@dataclass(frozen=True)
class Batch:
    """A step of the engine, for all layers that share its block tables."""

    decodes: Part | None
    prefills: Part | None
    max_context_len: int
    """An upper bound on the context lengths."""


def split(
    query_start_loc: Tensor,
    query_start_loc_cpu: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    num_tokens: int,
    max_query_len: int,
    max_context_len: int,
    decode_query_len: int,
) -> Batch:
    """Cuts a step where the first request with more than `decode_query_len` queries is.

    Args:
        query_start_loc: [R + 1] int32: request r has the tokens query_start_loc[r] to
            query_start_loc[r + 1] of the batch.
        query_start_loc_cpu: The same in host memory.
        block_tables: [R, M] int32.
        context_lens: [R] int32.
        num_tokens: Tokens of the batch, padding behind the last request's included.
        max_query_len: An upper bound on a request's queries.
        max_context_len: An upper bound on the context lengths.
        decode_query_len: Queries up to which a request is a decode.

    Returns:
        Requests behind the cut are prefills, whatever their queries.
    """
    num_requests = context_lens.shape[0]
    cut = num_requests
    if max_query_len > decode_query_len:
        longer = torch.diff(query_start_loc_cpu[: num_requests + 1]) > decode_query_len
        cut = int(longer.int().argmax()) if bool(longer.any()) else num_requests
    row = int(query_start_loc_cpu[cut]) if cut < num_requests else num_tokens
    decodes = prefills = None
    if cut > 0:
        bound = min(max_query_len, decode_query_len)
        # Padding requests without a query would shift the rows of those behind them.
        single = bound == 1 and row == cut
        decodes = Part(
            slice(0, row),
            block_tables[:cut],
            context_lens[:cut],
            None if single else query_start_loc[: cut + 1],
            bound,
        )
    if cut < num_requests:
        starts = query_start_loc[cut : num_requests + 1]
        prefills = Part(
            slice(row, num_tokens),
            block_tables[cut:num_requests],
            context_lens[cut:],
            starts - row if row else starts,
            max_query_len,
        )
    return Batch(decodes, prefills, max_context_len)


def caches(kv_cache: Tensor, head_size: int, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """K and V of one of vLLM's caches, without a copy.

    Args:
        kv_cache: [N, G, S, 2 * D], the last dim contiguous, other strides free.
        head_size: D.
        kv_cache_dtype: vLLM's name of what is stored.

    Returns:
        Two [N, S, G, D].

    Raises:
        ValueError: A cache of another shape.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * head_size:
        raise ValueError(
            f"paged_attn.integrations.vllm: kv_cache must be [N, G, S, {2 * head_size}], "
            f"got {list(kv_cache.shape)}"
        )
    if kv_cache_dtype in FP8_CACHES:
        kv_cache = kv_cache.view(FP8_CACHES[kv_cache_dtype])
    k_cache, v_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return k_cache, v_cache


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, part: Part, out: Tensor, **options: Any
) -> None:
    """Attention of a part's rows, into the same rows of `out`.

    Args:
        q: [T, H, D], the whole batch's.
        k_cache: [N, S, G, D].
        v_cache: Like `k_cache`.
        part: Which requests.
        out: [T, H, D].
        options: Those of `decode`.
    """
    ops.decode(
        q[part.rows],
        k_cache,
        v_cache,
        part.block_tables,
        part.context_lens,
        part.cu_seqlens_q,
        max_query_len=0 if part.cu_seqlens_q is None else part.max_query_len,
        out=out[part.rows],
        **options,
    )
