"""A decode step of transformers' continuous batching, with each attention that is installed.

A Llama of random weights generates for a batch of prompts. A step's time is the median of the times
between two tokens of a sequence, all sequences being in every step that counts.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from paged_attn.integrations.transformers import NAME, register

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.continuous_batching",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    add("--dtype", choices=tuple(DTYPES), default="bf16" if cuda else "fp32")
    add("--batch", type=int, default=64 if cuda else 4, help="prompts")
    add("--prompt-len", type=int, default=1024 if cuda else 256, help="tokens a prompt")
    add("--new-tokens", type=int, default=64 if cuda else 16)
    add("--layers", type=int, default=16 if cuda else 4)
    add("--heads", type=int, default=32, help="query heads")
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--attention", nargs="+", help="names; those that are installed if none")
    options = parser.parse_args(arguments)
    if options.new_tokens < 3:
        parser.error("--new-tokens must be at least 3: the first is no decode step's")
    return options


def installed() -> list[str]:
    """Names of attention that continuous batching can run with here; ours first."""
    flash = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
    known = importlib.import_module("transformers").AttentionInterface()
    # Before transformers 5.19 "sdpa" was none of continuous batching.
    sdpa = "paged|sdpa" if "paged|sdpa" in known else "sdpa"
    return [NAME, *flash, sdpa, "paged|eager"]


def make_model(options: argparse.Namespace) -> Any:
    """A Llama of random weights."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    hidden = options.heads * options.head_dim
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.prompt_len + options.new_tokens,
    )
    return transformers.LlamaForCausalLM(config).to(options.device, DTYPES[options.dtype]).eval()


def step_seconds(model: Any, options: argparse.Namespace) -> float:
    """Seconds of a step in which every sequence gets a token.

    Raises:
        RuntimeError: A sequence failed, or no such step was seen.
    """
    transformers = importlib.import_module("transformers")
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(32000, (options.batch, options.prompt_len), generator=generator)
    batching = transformers.ContinuousBatchingConfig(allow_block_sharing=False)
    batching.auto_switch_to_flash = False  # what is asked for, not what transformers prefers
    if options.device == "cpu":
        batching.num_blocks = options.batch * (
            -(-(options.prompt_len + options.new_tokens) // 256) + 1
        )
        batching.max_batch_tokens = max(512, options.batch)
    outputs = model.generate_batch(
        prompts.tolist(),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=batching,
        record_timestamps=True,
    ).values()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    if len(outputs) < options.batch:
        raise RuntimeError("transformers lost sequences: its log says why")
    # Once the last sequence has its first token, and until the first has its last.
    begin = max(output.timestamps[0] for output in outputs)
    end = min(output.timestamps[-1] for output in outputs)
    stamps = [stamp for stamp in next(iter(outputs)).timestamps if begin <= stamp <= end]
    steps = [later - stamp for stamp, later in pairwise(stamps)]
    if not steps:
        raise RuntimeError("no step had all sequences: ask for more --new-tokens")
    return statistics.median(steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if ours failed."""
    options = parse_arguments(arguments)
    version = importlib.import_module("transformers").__version__
    model = make_model(options)
    register()
    print(
        f"transformers {version}, {options.device}, {options.dtype}: {options.batch} sequences of "
        f"{options.prompt_len} + {options.new_tokens} tokens, {options.layers} layers, "
        f"{options.heads}/{options.kv_heads} heads of {options.head_dim}"
    )
    failed = False
    for name in options.attention or installed():
        try:
            model.set_attn_implementation(name)
            print(f"{name:20} {1e3 * step_seconds(model, options):9.3f} ms a step")
        except (ImportError, RuntimeError, ValueError) as error:
            failed |= name == NAME
            print(f"{name:20} {str(error).splitlines()[0]}")
        gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
