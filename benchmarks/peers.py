"""The kernels that this package's op is compared with."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import DTYPES
from benchmarks.harness import Call
from benchmarks.libraries import FlashAttention3, FlashInfer, FlashInferXqa
from benchmarks.peer import Peer, Unsupported, absent
from benchmarks.problem import Problem


class GatherSdpa(Peer):
    """The K and V of each sequence gathered, then PyTorch's own attention."""

    key, title, devices = "sdpa", "gather+SDPA", ("cuda", "cpu")

    def bind(self, p: Problem) -> Call:
        """One call for the whole batch where lengths are equal (CUDA), else one a sequence."""
        heads, dim = p.q.shape[1:]
        ids = [p.block_tables[b, :n].long() for b, n in enumerate(p.num_blocks)]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            q = q.view(-1, heads, 1, dim)
            return scaled_dot_product_attention(q, k, v, enable_gqa=True).view(-1, heads, dim)

        def batched(i: int) -> Tensor:
            k, v = (x[i][table].flatten(1, 2)[:, : p.lens[0]] for x in (p.k, p.v))
            return attend(p.q, k, v)

        def one_by_one(i: int) -> Tensor:
            out = torch.zeros_like(p.q)
            for b, length in enumerate(p.lens):
                if length:
                    k, v = (x[i][ids[b]].flatten(0, 1)[None, :length] for x in (p.k, p.v))
                    out[b] = attend(p.q[b], k, v)[0]
            return out

        if len(set(p.lens)) > 1 or p.q.device.type == "cpu":
            return one_by_one
        table = torch.stack(ids)
        return batched


class VllmCpu(Peer):
    """vLLM's CPU attention op, cpu_attention_with_kv_cache."""

    key, title, devices = "vllm", "vLLM CPU", ("cpu",)

    def missing(self) -> str | None:
        """Its package must be installed and its library for this instruction set must load."""
        if (reason := absent("vllm")) is not None:
            return reason
        try:
            importlib.import_module("vllm._custom_ops")
        except Exception as error:  # whatever a foreign package's import raises
            return f"vllm does not import: {error}"
        has_op = hasattr(torch.ops._C, "cpu_attention_with_kv_cache")
        return None if has_op else "this vllm has no CPU attention op"

    def bind(self, p: Problem) -> Call:
        """Its own cache layout, its instruction set as it picks it, its schedule made before."""
        ops = importlib.import_module("vllm._custom_ops")
        backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        cell, (rows, heads, dim) = p.cell, p.q.shape
        dtype = DTYPES[cell.dtype]
        isa = backend._get_attn_isa(dtype, cell.page, dim)
        caches = []
        blocks = p.k[0].shape[0]
        slots = torch.arange(blocks * cell.page)
        for k, v in zip(p.k, p.v, strict=True):
            pair = torch.empty(blocks, cell.kv_heads, 2 * cell.page, dim, dtype=dtype)
            packed_k, packed_v = pair.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                k.reshape(-1, cell.kv_heads, dim),
                v.reshape(-1, cell.kv_heads, dim),
                packed_k,
                packed_v,
                slots,
                isa,
            )
            caches.append((packed_k, packed_v))
        starts = torch.arange(rows + 1, dtype=torch.int32)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            rows, heads, cell.kv_heads, dim, p.context_lens, dtype, starts, True, -1, isa, True
        )
        out = torch.zeros_like(p.q)

        def call(i: int) -> Tensor:
            ops.cpu_attention_with_kv_cache(
                p.q,
                *caches[i],
                out,
                starts,
                p.context_lens,
                p.scale,
                True,
                None,
                -1,
                p.block_tables,
                0.0,
                metadata,
                None,
            )
            return out

        return call


class TutorialTriton(Peer):
    """The tutorials' one-program-a-head kernel."""

    key, title = "tutorial", "tutorial (Triton)"

    def missing(self) -> str | None:
        """Triton must be installed."""
        return absent("triton")

    def bind(self, p: Problem) -> Call:
        """Nothing to prepare."""
        kernel = importlib.import_module("benchmarks.tutorial_kernel").decode
        return lambda i: kernel(p.q, p.k[i], p.v[i], p.block_tables, p.context_lens)


class FlexAttention(Peer):
    """PyTorch's FlexAttention over the whole pool, a block mask naming each sequence's blocks."""

    key, title = "flex", "FlexAttention"

    def missing(self) -> str | None:
        """It compiles to Triton."""
        return absent("triton")

    def bind(self, p: Problem) -> Call:
        """Builds the block mask from the tables: full blocks, and last ones cut by slot."""
        if p.layout != "NHD":
            raise Unsupported("the pool is one long sequence a head only in NHD")
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        cell, (rows, heads, dim) = p.cell, p.q.shape
        page = cell.page
        if page < 16 or page & (page - 1):
            raise Unsupported("blocks must be a power of two of at least 16 tokens")
        counts = torch.tensor(p.num_blocks, dtype=torch.int32, device=p.q.device)
        lens, present = p.context_lens, counts > 0
        last = (counts - 1).clamp(min=0).long()
        last_page = p.block_tables.gather(1, last[:, None]).squeeze(1)
        last_len = lens - last.int() * page

        def inside(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx // page != last_page[b]) | (kv_idx % page < last_len[b])

        # A mask's indices: [B, 1 head, 1 query block, KV blocks].
        total = p.k[0].shape[0]
        full = torch.zeros(rows, 1, 1, total, dtype=torch.int32, device=p.q.device)
        width = min(total, p.block_tables.shape[1])
        full[:, 0, 0, :width] = p.block_tables[:, :width]
        partial_ids = torch.zeros_like(full)
        partial_ids[:, 0, 0, 0] = last_page
        mask = flex.BlockMask.from_kv_blocks(
            present.int().view(rows, 1, 1),
            partial_ids,
            (counts - 1).clamp(min=0).view(rows, 1, 1),
            full,
            BLOCK_SIZE=(128, page),
            mask_mod=inside,
            seq_lengths=(1, total * page),
        )
        torch.compiler.reset()  # else the cells together exceed the limit of recompilations
        run = torch.compile(flex.flex_attention, dynamic=False)
        q = p.q.view(rows, heads, 1, dim)

        def call(i: int) -> Tensor:
            k, v = (x[i].flatten(0, 1).transpose(0, 1)[None] for x in (p.k, p.v))
            return run(q, k, v, block_mask=mask, scale=p.scale, enable_gqa=True).view(p.q.shape)

        return call


PEERS: tuple[Peer, ...] = (
    GatherSdpa(),
    VllmCpu(),
    TutorialTriton(),
    FlexAttention(),
    FlashInfer(tensor_cores=True),
    FlashInfer(tensor_cores=False),
    FlashInferXqa("NHD"),
    FlashInferXqa("HND"),
    FlashAttention3(metadata=False),
    FlashAttention3(metadata=True),
)
