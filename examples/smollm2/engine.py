"""Continuous batching: many sequences of any length share one pool of KV blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from examples.smollm2.model import PagedBatch, SmolLM2
from paged_attn import BlockManager, OutOfBlocks


@dataclass
class Request:
    """A prompt and what has been generated for it."""

    seq_id: int
    prompt: list[int]
    max_new_tokens: int
    generated: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def tokens(self) -> list[int]:
        """All tokens so far: what a prefill has to run."""
        return self.prompt + self.generated

    @property
    def max_slots(self) -> int:
        """Slots it may come to fill; the last token generated is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Step:
    """What one step did, and the pool as its decode saw it."""

    owners: np.ndarray  # [num_blocks] int64: the seq_id that owns each block, -1 for none
    context_lens: list[int]  # tokens in the cache, per running sequence
    waiting: int
    utilization: float  # share of the reserved slots that hold tokens
    joined: list[int] = field(default_factory=list)  # seq_ids
    preempted: list[int] = field(default_factory=list)  # seq_ids
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class RequestTooLarge(ValueError):
    """A request that the pool could not hold even if it were alone."""


class Engine:
    """Greedy generation for a queue of requests.

    Every step, in this order:

    1. each running sequence gets a slot for its next token; where the pool has none left, the
       sequence that joined last gives its blocks back and waits again, in front;
    2. waiting requests join while the pool has room for them, and are prefilled;
    3. one decode pass over all running sequences; those that are done leave.

    A preempted sequence keeps its tokens: when it rejoins, they are its prompt.
    """

    def __init__(
        self,
        model: SmolLM2,
        *,
        num_blocks: int,
        block_size: int,
        stop_ids: Collection[int] = (),
        max_batch: int = 256,
    ) -> None:
        """Allocates the pool.

        Args:
            model: Weights; their dtype and device are the pool's.
            num_blocks: Blocks in the pool.
            block_size: Tokens a block.
            stop_ids: Token ids that end a sequence.
            max_batch: Largest number of sequences running at once.
        """
        self.model = model
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.manager = BlockManager(num_blocks, block_size)
        self.kv_cache = model.new_cache(num_blocks, block_size)
        self.stop_ids = stop_ids
        self.max_batch = max_batch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they joined
        self.last_batch: PagedBatch | None = None  # of the latest decode pass

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues `requests`.

        Raises:
            RequestTooLarge: The pool cannot hold the largest one; none has been queued.
            ValueError: One exceeds the model's context, or asks for less than one token.
        """
        for r in requests:
            if r.max_new_tokens < 1 or not r.prompt:
                raise ValueError(f"request {r.seq_id}: needs a prompt and at least one new token")
            if r.max_slots > self.model.config.max_context:
                raise ValueError(
                    f"request {r.seq_id}: {len(r.prompt)} prompt tokens and {r.max_new_tokens} new "
                    f"ones exceed the model's context of {self.model.config.max_context}"
                )
        largest = max(requests, key=lambda r: r.max_slots)
        if self._blocks(largest.max_slots) > self.num_blocks:
            raise RequestTooLarge(
                f"request {largest.seq_id}: {len(largest.prompt)} prompt tokens and "
                f"{largest.max_new_tokens} new ones need {self._blocks(largest.max_slots)} blocks "
                f"of {self.block_size} tokens, the pool has {self.num_blocks}"
            )
        self.waiting.extend(requests)

    def run(self, on_step: Callable[[Step], None] = lambda step: None) -> list[Step]:
        """Steps until every request is done; `on_step` sees each step when it ends."""
        steps = []
        while self.waiting or self.running:
            steps.append(self.step())
            on_step(steps[-1])
        return steps

    @torch.inference_mode()
    def step(self) -> Step:
        """One step."""
        preempted = self._grow()
        # Whoever joins now would only take the blocks that had to be taken from another.
        joined = [] if preempted else self._admit()
        start = time.perf_counter()
        if joined:
            self._prefill(joined)
        prefill_seconds = time.perf_counter() - start

        step = Step(
            owners=self._owners(),
            context_lens=[self.manager.num_tokens(r.seq_id) for r in self.running],
            waiting=len(self.waiting),
            utilization=self.manager.stats()["utilization"],
            joined=[r.seq_id for r in joined],
            preempted=preempted,
            prefill_tokens=sum(len(r.tokens) - 1 for r in joined),
            prefill_seconds=prefill_seconds,
        )
        start = time.perf_counter()
        if self.running:
            self._decode()
        step.decode_seconds = time.perf_counter() - start
        return step

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self) -> list[int]:
        """Appends a slot to every running sequence; returns who was preempted for it."""
        preempted = []
        while self.running:
            try:
                self.manager.append([r.seq_id for r in self.running], num_tokens=1)
                break
            except OutOfBlocks:
                last = self.running.pop()
                self.manager.free(last.seq_id)
                last.preemptions += 1
                self.waiting.appendleft(last)
                preempted.append(last.seq_id)
        return preempted

    def _admit(self) -> list[Request]:
        """Moves requests from the queue to the pool, first come first served."""
        joined: list[Request] = []
        free = self.manager.num_free_blocks
        while self.waiting and len(self.running) + len(joined) < self.max_batch:
            request = self.waiting[0]
            # Its first decode, in this same step, takes one slot more than the prefill.
            needed = self._blocks(min(len(request.tokens) + 1, request.max_slots))
            if needed > free:
                break
            free -= needed
            self.manager.allocate(request.seq_id, num_tokens=len(request.tokens))
            joined.append(self.waiting.popleft())
        return joined

    def _prefill(self, joined: list[Request]) -> None:
        """Runs all tokens of `joined`, which brings each its next token and a slot for it."""
        tokens = [r.tokens for r in joined]
        batch = PagedBatch.prefill(self.manager, self.kv_cache, [r.seq_id for r in joined], tokens)
        hidden = self.model(batch.token_ids, batch.positions, batch.attend)
        ends = torch.tensor([len(t) for t in tokens], device=hidden.device).cumsum(0) - 1
        self._take(joined, hidden[ends])
        unfinished = self._retire(joined)
        if unfinished:
            self.manager.append([r.seq_id for r in unfinished], num_tokens=1)
        self.running += unfinished

    def _decode(self) -> None:
        batch = PagedBatch.decode(
            self.manager,
            self.kv_cache,
            [r.seq_id for r in self.running],
            [r.generated[-1] for r in self.running],
        )
        self._take(self.running, self.model(batch.token_ids, batch.positions, batch.attend))
        self.running = self._retire(self.running)
        self.last_batch = batch

    def _take(self, requests: list[Request], hidden: torch.Tensor) -> None:
        """Appends to each request the most likely token after its row of hidden."""
        tokens = self.model.logits(hidden).argmax(-1).tolist()
        for request, token in zip(requests, tokens, strict=True):
            request.generated.append(token)

    def _retire(self, requests: list[Request]) -> list[Request]:
        """Frees the blocks of those that are done; returns the others."""
        unfinished = []
        for request in requests:
            full = len(request.generated) == request.max_new_tokens
            if full or request.generated[-1] in self.stop_ids:
                self.manager.free(request.seq_id)
            else:
                unfinished.append(request)
        return unfinished

    def _owners(self) -> np.ndarray:
        owners = np.full(self.num_blocks, -1, dtype=np.int64)
        for request in self.running:
            owners[self.manager.block_table(request.seq_id)] = request.seq_id
        return owners
