"""The layers' class that vLLM gets, on steps as vLLM makes them, against the definition."""

from __future__ import annotations

import importlib
import itertools
import types
from typing import Any

import pytest
import torch
import vllm_stub
from accuracy import assert_accurate, assert_same_bits
from attention_case import Case, Draw, build
from test_cache import whole_storage

from paged_attn import reference
from paged_attn.integrations import _vllm_batch

# Where [N, G, S, 2 * D] lies in memory, outermost first; L is a dim of layers.
ORDERS = ["LNGSC", "LNSGC", "LGNSC", "NLGSC", "NLSGC", "NGLSC"]
STEPS = {
    "decodes": [1] * 7,
    "speculated": [4, 1, 1, 4],
    "prefills": [40, 17, 3],
    "mixed": [1, 1, 4, 1, 33, 5],
    "not in order": [1, 9, 1, 4],
    "padding requests": [1, 1, 0, 0],
    "one": [1],
}
SPECULATED = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 21},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": torch.float32},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "k_scale": "[]", "v_scale": "[]"},
    "all": {
        "window": 21,
        "softcap": 2.0,
        "alibi": True,
        "sinks": torch.bfloat16,
        "cache_dtype": torch.float8_e5m2,
        "k_scale": "[]",
        "v_scale": "[]",
    },
}
CACHE_DTYPES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    vllm_stub.install(monkeypatch)
    return importlib.import_module("paged_attn.integrations._vllm_backend")


