"""vLLM's engine gives the tokens of its own backend with this package's: batches, blocks, layouts.

All jobs ask the same prompts greedily in fp32, so that one run of vLLM's own backend holds for all.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from engine import Job, Result
from jobs import MODELS, OUR_IMPL, OURS, OWN_IMPL, SEED, RunEngine, smollm2

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
# The first has the options of the run that vLLM's own backend gets: their times are compared.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "own options": ("LBHNC", {"block_size": 128, "max_num_seqs": 16}),
    "block 16": ("LBNHC", {"block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 96}),
    "block 5": (
        "LHBNC",
        # The pool is too small for seven: some are preempted.
        {
            "block_size": 5,
            "max_num_seqs": 7,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 110,
        },
    ),
    "speculation": ("BLHNC", {"block_size": 16, "max_num_seqs": 4, **NGRAM}),
    "block 5, speculation": ("BLNHC", {"block_size": 5, "max_num_seqs": 16, **NGRAM}),
    "block 128": ("BHLNC", {"block_size": 128, "max_num_seqs": 3}),
}
ROUNDS_TIMED = 5
TEXT = """the lighthouse on the northern point had been dark for eleven years when she came back to
the island one two three four five one two three four five of the water and the sun in the morning
def add(a, b): return a + b def mul(a, b): return a * b if not then while for each of them"""


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """16: some begin alike, some repeat themselves, the longest has more than 220 tokens."""
    import tokenizers

    rng = random.Random(SEED)
    tokenizer = tokenizers.Tokenizer.from_file(str(MODELS / "smollm2" / "tokenizer.json"))
    words = TEXT.split()
    shared = [rng.choice(words) for _ in range(130)]
    drawn = [[*shared, *rng.sample(words, rng.randint(1, 40))] for _ in range(5)]
    for _ in range(5):
        phrase = rng.sample(words, rng.randint(2, 6))
        drawn.append(phrase * rng.randint(3, 8))
    drawn += [[rng.choice(words) for _ in range(rng.choice((1, 2, 9, 30, 60)))] for _ in range(5)]
    drawn.append([rng.choice(words) for _ in range(220)])
    rng.shuffle(drawn)
    return [tokenizer.encode(" ".join(words)).ids for words in drawn]


@pytest.fixture(scope="session")
def own(prompts: list[list[int]], run_engine: RunEngine) -> Result:
    """vLLM's own backend, with this package installed but not asked for."""
    _, options = CONFIGURATIONS["own options"]
    result = run_engine(replace(smollm2(prompts, **options), rounds=ROUNDS_TIMED))
    assert {layer["impl"] for layer in result.layers} == {OWN_IMPL}
    assert result.tokens[0] == result.tokens[1]
    return result


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens(name: str, prompts: list[list[int]], own: Result, run_engine: RunEngine) -> None:
    layout, options = CONFIGURATIONS[name]
    job = smollm2(prompts, enable_prefix_caching=True, **options)
    timed = name == "own options"
    counted = name == "block 16"
    rounds = ROUNDS_TIMED if timed else 1 if counted else 2
    job = replace(job, rounds=rounds, watch=not timed, count_calls=counted)
    job.environment.update(OURS, VLLM_KV_CACHE_LAYOUT=layout)
    result = run_engine(job)

    assert result.version == own.version
    check_layers(result, layout, options["block_size"])
    for tokens in result.tokens:
        assert tokens == own.tokens[0]
    if rounds > 1:
        assert result.cached[-1] > max(map(len, prompts))
    if timed:
        show_times(own, result)
    else:
        check_steps(result, options)
    if counted:
        check_calls(result)


def check_layers(result: Result, layout: str, block_size: int) -> None:
    """Ours in every layer of the worker, over caches of that memory order."""
    assert {layer["impl"] for layer in result.layers} == {OUR_IMPL}
    assert {layer["backend"] for layer in result.layers} == {"CpuBackend"}
    assert {layer["layout"] for layer in result.layers} == {layout}
    assert len(result.layers) == 30
    first, second = result.layers[:2]
    assert first["shape"][2] == block_size
    blocks, heads, slots, _ = first["strides"]
    strides = {"L": second["address"] - first["address"], "B": blocks, "H": heads, "N": slots}
    strides["L"] //= 4  # fp32
    assert "".join(sorted(strides, key=strides.__getitem__, reverse=True)) + "C" == layout


