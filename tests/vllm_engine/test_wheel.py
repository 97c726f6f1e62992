"""The classes against a vLLM for CUDA, which does not run without a GPU: its wheel is read.

PAGED_ATTN_VLLM_WHEEL is the folder of an unpacked wheel. Held to its source: every abstract method
is there, every method takes what its base and vLLM's calls hand over, every name of vLLM's that
the classes use exists. Its base classes and its registry load on a CPU: they take the classes.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paged_attn import integrations
from paged_attn.integrations import _vllm_backend

WHEEL = Path(os.environ["PAGED_ATTN_VLLM_WHEEL"])
OURS = Path(integrations.__file__).parent
BACKEND = "vllm.v1.attention.backend"
REGISTRY = "vllm.v1.attention.backends.registry"
LAYER = "vllm.model_executor.layers.attention.attention"
BASES: dict[str, list[str]] = {
    "CustomBackend": ["AttentionBackend"],
    "PagedAttnImpl": ["AttentionImpl", "AttentionImplBase"],
    "PagedAttnBuilder": ["AttentionMetadataBuilder"],
}


@cache
def tree(module: str) -> ast.Module:
    path = WHEEL.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def find(module: str, name: str) -> Any:
    """The top-level class or function of that name."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    (found,) = [n for n in tree(module).body if isinstance(n, kinds) and n.name == name]
    return found


def methods(name: str) -> dict[str, ast.FunctionDef]:
    body = find(BACKEND, name).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def is_abstract(method: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in method.decorator_list)


def parameters(method: ast.FunctionDef) -> list[str]:
    arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    return [a.arg for a in arguments if a.arg not in ("self", "cls")]


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method of that name."""

    def called(function: ast.expr) -> str:
        return getattr(function, "attr", getattr(function, "id", ""))

    return [c for c in ast.walk(node) if isinstance(c, ast.Call) and called(c.func) == name]


def names(module: str) -> set[str]:
    """All that a module's top level binds, below conditions too."""
    bound: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name) for alias in node.names)
    return bound


@pytest.mark.parametrize("ours", BASES)
def test_abstract_methods_are_there(ours: str) -> None:
    for base in BASES[ours]:
        for name, method in methods(base).items():
            if is_abstract(method):
                assert name in dir(getattr(_vllm_backend, ours))
                assert not getattr(
                    getattr(getattr(_vllm_backend, ours), name), "__isabstractmethod__", False
                )


@pytest.mark.parametrize("ours", BASES)
def test_methods_take_what_their_bases_take(ours: str) -> None:
    cls = getattr(_vllm_backend, ours)
    compared = 0
    for base in BASES[ours]:
        for name, method in methods(base).items():
            own = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
            if own is None or not getattr(own, "__module__", "").startswith("paged_attn"):
                continue
            function = getattr(own, "__func__", own)
            taken = inspect.signature(function).parameters
            wanted = parameters(method)
            is_static = isinstance(own, staticmethod)
            inspect.signature(function).bind(*([] if is_static else [cls]), *wanted)
            if not any(p.kind is p.VAR_POSITIONAL for p in taken.values()):
                in_order = [p for p in taken if p not in ("self", "cls")]
                assert in_order[: len(wanted)] == wanted, name
            compared += 1
    assert compared >= {"CustomBackend": 6, "PagedAttnImpl": 2, "PagedAttnBuilder": 2}[ours]


def test_layers_hand_over_what_the_impl_takes() -> None:
    (made,) = calls(tree(LAYER), "impl_cls")
    given = [argument.id for argument in made.args if isinstance(argument, ast.Name)]
    taken = list(inspect.signature(_vllm_backend.PagedAttnImpl.__init__).parameters)[1:]
    assert taken[: len(given)] == given
    assert len(given) == len(made.args) == 10

    (updated,) = calls(tree(LAYER), "do_kv_cache_update")
    update = inspect.signature(_vllm_backend.PagedAttnImpl.do_kv_cache_update)
    update.bind(None, *updated.args, **{k.arg: k for k in updated.keywords if k.arg})

    forward = inspect.signature(_vllm_backend.PagedAttnImpl.forward)
    attended = [
        c for c in calls(tree(LAYER), "forward") if ast.unparse(c.func) == "self.impl.forward"
    ]
    assert attended
    for call in attended:
        forward.bind(None, *call.args, **{k.arg: k for k in call.keywords if k.arg})


