"""BlockManager against a plain Python model that tracks every slot's content.

PAGED_ATTN_MODEL_STEPS random steps are taken (default 100000). The seed is printed, and
PAGED_ATTN_MODEL_SEED repeats it.
"""

import os
import random

import numpy as np
import pytest
from block_manager_case import INT64_MAX, INT64_MIN, observe

from paged_attn import BlockManager, OutOfBlocks, UnknownSequence


class Model:
    """What the manager should be, with every slot's content.

    `slots` stands for the cache: tokens are written through slot_mapping, as `reshape_and_cache`
    does, and read through the block tables, as `decode` does. Every token is unique, so a block
    owned twice, or lost, shows as wrong content.
    """

    def __init__(self, rng):
        self.rng = rng
        self.num_blocks = rng.randint(1, 64)
        self.block_size = rng.choice([1, 2, 3, 4, 7, 8])
        self.manager = BlockManager(self.num_blocks, self.block_size)
        self.slots = np.full(self.num_blocks * self.block_size, -1)
        self.tokens = {}  # id -> the tokens of the sequence
        self.next_token = 0

    def need(self, num_tokens):
        return -(-num_tokens // self.block_size)

    @property
    def free(self):
        return self.num_blocks - sum(self.need(len(t)) for t in self.tokens.values())

    def new_tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def new_id(self):
        edges = [0, -1, INT64_MIN, INT64_MAX]
        while True:
            seq_id = self.rng.choice([*edges, self.rng.randint(INT64_MIN, INT64_MAX)])
            if seq_id not in self.tokens:
                return seq_id

    def write(self, seq_ids, counts):
        """Writes the last tokens of the sequences into their slots."""
        uniform = len(set(counts)) == 1 and self.rng.random() < 0.5
        step = self.manager.step_inputs(seq_ids, query_lens=counts[0] if uniform else counts)
        values = [
            token for i, n in zip(seq_ids, counts, strict=True) for token in self.tokens[i][-n:]
        ]
        self.slots[step[2]] = values
        self.read(seq_ids, step)

    def read(self, seq_ids, step):
        """Each sequence, read through its row of the step's table, holds its own tokens."""
        tables, context_lens = step[0], step[1]
        offsets = np.arange(self.block_size)
        content = self.slots[tables[:, :, None] * self.block_size + offsets]
        content = content.reshape(len(seq_ids), tables.shape[1] * self.block_size)
        for row, (seq_id, length) in enumerate(zip(seq_ids, context_lens.tolist(), strict=True)):
            assert content[row, :length].tolist() == self.tokens[seq_id]

    def expect_out_of_blocks(self, needed, call, *args, **kwargs):
        before = observe(self.manager, self.tokens)
        with pytest.raises(OutOfBlocks) as caught:
            call(*args, **kwargs)
        assert (caught.value.needed, caught.value.free) == (needed, self.free)
        assert observe(self.manager, self.tokens) == before

    def allocate(self):
        seq_id = self.new_id()
        count = self.rng.randint(1, 3 * self.block_size)
        if self.need(count) > self.free:
            self.expect_out_of_blocks(
                self.need(count), self.manager.allocate, seq_id, num_tokens=count
            )
            return
        assert self.manager.allocate(seq_id, num_tokens=count) == 0
        self.tokens[seq_id] = self.new_tokens(count)
        self.write([seq_id], [count])

    def append(self):
        if not self.tokens:
            return
        batch = self.rng.random() < 0.6
        seq_ids = self.rng.sample(list(self.tokens), self.rng.randint(1, len(self.tokens)))
        seq_ids = seq_ids if batch else seq_ids[:1]
        most = self.rng.choice([1, 1, 1 + self.block_size, 2 * self.block_size])
        counts = [self.rng.randint(1, most) for _ in seq_ids]
        same = len(set(counts)) == 1
        num_tokens = counts[0] if same or not batch else counts
        needed = sum(
            self.need(len(self.tokens[i]) + n) - self.need(len(self.tokens[i]))
            for i, n in zip(seq_ids, counts, strict=True)
        )
        argument = seq_ids if batch else seq_ids[0]
        if needed > self.free:
            self.expect_out_of_blocks(needed, self.manager.append, argument, num_tokens=num_tokens)
            return
        assert self.manager.append(argument, num_tokens=num_tokens) == []
        for seq_id, count in zip(seq_ids, counts, strict=True):
            self.tokens[seq_id] = self.tokens[seq_id] + self.new_tokens(count)
        self.write(seq_ids, counts)

    def release(self):
        if self.tokens:
            seq_id = self.rng.choice(list(self.tokens))
            self.read([seq_id], self.manager.step_inputs([seq_id]))
            self.manager.free(seq_id)
            del self.tokens[seq_id]

    def refused(self):
        """Calls that must raise, with the state as it was."""
        before = observe(self.manager, self.tokens)
        unknown = self.new_id()
        known = self.rng.choice([*self.tokens, None])
        calls = [
            (UnknownSequence, self.manager.free, unknown),
            (UnknownSequence, self.manager.append, [*self.tokens, unknown]),
            (UnknownSequence, self.manager.step_inputs, [*self.tokens, unknown]),
        ]
        if known is not None:
            calls.append((ValueError, self.manager.append, [*self.tokens, known]))
            calls.append((ValueError, lambda i: self.manager.allocate(i, num_tokens=1), known))
        error, call, argument = self.rng.choice(calls)
        with pytest.raises(error):
            call(argument)
        assert observe(self.manager, self.tokens) == before

    def verify(self):
        self.manager.check()
        seq_ids = list(self.tokens)
        self.read(seq_ids, self.manager.step_inputs(seq_ids))
        used = self.num_blocks - self.free
        held = sum(map(len, self.tokens.values()))
        assert self.manager.num_free_blocks == self.free
        stats = self.manager.stats()
        assert (stats["used"], stats["free"]) == (used, self.free)
        assert stats["utilization"] == (held / (used * self.block_size) if used else 0.0)


def test_random_walk_against_the_model():
    num_steps = int(os.environ.get("PAGED_ATTN_MODEL_STEPS", 100_000))
    seed = int(os.environ.get("PAGED_ATTN_MODEL_SEED", random.SystemRandom().getrandbits(32)))
    print(f"PAGED_ATTN_MODEL_SEED={seed}")
    rng = random.Random(seed)
    actions = [Model.allocate] * 6 + [Model.append] * 5 + [Model.release] * 4 + [Model.refused]
    for start in range(0, num_steps, 1000):
        model = Model(rng)
        for step in range(start, min(start + 1000, num_steps)):
            rng.choice(actions)(model)
            model.manager.check()
            if step % 8 == 0:
                model.verify()
        model.verify()
        for seq_id in model.tokens:
            model.manager.free(seq_id)
        assert model.manager.num_free_blocks == model.num_blocks
        model.manager.check()
