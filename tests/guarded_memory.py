"""Memory that ends at an unmapped page: a step outside ends the process, or the CUDA context."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from test_cache import whole_storage

PROTECTED = 0  # PROT_NONE
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


class HostMemory:
    """`size` bytes that end at a page which must not be touched; whole pages begin there too."""

    page = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.size = size
        mapped = size + -size % self.page
        self.mapping = mmap.mmap(-1, mapped + 2 * self.page)
        self.begin = self.page + mapped - size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        base = torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()
        for address in (base, base + self.page + mapped):
            if libc.mprotect(address, self.page, PROTECTED) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def view(self, past_the_end: int = 0) -> torch.Tensor:
        """Its bytes as a tensor."""
        count = self.size + past_the_end
        return torch.frombuffer(self.mapping, dtype=torch.uint8, offset=self.begin, count=count)


def call_driver(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} returned {status}")


class DeviceMemory:
    """The same on the current CUDA device."""

    def __init__(self, size: int) -> None:
        self.size = size
        location = Location(LOCATION_DEVICE, torch.cuda.current_device())
        properties = AllocationProperties(type=PINNED, location=location)
        page = ctypes.c_size_t()
        call_driver(
            "cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), 0
        )
        self.page = page.value
        size += -size % self.page
        base, handle = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        reserved = ctypes.c_size_t(size + 2 * self.page)
        zero = ctypes.c_size_t(0)
        no_address = ctypes.c_ulonglong(0)
        flags = ctypes.c_ulonglong(0)
        bytes_ = ctypes.c_size_t(size)
        call_driver("cuMemAddressReserve", ctypes.byref(base), reserved, zero, no_address, flags)
        call_driver("cuMemCreate", ctypes.byref(handle), bytes_, ctypes.byref(properties), flags)
        start = ctypes.c_ulonglong(base.value + self.page)
        call_driver("cuMemMap", start, bytes_, zero, handle, flags)
        access = AccessDescription(location, READ_WRITE)
        call_driver("cuMemSetAccess", start, bytes_, ctypes.byref(access), ctypes.c_size_t(1))
        self.address = base.value + self.page + size - self.size

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


MEMORY = {"cpu": HostMemory, "cuda": DeviceMemory}


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose storage ends at unmapped memory; one of whole pages begins there too."""
    storage = whole_storage(tensor).view(torch.uint8)
    memory = MEMORY[tensor.device.type](storage.numel()).view()
    copy = memory.copy_(storage).view(tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