def test_the_builder_is_called_as_it_is_defined() -> None:
    """The fields that it reads, and the helper of its base."""
    fields = {
        node.target.id
        for node in find(BACKEND, "CommonAttentionMetadata").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    source = ast.parse(inspect.getsource(_vllm_backend).replace("\t", "    "))
    read = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "common"
    }
    assert len(read) >= 7
    assert read <= fields
    assert {"mm_req_doc_ranges", "rswa_prefix_lens"} <= fields
    threshold = methods("AttentionMetadataBuilder")["_init_reorder_batch_threshold"]
    (called,) = calls(source, "_init_reorder_batch_threshold")
    assert {k.arg for k in called.keywords} <= set(parameters(threshold))


def test_every_name_of_vllms_exists() -> None:
    """Those of import statements, of the registry and of FlashAttention's module."""
    used = 0
    for path in OURS.glob("*vllm*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            if node.module.split(".")[0] != "vllm":
                continue
            for alias in node.names:
                used += 1
                folder = WHEEL.joinpath(*node.module.split("."))
                assert alias.name in names(node.module) or (folder / f"{alias.name}.py").is_file()
    assert used >= 8

    members = find(REGISTRY, "AttentionBackendEnum")
    assigned = {t.id for n in members.body if isinstance(n, ast.Assign) for t in n.targets}
    assert {"CUSTOM", "CPU_ATTN"} <= assigned
    defined = {n.name for n in members.body if isinstance(n, ast.FunctionDef)}
    assert {"is_overridden", "get_path"} <= defined
    assert parameters(find(REGISTRY, "register_backend"))[:2] == ["backend", "class_path"]


def test_flash_attention_takes_what_prefill_hands_over() -> None:
    source = ast.parse((OURS / "_vllm_flash_prefill.py").read_text())
    (called,) = calls(source, "function")
    interface = "vllm.vllm_flash_attn.flash_attn_interface"
    taken = parameters(find(interface, "flash_attn_varlen_func"))
    assert {k.arg for k in called.keywords} <= set(taken)
    utils = "vllm.v1.attention.backends.fa_utils"
    assert "flash_attn_varlen_func" in names(utils)
    (asked,) = calls(source, "get_flash_attn_version")
    taken = parameters(find(utils, "get_flash_attn_version"))
    assert {k.arg for k in asked.keywords} <= set(taken)


def test_caches_are_of_the_shape_that_is_split() -> None:
    """FlashAttention's backend of that vLLM splits its caches the same way."""
    flash = ast.unparse(tree("vllm.v1.attention.backends.flash_attn"))
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in flash
    supported = methods("AttentionBackend")["supported_kv_cache_layouts"]
    assert ast.unparse(supported.body[-1]) == "return None"
    assert ast.unparse(supported.returns).endswith("None")


def test_its_registry_leads_to_our_class() -> None:
    """And its checks of a configuration let pass what is served, nothing else."""
    program = """
import torch
import vllm
assert vllm.__file__.startswith(WHEEL)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from paged_attn import _library
from paged_attn.integrations.vllm import register

_library.why_no_cuda = None  # as where there is a GPU
register()
backend = AttentionBackendEnum.CUSTOM.get_class()
assert backend.__module__ == "paged_attn.integrations._vllm_backend"
assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
for cls in (backend, backend.get_impl_cls(), backend.get_builder_cls()):
    assert not cls.__abstractmethods__

def reasons(head_size=128, dtype=torch.bfloat16, cache="auto", block=16, capability=(9, 0),
            attn_type="decoder", mla=False, sink=False, **more):
    answer = backend.validate_configuration(
        head_size, dtype, cache, block, mla, sink, False, False, False,
        DeviceCapability(*capability), attn_type, **more)
    return answer

assert reasons() == []
assert reasons(head_size=72, block=5, cache="fp8_e5m2", sink=True, has_sliding_window=True) == []
assert reasons(dtype=torch.float32, capability=(8, 0)) == []
assert reasons(dtype=torch.float32, cache="fp8")
assert reasons(cache="float16")
for refused in ({"head_size": 512}, {"capability": (7, 5)}, {"attn_type": "encoder_only"},
                {"mla": True}, {"use_non_causal": True}, {"use_batch_invariant": True},
                {"use_dcp": True}, {"use_pcp": True}, {"use_rswa": True}, {"cache": "nvfp4"}):
    assert reasons(**refused), refused
"""
    program = f"WHEEL = {str(WHEEL)!r}\n" + program
    environment = {**os.environ, "PYTHONPATH": str(WHEEL)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
