"""FlashAttention's names are taken; what is not done, or is wrong, is refused by name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import Draw
from flash_case import build_flash, expect_ops

from paged_attn.integrations import flash_attn
from paged_attn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

# FlashAttention 2's parameters in their order, then what only FlashAttention 3 has.
NAMES: dict[str, tuple[str, str]] = {
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse",
        "qv page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale "
        "k_descale v_descale attention_chunk scheduler_metadata pack_gqa sm_margin",
    ),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size softcap alibi_slopes deterministic return_attn_probs block_table",
        "seqused_q seqused_k qv q_descale k_descale v_descale attention_chunk num_splits pack_gqa "
        "sm_margin",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    """Callers look for parameters by name, and pass FlashAttention 2's by place."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    fa2, fa3 = (names.split() for names in NAMES[name])
    by_place = [
        key
        for key, one in parameters.items()
        if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert by_place == fa2
    assert {*fa3} <= {*parameters} - {*fa2}
    assert "s_aux" in parameters
    assert not parameters["causal"].default
    arguments, _, _ = (getattr(flash_attn, name).__doc__ or "").partition("Returns:")
    assert re.findall(r"^ {8}(\w+): ", arguments, re.M) == list(parameters)


def test_names_of_the_module() -> None:
    assert {*flash_attn.__all__} == {*NAMES}


def kvcache(draw: Draw, **how: Any) -> dict[str, Any]:
    flash = build_flash(draw, [20, 5], query_len=2, new_len=2, fill=0.0, rotary_dim=32, **how)
    return flash.with_kvcache()


def varlen(draw: Draw) -> dict[str, Any]:
    return build_flash(draw, [20, 5], query_len=[2, 3], fill=0.0).varlen()


INT32 = torch.int32
# What is put in the place of which argument, and what the error says of it.
UNSUPPORTED: dict[str, list[tuple[str, Any]]] = {
    "flash_attn_with_kvcache": [
        ("cache_leftpad", torch.zeros(2, dtype=INT32)),
        ("qv", torch.zeros(2, 2, 4, 64)),
        ("q_descale", torch.ones(2, 2)),
        ("attention_chunk", 16),
        ("k_descale", torch.ones(2, 2)),
        ("v_descale", torch.ones(2, 2)),
        ("window_size", (3, -1)),
        ("window_size", (3, 5)),
        ("alibi_slopes", torch.ones(4)),
    ],
    "flash_attn_varlen_func": [
        ("seqused_q", torch.zeros(2, dtype=INT32)),
        ("qv", torch.zeros(5, 4, 64)),
        ("q_descale", torch.ones(2, 2)),
        ("attention_chunk", 16),
        ("dropout_p", 0.1),
        ("dropout_p", None),
        ("dropout_p", torch.ones(2, dtype=INT32)),
        ("window_size", (3, 1)),
        ("alibi_slopes", torch.ones(4)),
        ("k_descale", torch.ones(2, 2)),
    ],
}
WRONG: dict[str, list[tuple[str, Any]]] = {
    "flash_attn_with_kvcache": [
        ("q", torch.zeros(2, 4, 64)),
        ("k_cache", torch.zeros(9, 2, 64)),
        ("k", torch.zeros(4, 2, 64)),
        ("k", None),
        ("v", None),
        ("cache_seqlens", None),
        ("cache_seqlens", torch.zeros(2, dtype=torch.int64)),
        ("cache_seqlens", torch.zeros(3, dtype=INT32)),
        ("cache_seqlens", torch.zeros(2, dtype=INT32, device="meta")),
        ("cache_seqlens", [20, 5]),
        ("cache_batch_idx", torch.zeros(2, dtype=INT32)),
        ("block_table", torch.zeros(2, 3, dtype=torch.int64)),
        ("block_table", torch.zeros(3, 3, dtype=INT32)),
        ("block_table", torch.zeros(2, dtype=INT32)),
        ("page_table", torch.zeros(2, 3, dtype=INT32)),
        ("cu_seqlens_q", torch.zeros(3, dtype=torch.int64)),
        ("cu_seqlens_k_new", torch.zeros(2, dtype=INT32)),
        ("window_size", 5),
        ("window_size", (5,)),
        ("window_size", (5, 0.5)),
        ("rotary_cos", None),
        ("rotary_sin", None),
        ("rotary_cos", torch.zeros(500, 33)),
        ("rotary_cos", torch.zeros(8, 16)),
        ("rotary_cos", torch.zeros(500, 16, dtype=torch.int64)),
        ("rotary_sin", torch.zeros(500, 8)),
        ("rotary_seqlens", torch.zeros(3, dtype=INT32)),
        ("k_descale", torch.ones(3, 2)),
    ],
    "flash_attn_varlen_func": [
        ("q", torch.zeros(2, 2, 4, 64)),
        ("cu_seqlens_q", torch.zeros(3, dtype=torch.int64)),
        ("cu_seqlens_q", torch.zeros(0, dtype=INT32)),
        ("cu_seqlens_k", torch.zeros(2, dtype=INT32)),
        ("cu_seqlens_k", None),
        ("block_table", torch.zeros(3, 3, dtype=INT32)),
        ("seqused_k", torch.zeros(3, dtype=INT32)),
        ("window_size", None),
    ],
}


def assert_refused(
    arguments: dict[str, Any], function: str, name: str, value: Any, error: type[Exception]
) -> None:
    """Before any op runs."""
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        value = value.to(arguments["q"].device)
    message = rf"^paged_attn\.{function}: {name} must be .+, got .+"
    with expect_ops(), pytest.raises(error, match=message):
        getattr(flash_attn, function)(**(arguments | {name: value}))


def cases(table: dict[str, list[tuple[str, Any]]]) -> list[tuple[str, str, Any]]:
    return [(function, *case) for function, given in table.items() for case in given]


@pytest.mark.parametrize(("function", "name", "value"), cases(UNSUPPORTED))
def test_what_is_not_supported(
    draw: Draw, device: str, function: str, name: str, value: Any
) -> None:
    arguments = kvcache(draw) if function == "flash_attn_with_kvcache" else varlen(draw)
    assert_refused(arguments, function, name, value, NotImplementedError)


@pytest.mark.parametrize(("function", "name", "value"), cases(WRONG))
def test_what_is_wrong(draw: Draw, device: str, function: str, name: str, value: Any) -> None:
    arguments = kvcache(draw) if function == "flash_attn_with_kvcache" else varlen(draw)
    if value is None and name in ("k", "v"):
        # The one that is left is told.
        name, arguments = {"k": "v", "v": "k"}[name], arguments | {name: None}
        value = arguments[name]
    assert_refused(arguments, function, name, value, ValueError)


def test_rotary_turns_new_keys_only(draw: Draw, device: str) -> None:
    arguments = kvcache(draw) | {"k": None, "v": None}
    assert_refused(
        arguments, "flash_attn_with_kvcache", "rotary_cos", arguments["rotary_cos"], ValueError
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("cu_seqlens_k", None), ("max_seqlen_k", None), ("k", torch.zeros(9, 1, 2, 64))],
)
def test_packed_keys_need_their_bounds(draw: Draw, device: str, name: str, value: Any) -> None:
    arguments = build_flash(draw, [20, 5], query_len=[2, 3]).varlen(packed=True)
    assert_refused(arguments, "flash_attn_varlen_func", name, value, ValueError)


