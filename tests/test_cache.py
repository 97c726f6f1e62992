"""reshape_and_cache writes the named slots, bit for bit, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, LAYOUTS, Draw, pools

from paged_attn import reference

reshape_and_cache = torch.ops.paged_attn.reshape_and_cache
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
# Of the others the rows are too little aligned with elements of one byte.
FP8_LAYOUTS = [layout for layout in LAYOUTS if layout != "gaps"]


def sources(draw: Draw, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """key and value [T, G, D] as engines have them."""
    packed = draw.normal(tokens, 3, heads, dim, dtype=dtype)
    by_head = draw.normal(heads, tokens, dim + 8, dtype=dtype).transpose(0, 1)[..., :dim]
    return {
        "contiguous": (packed[:, 0].contiguous(), packed[:, 1].contiguous()),
        "packed": (packed[:, 1], packed[:, 2]),
        "heads first": (by_head, packed[:, 0]),
        "expanded": (packed[:1, 0].expand(tokens, -1, -1), packed[:, :1, 0].expand(-1, heads, -1)),
    }


@pytest.mark.parametrize("source", ["contiguous", "packed", "heads first", "expanded"])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_exactly_the_slots(
    draw: Draw,
    device: str,
    dtype: torch.dtype,
    layout: str,
    slot_dtype: torch.dtype,
    source: str,
) -> None:
    """Slots of -1 and past the pool are skipped; the bytes between rows survive."""
    blocks = 7
    block_size = draw.rng.choice((1, 3, 16, 48))
    heads = draw.rng.choice((1, 2, 5))
    dim = draw.rng.choice((8, 64, 72, 128, 256))
    slots = draw.rng.sample(range(blocks * block_size), 5)
    limit = blocks * block_size
    slots = [-1, slots[0], limit, slots[1], slots[2], -(2**31), slots[3], 2**31 - 1, slots[4]]
    slot_mapping = torch.tensor(slots, dtype=slot_dtype, device=device)
    key, value = sources(draw, len(slots) + 2, heads, dim, dtype)[source]

    ours = pools(layout, blocks, block_size, heads, dim, dtype, device, fill=2.0)
    expected = pools(layout, blocks, block_size, heads, dim, dtype, device, fill=2.0)
    assert reshape_and_cache(key, value, *ours, slot_mapping) is None
    reference.reshape_and_cache(key, value, *expected, slot_mapping)
    for cache, wanted in zip(ours, expected, strict=True):
        assert_same_bits(cache, wanted)
        assert_same_bits(whole_storage(cache), whole_storage(wanted))
    assert int((ours[0] != 2.0).any(-1).any(-1).sum()) == 5


SCALES = [None, [], [1], "heads"]


def new_scale(draw: Draw, shape: Any, heads: int) -> torch.Tensor | None:
    if shape is None:
        return None
    sizes = [heads] if shape == "heads" else shape
    sign = draw.rng.choice((1.0, -1.0))
    return sign * torch.exp2(draw.normal(*sizes))


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [*[(dtype, dtype) for dtype in DTYPES], *itertools.product(DTYPES[:2], FP8)],
)
def test_values_over_their_scales(
    draw: Draw, device: str, dtype: torch.dtype, cache_dtype: torch.dtype, scale: Any
) -> None:
    """In fp8 saturated; from below fp8's least number to beyond its largest, both signs."""
    layout, heads = draw.rng.choice(FP8_LAYOUTS), draw.rng.choice((1, 3))
    dim = draw.rng.choice((8, 64, 72))
    shape = (layout, 5, 3, heads, dim, cache_dtype, device)
    ours, expected = pools(*shape, fill=2.0), pools(*shape, fill=2.0)
    tokens = 11
    slots = torch.tensor(draw.rng.sample(range(-3, 18), tokens), device=device)
    key, value = sources(draw, tokens, heads, dim, dtype)[
        draw.rng.choice(("packed", "heads first"))
    ]
    key.mul_(torch.exp2(draw.integers(-18, 18, *key.shape, dtype=torch.float32)).to(dtype))
    if draw.rng.random() < 0.5:
        # Rows that no vector of more than one element fits.
        key = torch.cat([key, key], -1)[..., 1 : dim + 1]
    scales = new_scale(draw, scale, heads), new_scale(draw, scale, heads)
    reshape_and_cache(key, value, *ours, slots, *scales)
    reference.reshape_and_cache(key, value, *expected, slots, *scales)
    for cache, wanted in zip(ours, expected, strict=True):
        assert_same_bits(whole_storage(cache), whole_storage(wanted))


