// Python docstrings of BlockManager.
#pragma once

namespace paged_attn {

constexpr const char* kBlockManagerDoc = R"(BlockManager(num_blocks, block_size)

Owns which sequence holds which block of a paged KV cache; knows nothing of tensors.

Every call succeeds, or raises and changes nothing. The GIL is held throughout every call, so
threads may share a manager. Placement is deterministic: a new pool hands out blocks 0, 1, 2 and so
on; later the block given back last comes first, and `free` gives a sequence's blocks back from its
last to its first. The same calls therefore give the same tables.

Args:
    num_blocks: Blocks in the pool, 1 to 2147483647.
    block_size: Slots (tokens) a block, 1 to 2147483647.

Raises:
    ValueError: A size is out of range.
)";

constexpr const char* kAllocateDoc = R"(allocate(seq_id, *, num_tokens) -> int

Register a sequence of `num_tokens` tokens, which take ceil(num_tokens / block_size) blocks.

Args:
    seq_id: Any int64 that names no present sequence.
    num_tokens: Tokens of the prompt, 1 to 2147483647.

Returns:
    How many leading tokens are cached already, so that their K and V need not be computed; 0.

Raises:
    OutOfBlocks: Too few blocks are free.
    ValueError: The sequence exists, or an argument is out of range.
)";

constexpr const char* kAppendDoc = R"(append(seq_id, *, num_tokens=1) -> list[tuple[int, int]]
append(seq_ids, *, num_tokens=1) -> list[tuple[int, int]]

Grow one sequence, or a batch of them all or none. A sequence takes a new block exactly when its
last one is full.

Args:
    seq_id: The sequence to grow.
    seq_ids: Or several: a list, tuple or one-dimensional array of distinct ids. New blocks are
        handed out in this order.
    num_tokens: Tokens to add, at least 1; for a batch one int for all, or one a sequence.

Returns:
    The (source, destination) block copies to make before the new tokens are written; empty, as
    sequences do not share blocks.

Raises:
    OutOfBlocks: Too few blocks are free for all of it.
    UnknownSequence: An id names no present sequence.
    ValueError: An id comes twice in a batch (several tokens go through num_tokens), an argument is
        out of range, or a sequence would grow past 2147483647 tokens.
)";

constexpr const char* kFreeDoc = R"(free(seq_id) -> None

Forget a sequence and give its blocks back.

Raises:
    UnknownSequence: The id names no present sequence, for instance one that was freed already.
)";

constexpr const char* kBlockTableDoc = R"(block_table(seq_id) -> numpy.ndarray

The blocks of a sequence in order, int32 [ceil(length / block_size)]: position p lies in slot
table[p // block_size] * block_size + p % block_size. A copy; later calls do not change it.

Raises:
    UnknownSequence: The id names no present sequence.
)";

constexpr const char* kNumTokensDoc = R"(num_tokens(seq_id) -> int

The length of a sequence: allocated and appended tokens.

Raises:
    UnknownSequence: The id names no present sequence.
)";

constexpr const char* kStatsDoc = R"(stats() -> dict[str, int | float]

Counts of blocks (`used` by sequences, of those `shared` by several, `cached` for their content
alone, `free`, and `evicted` so far), `hit_tokens` found cached by `allocate` so far, and
`utilization`: the share of the used blocks' slots that hold tokens, 0.0 when none is used.
used + cached + free is num_blocks.
)";

constexpr const char* kStepInputsDoc =
    R"(step_inputs(seq_ids, *, query_lens=1, width=None, pad_to=None, out=None)

The tensors of one step for `reshape_and_cache` and `decode`, in one call.

The queries of a step are the last tokens of their sequences, so append (or allocate) first: with a
query length of q, slot_mapping names the slots of the last q tokens, and context_lens counts them.
B is the number of rows: the sequences, then padding rows up to `pad_to`.

Args:
    seq_ids: A list, tuple or one-dimensional array of ids; one may come more than once.
    query_lens: Query tokens a sequence: one int for all, or one a sequence. 0 is allowed.
    width: Columns of block_tables; by default those of `out`, else as many as the longest sequence
        has blocks.
    pad_to: Number of rows; by default no padding. A padding row has context length 0 and a table
        of -1. With one int `query_lens` it takes that many slots of -1 and counts in cu_seqlens_q,
        so that every shape depends on pad_to alone; with a sequence of ints it takes none.
    out: Four arrays to write into instead of new ones, of the results' dtypes and shapes, writable,
        C-contiguous and not overlapping. slot_mapping may be longer than needed: the rest is filled
        with -1. No array is allocated then.

Returns:
    (block_tables, context_lens, slot_mapping, cu_seqlens_q), or the arrays of `out`:
    int32 [B, width], unused entries -1; int32 [B], tokens with the queries included;
    int64 [T], block * block_size + offset of each query token, -1 for padding;
    int32 [B + 1], row b owns query tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1].

Raises:
    UnknownSequence: An id names no present sequence.
    ValueError: A sequence is shorter than its query length, `width` or `pad_to` is too small, an
        array of `out` does not fit, or an argument is out of range.
    Nothing is written then.
)";

constexpr const char* kCheckDoc = R"(check() -> None

Verify that every block is either free or held as often as tables name it, and that tables are as
long as their sequences need. Takes time in proportion to the pool; for tests.

Raises:
    RuntimeError: They do not agree, which would be a bug in BlockManager.
)";

constexpr const char* kNumFreeBlocksDoc = "Blocks that `allocate` could take.";

constexpr const char* kOutOfBlocksDoc = R"(More blocks are needed than are free.

Attributes:
    needed (int): New blocks that the call needed.
    free (int): Blocks that were free.
)";

constexpr const char* kUnknownSequenceDoc = "The id names no present sequence.";

}  // namespace paged_attn