def in_vllms_cache(case: Case, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The case's K and V as one layer's [N, G, S, 2 * D], and all layers' storage."""
    content = torch.cat([case.k_cache, case.v_cache], dim=-1).transpose(1, 2)
    if content.dtype in CACHE_DTYPES:
        content = content.view(torch.uint8)
    sizes = dict(zip("NGSCL", (*content.shape, 3), strict=True))
    memory = torch.zeros([sizes[d] for d in order], dtype=content.dtype, device=content.device)
    layers = memory.permute(*(order.index(d) for d in "LNGSC"))
    layers[1] = content
    return layers[1], memory


def layer_of(backend: types.ModuleType, case: Case) -> tuple[Any, Any]:
    """The impl that vLLM would make for the case's options, and the layer that owns it."""
    options = case.options
    slopes = options.get("alibi_slopes")
    impl = backend.PagedAttnImpl(
        case.q.shape[1],
        case.q.shape[2],
        options.get("scale", case.q.shape[2] ** -0.5),
        case.k_cache.shape[2],
        None if slopes is None else slopes.tolist(),
        options.get("window"),
        CACHE_DTYPES.get(case.k_cache.dtype, "auto"),
        options.get("softcap"),
        sinks=options.get("sinks"),
    )
    if slopes is not None:
        impl.alibi_slopes = impl.alibi_slopes.to(slopes.device)
    # Of no meaning for caches of the model's dtype.
    nonsense = torch.tensor(float("nan"), device=case.q.device)
    layer = types.SimpleNamespace(
        _k_scale=options.get("k_scale", nonsense), _v_scale=options.get("v_scale", nonsense)
    )
    return impl, layer


def step_of(backend: types.ModuleType, case: Case, padding_rows: int = 0) -> _vllm_batch.Batch:
    assert case.cu_seqlens_q is not None
    builder = backend.PagedAttnBuilder(None, [], SPECULATED, torch.device(case.q.device))
    num_reqs = case.context_lens.shape[0]
    cpu = case.cu_seqlens_q.cpu()
    # Tables and lengths of vLLM's are as long as its largest batch.
    longer = torch.nn.functional.pad(case.context_lens, (0, 2), value=99)
    step = vllm_stub.Step(
        query_start_loc=case.cu_seqlens_q,
        query_start_loc_cpu=cpu,
        seq_lens=longer,
        block_table_tensor=case.block_tables,
        num_reqs=num_reqs,
        num_actual_tokens=int(cpu[-1]) + padding_rows,
        max_query_len=int(torch.diff(cpu).max()),
        max_seq_len=4096,
    )
    return builder.build(0, step)


def drawn_case(draw: Draw, lengths: list[int], **options: Any) -> Case:
    context = [n + draw.rng.choice((0, 3, 90)) if n else 0 for n in lengths]
    ratio = draw.rng.choice((1, 3, 4))
    kinds = {"num_heads": 2 * ratio, "num_kv_heads": 2, "q_layout": "qkv", "fill": 0.0}
    block_size = draw.rng.choice((5, 16, 128))
    return build(draw, context, query_len=lengths, block_size=block_size, **kinds, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step", STEPS)
def test_steps(backend: types.ModuleType, draw: Draw, device: str, step: str, order: str) -> None:
    padding = draw.rng.choice((0, 3))
    case = drawn_case(draw, STEPS[step], outside_rows=(0, padding), dtype=torch.float32)
    impl, layer = layer_of(backend, case)
    cache, memory = in_vllms_cache(case, order)
    before = memory.clone()
    batch = step_of(backend, case, padding)
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=device)
    assert impl.forward(layer, case.q, None, None, cache, batch, out) is out
    assert_accurate(case, out)
    assert_same_bits(memory, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(
    backend: types.ModuleType, draw: Draw, device: str, options: str, dtype: torch.dtype
) -> None:
    case = drawn_case(draw, STEPS["mixed"], dtype=dtype, **OPTIONS[options])
    impl, layer = layer_of(backend, case)
    cache, _ = in_vllms_cache(case, draw.rng.choice(ORDERS))
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=device)
    impl.forward(layer, case.q, None, None, cache, step_of(backend, case), out)
    assert_accurate(case, out)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", ["plain", "fp8"])
def test_writes(
    backend: types.ModuleType, draw: Draw, device: str, options: str, order: str
) -> None:
    """Keys and values go to their slots, and nothing else changes in the layers' memory."""
    case = drawn_case(draw, [1, 1, 30], dtype=torch.bfloat16, **OPTIONS[options])
    impl, layer = layer_of(backend, case)
    cache, memory = in_vllms_cache(case, order)
    before = memory.clone()
    expected = before.clone().as_strided(cache.shape, cache.stride(), cache.storage_offset())
    num_slots = cache.shape[0] * cache.shape[2]
    slots = torch.tensor([*draw.rng.sample(range(num_slots), 6), -1], device=device)
    key, value = draw.normal(2, 7, *case.k_cache.shape[2:], dtype=torch.bfloat16)
    impl.do_kv_cache_update(layer, key, value, cache, slots)

    expected_caches = _vllm_batch.caches(expected, impl.head_size, impl.kv_cache_dtype)
    scales = [case.options.get("k_scale"), case.options.get("v_scale")]
    reference.reshape_and_cache(key, value, *expected_caches, slots, *scales)
    assert not torch.equal(memory, before)
    assert_same_bits(whole_storage(memory), whole_storage(expected))


def test_without_a_step_the_output_is_zero(backend: types.ModuleType, draw: Draw) -> None:
    case = drawn_case(draw, [1, 1])
    impl, layer = layer_of(backend, case)
    out = torch.full(case.q.shape, float("nan"))
    impl.forward(layer, case.q, None, None, torch.tensor([]), None, out)
    assert not out.any()


def test_what_is_not_served_is_refused(backend: types.ModuleType, draw: Draw) -> None:
    impl = backend.PagedAttnImpl
    for arguments, message in (
        ({"attn_type": vllm_stub.AttentionType.ENCODER_ONLY}, "attn_type must be decoder"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype must be one of"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            impl(4, 64, 0.125, 2, **arguments)
    for head_size in (12, 264):
        with pytest.raises(NotImplementedError, match="head_size must be a multiple of 8"):
            impl(4, head_size, 0.125, 2)
    with pytest.raises(ValueError, match=r"kv_cache must be \[N, G, S, 128\]"):
        _vllm_batch.caches(torch.zeros(3, 2, 16, 64), 64, "auto")

    case = drawn_case(draw, [1, 1])
    made, layer = layer_of(backend, case)
    with pytest.raises(NotImplementedError, match="output_scale must be None"):
        made.forward(layer, case.q, None, None, None, None, case.q, output_scale=torch.ones(1))
    builder = backend.PagedAttnBuilder(None, [], SPECULATED, torch.device("cpu"))
    nothing = torch.zeros(2, dtype=torch.int32)
    refused = {"causal": [False, nothing], "mm_req_doc_ranges": [{0: [(1, 2)]}]}
    refused["rswa_prefix_lens"] = [nothing]
    for name, value in ((name, value) for name, values in refused.items() for value in values):
        step = vllm_stub.Step(nothing, nothing, nothing, nothing, 1, 1, 1, 1, **{name: value})
        with pytest.raises(NotImplementedError, match=name):
            builder.build(0, step)
    table = nothing.reshape(1, 2)
    text = vllm_stub.Step(nothing, nothing, nothing, table, 1, 1, 1, 1, mm_req_doc_ranges={})
    assert builder.build(0, text).prefills is None


def test_what_vllm_asks_before(backend: types.ModuleType) -> None:
    ours = backend.CpuBackend
    assert ours.get_name() == "CPU_ATTN"
    assert backend.CustomBackend.get_name() == "CUSTOM"
    assert ours.get_supported_kernel_block_sizes() == [vllm_stub.MultipleOf(1)]
    assert not ours.forward_includes_kv_cache_update
    sizes = [size for size in range(0, 300) if ours.supports_head_size(size)]
    assert sizes == list(range(8, 257, 8))
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    served = {
        (str(dtype), cache)
        for dtype, cache in itertools.product(dtypes, ours.supported_kv_cache_dtypes)
        if ours.supports_combination(64, dtype, cache, 16, False) is None
    }
    assert {cache for dtype, cache in served if dtype == "torch.float32"} == {"auto"}
    half = {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}
    assert {cache for dtype, cache in served if dtype == "torch.float16"} == {"float16", *half}
    capability = types.SimpleNamespace(major=7)
    assert not backend.CustomBackend.supports_compute_capability(capability)


def test_an_older_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches have other shapes."""
    vllm_stub.install(monkeypatch)
    monkeypatch.delattr(vllm_stub.AttentionBackend, "supported_kv_cache_layouts")
    with pytest.raises(ImportError, match="vLLM must be one whose caches"):
        importlib.import_module("paged_attn.integrations._vllm_backend")


def test_prefill_goes_to_vllms_flash_attention(
    monkeypatch: pytest.MonkeyPatch, draw: Draw, device: str
) -> None:
    """As its signature has it; what it does not serve stays with decode."""
    calls: list[int] = []

    def flash(
        *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale,
        causal, window_size, softcap, block_table, fa_version,
    ) -> None:  # fmt: skip
        calls.append(q.shape[0])
        assert causal
        assert fa_version == 3
        assert window_size[1] == (0 if window_size[0] >= 0 else -1)
        assert max_seqlen_k >= int(seqused_k.max())
        assert max_seqlen_q >= int(torch.diff(cu_seqlens_q).max())
        result = reference.decode(
            q, k, v, block_table, seqused_k, cu_seqlens_q, scale=softmax_scale,
            window=window_size[0] + 1 if window_size[0] >= 0 else -1, softcap=softcap,
        )  # fmt: skip
        out.copy_(result)

    version = {"get_flash_attn_version": lambda head_size: 3}
    platform = vllm_stub.install(monkeypatch, flash_attn_varlen_func=flash, **version)
    platform.cuda = True
    backend = importlib.import_module("paged_attn.integrations._vllm_backend")
    for options in OPTIONS:
        calls.clear()
        case = drawn_case(draw, STEPS["mixed"], dtype=torch.bfloat16, **OPTIONS[options])
        impl, layer = layer_of(backend, case)
        cache, _ = in_vllms_cache(case, "LNGSC")
        out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=device)
        impl.forward(layer, case.q, None, None, cache, step_of(backend, case), out)
        assert_accurate(case, out)
        served = options in ("plain", "window", "softcap") and case.k_cache.shape[1] % 16 == 0
        assert calls == ([38] if served else [])
