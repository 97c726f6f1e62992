"""transformers' continuous batching generates on our kernels what it generates without them."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import pytest
import torch
from attention_case import Draw
from optional import need

transformers = need("transformers")

from transformers_case import (  # noqa: E402
    BUILT_IN,
    LAYERS,
    VOCAB,
    assert_greedy,
    counted,
    generate,
    log_probabilities,
    smollm2,
    tiny,
    tokens_of,
    without_option,
)

from benchmarks import continuous_batching  # noqa: E402
from examples.smollm2 import weights  # noqa: E402
from paged_attn.integrations import transformers as integration  # noqa: E402
from paged_attn.integrations.flash_attn import flash_attn_varlen_func  # noqa: E402
from paged_attn.integrations.transformers import NAME, register  # noqa: E402

flash = importlib.import_module("transformers.modeling_flash_attention_utils")
batching = importlib.import_module("transformers.generation.continuous_batching")
# What transformers' continuous batching does not pass on to FlashAttention before 5.19.
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
LOST = {"gemma2": "softcap", "mistral": "sliding_window"} if VERSION < (5, 19) else {}
NEW_TOKENS = 12
CHAT = (
    "What is gravity? It is 1234.",
    "Good morning!",
    "Describe, in a few words and without naming it, the animal that gives us wool in winter.",
    "Name three fruits.",
)
GRAVITY = "Gravity is a fundamental concept in physics"  # as the file's own code has it


def draw_prompts(draw: Draw, *lengths: int) -> list[list[int]]:
    return [draw.integers(0, VOCAB - 1, n, dtype=torch.int64).tolist() for n in lengths]


@pytest.fixture
def block_tables(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets decode steps go through block tables without a GPU too."""
    if device == "cpu":
        target = f"{batching.__name__}.initialization.ensure_decode_fast_path_is_available"
        monkeypatch.setattr(target, lambda *args: None)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return weights.load()


