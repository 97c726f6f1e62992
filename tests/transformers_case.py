"""Models of transformers, small or with real weights, and what they generate in batches."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attention_case import Draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    ContinuousBatchingConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

from examples.smollm2 import weights

BUILT_IN = "paged|eager"
VOCAB, WINDOW, LAYERS = 64, 9, 3
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
# Its name from transformers 5.19 on, or before.
PAGE_SIZE = next(
    name
    for name in ("page_size", "block_size")
    if name in inspect.signature(ContinuousBatchingConfig).parameters
)


def tiny(draw: Draw, kind: str, **changes: Any) -> Any:
    """A model of random weights, large enough for attention to matter."""
    model_class, config_class, options = TINY[kind]
    model = model_class(config_class(**SHAPE | options | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(draw.normal(*parameter.shape))
            elif parameter.dim() > 1:
                parameter.copy_(0.15 * draw.normal(*parameter.shape))
    return model.to(draw.device).eval()


def without_option(model: Any) -> Any:
    """A copy whose softcap, sinks or, if it has neither, window is off."""
    model = copy.deepcopy(model)
    found = False
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping, found = None, True
        if hasattr(module, "sinks"):
            module.sinks.data.fill_(-1e4)
            found = True
    if not found:
        model.config.sliding_window = SHAPE["max_position_embeddings"]
    return model


def smollm2(loaded: tuple[weights.Config, dict[str, Tensor], Any], device: str) -> Any:
    """transformers' Llama with SmolLM2's weights, from the example's reading of the file."""
    config, stored, _ = loaded
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )

    def halves(rows: Tensor) -> Tensor:
        """A head's rows j and j + D / 2 rotate together here, in the file 2 j and 2 j + 1."""
        return rows.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    sizes = [config.head_dim * heads for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    state = {
        "model.embed_tokens.weight": stored["embed.weight"],
        "model.norm.weight": stored["norm.weight"],
        "lm_head.weight": stored["head.weight"],
    }
    for layer in range(config.num_layers):
        source, target = f"layers.{layer}.", f"model.layers.{layer}."
        q, k, v = stored[f"{source}attention.qkv.weight"].split(sizes)
        gate, up = stored[f"{source}mlp.gate_up.weight"].chunk(2)
        for name, value in {
            "self_attn.q_proj": halves(q),
            "self_attn.k_proj": halves(k),
            "self_attn.v_proj": v,
            "self_attn.o_proj": stored[f"{source}attention.output.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": stored[f"{source}mlp.down.weight"],
            "input_layernorm": stored[f"{source}attention_norm.weight"],
            "post_attention_layernorm": stored[f"{source}mlp_norm.weight"],
        }.items():
            state[f"{target}{name}.weight"] = value
    model.load_state_dict(state)
    return model.to(device).eval()


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        space, _, name = func.name().partition("::")
        if space == "paged_attn":
            self.counts[name] += 1
        return func(*args, **kwargs or {})


@contextmanager
def counted(model: Any) -> Iterator[Counter[str]]:
    """Calls of our ops and, as "forward", of the model, in whatever thread it runs."""
    counts: Counter[str] = Counter()
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts["forward"] += 1
        with _Counting(counts):
            return forward(*args, **kwargs)

    model.forward = counting
    try:
        yield counts
    finally:
        del model.forward


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    new_tokens: int,
    page_size: int = 4,
    **config: Any,
) -> list[GenerationOutput]:
    """What `generate_batch` makes of them, in their order, greedily and without a stop token."""
    config = {
        PAGE_SIZE: page_size,
        "num_blocks": 128,
        "max_batch_tokens": 64,
        "use_cuda_graph": False,
        "return_logprobs": True,
        **config,
    }
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
    )
    assert [output.prompt_ids for output in outputs.values()] == [*map(list, prompts)]
    return [*outputs.values()]


def tokens_of(outputs: Sequence[GenerationOutput]) -> list[list[int]]:
    for output in outputs:
        assert output.error is None, output.error
    return [output.generated_tokens for output in outputs]


@torch.no_grad()
def log_probabilities(model: Any, prompt: list[int], generated: list[int]) -> Tensor:
    """[generated, VOCAB] by one forward pass with eager attention and no cache."""
    model.set_attn_implementation("eager")
    token_ids = torch.tensor([prompt + generated], device=model.device)
    logits = model(token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).cpu()


def assert_greedy(model: Any, outputs: Sequence[GenerationOutput]) -> None:
    """Each token is the likeliest after those before it, and as likely as it was said to be."""
    for output in outputs:
        assert output.error is None, output.error
        assert output.generated_tokens
        expected = log_probabilities(model, output.prompt_ids, output.generated_tokens)
        chosen = expected.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), chosen, atol=1e-3, rtol=1e-3)
        assert (expected.amax(1) - chosen).max() < 1e-3
