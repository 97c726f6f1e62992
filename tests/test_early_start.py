"""`decode` that may begin early: what the promise leaves open is waited for, and bits stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from accuracy import assert_same_bits
from attention_case import HALF_DTYPES, Case, Draw, build
from test_append import new_tokens
from test_chain import PAUSE_CYCLES, overwrite
from test_cuda import capture

import paged_attn

pytestmark = pytest.mark.gpu

ops = torch.ops.paged_attn

LAYERS = 5
# One sequence, split among all processors; some, a few of them short; more than processors.
BATCHES = [[5000], [300, 5, 0, 70, 1000, 129], [17 + 3 * b for b in range(300)]]
# Of queries and of keys and values: token lanes or head lanes, a row tile or two.
HEADS = [(8, 8), (16, 4), (12, 1)]


@pytest.fixture
def early() -> Iterator[None]:
    previous = paged_attn.set_early_start(True)
    yield
    paged_attn.set_early_start(previous)


def layers(
    draw: Draw,
    lens: list[int],
    query_len: int | None,
    heads: tuple[int, int],
    head_dim: int,
    cache_dtype: torch.dtype | None = None,
) -> list[Case]:
    dtype = draw.rng.choice(HALF_DTYPES)
    scales = {} if cache_dtype is None else {"k_scale": "[G]", "v_scale": "[]"}
    first = build(
        draw,
        lens,
        query_len=query_len,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        **scales,
    )
    caches = [
        [draw.normal(*first.k_cache.shape).to(first.k_cache.dtype) for _ in range(2)]
        for _ in range(LAYERS)
    ]
    return [first.with_(k_cache=k, v_cache=v) for k, v in caches]


def step(cases: list[Case], outs: torch.Tensor) -> torch.Tensor:
    """Each layer's query is made of the result before, by a kernel in between or by none. No result
    is there before its layer has run."""
    outs.fill_(torch.nan)
    query = cases[0].q
    for layer, (case, out) in enumerate(zip(cases, outs, strict=True)):
        ops.decode.out(*case.with_(q=query).args, **case.options, out=out)
        query = out if layer % 2 else torch.add(out, query)
    return query.clone()


@pytest.mark.parametrize(
    ("head_dim", "cache_dtype"),
    [(64, None), (128, None), (256, None), (64, torch.float8_e4m3fn), (72, torch.float8_e5m2)],
)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("query_len", [None, 3])
@pytest.mark.parametrize("lens", BATCHES, ids=len)
def test_layers_one_after_another(
    draw: Draw,
    early: None,
    lens: list[int],
    query_len: int | None,
    heads: tuple[int, int],
    head_dim: int,
    cache_dtype: torch.dtype | None,
) -> None:
    cases = layers(draw, lens, query_len, heads, head_dim, cache_dtype)
    outs = torch.empty(LAYERS, *cases[0].q.shape, dtype=cases[0].q.dtype, device="cuda")
    paged_attn.set_early_start(False)
    expected = step(cases, outs)
    paged_attn.set_early_start(True)
    assert_same_bits(step(cases, outs), expected)
    out = torch.empty_like(expected)
    graph = capture(lambda: out.copy_(step(cases, outs)))
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, expected)


@pytest.mark.parametrize("last", ["q", "kv"])
@pytest.mark.parametrize(
    ("head_dim", "cache_dtype"),
    [(64, None), (128, None), (64, torch.float8_e4m3fn), (72, torch.float8_e5m2)],
)
@pytest.mark.parametrize("query_len", [None, 3])
@pytest.mark.parametrize("lens", BATCHES, ids=len)
def test_query_tokens_written_late(
    draw: Draw,
    early: None,
    lens: list[int],
    query_len: int | None,
    head_dim: int,
    cache_dtype: torch.dtype | None,
    last: str,
) -> None:
    """By the kernel before, which itself waits for a long one."""
    case = layers(draw, lens, query_len, (16, 4), head_dim, cache_dtype)[0]
    key, value = (t.contiguous() for t in new_tokens(draw, case))
    junk = torch.full_like(key, torch.nan)
    scales = (case.options.get("k_scale"), case.options.get("v_scale"))

    def append(key: torch.Tensor, value: torch.Tensor) -> None:
        sequences = (case.block_tables, case.context_lens, None)
        ops.append_kv(key, value, case.k_cache, case.v_cache, *sequences, *scales)

    append(key, value)
    expected = case.decode()
    late = case.with_(q=torch.full_like(case.q, torch.nan))
    append(junk, junk)
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CYCLES)
    if last == "q":
        append(key, value)
        overwrite(late.q, case.q)
    else:
        overwrite(late.q, case.q)
        append(key, value)
    assert_same_bits(late.decode(), expected)


def float_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as rows of 64 numbers in fp16, filled up with zeros."""
    numbers = tensor.contiguous().view(-1).view(torch.float16)
    return torch.nn.functional.pad(numbers, (0, -numbers.numel() % 64)).view(-1, 1, 64)


