"""Context lengths of decode steps, sampled from a trace of requests.

A step's lengths are not those of the requests: a request is in as many steps as it generates
tokens, and its context grows by one a step. So a serving engine's continuous batching is run over
the trace: N sequences at a time, each advancing a token a step, the next request in the file's
order in the place of one that has finished. The prompt's forward pass makes the first token;
step t of a request then has a context of its input + t tokens, up to its output - 1. Shared
prefixes are not shared here: every sequence has blocks of its own.

`python -m benchmarks.traces NAME=FILE...` prints quantiles of the lengths over all of a trace's
steps, which is what trace_quantiles.json holds of three public traces.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

QUANTILES_FILE = Path(__file__).with_name("trace_quantiles.json")
NUM_QUANTILES = 101


@dataclass
class Trace:
    """The requests of a file that decode at all, in its order.

    Attributes:
        inputs: prompt tokens of each.
        steps: decode steps of each: its generated tokens less the first; 1 at least.
    """

    inputs: Ints
    steps: Ints


def read_trace(path: Path) -> Trace:
    """Reads Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines.

    Raises:
        ValueError: a line that is neither, with file and line; no request that decodes.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file: {error}") from None
    rows = _json_rows(text, path) if text.lstrip().startswith("{") else _csv_rows(text, path)
    pairs = [(tokens, generated - 1) for tokens, generated in rows if generated > 1]
    if not pairs:
        raise ValueError(f"{path}: no request with a decode step (2 generated tokens or more)")
    inputs, steps = np.array(pairs, dtype=np.int64).T
    return Trace(inputs, steps)


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            pair = row["input_length"], row["output_length"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}:{number}: not a JSON object with input_length and output_length"
            ) from None
        yield _counts(*pair, path, number)


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, int]]:
    lines = csv.reader(text.splitlines())
    names = next(lines, [])
    try:
        columns = names.index("ContextTokens"), names.index("GeneratedTokens")
    except ValueError:
        raise ValueError(
            f"{path}:1: neither JSON lines nor a header with ContextTokens and GeneratedTokens"
        ) from None
    for row in lines:
        if not row:
            continue
        if len(row) != len(names):
            raise ValueError(
                f"{path}:{lines.line_num}: {len(names)} fields expected, got {len(row)}"
            )
        yield _counts(row[columns[0]], row[columns[1]], path, lines.line_num)


def _counts(tokens: Any, generated: Any, path: Path, line: int) -> tuple[int, int]:
    """Both as integers: at least 1 token in, 0 or more out, each below 2^31."""
    for name, value, least in (("input", tokens, 1), ("output", generated, 0)):
        whole = isinstance(value, int | str) and not isinstance(value, bool)
        if not (whole and str(value).strip().isdecimal() and least <= int(value) < 2**31):
            raise ValueError(
                f"{path}:{line}: {name} tokens must be a whole number of at least {least}, "
                f"got {value!r}"
            )
    return int(tokens), int(generated)


def first_steps(trace: Trace, batch: int) -> tuple[Ints, int, int]:
    """Continuous batching of `batch` sequences: when each request begins, and what is steady.

    Returns:
        The step at which each request is first in the batch, and the half-open range of steps in
        which the batch is full and none of the requests that it began with is left.

    Raises:
        ValueError: there is no such step.
    """
    begins = np.zeros_like(trace.steps)
    ends = [int(steps) for steps in trace.steps[:batch]]
    low = max(ends)
    heapq.heapify(ends)
    for request in range(batch, len(trace.steps)):
        begins[request] = ends[0]
        heapq.heapreplace(ends, ends[0] + int(trace.steps[request]))
    high = ends[0] if len(ends) == batch else 0
    if low >= high:
        raise ValueError(
            f"{len(trace.steps)} requests that decode keep no batch of {batch} full past the first "
            f"{low} steps; choose a smaller batch"
        )
    return begins, low, high


def sample_steps(trace: Trace, batch: int, steps: int, seed: int) -> list[tuple[int, list[int]]]:
    """Steps spread over the trace, one drawn from each of `steps` equal parts.

    Returns:
        Each step's number and its `batch` context lengths.

    Raises:
        ValueError: the trace is too short for the batch.
    """
    begins, low, high = first_steps(trace, batch)
    bounds = np.linspace(low, high, steps + 1)
    random = np.random.default_rng(seed)
    sampled = []
    for left, right in itertools.pairwise(bounds):
        step = min(int(random.uniform(left, right)), high - 1)
        here = (begins <= step) & (step < begins + trace.steps)
        lengths = trace.inputs[here] + 1 + step - begins[here]
        sampled.append((step, lengths.tolist()))
    return sampled


def step_quantiles(trace: Trace) -> list[int]:
    """`NUM_QUANTILES` quantiles, from 0 to 1, of the context lengths over all decode steps."""
    first, last = trace.inputs + 1, trace.inputs + trace.steps
    # How many contexts of each length there are: request by request +1 where its range begins and
    # -1 behind its end, then summed up.
    changes = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, last + 1, -1)
    below = changes.cumsum().cumsum()
    ranks = np.linspace(0, below[-1] - 1, NUM_QUANTILES).round().astype(np.int64)
    return np.searchsorted(below, ranks, side="right").tolist()


def built_in() -> dict[str, dict[str, Any]]:
    """The traces of trace_quantiles.json: source, licence and quantiles by name."""
    content: dict[str, dict[str, Any]] = json.loads(QUANTILES_FILE.read_text())
    return content


def draw_lengths(name: str, count: int, seed: int) -> list[int]:
    """Independent lengths from a built-in trace's quantiles, linear between them."""
    quantiles = built_in()[name]["quantiles"]
    shares = np.random.default_rng(seed).uniform(size=count)
    lengths = np.interp(shares, np.linspace(0, 1, len(quantiles)), quantiles)
    return [round(length) for length in lengths.tolist()]


def step_lengths(source: str, batch: int, steps: int, seed: int) -> list[tuple[int, list[int]]]:
    """Sampled steps of a built-in trace or of a file, see `sample_steps`.

    Raises:
        ValueError: neither the name of a trace nor a readable file, or a bad one.
    """
    names = built_in()
    if source in names:
        return [(i, draw_lengths(source, batch, seed + i)) for i in range(steps)]
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"{source!r} is neither a file nor one of {', '.join(names)}")
    try:
        return sample_steps(read_trace(path), batch, steps, seed)
    except OSError as error:
        raise ValueError(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    """Prints quantiles of the files, by the names given, as JSON; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    quantiles = {}
    try:
        for argument in given:
            name, _, file = argument.rpartition("=")
            quantiles[name or Path(file).stem] = step_quantiles(read_trace(Path(file)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not given:
        print("usage: python -m benchmarks.traces [NAME=]FILE...", file=sys.stderr)
        return 2
    print(json.dumps(quantiles))
    return 0


if __name__ == "__main__":
    sys.exit(main())