def check_steps(result: Result, options: dict[str, Any]) -> None:
    """The batches were what the test is about."""
    decodes = [step["decodes"] for step in result.steps if step["decodes"]]
    prefills = [step["prefills"] for step in result.steps if step["prefills"]]
    assert max(map(len, decodes)) > 1
    assert prefills
    if "num_gpu_blocks_override" in options:
        assert result.preemptions > 0
    if "max_num_batched_tokens" in options:
        assert any(step["decodes"] and step["prefills"] for step in result.steps)
        sizes = [sum(step["decodes"]) + sum(step["prefills"]) for step in result.steps]
        assert max(sizes) <= options["max_num_batched_tokens"]
    if "speculative_config" in options:
        ragged = [lengths for lengths in decodes if len(set(lengths)) > 1 and max(lengths) == 4]
        assert ragged, "no step had requests with and without speculated tokens"
        print(f"ragged decodes in {len(ragged)} of {len(decodes)} steps, as {ragged[0]}")
    else:
        assert {length for lengths in decodes for length in lengths} == {1}


def check_calls(result: Result) -> None:
    """A call of decode for the decodes, one for the prefills, in each layer; no attention else."""
    parts = sum(bool(step["decodes"]) + bool(step["prefills"]) for step in result.steps)
    layers = len(result.layers)
    called = sum(n for op, n in result.calls.items() if op.startswith("paged_attn::decode"))
    written = result.calls["paged_attn::reshape_and_cache"]
    print(f"{called} calls of decode, {written} of reshape_and_cache in {len(result.steps)} steps")
    assert called == parts * layers
    assert written == len(result.steps) * layers
    assert not [op for op in result.calls if "attention" in op or "cpu_attn" in op]


def show_times(own: Result, ours: Result) -> None:
    """Of the first round, and of the best later one, whose prompts are in the prefix cache."""
    count = sum(map(len, own.tokens[0]))
    for name, result in (("vLLM's own", own), ("paged_attn", ours)):
        first, later = result.seconds[0], min(result.seconds[1:])
        print(f"{name}: {count / first:.1f} new tokens/s with prefill, {count / later:.1f} after")


@pytest.mark.parametrize("model", ["gemma2", "bloom"])
def test_windows_soft_cap_and_alibi(model: str, rng: random.Random, run_engine: RunEngine) -> None:
    prompts = [[rng.randrange(2, 512) for _ in range(rng.randint(1, 90))] for _ in range(8)]
    options = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True}
    job = Job(str(MODELS / model), prompts, 12, {**options, "block_size": 32})
    expected = run_engine(job)
    assert {layer["impl"] for layer in expected.layers} == {OWN_IMPL}
    job.options.update(block_size=16, max_num_seqs=3, max_num_batched_tokens=64)
    job.environment.update(OURS)
    result = run_engine(job)
    assert {layer["impl"] for layer in result.layers} == {OUR_IMPL}
    assert result.tokens == expected.tokens


def test_fp8_cache(prompts: list[list[int]], own: Result, run_engine: RunEngine) -> None:
    """vLLM's own needs AVX-512 for these caches: held to fp32, near the start of each answer."""
    job = smollm2(prompts, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", block_size=16)
    job.environment.update(OURS)
    result = run_engine(job)
    assert {layer["impl"] for layer in result.layers} == {OUR_IMPL}
    assert {layer["dtype"] for layer in result.layers} == {"torch.uint8"}
    errors = []
    for prompt in range(len(prompts)):
        tokens = zip(result.tokens[0][prompt], own.tokens[0][prompt], strict=True)
        logprobs = zip(result.logprobs[prompt], own.logprobs[prompt], strict=True)
        for (token, expected), (logprob, exact) in zip(tokens, logprobs, strict=True):
            if token != expected:
                break
            errors.append(abs(logprob - exact))
    print(f"fp8: {len(errors)} tokens alike, logprobs off by {statistics.mean(errors):.3f}")
    assert len(errors) > 3 * len(prompts)
    assert statistics.mean(errors) < 0.15