def written_by_a_call(
    draw: Draw, tensors: dict[str, torch.Tensor]
) -> tuple[Callable[[], None], torch.Tensor, dict[str, torch.Tensor]]:
    """A call that writes copies of tensors, side by side in its result, and lets what comes next
    start early: the call, its result, and the copies."""
    parts = [float_bits(tensor) for tensor in tensors.values()]
    rows = torch.cat(parts)
    # The writer's sequences have one value each, which is the result. The last one's comes when all
    # blocks are done, for they share it.
    lens = [1] * (len(rows) - 1) + [20_000]
    writer = build(draw, lens, num_heads=1, num_kv_heads=1)
    values = rows.repeat_interleave(writer.context_lens.long(), dim=0)
    writer.v_cache[writer.all_live_slots()] = values
    memory = torch.empty_like(writer.q)
    copies = {}
    for (name, tensor), part in zip(
        tensors.items(), memory.split([len(part) for part in parts]), strict=True
    ):
        copies[name] = part.view(-1).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    return lambda: ops.decode.out(*writer.args, out=memory), memory, copies


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("lens", [[400], [300, 5, 0, 70]], ids=len)
def test_all_is_written_by_the_call_before(
    draw: Draw, lens: list[int], in_graph: bool, promised: bool
) -> None:
    """By one that lets others start early, lengths last. Who promised that it writes none of it
    gets some result, and right ones from later calls."""
    right = build(draw, lens, num_heads=4, num_kv_heads=1, head_dim=64, fill=0.0)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    write, memory, copies = written_by_a_call(draw, {name: getattr(right, name) for name in names})
    late = right.with_(**copies)
    out = torch.empty_like(right.q)

    def run() -> None:
        write()
        ops.decode.out(*late.args, out=out)

    expected = right.decode()
    previous = paged_attn.set_early_start(promised)
    replay = capture(run).replay if in_graph else run
    for _ in range(20):
        memory.zero_()
        replay()
        if not promised:
            assert_same_bits(out, expected)
    paged_attn.set_early_start(previous)
    assert_same_bits(late.decode(), expected)


@pytest.mark.parametrize("in_graph", [False, True])
def test_append_to_an_empty_pool_behind_a_call(draw: Draw, in_graph: bool) -> None:
    """Nothing is appended, but decode must not take its place behind a call that it would wait for
    too late: lengths come last."""
    case = build(draw, [40, 0, 3], num_heads=4, num_kv_heads=1, head_dim=64)
    empty = case.k_cache[:0]
    key = torch.zeros(3, 1, 64, dtype=case.q.dtype, device="cuda")
    write, memory, copies = written_by_a_call(draw, {"context_lens": case.context_lens})
    out = torch.empty_like(case.q)

    def run() -> None:
        write()
        sequences = (case.block_tables, copies["context_lens"])
        out.copy_(ops.append_decode(case.q, key, key, empty, empty, *sequences))

    replay = capture(run).replay if in_graph else run
    for _ in range(20):
        memory.zero_()
        replay()
        assert bool(out[[0, 2]].isnan().all())
        assert_same_bits(out[1], torch.zeros_like(out[1]))


def test_previous_setting() -> None:
    assert paged_attn.set_early_start(True) is False
    assert paged_attn.set_early_start(False) is True
    assert paged_attn.set_early_start(False) is False
