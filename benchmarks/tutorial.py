"""The benchmark that the paged attention tutorials run, with PyTorch's own timer.

Batch 32, 32 heads of 128, blocks of 16, fp16, lengths evenly from 100 to 999, a pool of 2048
blocks; quantiles .5, .2 and .8 of a call. Unlike the table's harness it calls eagerly and on one
pool again and again: it tells what a user's first experiment would see.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.utils.benchmark import Timer

from benchmarks import report
from benchmarks.cases import Cell
from benchmarks.peer import Unsupported
from benchmarks.problem import make_problem
from benchmarks.variants import OURS

CELL = Cell("tutorial", 32, 32, 32, 128, (100, 1000), page=16, dtype="fp16")
POOL_BLOCKS = 2048
QUANTILES = (0.5, 0.2, 0.8)
MIN_SECONDS = 1.0

# Largest relative error in fp16 that counts as right.
TOLERANCE = 2e-3


def run(options: argparse.Namespace, command: str) -> int:
    """Times ours and the chosen peers, prints a line each, writes the JSON file.

    Returns:
        The exit status: 1 if ours is wrong.
    """
    problem = make_problem(
        CELL, options.device, layers=1, pool_blocks=POOL_BLOCKS, seed=options.seed
    )
    exact = problem.exact
    kernels = {}
    status = 0
    print(f"{'kernel':20s}" + "".join(f"{f'q{q}':>12s}" for q in QUANTILES) + "   µs a call")
    for peer in [OURS, *options.chosen_peers]:
        if peer.missing() is not None:
            continue
        try:
            call = peer.bind(problem)
            error = float((call(0).double() - exact).norm() / exact.norm())
        except Unsupported as reason:
            print(f"{peer.title:20s} unsupported: {reason}")
            continue
        except Exception as failure:  # a peer's own failure must not end the table
            print(f"{peer.title:20s} failed: {' '.join(str(failure).split())[-200:]}")
            status |= int(peer is OURS)
            continue
        if not error <= TOLERANCE:
            print(f"{peer.title:20s} WRONG: relative error {error:.1e}")
            status |= int(peer is OURS)
            continue
        timer = Timer("call(0)", globals={"call": call}, num_threads=torch.get_num_threads())
        times = timer.blocked_autorange(min_run_time=MIN_SECONDS).times
        figures = [float(np.quantile(times, q)) * 1e6 for q in QUANTILES]
        print(f"{peer.title:20s}" + "".join(f"{figure:12.1f}" for figure in figures), flush=True)
        kernels[peer.key] = {f"q{q}_us": f for q, f in zip(QUANTILES, figures, strict=True)}
        kernels[peer.key]["error"] = error
    content = {**report.environment(options.device, command), "kernels": kernels}
    report.leave(content, "tutorial", options)
    return status