def test_smollm2(loaded: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real weights; prompts that begin alike share blocks where transformers shares them."""
    model = smollm2(loaded, device)
    prompts = [loaded[2].encode_chat(prompt) for prompt in CHAT]
    # As many tokens a step as the longest prompt has, so that later prompts find blocks.
    how = {"page_size": 8, "max_batch_tokens": 80, "max_blocks_per_request": 0}
    assert max(map(len, prompts)) - min(map(len, prompts)) > 10
    model.set_attn_implementation(BUILT_IN)
    expected = tokens_of(generate(model, prompts, NEW_TOKENS, **how))
    assert loaded[2].decode(expected[0]).startswith(GRAVITY)

    shared = []
    search = batching.PagedAttentionCache.search_prefix_match

    def watched(*args: Any) -> int:
        shared.append(search(*args))
        return shared[-1]

    monkeypatch.setattr(batching.PagedAttentionCache, "search_prefix_match", watched)
    register(model)
    with counted(model) as counts:
        outputs = generate(model, prompts, NEW_TOKENS, **how)
    assert tokens_of(outputs) == expected
    assert counts["decode"] == counts["forward"] * loaded[0].num_layers > 0
    assert sum(shared) >= how["page_size"]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tiny_models(draw: Draw, device: str, kind: str) -> None:
    """GQA, sliding windows, softcaps, sinks: against one eager forward pass without a cache."""
    model = tiny(draw, kind)
    register(model)
    prompts = draw_prompts(draw, 1, 5, 23, 40)
    with counted(model) as counts:
        outputs = generate(model, prompts, NEW_TOKENS, max_blocks_per_request=0)
    if kind in LOST:
        assert all(f"{LOST[kind]} must be None" in str(output.error) for output in outputs)
        return
    assert counts["decode"] == counts["forward"] * LAYERS > 0
    assert_greedy(model, outputs)
    if kind != "llama":  # a kernel that ignored the option would show
        longest = outputs[-1].prompt_ids, outputs[-1].generated_tokens
        difference = log_probabilities(model, *longest) - log_probabilities(
            without_option(model), *longest
        )
        assert difference.abs().max() > 0.05


@pytest.mark.parametrize("padded", [False, True])
def test_decode_through_block_tables(
    draw: Draw, device: str, block_tables: None, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of new tokens append to the cache and attend in one op, padding rows too."""
    model = tiny(draw, "llama")
    register(model)
    runner = importlib.import_module(f"{batching.__name__}.model_runner").ModelRunner
    start, compute = runner.__init__, runner.compute_batch
    rows = []

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.pad_inputs = padded

    def watched(self: Any, model: Any, batch: dict[str, Any]) -> None:
        if batch["block_table"] is not None:
            rows.append(batch["block_table"].shape[1])
        compute(self, model, batch)

    monkeypatch.setattr(runner, "__init__", padding)
    monkeypatch.setattr(runner, "compute_batch", watched)
    tables = {"max_blocks_per_request": 12, "max_requests_per_batch": 8}
    with counted(model) as counts:
        outputs = generate(model, draw_prompts(draw, 1, 5, 23), NEW_TOKENS, **tables)
    assert_greedy(model, outputs)
    assert counts["append_decode"] == len(rows) * LAYERS
    assert counts["append_decode"] + counts["decode"] == counts["forward"] * LAYERS
    assert rows.count(4 if padded else 3) >= NEW_TOKENS - 2


@pytest.mark.gpu
def test_cuda_graphs(draw: Draw) -> None:
    """As transformers runs it by default: both kinds of steps captured and replayed, padded."""
    model = tiny(draw, "llama")
    register(model)
    prompts = draw_prompts(draw, 1, 5, 23, 40, 7)
    with counted(model) as counts:
        outputs = generate(model, prompts, NEW_TOKENS, use_cuda_graph=True)
    assert_greedy(model, outputs)
    assert counts["append_decode"] > 0


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_generate(draw: Draw, device: str, kind: str) -> None:
    """Outside continuous batching the name works too, with padding and without."""
    model = tiny(draw, kind)
    prompts = torch.tensor(draw_prompts(draw, 14, 14), device=device)
    mask = torch.ones_like(prompts)
    mask[1, :4] = 0
    for attention_mask in (mask, torch.ones_like(mask)):
        how = {"attention_mask": attention_mask, "max_new_tokens": 6, "do_sample": False}
        model.set_attn_implementation("eager")
        expected = model.generate(prompts, **how)
        register(model)
        with counted(model) as counts:
            assert torch.equal(model.generate(prompts, **how), expected)
        assert counts["decode"] == counts["forward"] * LAYERS > 0


def test_the_name_is_one_that_decodes_through_block_tables() -> None:
    requested = importlib.import_module("transformers.utils.generic").is_flash_attention_requested
    for name in (NAME, integration.PAGED_NAME):
        assert requested(requested_attention_implementation=name, version=[2, 3])


def test_calling_it_again_changes_nothing(draw: Draw) -> None:
    model = tiny(draw, "gpt_oss")
    register(model)
    first, listed = flash._lazy_imports, model._compatible_flash_implementations
    register(model)
    register()
    assert flash._lazy_imports is first
    assert model._compatible_flash_implementations == listed
    assert listed.count(NAME) == 1
    assert NAME not in type(model)._compatible_flash_implementations


def test_other_models_and_names_are_left_alone(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one process; other names are looked up as before."""
    ours, theirs = tiny(draw, "llama"), tiny(draw, "llama")
    register(ours)
    theirs.set_attn_implementation(BUILT_IN)
    prompts = draw_prompts(draw, 3, 8)
    for _ in range(2):
        with counted(theirs) as counts:
            assert_greedy(theirs, generate(theirs, prompts, 3))
            theirs.set_attn_implementation(BUILT_IN)
        assert set(counts) == {"forward"}
        with counted(ours) as counts:
            assert_greedy(ours, generate(ours, prompts, 3))
            register(ours)
        assert counts["decode"]

    asked = []
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **how: asked.append((args, how)))
    register()
    flash._lazy_imports("flash_attention_2", None, allow_all_kernels=True)
    flash._lazy_imports(None)
    assert asked == [(("flash_attention_2", None), {"allow_all_kernels": True}), ((None,), {})]
    assert flash._lazy_imports(NAME)[1] is flash_attn_varlen_func


@pytest.mark.parametrize(
    "needed", [f"{m}.{hook}" for m, hooks in integration.HOOKS.items() for hook in hooks]
)
def test_a_transformers_without_a_hook_is_refused(
    needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"transformers.{needed}")
    message = f"must have transformers.{needed}, .* got transformers {transformers.__version__}"
    with pytest.raises(ImportError, match=message):
        register()


def test_a_transformers_without_a_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match=r"must have transformers.masking_utils, as "):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError):
        register()


def test_a_transformers_that_looks_elsewhere_is_refused(
    draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(draw, "llama")
    answers = ((None, None, None, None, None), None)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *args, **how: answers)
    with pytest.raises(ImportError, match=r"must have attention that is looked up by"):
        register(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_supports_flash_attn", False),
        ("_can_set_attn_implementation", classmethod(lambda cls: False)),
    ],
)
def test_models_that_flash_attention_does_not_serve_are_refused(
    draw: Draw, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(draw, "llama")
    before = model.config._attn_implementation
    monkeypatch.setattr(type(model), name, value)
    with pytest.raises(NotImplementedError, match=r"model must be one .* got 'LlamaForCausalLM'"):
        register(model)
    assert model.config._attn_implementation == before


def test_errors_of_ops_arrive_with_the_outputs(draw: Draw) -> None:
    model = tiny(draw, "llama", head_dim=12)
    register(model)
    (output,) = generate(model, draw_prompts(draw, 3), 2)
    assert "paged_attn.decode: q must" in str(output.error)


def test_dropout_is_refused(draw: Draw) -> None:
    model = tiny(draw, "llama", attention_dropout=0.5).train()
    register(model)
    with pytest.raises(NotImplementedError, match=r"dropout_p must be 0"), torch.no_grad():
        model(torch.tensor(draw_prompts(draw, 4)))


def test_benchmark(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--batch 3 --prompt-len 9 --new-tokens 8 --layers 1 --heads 4 --kv-heads 2"
    arguments = f"--device {device} --dtype fp32 --attention {NAME} nonsense {sizes}".split()
    assert continuous_batching.main(arguments) == 0
    first, ours, nonsense = capsys.readouterr().out.splitlines()
    assert "3 sequences of 9 + 8 tokens" in first
    assert re.fullmatch(rf"{NAME} +[0-9]+\.[0-9]+ ms a step", ours)
    assert nonsense.startswith("nonsense")
    assert "ms a step" not in nonsense
