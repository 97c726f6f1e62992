"""Types of the compiled block manager; `help(BlockManager)` has the full documentation."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

_Ints: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
_StepInputs: TypeAlias = tuple[
    NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]
]

class _Stats(TypedDict):
    used: int
    shared: int
    cached: int
    free: int
    evicted: int
    hit_tokens: int
    utilization: float

class OutOfBlocks(RuntimeError):
    """More blocks are needed than are free."""

    needed: int
    free: int

class UnknownSequence(KeyError):
    """The id names no present sequence."""

class BlockManager:
    """Owns which sequence holds which block of a paged KV cache; knows nothing of tensors."""

    def __init__(self, num_blocks: int, block_size: int) -> None: ...
    def allocate(self, seq_id: int, *, num_tokens: int) -> int:
        """Register a sequence; returns how many leading tokens are cached already."""

    @overload
    def append(self, seq_id: int, *, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Grow a sequence; returns the (source, destination) block copies to make."""

    @overload
    def append(self, seq_ids: _Ints, *, num_tokens: int | _Ints = 1) -> list[tuple[int, int]]:
        """Grow a batch of distinct sequences, all or none."""

    def free(self, seq_id: int) -> None:
        """Forget a sequence and give its blocks back."""

    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        """A copy of the sequence's blocks in order, int32 [ceil(length / block_size)]."""

    def num_tokens(self, seq_id: int) -> int:
        """The length of a sequence in tokens."""

    def stats(self) -> _Stats:
        """Counts of blocks, tokens found cached, and the share of used slots that hold tokens."""

    def step_inputs(
        self,
        seq_ids: _Ints,
        *,
        query_lens: int | _Ints = 1,
        width: int | None = None,
        pad_to: int | None = None,
        out: Sequence[NDArray[Any]] | None = None,
    ) -> _StepInputs:
        """(block_tables [B, width], context_lens [B], slot_mapping [T], cu_seqlens_q [B + 1])."""

    def check(self) -> None:
        """Raise RuntimeError unless tables, reference counts and free list agree."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could take."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def block_size(self) -> int:
        """Slots (tokens) a block."""
