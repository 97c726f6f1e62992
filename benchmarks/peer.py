"""What every kernel of the table has in common.

A peer says whether it can run here (`missing`) and binds itself to a problem (`bind`), which
gives a function of the layer that computes decode on that layer's K and V. Whatever a library
lets its user prepare once for a batch (plans, metadata, other memory orders) is done in `bind`
and not timed, which favours the peer: this package's op has nothing to prepare.
"""

from __future__ import annotations

import importlib.util

from torch import Tensor

from benchmarks.harness import Call
from benchmarks.problem import Problem


class Unsupported(Exception):
    """This peer cannot do this problem, for the reason given."""


def absent(module: str) -> str | None:
    """Why a module cannot be imported, None if it can be found."""
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    return None if found else f"{module} is not installed"


class Peer:
    """One kernel of the table.

    Attributes:
        key: its name for --peers and in the JSON file.
        title: its column's heading.
        devices: device types that it runs on.
    """

    key = ""
    title = ""
    devices: tuple[str, ...] = ("cuda",)

    def missing(self) -> str | None:
        """Why it cannot run on this machine, None if it can."""
        return None

    def bind(self, p: Problem) -> Call:
        """Prepares a problem; the result computes [B, H, D] for a layer.

        Raises:
            Unsupported: it cannot do this problem.
        """
        raise NotImplementedError

    def exact(self, p: Problem) -> Tensor:
        """What the call should compute, in fp64."""
        return p.exact
