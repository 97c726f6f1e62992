"""Every wrong argument of every op raises an error that names it, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from attention_case import OPTION_SETS, Draw, build

Arguments = dict[str, Any]
Mutation = Callable[[Arguments], Any]

HEADS, KV_HEADS, DIM = 6, 2, 64
CANARY = 3.0
ALL_OPTIONS: Arguments = {**OPTION_SETS["all"], "k_scale": "[G]"}
OVERLOADS = ("decode", "decode.out", "decode_with_lse", "decode_with_lse.out")
TENSORS = (
    "q",
    "k_cache",
    "v_cache",
    "block_tables",
    "context_lens",
    "cu_seqlens_q",
    "alibi_slopes",
    "sinks",
    "k_scale",
    "v_scale",
)


def decode_arguments(draw: Draw, query_len: Any = None, **options: Any) -> Arguments:
    case = build(
        draw, [40, 17, 1], query_len=query_len, num_heads=HEADS, head_dim=DIM, fill=0.0, **options
    )
    arguments = {**dict(zip(TENSORS, case.args, strict=False)), **case.options}
    arguments["out"] = torch.full_like(case.q, CANARY)
    arguments["lse"] = torch.full(case.q.shape[:-1], CANARY, device=draw.device)
    return arguments


def call(overload: str, arguments: Arguments) -> Any:
    name, _, variant = overload.partition(".")
    op = getattr(getattr(torch.ops.paged_attn, name), variant or "default")
    outputs = {"decode.out": {"out"}, "decode_with_lse.out": {"out", "lse"}}.get(overload, set())
    tensors = [arguments.get(key) for key in TENSORS]
    options = {
        key: value
        for key, value in arguments.items()
        if key not in TENSORS and (key not in ("out", "lse") or key in outputs)
    }
    return op(*tensors, **options)


def contiguous_as(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with stride 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def change(names: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    """Of the arguments that `names` has between its spaces."""
    return lambda a: a.update({name: how(a[name]) for name in names.split()})


def reshaped(names: str, shape: Callable[[torch.Tensor], tuple[int, ...]]) -> Mutation:
    return change(names, lambda t: contiguous_as(t, shape(t)))


def cast(names: str, dtype: torch.dtype) -> Mutation:
    return change(names, lambda t: t.to(dtype))


def strided(name: str) -> Mutation:
    return change(name, every_other)


def option(name: str, value: Any) -> Mutation:
    return lambda a: a.update({name: value})


def head_dim(value: int) -> Mutation:
    return reshaped("q out k_cache v_cache", lambda t: (*t.shape[:-1], value))


# (what is wrong, mutation, the argument that the message names)
WRONG_DECODE: list[tuple[str, Mutation, str]] = [
    ("q of rank 2", reshaped("q", lambda t: t.shape[:2]), "q"),
    ("q of rank 5", reshaped("q", lambda t: (1, 1, *t.shape)), "q"),
    ("q of another batch", reshaped("q", lambda t: (4, *t.shape[1:])), "q"),
    ("heads not a multiple", reshaped("q", lambda t: (3, 5, DIM)), "q"),
    ("fewer heads than KV heads", reshaped("q", lambda t: (3, 1, DIM)), "q"),
    ("no heads", reshaped("q", lambda t: (3, 0, DIM)), "q"),
    ("q's last dim strided", strided("q"), "q"),
    ("float64", cast("q out k_cache v_cache", torch.float64), "q"),
    ("integers", cast("q out k_cache v_cache", torch.int16), "q"),
    ("head dim 0", head_dim(0), "q"),
    ("head dim 4", head_dim(4), "q"),
    ("head dim 60", head_dim(60), "q"),
    ("head dim 264", head_dim(264), "q"),
    ("k_cache of rank 3", reshaped("k_cache", lambda t: t.shape[1:]), "k_cache"),
    ("k_cache of rank 5", reshaped("k_cache", lambda t: (1, *t.shape)), "k_cache"),
    ("v_cache of rank 3", reshaped("v_cache", lambda t: t.shape[1:]), "v_cache"),
    ("k_cache of q's other dtype", cast("k_cache", torch.bfloat16), "k_cache"),
    ("v_cache of another dtype", cast("v_cache", torch.float32), "v_cache"),
    ("k_cache of another head dim", reshaped("k_cache", lambda t: (*t.shape[:3], 72)), "k_cache"),
    ("v_cache of another head dim", reshaped("v_cache", lambda t: (*t.shape[:3], 72)), "v_cache"),
    ("v_cache of another pool", reshaped("v_cache", lambda t: (1, *t.shape[1:])), "v_cache"),
    (
        "v_cache of another block size",
        reshaped("v_cache", lambda t: (t.shape[0], 8, *t.shape[2:])),
        "v_cache",
    ),
    (
        "v_cache of other KV heads",
        reshaped("v_cache", lambda t: (*t.shape[:2], 1, DIM)),
        "v_cache",
    ),
    ("k_cache's last dim strided", strided("k_cache"), "k_cache"),
    ("v_cache's last dim strided", strided("v_cache"), "v_cache"),
    ("block_tables of rank 1", reshaped("block_tables", lambda t: t.shape[:1]), "block_tables"),
    (
        "block_tables of rank 3",
        reshaped("block_tables", lambda t: (*t.shape, 1)),
        "block_tables",
    ),
    ("block_tables int64", cast("block_tables", torch.int64), "block_tables"),
    ("block_tables float32", cast("block_tables", torch.float32), "block_tables"),
    ("block_tables strided", strided("block_tables"), "block_tables"),
    ("context_lens of rank 2", reshaped("context_lens", lambda t: (3, 1)), "context_lens"),
    ("context_lens of rank 0", reshaped("context_lens", lambda t: ()), "context_lens"),
    ("context_lens too short", reshaped("context_lens", lambda t: (2,)), "context_lens"),
    ("context_lens too long", reshaped("context_lens", lambda t: (4,)), "context_lens"),
    ("context_lens int64", cast("context_lens", torch.int64), "context_lens"),
    ("context_lens strided", strided("context_lens"), "context_lens"),
    ("max_query_len negative", option("max_query_len", -1), "max_query_len"),
    ("scale NaN", option("scale", float("nan")), "scale"),
    ("scale infinite", option("scale", float("inf")), "scale"),
    ("scale beyond float32", option("scale", -1e39), "scale"),
]

# Of arguments that have all options; fp8 too.
WRONG_OPTIONS: list[tuple[str, Mutation, str]] = [
    ("window 0", option("window", 0), "window"),
    ("softcap negative", option("softcap", -1.0), "softcap"),
    ("softcap NaN", option("softcap", float("nan")), "softcap"),
    ("softcap infinite", option("softcap", float("inf")), "softcap"),
    ("softcap beyond float32", option("softcap", 1e39), "softcap"),
    ("softcap 0 in float32", option("softcap", 1e-60), "softcap"),
    ("window without causal", lambda a: a.update(causal=False, alibi_slopes=None), "window"),
    (
        "alibi_slopes without causal",
        lambda a: a.update(causal=False, window=-1),
        "alibi_slopes",
    ),
    ("fp32 q with fp8 caches", cast("q out", torch.float32), "q"),
    ("K and V in different fp8", cast("v_cache", torch.float8_e5m2), "v_cache"),
    ("V in fp16 beside fp8", cast("v_cache", torch.float16), "v_cache"),
    ("K in fp16 beside fp8", cast("k_cache", torch.float16), "v_cache"),
    ("another fp8", cast("k_cache v_cache", torch.float8_e4m3fnuz), "k_cache"),
    ("caches of bytes", change("k_cache v_cache", lambda t: t.view(torch.uint8)), "k_cache"),
    ("sinks in the other 16 bits", cast("sinks", torch.bfloat16), "sinks"),
    ("sinks in float64", cast("sinks", torch.float64), "sinks"),
    *(
        (f"{name} of {what}", mutate(name), name)
        for name in ("alibi_slopes", "sinks")
        for what, mutate in (
            ("rank 0", lambda name: reshaped(name, lambda t: ())),
            ("rank 2", lambda name: reshaped(name, lambda t: (1, HEADS))),
            ("KV heads", lambda name: reshaped(name, lambda t: (KV_HEADS,))),
            ("one head", lambda name: reshaped(name, lambda t: (1,))),
            ("strides", strided),
        )
    ),
    ("alibi_slopes in fp16", cast("alibi_slopes", torch.float16), "alibi_slopes"),
    *(
        (f"{name} of {what}", mutate(name), name)
        for name in ("k_scale", "v_scale")
        for what, mutate in (
            ("rank 2", lambda name: reshaped(name, lambda t: (1, KV_HEADS))),
            ("query heads", lambda name: reshaped(name, lambda t: (HEADS,))),
            ("no heads", lambda name: reshaped(name, lambda t: (0,))),
            ("strides", strided),
            ("fp16", lambda name: cast(name, torch.float16)),
            ("float64", lambda name: cast(name, torch.float64)),
        )
    ),
]

WRONG_RAGGED: list[tuple[str, Mutation, str]] = [
    ("q of rank 4", reshaped("q", lambda t: (1, *t.shape)), "q"),
    ("cu_seqlens_q of B", reshaped("cu_seqlens_q", lambda t: (3,)), "cu_seqlens_q"),
    ("cu_seqlens_q too long", reshaped("cu_seqlens_q", lambda t: (5,)), "cu_seqlens_q"),
    ("cu_seqlens_q of rank 2", reshaped("cu_seqlens_q", lambda t: (4, 1)), "cu_seqlens_q"),
    ("cu_seqlens_q int64", cast("cu_seqlens_q", torch.int64), "cu_seqlens_q"),
    ("cu_seqlens_q strided", strided("cu_seqlens_q"), "cu_seqlens_q"),
]

WRONG_OUTPUTS: list[tuple[str, Mutation, str]] = [
    ("out of rank 2", reshaped("out", lambda t: t.shape[:2]), "out"),
    ("out of another batch", reshaped("out", lambda t: (4, HEADS, DIM)), "out"),
    ("out of other heads", reshaped("out", lambda t: (3, HEADS - 1, DIM)), "out"),
    ("out of another head dim", reshaped("out", lambda t: (3, HEADS, DIM + 8)), "out"),
    ("out of another dtype", cast("out", torch.float32), "out"),
    ("out's last dim strided", strided("out"), "out"),
    ("lse of another rank", reshaped("lse", lambda t: (*t.shape, 1)), "lse"),
    ("lse of other heads", reshaped("lse", lambda t: (3, HEADS - 1)), "lse"),
    ("lse in q's dtype", cast("lse", torch.float16), "lse"),
]


def table(rows: list[tuple[str, Mutation, str]]) -> Any:
    values = [(mutate, argument) for _, mutate, argument in rows]
    return pytest.mark.parametrize(
        ("mutate", "argument"), values, ids=[name.replace(" ", "-") for name, *_ in rows]
    )


def assert_refused(overload: str, arguments: Arguments, argument: str, message: str) -> None:
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ValueError, match=message) as caught:
        call(overload, arguments)
    op = overload.partition(".")[0]
    assert str(caught.value).startswith(f"paged_attn.{op}: ")
    for name, value in before.items():
        assert torch.equal(arguments[name].cpu().double(), value.cpu().double()), name


def form(argument: str) -> str:
    return rf": {re.escape(argument)} must be .+, got .+"


def assert_right(overload: str, arguments: Arguments) -> None:
    results = call(overload, arguments)
    if results is None:
        results = arguments["out"]
    out = results[0] if isinstance(results, tuple) else results
    assert out.shape == arguments["q"].shape
    assert bool(((out != CANARY) & out.isfinite()).all())


@pytest.mark.parametrize("overload", OVERLOADS)
def test_the_unspoilt_arguments_are_right(draw: Draw, device: str, overload: str) -> None:
    for query_len in (None, 2, [2, 1, 1]):
        for options in ({}, ALL_OPTIONS, OPTION_SETS["all_noncausal"]):
            assert_right(overload, decode_arguments(draw, query_len, **options))


@table(WRONG_DECODE)
@pytest.mark.parametrize("overload", OVERLOADS)
def test_wrong_decode(
    draw: Draw, device: str, overload: str, mutate: Mutation, argument: str
) -> None:
    arguments = decode_arguments(draw)
    mutate(arguments)
    assert_refused(overload, arguments, argument, form(argument))


@table(WRONG_RAGGED)
@pytest.mark.parametrize("overload", OVERLOADS)
def test_wrong_ragged_queries(
    draw: Draw, device: str, overload: str, mutate: Mutation, argument: str
) -> None:
    arguments = decode_arguments(draw, [2, 1, 1])
    mutate(arguments)
    assert_refused(overload, arguments, argument, form(argument))


@table(WRONG_OUTPUTS)
def test_wrong_outputs(draw: Draw, device: str, mutate: Mutation, argument: str) -> None:
    for overload in ("decode.out", "decode_with_lse.out"):
        if argument == "lse" and overload == "decode.out":
            continue
        arguments = decode_arguments(draw)
        mutate(arguments)
        assert_refused(overload, arguments, argument, form(argument))


@table(WRONG_OPTIONS)
@pytest.mark.parametrize("overload", OVERLOADS)
def test_wrong_options(
    draw: Draw, device: str, overload: str, mutate: Mutation, argument: str
) -> None:
    arguments = decode_arguments(draw, **ALL_OPTIONS)
    mutate(arguments)
    assert_refused(overload, arguments, argument, form(argument))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, "float16 as q, or fp8 (float8_e4m3fn, float8_e5m2)"),
        (torch.float32, "float32 as q"),
    ],
)
def test_dtypes_offered_for_a_cache_can_be_had(
    draw: Draw, device: str, dtype: torch.dtype, expected: str
) -> None:
    arguments = decode_arguments(draw, dtype=dtype)
    cast("k_cache", torch.bfloat16)(arguments)
    message = f"k_cache must be {expected}, got bfloat16"
    assert_refused("decode", arguments, "k_cache", re.escape(message))


def test_the_tutorials_block_size_is_not_taken_for_an_option(draw: Draw, device: str) -> None:
    """Its kernel's sixth positional argument."""
    case = build(draw, [5])
    with pytest.raises((TypeError, RuntimeError)):
        torch.ops.paged_attn.decode(*case.args[:5], 16)
    assert_accurate(case, case.decode())


@pytest.mark.parametrize("wrong", [{"scale": "half"}, {"window": 1.5}, {"no_such_option": 1}])
def test_wrong_python_types(draw: Draw, device: str, wrong: dict[str, Any]) -> None:
    case = build(draw, [5])
    with pytest.raises((TypeError, RuntimeError)):
        torch.ops.paged_attn.decode(*case.args, **wrong)


ONE_GPU = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
OTHER_DEVICES = ["cpu", pytest.param("cuda:1", marks=ONE_GPU)]


@pytest.mark.gpu
@pytest.mark.parametrize("other", OTHER_DEVICES)
@pytest.mark.parametrize("argument", TENSORS)
def test_tensors_on_two_devices(draw: Draw, argument: str, other: str) -> None:
    arguments = decode_arguments(draw, [2, 1, 1], **ALL_OPTIONS)
    arguments[argument] = arguments[argument].to(other)
    named = "(k_cache|q)" if argument == "q" else argument
    with pytest.raises(ValueError, match=rf"paged_attn\.decode: {named} must be .+, got .+"):
        call("decode", arguments)
