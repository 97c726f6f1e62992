"""Rotary position embedding in plain PyTorch, as caches that are appended to need it."""

from __future__ import annotations

import torch
from torch import Tensor


def token_positions(
    first: Tensor, num_tokens: int, cu_seqlens: Tensor | None, step: int = 1
) -> Tensor:
    """The position of every token, from that of each sequence's first.

    Args:
        first: [B] int32.
        num_tokens: Tokens a sequence, or with `cu_seqlens` tokens in all.
        cu_seqlens: [B + 1] int32: sequence b owns the tokens cu_seqlens[b] to cu_seqlens[b + 1].
        step: From one token's position to the next's.

    Returns:
        [B, num_tokens], or with `cu_seqlens` [num_tokens]; tokens of no sequence have some
        position.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=first.device)
    if cu_seqlens is None:
        return first[:, None] + step * tokens
    if first.shape[0] == 0:
        return tokens
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    sequence = sequence.clamp(0, first.shape[0] - 1)
    return first[sequence] + step * (tokens - cu_seqlens[sequence])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates pairs of elements by their token's angles, in fp32.

    Args:
        x: [..., heads, D].
        cos: [P, R / 2], any floating dtype; the first R <= D elements of a head are rotated.
        sin: Like `cos`.
        positions: [...], rows of `cos`; what lies outside [0, P) counts as the nearest inside.
        interleaved: True: elements 2 i and 2 i + 1 are a pair; False: i and i + R / 2.

    Returns:
        x's shape and dtype.
    """
    rows = positions.clamp(0, cos.shape[0] - 1)
    cosine, sine = (angles[rows].float()[..., None, :] for angles in (cos, sin))
    rotated_dim = 2 * cos.shape[1]
    rotated, passed = x[..., :rotated_dim].float(), x[..., rotated_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    pair = (first * cosine - second * sine, first * sine + second * cosine)
    joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((joined.to(x.dtype), passed), dim=-1)
