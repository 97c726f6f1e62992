"""What the tests of BlockManager share."""

from paged_attn import BlockManager, UnknownSequence

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def observe(manager, seq_ids):
    """Everything that a caller can see of a manager, for comparison."""
    manager.check()
    state = {"free": manager.num_free_blocks, "stats": manager.stats()}
    for seq_id in seq_ids:
        try:
            length, table = manager.num_tokens(seq_id), manager.block_table(seq_id)
        except UnknownSequence:
            state[seq_id] = None
        else:
            state[seq_id] = (length, table.tolist())
    return state


def three_sequences():
    """Pool of 8 blocks of 4; lengths 6, 4, 1 take 2, 1, 1 blocks and leave 4."""
    manager = BlockManager(8, 4)
    for seq_id, num_tokens in enumerate((6, 4, 1)):
        assert manager.allocate(seq_id, num_tokens=num_tokens) == 0
    return manager
