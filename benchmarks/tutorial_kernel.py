"""The paged attention tutorials' design in Triton: the rung that this project climbed from.

One program per (sequence, query head) walks the sequence's blocks in order: it looks the block
up in the table, loads its K, updates a running maximum and a running sum of exponentials, and
adds its V. Nothing is shared between the heads of a group and nothing is split over the context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_one_head(  # type: ignore[no-untyped-def]
    out,
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    scale,
    group,
    table_stride,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    page: tl.constexpr,
    page_padded: tl.constexpr,
    head_dim: tl.constexpr,
    dim_padded: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    length = tl.load(context_lens + row)
    dims = tl.arange(0, dim_padded)
    slots = tl.arange(0, page_padded)
    here = dims < head_dim
    query = tl.load(q + (row * heads + head) * head_dim + dims, mask=here, other=0.0)
    query = query.to(tl.float32) * scale
    k_offsets = slots[:, None] * k_slot + (head // group) * k_head + dims[None, :]
    v_offsets = slots[:, None] * v_slot + (head // group) * v_head + dims[None, :]

    largest = float("-inf")
    total = 0.0
    result = tl.zeros([dim_padded], dtype=tl.float32)
    for column in range(0, tl.cdiv(length, page)):
        block = tl.load(block_tables + row * table_stride + column).to(tl.int64)
        seen = (slots < page) & (column * page + slots < length)
        mask = seen[:, None] & here[None, :]
        k = tl.load(k_cache + block * k_block + k_offsets, mask=mask, other=0.0)
        scores = tl.sum(query[None, :] * k.to(tl.float32), axis=1)
        scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, axis=0))
        weights = tl.exp(scores - grown)
        rescale = tl.exp(largest - grown)
        v = tl.load(v_cache + block * v_block + v_offsets, mask=mask, other=0.0)
        result = result * rescale + tl.sum(weights[:, None] * v.to(tl.float32), axis=0)
        total = total * rescale + tl.sum(weights, axis=0)
        largest = grown

    result = tl.where(length > 0, result / total, 0.0)
    tl.store(out + (row * heads + head) * head_dim + dims, result, mask=here)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> Tensor:
    """Attention of one new token a sequence over its paged K and V.

    Args:
        q: [B, H, D], contiguous.
        k_cache: [N, S, G, D], last dim contiguous.
        v_cache: as k_cache.
        block_tables: [B, M], int32.
        context_lens: [B], int32.

    Returns:
        [B, H, D] in q's dtype.
    """
    batch, heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q)
    _decode_one_head[(batch, heads)](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        head_dim**-0.5,
        heads // kv_heads,
        block_tables.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page=page,
        page_padded=triton.next_power_of_2(page),
        head_dim=head_dim,
        dim_padded=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return out
