"""The figures and the text that the demo prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from examples.smollm2.compare import Timing
from examples.smollm2.dense import Generation
from examples.smollm2.engine import Request, Step
from examples.smollm2.weights import Tokenizer


def completions(requests: Sequence[Request], tokenizer: Tokenizer, width: int = 64) -> str:
    """A line a sequence: its lengths, how often it was preempted, and the start of its text."""
    lines = [" seq  prompt  new  preempted  completion"]
    for r in requests:
        text = " ".join(tokenizer.decode(r.generated).split())
        text = text if len(text) <= width else text[: width - 1] + "…"
        lines.append(
            f"{r.seq_id:4d}  {len(r.prompt):6d}  {len(r.generated):3d}  {r.preemptions:9d}  {text}"
        )
    return "\n".join(lines)


def speed(steps: Sequence[Step]) -> str:
    """Tokens a second of prefill and decode, and how many sequences ran at once."""
    prefill_tokens = sum(s.prefill_tokens for s in steps)
    prefill_seconds = sum(s.prefill_seconds for s in steps)
    decode_tokens = sum(len(s.context_lens) for s in steps)
    decode_seconds = sum(s.decode_seconds for s in steps)
    return (
        f"prefill            {prefill_tokens / prefill_seconds:8.0f} tokens/s "
        f"({prefill_tokens} tokens in {prefill_seconds:.1f} s)\n"
        f"decode             {decode_tokens / max(decode_seconds, 1e-9):8.0f} tokens/s "
        f"({decode_tokens} tokens in {decode_seconds:.1f} s, {len(steps)} steps)"
    )


def occupancy(
    steps: Sequence[Step], longest_request: int, max_context: int, pool_slots: int
) -> str:
    """Share of reserved slots that hold tokens, beside contiguous reservation.

    Both are means over the same decode steps with the same running sequences.

    Args:
        steps: All steps of the engine.
        longest_request: Tokens of the longest request, prompt and completion: the least that a
            contiguous reservation of one size for all can do with.
        max_context: Tokens that the model allows: what has to be reserved where nothing is known
            of the requests.
        pool_slots: Tokens that the pool has room for.
    """
    busy = [s for s in steps if s.context_lens]
    if not busy:
        return "no decode step: every sequence ended with its prefill"
    paged = statistics.fmean(s.utilization for s in busy)
    mean_context = statistics.fmean(statistics.fmean(s.context_lens) for s in busy)
    at_once = statistics.fmean(len(s.context_lens) for s in busy)
    most = max(len(s.context_lens) for s in busy)
    return (
        f"reserved slots that hold tokens: {paged:.1%}; contiguous, with room for the longest "
        f"request ({longest_request}) each: {mean_context / longest_request:.1%}, for the model's "
        f"limit ({max_context}): {mean_context / max_context:.1%}\n"
        f"sequences at once: {at_once:.1f} on average, {most} at most; contiguous, the same memory "
        f"has room for {pool_slots // longest_request} of {longest_request} tokens"
    )


def attention(timings: Sequence[Timing]) -> str:
    """Median time of the decode op a step against gather-then-SDPA."""
    if not timings:
        return "decode attention: no step timed"
    paged = statistics.median(t.paged_seconds for t in timings) * 1e3
    gather = statistics.median(t.gather_seconds for t in timings) * 1e3
    difference = max(t.largest_difference for t in timings)
    return (
        f"decode attention, all layers of a step (median of {len(timings)} steps): "
        f"paged_attn.decode {paged:.2f} ms, gather then SDPA {gather:.2f} ms: "
        f"{gather / paged:.1f} times as long; outputs differ by at most {difference:.1e}"
    )


def equality(requests: Sequence[Request], dense: Sequence[Generation]) -> tuple[str, bool]:
    """Compares greedy tokens with those of dense attention, sequence by sequence.

    Returns:
        The text, and whether all sequences are equal.
    """
    different = []
    for request, expected in zip(requests, dense, strict=True):
        if request.generated != expected.tokens:
            pairs = zip(request.generated, expected.tokens, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(request.generated))
            gap = expected.gaps[min(first, len(expected.gaps) - 1)]
            different.append(
                f"  sequence {request.seq_id} differs from token {first} on, where dense "
                f"attention's two best logits are {gap:.2g} apart"
            )
    equal = len(requests) - len(different)
    lines = [f"greedy tokens equal to dense attention: {equal} of {len(requests)} sequences"]
    return "\n".join(lines + different), not different
