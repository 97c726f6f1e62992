"""What one entry of the lists of mutants says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A bug of one line that tests must notice.

    Attributes:
        name: What bug it is.
        promise: What it breaks.
        file: From the repository's root.
        original: Text that occurs exactly once in the file.
        replacement: What takes its place.
        tests: pytest ids in this folder, separated by spaces: at least one of them must fail.
        device: Where it can be seen: "cpu" or "cuda".
        shape: cuda: the row of heuristics.h's kKernelShapes that the tests run, "" if they run none
            of these kernels. No other is built.
    """

    name: str
    promise: str
    file: str
    original: str
    replacement: str
    tests: str
    device: str = "cpu"
    shape: str = ""
