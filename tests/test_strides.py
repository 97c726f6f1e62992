"""Strides are free wherever the contract says so, and none is guessed from shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_same_bits
from attention_case import DTYPES, LAYOUTS, Q_LAYOUTS, Draw, build, pools

LENS = [33, 1, 70, 16]


@pytest.mark.parametrize("q_layout", Q_LAYOUTS)
@pytest.mark.parametrize("query_len", [None, 3, [2, 0, 5, 1]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout(
    draw: Draw, device: str, dtype: torch.dtype, layout: str, query_len: Any, q_layout: str
) -> None:
    case = build(
        draw,
        LENS,
        query_len=query_len,
        num_heads=6,
        num_kv_heads=3,
        head_dim=draw.rng.choice((64, 72, 128)),
        dtype=dtype,
        layout=layout,
        q_layout=q_layout,
    )
    assert_accurate(case, *case.decode_with_lse())


def with_nonsense_strides(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The same elements; dimensions of size 1, the last excepted, get a stride without meaning."""
    strides = [
        stride if size == 1 and dim < tensor.dim() - 1 else old
        for dim, (size, old) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return tensor.as_strided(tensor.shape, strides)


@pytest.mark.parametrize("stride", [0, 1, 3, 2**31 + 1, 2**62])
@pytest.mark.parametrize(
    "shape",
    [
        {"lens": [9], "num_heads": 1, "num_kv_heads": 1, "num_blocks": 1, "spare_columns": 0},
        {"lens": [9, 20], "num_heads": 2, "num_kv_heads": 1},
        {"lens": [5, 2], "num_heads": 4, "num_kv_heads": 2, "block_size": 1},
        {"lens": [5], "num_heads": 4, "num_kv_heads": 2, "query_len": 1},
        {"lens": [20, 5], "num_heads": 1, "num_kv_heads": 1, "query_len": [1, 0]},
    ],
)
def test_strides_of_single_elements_mean_nothing(
    draw: Draw, device: str, shape: dict[str, Any], stride: int
) -> None:
    case = build(draw, **shape)
    expected, expected_lse = case.decode_with_lse()
    odd = case.with_(
        q=with_nonsense_strides(case.q, stride),
        k_cache=with_nonsense_strides(case.k_cache, stride),
        v_cache=with_nonsense_strides(case.v_cache, stride),
        block_tables=with_nonsense_strides(case.block_tables, stride),
    )
    out = with_nonsense_strides(torch.empty_like(expected), stride)
    lse = torch.empty_like(expected_lse)
    torch.ops.paged_attn.decode_with_lse.out(*odd.args, **odd.options, out=out, lse=lse)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    key = draw.normal(1, shape["num_kv_heads"], 64, dtype=torch.float16)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    odd_key = with_nonsense_strides(key, stride)
    torch.ops.paged_attn.reshape_and_cache(odd_key, odd_key, odd.k_cache, odd.v_cache, slots)
    assert_same_bits(case.k_cache[0, 0], key[0])
    assert_same_bits(case.v_cache[0, 0], key[0])


def test_table_rows_wider_than_the_table(draw: Draw, device: str) -> None:
    case = build(draw, LENS)
    expected = case.decode()
    rows, width = case.block_tables.shape
    wide = torch.full((rows, width + 77), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, 5 : 5 + width] = case.block_tables
    assert_same_bits(case.with_(block_tables=wide[:, 5 : 5 + width]).decode(), expected)


def test_one_table_for_all_rows(draw: Draw, device: str) -> None:
    """A table expanded over the batch: row stride 0."""
    case = build(draw, [50])
    case = case.with_(
        q=draw.normal(4, 4, 64, dtype=torch.float16),
        block_tables=case.block_tables.expand(4, -1),
        context_lens=torch.tensor([50, 3, 17, 48], dtype=torch.int32, device=device),
    )
    assert_accurate(case, *case.decode_with_lse())


def test_expanded_query(draw: Draw, device: str) -> None:
    case = build(draw, LENS)
    case = case.with_(q=case.q[:1].expand(4, -1, -1))
    assert_accurate(case, *case.decode_with_lse())


def test_cache_expanded_over_heads(draw: Draw, device: str) -> None:
    case = build(draw, LENS, num_heads=4, num_kv_heads=1)
    case = case.with_(
        k_cache=case.k_cache.expand(-1, -1, 4, -1), v_cache=case.v_cache.expand(-1, -1, 4, -1)
    )
    assert_accurate(case, *case.decode_with_lse())


def test_keys_that_are_the_values(draw: Draw, device: str) -> None:
    case = build(draw, LENS)
    case = case.with_(v_cache=case.k_cache)
    assert_accurate(case, *case.decode_with_lse())


def out_views(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Outputs of `shape` [..., H, D] whose rows are not where a contiguous tensor has them."""
    *rows, heads, dim = shape
    flat = torch.empty(*rows, heads * dim + 24, dtype=dtype, device=device)
    by_head = torch.empty(heads, *rows, dim + 8, dtype=dtype, device=device)
    return [
        torch.empty(*rows, heads * dim, dtype=dtype, device=device).view(shape),
        flat[..., 8 : 8 + heads * dim].unflatten(-1, (heads, dim)),
        by_head.movedim(0, -2)[..., :dim],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [None, 3, [2, 0, 5, 1]])
def test_out_of_any_strides(draw: Draw, device: str, query_len: Any, dtype: torch.dtype) -> None:
    case = build(draw, LENS, query_len=query_len, dtype=dtype)
    expected = case.decode()
    for out in out_views(tuple(case.q.shape), dtype, device):
        out.fill_(float("nan"))
        torch.ops.paged_attn.decode.out(*case.args, out=out)
        assert_same_bits(out, expected)


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A contiguous copy that begins `elements` past an aligned address."""
    buffer = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    view = buffer[elements:].view(tensor.shape)
    return view.copy_(tensor)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_bases(
    draw: Draw, device: str, name: str, elements: int, dtype: torch.dtype
) -> None:
    """Right, or refused by name."""
    case = build(draw, LENS, dtype=dtype)
    out = torch.full_like(case.q, 3.0)
    if name == "out":
        out = shifted(out, elements)
    else:
        case = case.with_(**{name: shifted(getattr(case, name), elements)})
    refusal = None
    try:
        torch.ops.paged_attn.decode.out(*case.args, out=out)
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        assert_accurate(case, out)
    else:
        assert refusal.startswith(f"paged_attn.decode: {name} must be")
        assert bool((out == 3.0).all())


@pytest.mark.parametrize("head_dim", [8, 24, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_the_promised_alignment(
    draw: Draw, device: str, dtype: torch.dtype, head_dim: int
) -> None:
    """Rows start at odd multiples of 16 bytes, the least the contract asks for."""
    case = build(draw, LENS, head_dim=head_dim, dtype=dtype)
    step = 16 // case.q.element_size()
    case = case.with_(**{n: shifted(getattr(case, n), step) for n in ("q", "k_cache", "v_cache")})
    assert_accurate(case, *case.decode_with_lse())


def test_caches_of_different_strides_are_not_swapped(draw: Draw, device: str) -> None:
    """K head-major with gaps, V token-major, both in one storage."""
    case = build(draw, LENS, num_heads=6, num_kv_heads=3)
    n, s, g, d = case.k_cache.shape
    storage = torch.full((2 * n * s * g * (d + 8),), float("nan"), device=device).half()
    half = storage.numel() // 2
    k_cache = storage[:half].view(n, g, s, d + 8).transpose(1, 2)[..., :d]
    v_cache = storage[half:].view(n, s, g, d + 8)[..., 8:]
    k_cache.copy_(case.k_cache)
    v_cache.copy_(case.v_cache)
    expected = case.decode()
    case = case.with_(k_cache=k_cache, v_cache=v_cache)
    assert_accurate(case, case.decode())
    torch.testing.assert_close(case.decode(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_need_copies(device: str, layout: str) -> None:
    """Each pool of these tests is a view: K and V share no element."""
    k_cache, v_cache = pools(layout, 3, 4, 2, 8, torch.float16, device, fill=0.0)
    k_cache.fill_(1.0)
    v_cache.fill_(2.0)
    assert bool((k_cache == 1.0).all())
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
