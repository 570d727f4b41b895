"""Which sequences take part in a step, and with how many tokens. Plain integers, no tensors.

First come, first served. Running sequences go first, so that a long prompt never stalls the streams;
prompts are computed in chunks with what is left of the step's token budget. When blocks run out, the
youngest running sequence gives its own back and is computed anew later; its random numbers depend on
positions only, so nothing it says changes.
"""

from collections import deque
from dataclasses import dataclass

from engine.block_manager import BlockPool, BlockTable
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's part in a step: ``num_tokens`` known tokens to compute, and drafts on top.

    ``completes``: the last known token is among them, so the step draws what follows it.
    """

    sequence: Sequence
    num_tokens: int
    num_draft_tokens: int

    @property
    def completes(self) -> bool:
        return self.num_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """Owns the queue and the running set, and reserves blocks in both pools for what it schedules.

    ``draft_pool`` is None without a draft model; ``max_draft_len`` is the draft model's context.
    """

    def __init__(
        self,
        target_pool: BlockPool,
        draft_pool: BlockPool | None,
        max_num_sequences: int,
        max_num_batched_tokens: int,
        max_draft_len: int,
    ) -> None:
        self.target_pool = target_pool
        self.draft_pool = draft_pool
        self.max_num_sequences = max_num_sequences
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_draft_len = max_draft_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this length fits into the empty pools."""
        pools = [self.target_pool] + ([self.draft_pool] if self.draft_pool else [])
        return all(pool.blocks_for(num_tokens) <= pool.num_blocks for pool in pools)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Scheduled]:
        budget = self.max_num_batched_tokens
        scheduled: list[Scheduled] = []
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence not in self.running:
                continue  # preempted for an older one
            part = self._plan(sequence, budget)
            if self._reserve_or_preempt(sequence, part):
                scheduled.append(part)
                budget -= part.num_tokens + part.num_draft_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_sequences:
            sequence = self.waiting[0]
            part = self._plan(sequence, budget)
            # The whole prompt is reserved at once: half-admitted prompts could block each other.
            if not self._has_room(sequence, len(sequence) + part.num_draft_tokens):
                break
            self._reserve(sequence, len(sequence) + part.num_draft_tokens)
            self.running.append(self.waiting.popleft())
            scheduled.append(part)
            budget -= part.num_tokens + part.num_draft_tokens
        return scheduled

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget what either cache holds beyond the first ``num_tokens`` tokens."""
        for pool, table in self._shares(sequence):
            pool.truncate(table, num_tokens)

    def cache_usage(self) -> dict[str, float]:
        usage = {"target": self.target_pool.usage}
        if self.draft_pool is not None:
            usage["draft"] = self.draft_pool.usage
        return usage

    def _plan(self, sequence: Sequence, budget: int) -> Scheduled:
        num_uncomputed = sequence.num_uncomputed_tokens
        if num_uncomputed > 1:
            return Scheduled(sequence, min(num_uncomputed, budget), 0)
        num_draft_tokens = min(
            sequence.num_speculative_tokens,
            sequence.max_num_tokens - len(sequence) - 1,  # a round emits one more than it drafts
            self.max_draft_len - len(sequence) if sequence.method == "draft_model" else budget,
            budget - 1,
        )
        return Scheduled(sequence, 1, max(0, num_draft_tokens))

    def _reserve_or_preempt(self, sequence: Sequence, part: Scheduled) -> bool:
        """Make room for ``part``, taking blocks from the youngest; False if it was the youngest itself."""
        num_tokens = len(sequence) + part.num_draft_tokens
        while not self._has_room(sequence, num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._reserve(sequence, num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return all(pool.can_reserve(table, num_tokens) for pool, table in self._shares(sequence))

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        for pool, table in self._shares(sequence):
            pool.reserve(table, num_tokens)

    def _release(self, sequence: Sequence) -> None:
        for pool, table in self._shares(sequence):
            pool.release(table)

    def _shares(self, sequence: Sequence) -> list[tuple[BlockPool, BlockTable]]:
        """The pools that hold this sequence, each with its table there."""
        shares = [(self.target_pool, sequence.target_blocks)]
        if sequence.method == "draft_model":
            assert self.draft_pool is not None
            shares.append((self.draft_pool, sequence.draft_blocks))
        return shares
