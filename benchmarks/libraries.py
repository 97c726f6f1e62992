"""Peers from CUDA libraries: FlashInfer's three paths and FlashAttention-3."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.peer import Peer, Unsupported, absent
from benchmarks.problem import Problem


class FlashInfer(Peer):
    """FlashInfer's decode wrapper, on tensor cores or CUDA cores; its plan made before."""

    def __init__(self, tensor_cores: bool):
        """Chooses the path."""
        self._tensor_cores = tensor_cores
        self.key = "fi_tc" if tensor_cores else "fi_cc"
        self.title = "FlashInfer " + ("tensor" if tensor_cores else "CUDA")

    def missing(self) -> str | None:
        """FlashInfer must be installed."""
        return absent("flashinfer")

    def bind(self, p: Problem) -> Call:
        """Plans for the batch; an interleaved pool is passed as one tensor."""
        flashinfer = importlib.import_module("flashinfer")
        cell, device = p.cell, p.q.device
        counts = torch.tensor([0, *p.num_blocks], dtype=torch.int32)
        indptr = counts.cumsum(0).int().to(device)
        pages = [p.block_tables[b, :n] for b, n in enumerate(p.num_blocks)]
        indices = torch.cat(pages).contiguous()
        ends = [
            length - max(n - 1, 0) * cell.page
            for length, n in zip(p.lens, p.num_blocks, strict=True)
        ]
        last_len = torch.tensor(ends, dtype=torch.int32, device=device)
        layout = "HND" if p.layout == "HND" else "NHD"
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(512, device),
            layout,
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last_len.clone(),
        )
        wrapper.plan(
            indptr,
            indices,
            last_len,
            p.q.shape[1],
            cell.kv_heads,
            cell.head_dim,
            cell.page,
            q_data_type=p.q.dtype,
            kv_data_type=p.q.dtype,
            sm_scale=p.scale,
        )
        caches: list[Any]
        if p.layout == "interleaved":
            shape = (-1, 2, cell.page, cell.kv_heads, cell.head_dim)
            caches = [pool.view(shape) for pool in p.pools]
        else:
            caches = list(zip(*p.caches_as(layout), strict=True))
        return lambda i: wrapper.run(p.q, caches[i])


class FlashInferXqa(Peer):
    """XQA, TensorRT-LLM's decode kernel, through FlashInfer, in either memory order."""

    def __init__(self, layout: str):
        """Chooses the memory order, which the problem is copied to where it differs."""
        self._layout = layout
        self.key = f"xqa_{layout.lower()}"
        self.title = f"XQA {layout}"

    def missing(self) -> str | None:
        """FlashInfer must be installed."""
        return absent("flashinfer")

    def bind(self, p: Problem) -> Call:
        """A workspace; no plan."""
        if 0 in p.lens:
            raise Unsupported("rows of length 0")
        decode = importlib.import_module("flashinfer.decode")
        k, v = p.caches_as(self._layout)
        out = torch.empty_like(p.q)
        run = partial(
            decode.trtllm_batch_decode_with_kv_cache,
            workspace_buffer=_workspace(256, p.q.device),
            block_tables=p.block_tables,
            seq_lens=p.context_lens,
            max_seq_len=p.max_context,
            bmm1_scale=p.scale,
            bmm2_scale=1.0,
            out=out,
            kv_layout=self._layout,
            backend="xqa",
        )
        return lambda i: run(p.q, (k[i], v[i]))


class FlashAttention3(Peer):
    """FlashAttention-3's flash_attn_with_kvcache, scheduling metadata computed before or inside."""

    def __init__(self, metadata: bool):
        """Chooses whether the schedule is made before."""
        self._metadata = metadata
        self.key = "fa3_meta" if metadata else "fa3"
        self.title = "FA3 scheduled" if metadata else "FA3"

    def missing(self) -> str | None:
        """Its hopper package must be installed."""
        return absent("flash_attn_interface")

    def bind(self, p: Problem) -> Call:
        """Optionally computes the schedule of the batch."""
        fa3 = importlib.import_module("flash_attn_interface")
        schedule = None
        if self._metadata:
            schedule = fa3.get_scheduler_metadata(
                p.q.shape[0],
                1,
                p.max_context,
                p.q.shape[1],
                p.cell.kv_heads,
                p.cell.head_dim,
                p.context_lens,
                p.q.dtype,
                page_size=p.cell.page,
                causal=True,
            )
        q = p.q.unsqueeze(1)

        def call(i: int) -> Tensor:
            out = fa3.flash_attn_with_kvcache(
                q,
                p.k[i],
                p.v[i],
                cache_seqlens=p.context_lens,
                page_table=p.block_tables,
                softmax_scale=p.scale,
                causal=True,
                scheduler_metadata=schedule,
            )
            return (out[0] if isinstance(out, tuple) else out).squeeze(1)

        return call


def _workspace(mebibytes: int, device: torch.device) -> Tensor:
    """A zeroed scratch buffer, which these libraries ask their caller for."""
    return torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)
