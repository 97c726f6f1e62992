"""The denominator of every ratio: the time in which the device merely reads the same K and V.

Several ways to read are timed and the fastest counts, because a ratio to a slow read flatters.
On CUDA: the kernels of read_limit.cu, over the buffers from end to end, page by page in the order
of the tables, and through shared memory a share a block, with several unrolls, grids and priorities
in the L2. On the CPU: torch's reductions.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
from pathlib import Path

import torch

from benchmarks.harness import Call, Captured, capture, time_graphs
from benchmarks.native import compiled, find_nvcc
from benchmarks.problem import Problem

UNROLLS = (1, 2, 4, 8)
BLOCKS_PER_SM = (1, 2, 4, 8, 16)
L2_PRIORITIES = ("normal", "evict first")
ORDERS = ("flat", "pages", "ring")  # as read_limit.cu numbers them
VECTOR_BYTES = 16

# Ways that stay in the race of the real measurement after a short heat.
FINALISTS = 3
HEAT_REPEATS = 3


def cpu_reads(problem: Problem) -> dict[str, Call]:
    """Reductions over as many bytes of each layer's pool as decode must read."""
    words = problem.nbytes // 8
    flat = [pool.view(torch.int64)[:words] for pool in problem.pools]
    return {
        "read max int64": lambda layer: flat[layer].max(),
        "read sum int64": lambda layer: flat[layer].sum(),
        "read max fp32": lambda layer: flat[layer].view(torch.float32).amax(),
    }


def build_library() -> ctypes.CDLL:
    """Compiles read_limit.cu for this GPU, or finds it compiled from the same source.

    Only nvcc is needed: no torch header, no ninja.

    Raises:
        RuntimeError: no nvcc, or it fails; with its words.
    """
    nvcc = find_nvcc("the read limit")
    major, minor = torch.cuda.get_device_capability()
    flags = ["-shared", "-O3", "-std=c++17", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
    return ctypes.CDLL(str(compiled(Path(__file__).with_name("read_limit.cu"), [nvcc, *flags])))


class CudaReads:
    """Reads of a problem's K and V, one launch a layer.

    K and V are what the kernels see: two buffers of pages, wherever the layout puts them.
    """

    def __init__(self, problem: Problem, library: ctypes.CDLL):
        """Flattens the tables into the list of pages to read.

        Raises:
            RuntimeError: a token's bytes are no multiple of 16.
        """
        self._problem = problem
        self._launch = library.read_limit_launch
        self._launch.restype = ctypes.c_int
        cell = problem.cell
        token_bytes = cell.kv_heads * cell.head_dim * problem.q.element_size()
        if token_bytes % VECTOR_BYTES:
            raise RuntimeError(f"the read limit needs tokens of 16-byte vectors, not {token_bytes}")
        self._page_vectors = cell.page * token_bytes // VECTOR_BYTES
        interleaved = problem.layout == "interleaved"
        self._page_stride = self._page_vectors * (2 if interleaved else 1)
        self._vectors = problem.nbytes // 2 // VECTOR_BYTES
        device = problem.q.device
        pages, tokens = [], []
        for row, (length, count) in enumerate(zip(problem.lens, problem.num_blocks, strict=True)):
            pages.append(problem.block_tables[row, :count])
            tokens.extend([cell.page] * (length // cell.page))
            if length % cell.page:
                tokens.append(length % cell.page)
        self._pages = torch.cat(pages).contiguous()
        valid = torch.tensor(tokens, dtype=torch.int64) * token_bytes // VECTOR_BYTES
        self._valid = valid.int().to(device)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count

    def ways(self) -> dict[str, Call]:
        """Every way to read that suits the page size."""
        calls: dict[str, Call] = {}
        choices = itertools.product(UNROLLS, BLOCKS_PER_SM, L2_PRIORITIES, ORDERS)
        for unroll, per_sm, priority, order in choices:
            if order == "pages" and unroll * 32 > self._page_vectors:
                continue
            # A ring takes most of a multiprocessor's shared memory.
            if order == "ring" and per_sm > 1:
                continue
            blocks = per_sm * self._sms
            name = f"read {order} unroll {unroll} grid {blocks} L2 {priority}"
            calls[name] = self.call(unroll, blocks, order, priority)
        return calls

    def call(
        self,
        unroll: int,
        blocks: int,
        order: str,
        priority: str,
        *,
        checksum: torch.Tensor | None = None,
    ) -> Call:
        """A function of the layer that reads it once on the current stream."""
        pool_pointers = []
        for layer, pool in enumerate(self._problem.pools):
            # But by pages a read goes through both halves of the pool, whatever they hold.
            second = pool.data_ptr() + pool.nbytes // 2
            v_pointer = self._problem.v[layer].data_ptr() if order == "pages" else second
            pool_pointers.append((pool.data_ptr(), v_pointer))

        def read(layer: int) -> None:
            k_pointer, v_pointer = pool_pointers[layer]
            error = self._launch(
                ctypes.c_void_p(k_pointer),
                ctypes.c_void_p(v_pointer),
                ctypes.c_void_p(self._pages.data_ptr()),
                ctypes.c_void_p(self._valid.data_ptr()),
                ctypes.c_int(self._pages.numel()),
                ctypes.c_int64(self._page_stride),
                ctypes.c_int(self._page_vectors),
                ctypes.c_int64(self._vectors),
                ctypes.c_int(ORDERS.index(order)),
                ctypes.c_int(unroll),
                ctypes.c_int(blocks),
                ctypes.c_int(priority == "evict first"),
                ctypes.c_void_p(None if checksum is None else checksum.data_ptr()),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            if error:
                raise RuntimeError(f"the read kernel did not launch: CUDA error {error}")

        return read

    def check(self) -> None:
        """Shows by a checksum that all kernels read every byte once.

        Raises:
            RuntimeError: a sum differs from torch's.
        """
        pool = self._problem.pools[0].view(torch.int32)
        page_words = self._page_vectors * VECTOR_BYTES // 4
        flat = pool.view(2, -1)[:, : self._vectors * VECTOR_BYTES // 4].sum()
        if self._problem.layout == "interleaved":
            blocks = pool.view(-1, 2, page_words).transpose(0, 1)
        else:
            blocks = pool.view(2, -1, page_words)
        paged = torch.zeros_like(flat)
        for valid in self._valid.unique().tolist():
            chosen = self._pages[self._valid == valid].long()
            paged += blocks[:, chosen, : valid * VECTOR_BYTES // 4].sum()
        for unroll, priority, order in itertools.product(UNROLLS, L2_PRIORITIES, ORDERS):
            checksum = torch.zeros(1, dtype=torch.int32, device=self._pages.device)
            self.call(unroll, 2 * self._sms, order, priority, checksum=checksum)(0)
            if (int(checksum) - int(paged if order == "pages" else flat)) % 2**32:
                way = f"{order} unroll {unroll} L2 {priority}"
                raise RuntimeError(f"the read kernel misses bytes: {way}")


def fastest_reads(problem: Problem, library: ctypes.CDLL) -> dict[str, Captured]:
    """Graphs of the few fastest ways to read a problem, after a short heat of all."""
    reads = CudaReads(problem, library)
    reads.check()
    graphs = {name: capture(call, problem.layers) for name, call in reads.ways().items()}
    heat = time_graphs(graphs, problem.layers, HEAT_REPEATS)
    best = sorted(graphs, key=lambda name: statistics.median(heat[name].samples))
    return {name: graphs[name] for name in best[:FINALISTS]}