def test_a_contiguous_cache_for_fewer_sequences(draw: Draw, device: str) -> None:
    arguments = kvcache(draw, block_size=32, spare_columns=0) | {"block_table": None}
    cache = arguments["k_cache"][:1]
    assert_refused(arguments, "flash_attn_with_kvcache", "k_cache", cache, ValueError)


@pytest.mark.parametrize("option", [{"softcap": -1.0}, {"s_aux": torch.zeros(3)}])
def test_the_ops_check_the_rest(draw: Draw, device: str, option: dict[str, Any]) -> None:
    """Before they write: k and v are not appended by a call that fails."""
    option = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in option.items()
    }
    arguments = kvcache(draw)
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match=r"^paged_attn\.append_decode: .+ must be .+, got"):
        flash_attn_with_kvcache(**arguments, **option)
    assert_same_bits(arguments["k_cache"].clone(), before)


def test_backward_raises(draw: Draw, device: str) -> None:
    arguments = varlen(draw)
    arguments["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="forward only"):
        flash_attn_varlen_func(**arguments).sum().backward()


@pytest.mark.parametrize("appending", [False, True])
def test_no_sequences(draw: Draw, device: str, appending: bool) -> None:
    new = {"new_len": 1, "rotary_dim": 32} if appending else {}
    flash = build_flash(draw, [], query_len=1, descale=True, **new)
    assert flash_attn_with_kvcache(**flash.with_kvcache()).shape == (0, 1, 4, 64)
    new = {"new_len": [], "rotary_dim": 32} if appending else {}
    flash = build_flash(draw, [], query_len=[], outside_rows=(1, 2), **new)
    out = flash_attn_with_kvcache(**flash.with_kvcache())
    assert torch.equal(out, torch.zeros_like(flash.case.q))
    if not appending:
        out = flash_attn_varlen_func(**flash.varlen(packed=True))
        assert torch.equal(out, torch.zeros_like(flash.case.q))


def test_checks_name_bad_content(draw: Draw, device: str, checks: None) -> None:
    arguments = kvcache(draw)
    arguments["block_table"][1, 0] = 1000
    with pytest.raises(IndexError, match=r"block_tables\[1, 0\]"):
        flash_attn_with_kvcache(**arguments)
