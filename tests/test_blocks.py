"""copy_blocks and swap_blocks move the named blocks, byte for byte, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import DTYPES, LAYOUTS, Draw, pools
from test_cache import FP8, whole_storage

from paged_attn import reference

ops = torch.ops.paged_attn
ANY_DTYPE = [*DTYPES, *FP8, torch.uint8, torch.float64]
# Layouts whose blocks are dense in memory.
DENSE_LAYOUTS = ["NHD", "HND", "mixed", "interleaved", "layers"]


def fill_with_bytes(draw: Draw, tensor: torch.Tensor) -> None:
    """The whole storage, NaN and all."""
    storage = whole_storage(tensor).view(torch.uint8)
    storage.copy_(draw.integers(0, 255, *storage.shape, dtype=torch.uint8))


def same_storages(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for cache, wanted in zip(ours, expected, strict=True):
        first, second = (whole_storage(t).view(torch.uint8) for t in (cache, wanted))
        assert torch.equal(first, second)


def twins(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        whole_storage(t).clone().as_strided(t.shape, t.stride(), t.storage_offset())
        for t in tensors
    ]


def distinct_pairs(draw: Draw, num_blocks: int, count: int, device: str) -> torch.Tensor:
    """Pairs that share no block."""
    ids = draw.rng.sample(range(num_blocks), 2 * count)
    return torch.tensor(ids, dtype=torch.int64, device=device).view(count, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_copy_of_every_layout(draw: Draw, device: str, dtype: torch.dtype, layout: str) -> None:
    """Each layer has strides of its own; ids outside the pool skip their pair."""
    rng = draw.rng
    num_blocks = rng.choice((4, 9))
    shape = (num_blocks, rng.choice((1, 3, 16)), rng.choice((1, 2, 5)), rng.choice((1, 5, 8, 72)))
    layouts = [layout, *rng.choices(LAYOUTS, k=rng.choice((0, 2)))]
    caches = [pools(name, *shape, dtype, device, fill=None) for name in layouts]
    k_caches, v_caches = [k for k, _ in caches], [v for _, v in caches]
    for cache in (*k_caches, *v_caches):
        fill_with_bytes(draw, cache)
    mapping = distinct_pairs(draw, num_blocks, 2, device)
    bad = [[-1, 0], [0, -1], [num_blocks, 1], [1, num_blocks], [2**40, 0], [0, -(2**63)]]
    mapping = torch.cat([torch.tensor(bad, device=device), mapping])
    # Layers may share a storage: twins of K first, then of V, would not.
    for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
        ours, expected = twins([k_cache, v_cache]), twins([k_cache, v_cache])
        assert ops.copy_blocks([ours[0]], [ours[1]], mapping) is None
        reference.copy_blocks([expected[0]], [expected[1]], mapping)
        same_storages(ours, expected)
    before = twins([*k_caches, *v_caches])
    expected = twins([*k_caches, *v_caches])
    ops.copy_blocks(before[: len(caches)], before[len(caches) :], mapping)
    reference.copy_blocks(expected[: len(caches)], expected[len(caches) :], mapping)
    same_storages(before, expected)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_copy_of_misaligned_caches(draw: Draw, device: str, offset: int) -> None:
    storage = torch.empty(5 * 64 + offset, dtype=torch.uint8, device=device)
    fill_with_bytes(draw, storage)
    cache = storage[offset:].view(5, 4, 2, 8)
    ours, expected = twins([cache]), twins([cache])
    mapping = distinct_pairs(draw, 5, 2, device)
    ops.copy_blocks(ours, twins([cache]), mapping)
    reference.copy_blocks(expected, [], mapping)
    same_storages(ours, expected)


@pytest.mark.parametrize("layers", [1, 33, 300])
def test_copy_of_many_layers(draw: Draw, device: str, layers: int) -> None:
    pool = torch.empty(layers, 2, 6, 2, 3, 8, dtype=torch.float16, device=device)
    fill_with_bytes(draw, pool)
    expected = pool.clone()
    mapping = distinct_pairs(draw, 6, 3, device)
    k_caches, v_caches = list(pool[:, 0].unbind()), list(pool[:, 1].unbind())
    ops.copy_blocks(k_caches, v_caches, mapping)
    expected[:, :, mapping[:, 1]] = expected[:, :, mapping[:, 0]]
    assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))


def test_copy_of_large_blocks(draw: Draw, device: str) -> None:
    """More than one thread block, or thread, a block."""
    cache = draw.normal(7, 64, 8, 128, dtype=torch.bfloat16)
    ours = [cache.clone(), -cache]
    mapping = distinct_pairs(draw, 7, 3, device)
    ops.copy_blocks(ours[:1], ours[1:], mapping)
    cache[mapping[:, 1]] = cache[mapping[:, 0]]
    assert_same_bits(ours[0], cache)
    assert_same_bits(ours[1], -cache)


def test_copy_from_one_block_to_many(draw: Draw, device: str) -> None:
    cache = draw.normal(5, 4, 2, 8)
    value = cache.clone()
    mapping = torch.tensor([[2, 0], [2, 4], [2, 1]], device=device)
    ops.copy_blocks([cache], [value], mapping)
    for block in (0, 1, 4):
        assert_same_bits(cache[block], cache[2])
        assert_same_bits(value[block], value[2])


def test_copy_of_nothing(draw: Draw, device: str) -> None:
    none = torch.zeros(0, 2, dtype=torch.int64, device=device)
    pair = torch.tensor([[0, 1]], device=device)
    cache = draw.normal(3, 4, 2, 8)
    before = cache.clone()
    ops.copy_blocks([cache], [cache.clone()], none)
    ops.copy_blocks([], [], none)
    ops.copy_blocks([], [], pair)
    ops.copy_blocks([cache[:0]], [cache[:0]], pair)
    ops.copy_blocks([cache[:, :, :, :0]], [cache[:, :, :, :0]], pair)
    assert_same_bits(cache, before)


def test_copy_with_offsets_beyond_32_bits(draw: Draw, device: str) -> None:
    """The last of three blocks begins past 2^32 bytes."""
    stride = 2**31 + 64
    pool = torch.empty(2 * stride + 64, dtype=torch.uint8, device=device)
    cache = pool.as_strided((3, 4, 2, 8), (stride, 16, 8, 1))
    cache[0] = draw.integers(0, 255, 4, 2, 8, dtype=torch.uint8)
    small = torch.zeros(3, 4, 2, 8, dtype=torch.uint8, device=device)
    ops.copy_blocks([cache], [small], torch.tensor([[0, 2]], device=device))
    assert torch.equal(cache[2], cache[0])
    ops.swap_blocks([cache], [small], torch.tensor([[2, 1]]))
    assert torch.equal(small[1], cache[0])


@pytest.mark.parametrize("stride", [0, 1, 2**62])
def test_strides_of_single_elements_mean_nothing(draw: Draw, device: str, stride: int) -> None:
    cache = draw.normal(2, 4, 1, 8)
    odd = cache.as_strided(cache.shape, (32, 8, stride, 1))
    ops.copy_blocks([odd], [cache.clone()], torch.tensor([[0, 1]], device=device))
    assert_same_bits(cache[1], cache[0])
    one = cache[:1].as_strided((1, 4, 1, 8), (stride, 8, stride, 1))
    target = torch.zeros(1, 4, 1, 8, device=device)
    ops.swap_blocks([one], [target], torch.tensor([[0, 0]]))
    assert_same_bits(target[0], cache[0])


def test_checks_of_copy(draw: Draw, device: str, checks: None) -> None:
    cache = draw.normal(3, 4, 2, 8)
    before, value = cache.clone(), cache.clone()
    ops.copy_blocks([cache.clone()], [value], torch.tensor([[0, 1]], device=device))
    none, nothing = cache[:0], torch.tensor([[0, 0]], device=device)
    with pytest.raises(IndexError, match=r"block_mapping\[0, 0\] must be in \[0, 0\)"):
        ops.copy_blocks([none], [none], nothing)
    for pair, place, got in (([3, 0], "1, 0", 3), ([0, -1], "1, 1", -1)):
        mapping = torch.tensor([[0, 1], pair], device=device)
        message = (
            rf"^paged_attn\.copy_blocks: block_mapping\[{place}\] must be in \[0, 3\), got {got}"
        )
        with pytest.raises(IndexError, match=message):
            ops.copy_blocks([cache], [value], mapping)
    assert_same_bits(cache, before)


@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_swap_of_every_layout(draw: Draw, device: str, dtype: torch.dtype, layout: str) -> None:
    """Tensors of different sizes; runs of neighbours, single blocks, bad ids."""
    rng = draw.rng
    shape = (rng.choice((1, 3, 16)), rng.choice((1, 2, 5)), rng.choice((5, 8, 72)))
    srcs = list(pools(layout, 12, *shape, dtype, device, fill=None))
    dsts = list(
        pools(
            rng.choice((layout, "layers"))
            if layout in ("NHD", "interleaved", "layers")
            else layout,
            9,
            *shape,
            dtype,
            device,
            fill=None,
        )
    )
    for tensor in (*srcs, *dsts):
        fill_with_bytes(draw, tensor)
    first, to = rng.randint(0, 5), rng.randint(0, 3)
    pairs = [[first + i, to + i] for i in range(rng.randint(1, 4))]
    pairs += [[11, 8], [10, 7], [-1, 0], [0, -1], [12, 0], [0, 9], [2**40, 0]]
    if rng.random() < 0.5:
        rng.shuffle(pairs)
    mapping = torch.tensor(pairs)
    ours, expected = twins(dsts), twins(dsts)
    before = twins(srcs)
    assert ops.swap_blocks(srcs, ours, mapping) is None
    reference.swap_blocks(srcs, expected, mapping)
    same_storages(ours, expected)
    same_storages(srcs, before)


@pytest.mark.parametrize(
    "pairs",
    [
        [[0, 5], [1, 2], [2, 3]],
        [[0, 2], [3, 3], [4, 4]],
        [[3, 3], [2, 2], [1, 1]],
        [[0, 0], [1, 1], [-1, 2], [2, 2], [3, 4]],
    ],
    ids=str,
)
def test_swap_of_neighbours_on_one_side_only(
    draw: Draw, device: str, pairs: list[list[int]]
) -> None:
    src, dst = draw.normal(6, 4, 8), torch.zeros(6, 4, 8, device=device)
    expected = dst.clone()
    ops.swap_blocks([src], [dst], torch.tensor(pairs))
    reference.swap_blocks([src], [expected], torch.tensor(pairs))
    assert_same_bits(dst, expected)


def test_swap_within_one_tensor(draw: Draw, device: str) -> None:
    cache = draw.normal(6, 4, 2, 8)
    before = cache.clone()
    ops.swap_blocks([cache], [cache], torch.tensor([[0, 3], [1, 4]]))
    assert_same_bits(cache[3:5], before[:2])
    assert_same_bits(cache[:3], before[:3])
    # Chained: undefined, but inside.
    ops.swap_blocks([cache], [cache], torch.tensor([[0, 1], [1, 2], [2, 3]]))
    assert_same_bits(cache[4:], torch.stack([before[1], before[5]]))


def test_swap_of_any_rank(draw: Draw, device: str) -> None:
    for shape in ((7,), (7, 3), (7, 2, 3, 4, 5)):
        src, dst = draw.normal(*shape), torch.zeros(shape, device=device)
        ops.swap_blocks([src], [dst], torch.tensor([[2, 0], [3, 1]]))
        assert_same_bits(dst[:2], src[2:4])
        assert bool((dst[2:] == 0).all())


def test_swap_of_nothing(draw: Draw, device: str) -> None:
    tensor = draw.normal(3, 4)
    before = tensor.clone()
    ops.swap_blocks([tensor], [tensor], torch.zeros(0, 2, dtype=torch.int64))
    ops.swap_blocks([], [], torch.zeros(0, 2, dtype=torch.int64))
    ops.swap_blocks([tensor[:0]], [tensor], torch.tensor([[0, 0]]))
    ops.swap_blocks([tensor[:, :0]], [tensor[:, :0]], torch.tensor([[0, 1]]))
    assert_same_bits(tensor, before)


def test_checks_of_swap(draw: Draw, device: str, checks: None) -> None:
    """Each side has its own number of blocks."""
    src, dst = draw.normal(5, 4), torch.zeros(3, 4, device=device)
    ops.swap_blocks([src], [dst], torch.tensor([[4, 2]]))
    dst.zero_()
    for pair, place, limit in (([5, 0], "1, 0", 5), ([4, 3], "1, 1", 3)):
        message = rf"^paged_attn\.swap_blocks: block_mapping\[{place}\] must be in \[0, {limit}\)"
        with pytest.raises(IndexError, match=message):
            ops.swap_blocks([src], [dst], torch.tensor([[0, 0], pair]))
    assert bool((dst == 0).all())


def strided(stride: int) -> Any:
    """[6, 4, 8] with blocks `stride` elements apart."""
    return lambda t: torch.zeros(6 * stride, device=t.device).as_strided((6, 4, 8), (stride, 8, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["swap out", "swap in", "mixed"])
@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("stride", [32, 48])
def test_swap_between_host_and_device(draw: Draw, where: str, is_pinned: bool, stride: int) -> None:
    device_blocks = strided(stride)(torch.empty(0, device="cuda"))
    host = torch.zeros(9, 4, 8, pin_memory=is_pinned)
    device_blocks.copy_(draw.normal(6, 4, 8))
    host.copy_(draw.normal(9, 4, 8))
    mapping = torch.tensor([[0, 2], [1, 3], [5, 0], [-1, 1], [7, 1]])
    srcs, dsts = {
        "swap out": ([device_blocks], [host]),
        "swap in": ([host], [device_blocks]),
        "mixed": ([device_blocks, device_blocks], [host, torch.zeros_like(host)]),
    }[where]
    if where == "mixed":
        dsts = [dsts[0], torch.zeros(9, 4, 8, device="cuda")]
    ours, expected = dsts, [t.clone() for t in dsts]
    reference.swap_blocks(srcs, expected, mapping)
    ops.swap_blocks(srcs, ours, mapping)
    torch.cuda.synchronize()
    for dst, wanted in zip(ours, expected, strict=True):
        assert_same_bits(dst, wanted)


@pytest.mark.gpu
def test_swap_runs_on_the_current_stream_without_waiting(draw: Draw) -> None:
    host = torch.zeros(64, 4096, pin_memory=True)
    blocks = torch.zeros(64, 4096, device="cuda")
    mapping = torch.arange(64).view(-1, 1).expand(-1, 2).contiguous()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        blocks.fill_(3.0)
        ops.swap_blocks([blocks], [host], mapping)
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    done.synchronize()
    assert bool((host == 3.0).all())


@pytest.mark.gpu
def test_copy_in_a_graph(draw: Draw) -> None:
    """Replays with other pairs, and other values."""
    caches = [draw.normal(8, 4, 2, 8) for _ in range(4)]
    mapping = torch.tensor([[0, 1], [2, 3]], device="cuda")
    ops.copy_blocks(caches[:2], caches[2:], mapping)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.copy_blocks(caches[:2], caches[2:], mapping)
    for cache in caches:
        cache.copy_(draw.normal(8, 4, 2, 8))
    mapping.copy_(torch.tensor([[5, 0], [-1, 7]]))
    expected = twins(caches)
    reference.copy_blocks(expected[:2], expected[2:], mapping)
    graph.replay()
    same_storages(caches, expected)
