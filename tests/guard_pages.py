"""Runs decode and the ops that write caches on memory whose neighbours are not mapped.

An access outside ends the CUDA context, so this is a program of its own. It prints `ok`.
With `--prove` it reads one element past the end instead, which must fail.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import torch
from accuracy import assert_accurate
from attention_case import Case, Draw

PINNED, LOCATION_DEVICE, READ_WRITE = 1, 1, 3


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp's allocFlags."""

    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", AllocationFlags),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class GuardedMemory:
    """Exactly `size` bytes of device memory with an unmapped page before and behind."""

    def __init__(self, size: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        location = Location(LOCATION_DEVICE, torch.cuda.current_device())
        properties = AllocationProperties(type=PINNED, location=location)
        page = ctypes.c_size_t()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), 0)
        if size % page.value:
            raise ValueError(f"{size} bytes are not whole pages of {page.value}")
        self.size = size
        base, handle = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        reserved = ctypes.c_size_t(size + 2 * page.value)
        zero = ctypes.c_size_t(0)
        no_address = ctypes.c_ulonglong(0)
        flags = ctypes.c_ulonglong(0)
        bytes_ = ctypes.c_size_t(size)
        self.call("cuMemAddressReserve", ctypes.byref(base), reserved, zero, no_address, flags)
        self.call("cuMemCreate", ctypes.byref(handle), bytes_, ctypes.byref(properties), flags)
        self.address = base.value + page.value
        start = ctypes.c_ulonglong(self.address)
        self.call("cuMemMap", start, bytes_, zero, handle, flags)
        access = AccessDescription(location, READ_WRITE)
        self.call("cuMemSetAccess", start, bytes_, ctypes.byref(access), ctypes.c_size_t(1))

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def view(self, past_the_end: int = 0) -> torch.Tensor:
        """Its bytes as a tensor."""
        holder = type("Holder", (), {})()
        holder.__cuda_array_interface__ = {
            "shape": (self.size + past_the_end,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        return torch.as_tensor(holder, device="cuda")


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    memory = GuardedMemory(size)
    return memory.view().view(dtype).view(shape)


def check(dtype: torch.dtype, head_dim: int, block_size: int, query_len: int, seed: int) -> None:
    """Every block of the pool is used, the first and the last one in part and in full."""
    draw = Draw(seed, "cuda")
    heads, batch, columns = 2, 4, 131072
    element = torch.empty(0, dtype=dtype).element_size()
    num_blocks = math.lcm(2**21, block_size * heads * head_dim * element)
    num_blocks //= block_size * heads * head_dim * element
    shape = (num_blocks, block_size, heads, head_dim)
    k_cache, v_cache = guarded(shape, dtype), guarded(shape, dtype)
    for cache in (k_cache, v_cache):
        cache.copy_(draw.normal(*shape))
    tables = guarded((batch, columns), torch.int32).fill_(2147480000)
    order = draw.rng.sample(range(1, num_blocks - 1), 2) if num_blocks > 3 else [1, 1]
    edge = [num_blocks - 1, 0]
    for row, blocks in enumerate(([0, *order, edge[0]], edge, [*order, 0], [edge[0]])):
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    lens = [4 * block_size, 2 * block_size, 2 * block_size + 1, block_size]
    case = Case(
        q=draw.normal(batch, query_len, 3 * heads, head_dim, dtype=dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        context_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
    )
    assert_accurate(case, *case.decode_with_lse())

    tables[3] = torch.arange(columns, dtype=torch.int32) % num_blocks
    case.context_lens[3] = min(columns * block_size, 300_000)
    assert_accurate(case, *case.decode_with_lse())

    for bad in (-1, num_blocks, 2**31 - 1, -(2**31)):
        tables[0, 1] = bad
        out, lse = case.decode_with_lse()
        assert bool(out[0].isnan().all())
        assert bool(lse[0].isnan().all())
        assert not bool(out[1:].isnan().any())
    case.context_lens.fill_(2**31 - 1)
    assert bool(case.decode().isnan().all())

    key = draw.normal(4, heads, head_dim, dtype=dtype)
    last = num_blocks * block_size - 1
    slots = torch.tensor([0, last, last + 1, -1], device="cuda")
    torch.ops.paged_attn.reshape_and_cache(key, key, k_cache, v_cache, slots)
    assert torch.equal(k_cache[-1, -1], key[1])

    # The last slot and the first, then lengths and ids that lead outside.
    tables[:4, 0] = torch.tensor([num_blocks - 1, 0, num_blocks, -1], dtype=torch.int32)
    lens = torch.tensor([block_size, 1, block_size, 1], dtype=torch.int32, device="cuda")
    torch.ops.paged_attn.append_kv(-key, -key, k_cache, v_cache, tables, lens)
    assert torch.equal(k_cache[-1, -1], -key[0])
    assert torch.equal(v_cache[0, 0], -key[1])
    lens.fill_(2**31 - 1)
    torch.ops.paged_attn.append_kv(key, key, k_cache, v_cache, tables, lens)
    pairs = [[num_blocks - 1, 0], [num_blocks, 0], [0, num_blocks], [-1, 0], [0, -1]]
    mapping = torch.tensor(pairs, device="cuda")
    torch.ops.paged_attn.copy_blocks([k_cache], [v_cache], mapping)
    assert torch.equal(k_cache[0], k_cache[-1])
    torch.cuda.synchronize()


def main() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    if "--prove" in sys.argv:
        memory = GuardedMemory(2**21)
        print(int(memory.view().sum(dtype=torch.int64)) >= 0)
        print(memory.view(past_the_end=4)[-4:].clone().sum().item())
        return
    seed = int(sys.argv[1])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for head_dim in (64, 72, 128, 256):
            for block_size, query_len in ((16, 1), (1, 1), (128, 3), (48, 1), (8, 5)):
                check(dtype, head_dim, block_size, query_len, seed)
    print("ok")


if __name__ == "__main__":
    main()
