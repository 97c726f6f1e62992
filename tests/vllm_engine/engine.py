"""One run of vLLM's engine: python engine.py JOB.json RESULT.json, a `Job` and a `Result`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREEMPTIONS = "vllm:num_preemptions"


@dataclass
class Job:
    model: str
    prompts: list[list[int]]
    max_tokens: int
    options: dict[str, Any]
    """Of vllm.LLM."""
    environment: dict[str, str] = field(default_factory=dict)
    rounds: int = 1
    """How often all prompts are asked; what later rounds find in the prefix cache is `cached`."""
    watch: bool = False
    count_calls: bool = False


@dataclass
class Result:
    version: str
    tokens: list[list[list[int]]]
    """Of each round and prompt."""
    logprobs: list[list[float]]
    """Of the first round's tokens."""
    cached: list[int]
    """Of each round, prompt tokens found in the prefix cache."""
    seconds: list[float]
    """Of each round."""
    preemptions: int
    layers: list[dict[str, Any]]
    steps: list[dict[str, list[int]]]
    calls: dict[str, int]


def run(job: Job) -> Result:
    import vllm

    engine = vllm.LLM(
        model=job.model,
        enforce_eager=True,
        seed=0,
        worker_extension_cls="probe.Probe",
        disable_log_stats=False,
        **job.options,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=job.max_tokens, min_tokens=job.max_tokens, logprobs=1
    )
    sampling.detokenize = not job.options.get("skip_tokenizer_init", False)
    layers = engine.collective_rpc("attention_layers")[0]
    if job.watch:
        engine.collective_rpc("watch", args=(job.count_calls,))
    rounds, seconds = [], []
    for _ in range(job.rounds):
        begin = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        rounds.append(engine.generate(prompts, sampling, use_tqdm=False))
        seconds.append(time.perf_counter() - begin)
    seen = engine.collective_rpc("seen")[0] if job.watch else {"steps": [], "calls": {}}
    return Result(
        version=vllm.__version__,
        tokens=[[list(answer.outputs[0].token_ids) for answer in round_] for round_ in rounds],
        logprobs=[
            [
                step[token].logprob
                for step, token in zip(
                    answer.outputs[0].logprobs, answer.outputs[0].token_ids, strict=True
                )
            ]
            for answer in rounds[0]
        ],
        cached=[sum(answer.num_cached_tokens or 0 for answer in round_) for round_ in rounds],
        seconds=seconds,
        preemptions=sum(
            metric.value for metric in engine.get_metrics() if metric.name == PREEMPTIONS
        ),
        layers=layers,
        **seen,
    )


if __name__ == "__main__":
    result = run(Job(**json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(dataclasses.asdict(result)))
