"""Timing: many kernels side by side, a call per layer, medians of interleaved repeats.

On CUDA each kernel's calls, one a layer, are captured in one graph, and the graphs are replayed
in turn; the time of a call is the replay's over the number of layers. No cache is flushed: a
layer's K and V have left the L2 by the time that its turn comes again. On the CPU every call is
timed by itself, and a call during which the system ran something else in our place is repeated.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[int], Any]

# Cycles that the GPU idles before each replay, about 1 ms: the host has by then queued the whole
# graph, and its launch is not in the measured time.
HEAD_START_CYCLES = 2_000_000

# On the CPU a kernel that takes longer than this a layer is called in fewer of the repeats.
SLOW_CALL_SECONDS = 0.02

# Share of a call's time that its threads may have waited for a core.
MAX_WAIT = 0.01


@dataclass
class Timing:
    """Times of one kernel, in seconds a call.

    Attributes:
        samples: one a replay (CUDA) or a call (CPU).
        disturbed: CPU calls not among the samples because other processes held the cores.
        noisy: too few calls were undisturbed, so the samples are of disturbed ones too.
    """

    samples: list[float] = field(default_factory=list)
    disturbed: int = 0
    noisy: bool = False

    def quantile(self, share: float) -> float:
        """The sample below which `share` of them lie."""
        ordered = torch.tensor(self.samples, dtype=torch.float64)
        return float(torch.quantile(ordered, share))

    @property
    def median(self) -> float:
        """Median time of a call."""
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """The middle 60 % of the samples' width over their median."""
        return (self.quantile(0.8) - self.quantile(0.2)) / self.median

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds of it, in microseconds."""
        names = {"p20_us": 0.2, "median_us": 0.5, "p80_us": 0.8, "min_us": 0.0}
        figures: dict[str, Any] = {name: self.quantile(q) * 1e6 for name, q in names.items()}
        return {
            **figures,
            "samples": len(self.samples),
            "disturbed": self.disturbed,
            "noisy": self.noisy,
        }


@dataclass
class Captured:
    """A CUDA graph and the call that it was captured from.

    Attributes:
        call: kept because replays read the tensors that it holds.
        result: what the last layer's call returned, written again by every replay.
    """

    graph: torch.cuda.CUDAGraph
    call: Call
    result: Any

    def replay(self) -> None:
        """Runs every layer's call."""
        self.graph.replay()


def capture(call: Call, layers: int) -> Captured:
    """One CUDA graph with `call(layer)` for every layer."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        call(layers - 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    result = None
    with torch.cuda.graph(graph):
        for layer in range(layers):
            result = call(layer)
    return Captured(graph, call, result)


def time_graphs(
    graphs: dict[str, Captured],
    layers: int,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Replays the graphs in turn, `repeats` rounds after two to warm up.

    Args:
        graphs: by kernel name, each with a call per layer.
        layers: calls in a graph.
        repeats: samples of each kernel.
        advance: called after each measured round.
    """
    for _ in range(2):
        for graph in graphs.values():
            graph.replay()
    timings = {name: Timing() for name in graphs}
    order = list(graphs)
    for round_ in range(repeats):
        events = {}
        shift = round_ % len(order)
        for name in order[shift:] + order[:shift]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            graphs[name].replay()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            timings[name].samples.append(begin.elapsed_time(end) * 1e-3 / layers)
        advance()
    return timings


def waited_seconds() -> float:
    """Time that this process's threads have been ready to run while others held the cores.

    0 where the kernel does not account for it.
    """
    total = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        try:
            with open(path) as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended, or no accounting
            continue
    return total * 1e-9


def time_calls(
    calls: dict[str, Call],
    layers: int,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times CPU kernels in turn: every round goes through each kernel's layers once.

    Args:
        calls: by kernel name.
        layers: K/V pools to go through in a round.
        repeats: rounds in which every call is timed; up to three times as many are run while a
            kernel has fewer than half its samples undisturbed.
        advance: called after each of the first `repeats` rounds.
    """
    order = list(calls)
    period = {}
    for name, call in calls.items():
        call(0)
        begin = time.perf_counter()
        call(layers - 1)
        slow = (time.perf_counter() - begin) / SLOW_CALL_SECONDS
        period[name] = min(max(1, round(slow)), max(1, repeats // 3))

    clean: dict[str, list[float]] = {name: [] for name in order}
    disturbed: dict[str, list[float]] = {name: [] for name in order}

    def wanting(name: str) -> bool:
        return len(clean[name]) < layers * repeats // period[name] / 2

    for round_ in range(3 * repeats):
        extra = round_ >= repeats
        if extra and not any(wanting(name) for name in order):
            break
        shift = round_ % len(order)
        for name in order[shift:] + order[:shift]:
            if round_ % period[name] or (extra and not wanting(name)):
                continue
            for elapsed, waited in _timed_layers(calls[name], layers):
                fair = waited <= MAX_WAIT * elapsed
                (clean if fair else disturbed)[name].append(elapsed)
        if not extra:
            advance()

    timings = {}
    for name in order:
        noisy = wanting(name)
        samples = clean[name] + disturbed[name] if noisy else clean[name]
        timings[name] = Timing(samples, len(disturbed[name]), noisy)
    return timings


def _timed_layers(call: Call, layers: int) -> Iterator[tuple[float, float]]:
    """Seconds of each layer's call, and seconds that its threads waited for a core."""
    before = waited_seconds()
    for layer in range(layers):
        begin = time.perf_counter()
        call(layer)
        elapsed = time.perf_counter() - begin
        after = waited_seconds()
        yield elapsed, after - before
        before = after
