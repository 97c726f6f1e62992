"""The shapes that other paged attention kernels are tested with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from attention_case import DTYPES, HALF_DTYPES, Case, Draw, build


def upstream_case(draw: Draw, lens: list[int], **arguments: Any) -> Case:
    """Pools of the grids' sizes are left as allocated but for the live slots."""
    return build(draw, lens, fill=None, **arguments)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("heads", [(40, 40), (64, 8)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 120, 128, 192, 256])
def test_vllm_grid(
    draw: Draw, device: str, head_dim: int, heads: tuple[int, int], block_size: int
) -> None:
    longest = 1024 if device == "cuda" else 12288 // (heads[1] * head_dim // 32)
    lens = [draw.rng.randint(1, longest) for _ in range(6)] + [longest]
    case = upstream_case(
        draw,
        lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=4321 if device == "cuda" else None,
        dtype=draw.rng.choice(DTYPES),
    )
    assert_accurate(case, *case.decode_with_lse())


# The grid, and of it what a CPU computes in a moment.
FLASHINFER = list(itertools.product([12, 17, 128], [54, 97, 512, 2048, 16384]))
ON_CPU = [(12, 54), (17, 97), (128, 54), (12, 512), (1, 2048), (1, 16384)]


@pytest.mark.parametrize("page", [1, 8, 16])
@pytest.mark.parametrize(
    ("device", "batch", "kv_len"),
    [
        *(("cpu", *shape) for shape in ON_CPU),
        *(pytest.param("cuda", *shape, marks=pytest.mark.gpu) for shape in FLASHINFER),
    ],
)
def test_flashinfer_grid(draw: Draw, device: str, batch: int, kv_len: int, page: int) -> None:
    case = upstream_case(
        draw,
        [kv_len] * batch,
        num_heads=8 if device == "cuda" else 4,
        num_kv_heads=4 if device == "cuda" else 1,
        head_dim=128,
        block_size=page,
        layout=draw.rng.choice(("NHD", "HND")),
    )
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("page", [1, 4, 128])
@pytest.mark.parametrize(
    ("query_len", "kv_len"),
    [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048)],
)
def test_flash_attention_grid(
    draw: Draw, device: str, query_len: int, kv_len: int, page: int
) -> None:
    heads = (6, 2) if device == "cuda" else (2, 1)
    lens = [kv_len, draw.rng.randint(query_len, kv_len)]
    case = upstream_case(
        draw,
        lens,
        query_len=query_len,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=draw.rng.choice((59 // 8 * 8, 64, 80, 128)),
        block_size=page,
        dtype=draw.rng.choice((torch.float16, torch.bfloat16)),
    )
    assert_accurate(case, *case.decode_with_lse())


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_flash_mla_grid(
    draw: Draw, device: str, is_ragged: bool, num_heads: int, query_len: int
) -> None:
    """Many heads over one KV head; NaN in every slot and nonsense in every entry not in use."""
    batch, mean = (128, 4096) if device == "cuda" else (5, 100)
    lens = [mean] * batch
    if is_ragged:
        lens = [max(query_len, int(draw.rng.gauss(mean, mean / 2))) for _ in lens]
        lens[0] = 0
    case = build(
        draw,
        lens,
        query_len=query_len,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=256,
        block_size=64,
        dtype=draw.rng.choice(HALF_DTYPES),
        padding=2147480000,
    )
    assert_accurate(case, *case.decode_with_lse())