@pytest.mark.parametrize("only", ["k_scale", "v_scale"])
def test_a_scale_for_one_cache_only(draw: Draw, device: str, only: str) -> None:
    k_cache, v_cache = pools("NHD", 2, 4, 2, 64, torch.bfloat16, device, fill=0.0)
    key = draw.normal(8, 2, 64, dtype=torch.bfloat16)
    slots = torch.arange(8, device=device)
    reshape_and_cache(key, key, k_cache, v_cache, slots, **{only: torch.tensor(4.0, device=device)})
    scaled, plain = (k_cache, v_cache) if only == "k_scale" else (v_cache, k_cache)
    assert_same_bits(scaled.flatten(0, 1), key / 4)
    assert_same_bits(plain.flatten(0, 1), key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", FP8)
def test_every_value_in_fp8(device: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    key = patterns.view(-1, 1, 64)
    tokens = key.shape[0]
    k_cache, v_cache = pools("NHD", tokens, 1, 1, 64, cache_dtype, device, fill=0.0)
    reshape_and_cache(key, key, k_cache, v_cache, torch.arange(tokens, device=device))
    limit = torch.finfo(cache_dtype).max
    stored, exact = k_cache.flatten().double(), patterns.double().clamp(-limit, limit)
    assert torch.equal(stored.isnan(), patterns.isnan())
    is_number = ~patterns.isnan()
    assert torch.equal(stored.signbit()[is_number], exact.signbit()[is_number])
    # No fp8 number is nearer, and of two as near the even one was taken.
    numbers = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    finite = numbers[numbers.view(cache_dtype).float().isfinite()]
    finite = finite[finite < 128]
    distances = (exact.abs()[:, None] - finite.view(cache_dtype).double()).abs()
    nearest = distances.min(-1).values
    is_nearest = (stored.abs() - exact.abs()).abs() == nearest
    assert bool((is_nearest | stored.isnan()).all())
    is_tie = (distances == nearest[:, None]).sum(-1) == 2
    codes = k_cache.flatten().view(torch.uint8)
    assert bool((codes[is_tie] % 2 == 0).all())
    assert bool(is_tie.any())
    assert_same_bits(v_cache, k_cache)


def test_fp8_saturates_and_keeps_nan(device: str) -> None:
    values = [448.0, 449.0, 464.0, 1e4, float("inf"), float("nan"), -0.0, 2.0**-10]
    key = torch.tensor(values, device=device).half().view(1, 1, 8)
    k_cache, v_cache = pools("NHD", 1, 1, 1, 8, torch.float8_e4m3fn, device, fill=1.0)
    reshape_and_cache(key, -key, k_cache, v_cache, torch.tensor([0], device=device))
    codes = k_cache.view(torch.uint8).flatten().tolist()
    assert codes[:5] == [0x7E] * 5
    assert codes[5] & 0x7F == 0x7F
    assert codes[6:] == [0x80, 0]
    assert v_cache.view(torch.uint8).flatten().tolist()[:5] == [0xFE] * 5


def test_a_scale_of_zero(device: str) -> None:
    key = torch.tensor([1.0, -1.0, 0.0, 2.0] * 2, device=device).half().view(1, 1, 8)
    k_cache, v_cache = pools("NHD", 1, 1, 1, 8, torch.float8_e5m2, device, fill=1.0)
    zero = torch.zeros((), device=device)
    reshape_and_cache(key, key, k_cache, v_cache, torch.tensor([0], device=device), zero, zero)
    stored = k_cache.float().flatten()[:4]
    assert stored[0] == 57344
    assert stored[1] == -57344
    assert bool(stored[2].isnan())


def many_scales(draw: Draw, kind: str) -> torch.Tensor:
    """Of each kind 48."""
    if kind == "near 1":
        return torch.exp2(3 * draw.normal(48))
    if kind == "named":
        tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
        named = [0.0, float("inf"), float("nan"), tiny, tiny / 2, 2.0**-149, huge, 1 / 448, 448.0]
        named += [2.0**power for power in (-100, -64, -63, -20, -1, 0, 1, 20, 63, 64, 65, 100)]
        named += [1 - 2.0**-24, 1 + 2.0**-23, 1 / 3]
        return torch.tensor([*named, *(-x for x in named)], device=draw.device)
    if kind == "powers of 2 and their neighbours":
        bits = draw.integers(0, 254, 48, dtype=torch.int32) * 2**23
        bits += draw.integers(-1, 1, 48, dtype=torch.int32)
        return bits.view(torch.float32).abs()
    assert kind == "any bits"
    return draw.integers(-(2**31), 2**31 - 1, 48, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    "kind", ["near 1", "named", "powers of 2 and their neighbours", "any bits"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", FP8)
def test_every_value_over_many_scales(
    draw: Draw, device: str, cache_dtype: torch.dtype, dtype: torch.dtype, kind: str
) -> None:
    """As if divided in fp32 and then rounded, whatever the scale is, signs of 0 included."""
    scale = many_scales(draw, kind)
    heads, limit = len(scale), torch.finfo(cache_dtype).max
    patterns = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    key = patterns.view(-1, 1, 64).expand(-1, heads, -1)
    tokens = key.shape[0]
    caches = pools("NHD", tokens, 1, heads, 64, cache_dtype, device, fill=0.0)
    scales = scale, scale.flip(0)
    reshape_and_cache(key, key, *caches, torch.arange(tokens, device=device), *scales)
    for cache, divisor in zip(caches, scales, strict=True):
        quotients = key.float() / divisor[:, None]
        assert_same_bits(cache.flatten(0, 1), quotients.clamp(-limit, limit).to(cache_dtype))


@pytest.mark.parametrize("dim", [8, 16, 40, 64, 72, 128, 256])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 71])
def test_rows_of_every_length(draw: Draw, device: str, heads: int, dim: int) -> None:
    """Few and many tokens of few and many heads, wherever their rows lie."""
    pairs = [*((dtype, dtype) for dtype in DTYPES), *itertools.product(DTYPES[:2], FP8)]
    for tokens in (1, 2, 3, 7, 33, 1000):
        dtype, cache_dtype = draw.rng.choice(pairs)
        key, value = draw.rng.choice(list(sources(draw, tokens, heads, dim, dtype).values()))
        block_size = draw.rng.choice((1, 3, 16, 48))
        blocks = tokens // block_size + 2
        layout = draw.rng.choice(FP8_LAYOUTS if cache_dtype in FP8 else LAYOUTS)
        shape = (layout, blocks, block_size, heads, dim, cache_dtype, device)
        ours, expected = pools(*shape, fill=2.0), pools(*shape, fill=2.0)
        slots = draw.rng.sample(range(blocks * block_size), tokens)
        slots[draw.rng.randrange(tokens)] = -1
        slot_mapping = torch.tensor(slots, device=device)
        scales = new_scale(draw, "heads", heads), new_scale(draw, [], heads)
        if cache_dtype == dtype:
            scales = None, None
        reshape_and_cache(key, value, *ours, slot_mapping, *scales)
        reference.reshape_and_cache(key, value, *expected, slot_mapping, *scales)
        for cache, wanted in zip(ours, expected, strict=True):
            assert_same_bits(whole_storage(cache), whole_storage(wanted))


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)


@pytest.mark.parametrize("slot", [2**32, 2**40 + 3, 2**63 - 1, -(2**40), -(2**63)])
def test_int64_slots_are_not_cut_to_32_bits(draw: Draw, device: str, slot: int) -> None:
    k_cache, v_cache = pools("NHD", 4, 4, 2, 8, torch.float16, device, fill=2.0)
    key = draw.normal(1, 2, 8, dtype=torch.float16)
    reshape_and_cache(key, key, k_cache, v_cache, torch.tensor([slot], device=device))
    assert bool((k_cache == 2.0).all())
    assert bool((v_cache == 2.0).all())


def test_bits_of_any_value(draw: Draw, device: str) -> None:
    """NaN payloads, infinities, signed zeros and subnormal numbers arrive as they were."""
    for dtype, size in ((torch.float16, torch.int16), (torch.float32, torch.int32)):
        info = torch.iinfo(size)
        key = draw.integers(info.min, info.max, 16, 2, 64, dtype=size).view(dtype)
        k_cache, v_cache = pools("NHD", 2, 8, 2, 64, dtype, device, fill=0.0)
        slots = torch.randperm(16, generator=draw.generator, device=device)
        reshape_and_cache(key, key.flip(0), k_cache, v_cache, slots)
        stored = k_cache.view(size).flatten(0, 1)[slots]
        assert torch.equal(stored, key.view(size))
        stored = v_cache.view(size).flatten(0, 1)[slots]
        assert torch.equal(stored, key.flip(0).view(size))


def test_key_with_more_rows_than_slots(draw: Draw, device: str) -> None:
    """Rows of a padded batch: slot_mapping says how many tokens there are."""
    k_cache, v_cache = pools("NHD", 4, 4, 2, 8, torch.float16, device, fill=0.0)
    key = draw.normal(9, 2, 8, dtype=torch.float16)
    reshape_and_cache(key, key, k_cache, v_cache, torch.tensor([5, 2], device=device))
    assert_same_bits(k_cache[1, 1], key[0])
    assert_same_bits(k_cache[0, 2], key[1])
    assert int((k_cache != 0).any(-1).any(-1).sum()) == 2


def test_no_tokens_and_no_blocks(draw: Draw, device: str) -> None:
    k_cache, v_cache = pools("NHD", 4, 4, 2, 8, torch.float16, device, fill=2.0)
    key = draw.normal(3, 2, 8, dtype=torch.float16)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    reshape_and_cache(key, key, k_cache, v_cache, none)
    reshape_and_cache(key[:0], key[:0], k_cache, v_cache, none)
    reshape_and_cache(key, key, k_cache[:0], v_cache[:0], torch.arange(3, device=device))
    assert bool((k_cache == 2.0).all())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_checks(draw: Draw, device: str, checks: None, dtype: torch.dtype) -> None:
    """A slot past the pool raises before anything is written; a negative one is still skipped."""
    k_cache, v_cache = pools("NHD", 4, 4, 2, 8, torch.float16, device, fill=2.0)
    key = draw.normal(3, 2, 8, dtype=torch.float16)
    slots = torch.tensor([1, -1, 16], dtype=dtype, device=device)
    with pytest.raises(IndexError, match=r"^paged_attn\.reshape_and_cache: .*slot_mapping") as err:
        reshape_and_cache(key, key, k_cache, v_cache, slots)
    for number in ("2", "16"):
        assert number in str(err.value)
    assert bool((k_cache == 2.0).all())
    reshape_and_cache(key, key, k_cache, v_cache, slots.clamp(max=15))
    assert_same_bits(k_cache[3, 3], key[2])


def test_what_is_written_is_what_decode_reads(draw: Draw, device: str) -> None:
    """Token by token through the slots of a block table, then one decode."""
    block_size, length = 4, 11
    k_cache, v_cache = pools("HND", 6, block_size, 2, 64, torch.float32, device)
    table = torch.tensor([[4, 0, 5]], dtype=torch.int32, device=device)
    key, value = draw.normal(length, 2, 64), draw.normal(length, 2, 64)
    for position in range(length):
        block = int(table[0, position // block_size])
        slot = torch.tensor([block * block_size + position % block_size], device=device)
        reshape_and_cache(
            key[position : position + 1], value[position : position + 1], k_cache, v_cache, slot
        )
    q = draw.normal(1, 4, 64)
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    out = torch.ops.paged_attn.decode(q, k_cache, v_cache, table, lens)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.view(4, 1, 64),
        key.repeat_interleave(2, 1).transpose(0, 1),
        value.repeat_interleave(2, 1).transpose(0, 1),
    )
    torch.testing.assert_close(out[0], expected[:, 0], atol=1e-5, rtol=1e-5)
