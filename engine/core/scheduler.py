"""Decides which sequences take part in a step, and with how many tokens, in plain integers.

By priority, then first come, first served; a tenant that has nothing running goes before the others' second
sequences, and one of these gives way to it where there is no room. Sequences that decode go first, so that a
long prompt never stalls the streams; prompts are computed in chunks with what is left of the step's token
budget, less what earlier sequences have left in the cache. Long ones leave a part of that to short ones that
have just come. An encoder reads its prompt whole, so a step's last one may exceed the budget. When blocks run
out, the last in order gives its own back and is computed anew later; its random numbers depend on positions
only, so nothing it says changes.
"""

import time
from bisect import insort
from collections.abc import Sequence as Sequences
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import replace
from itertools import count

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.fairness import (
    PromptPace,
    all_that_may_give_way,
    firsts_first,
    next_to_give_way,
    order,
    shut_out,
)
from truedraft.engine.core.needs import Need, Needs
from truedraft.engine.core.planning import Planner
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.restoring import Restoring, stats_of
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import (
    MAX_CATCH_UP_TOKENS,
    MAX_PROMPT_TOKENS,
    DraftChoice,
    Kind,
    ScheduledSequence,
    StepPlan,
)
from truedraft.engine.core.window_blocks import WindowedPool
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import PrefixFileStats

# A prompt that has more than this part of a step's token budget left is long. As much of the budget is for
# others that have just come, while there are any.
LONG_PART = 4


class Scheduler:
    """Owns the queue, in order, the running set, and all block tables.

    ``proposers`` say which pools of theirs it hands out, and where a sequence is in them. ``planner`` decides
    who drafts, and how much; ``pace`` how many of the budget's tokens prompts may have.
    """

    def __init__(
        self,
        target_pool: BlockPool,
        max_num_sequences: int,
        max_num_batched_tokens: int,
        planner: Planner,
        proposers: Sequences[Proposer] = (),
        prefix_caching: bool = True,
        prompt_seconds: float = 0.0,
    ) -> None:
        self.target_pool = target_pool
        self.proposers = proposers
        self._need_of = {proposer.name: proposer.need for proposer in proposers}
        self._followers = [proposer for proposer in proposers if proposer.lets_go]
        self.max_num_sequences = max_num_sequences
        self.max_num_batched_tokens = max_num_batched_tokens
        self.planner = planner
        self.pace = PromptPace(prompt_seconds)
        self.prefix_caching = prefix_caching
        self.restoring: Restoring | None = None  # reads prefixes from files, if some are kept there
        self._catch_up_budget = 0  # tokens that draft caches may still catch up with in this step
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0  # sequences put back because blocks had run out
        self.num_yields = 0  # sequences put back for a tenant that had none running
        self.num_prefix_queries = 0  # prompt tokens looked up in the cache
        self.num_prefix_hits = 0  # prompt tokens found there
        self.num_restored_hits = 0  # some of these had been read from files for their request
        self._arrivals = count()

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Tells whether a sequence of this length fits into the empty pools."""
        pools = [self.target_pool, *self.draft_pools]
        return all(pool.blocks_for(num_tokens) <= pool.num_blocks for pool in pools)

    @property
    def draft_pools(self) -> list[BlockPool]:
        """Returns the pools of all proposers."""
        return [pool for proposer in self.proposers for pool in proposer.pools]

    def add(self, sequence: Sequence) -> None:
        sequence.arrival = next(self._arrivals)
        sequence.arrived = time.monotonic()
        insort(self.waiting, sequence, key=order)

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence, running or waiting, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            if self.restoring is not None:
                self.restoring.forget(sequence)
        self._release(sequence)
        self.planner.forget(sequence)
        sequence.let_go()

    def abort(self, request_ids: Set[str], index: int | None = None) -> None:
        """Forgets the sequences of requests, or one of each; unknown ones are ignored."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request_id in request_ids and index in (None, sequence.index):
                self.finish(sequence)

    def reset(self) -> None:
        """Forgets all sequences and what the caches hold, whatever state a broken step has left."""
        for sequence in [*self.running, *self.waiting]:
            self.planner.forget(sequence)
            sequence.let_go()
        self.running.clear()
        self.waiting.clear()
        if self.restoring is not None:
            self.restoring.forget_all()
        self.target_pool = self.target_pool.fresh()
        for proposer in self.proposers:
            proposer.reset()

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forgets what the caches hold beyond the first ``num_tokens`` tokens."""
        for pool, table in self._shares(sequence):
            pool.truncate(table, num_tokens)

    def publish(self, sequence: Sequence) -> None:
        """Lets later sequences find what the caches hold of this one's committed tokens, and lets go of what
        its own next tokens will not look at."""
        is_shared = self._uses_prefix_cache(sequence)
        for pool, table in self._shares(sequence):
            if is_shared and table.num_computed_tokens // pool.block_size > len(table.hashes):
                end = table.num_computed_tokens + pool.lookahead
                pool.publish(table, sequence.prefix_ids(end), sequence.prefix_salt)
                pool.keep_beginning(table, sequence.num_prompt_tokens)
            pool.let_go(table)

    def settle(self, sequence: Sequence) -> None:
        """Keeps in the caches all of a sequence's tokens but the pending one, and nothing of one that has
        ended."""
        self.truncate(sequence, len(sequence) - 1)
        self.publish(sequence)
        if sequence.finish_reason:
            self.finish(sequence)

    def prefix_file_stats(self) -> PrefixFileStats | None:
        files = self.target_pool.files
        return None if files is None else stats_of(files.folder, self.num_restored_hits)

    def cache_usage(self) -> dict[str, float]:
        """Returns the share of the blocks in use: of the target's, and of the fullest proposer's."""
        usage = {"target": self.target_pool.usage}
        if pools := self.draft_pools:
            usage["draft"] = max(pool.usage for pool in pools)
        return usage

    def schedule(self) -> StepPlan:
        """Plans the next step and reserves its blocks; the plan is empty if there is nothing to do."""
        started = time.perf_counter()
        if self.restoring is not None:
            self.restoring.store(is_alone=not self.running)
        self.running = firsts_first(self.running)
        newcomers = self._make_way()
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        choice = self.planner.choose(decoding)
        self._let_go()
        self._catch_up_budget = budget = self.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        # One that is preempted for an earlier one leaves the list at its end, and is not met.
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.is_decoding:
                part = self._plan(sequence, budget, choice.drafts.get(sequence))
                if self._reserve_or_preempt(sequence, part):
                    scheduled.append(part)
                    budget -= part.num_tokens + part.draft.num_first_drafts
        scheduled += self._plan_prompts(self.pace.within(budget), newcomers)
        for part in scheduled:
            self._extend(part)
        rows = [part for part in scheduled if part.completes]
        needs = self._needs(scheduled)
        max_rounds = 1
        if rows and len(rows) == len(self.running) and Need.PROMPT not in needs:
            max_rounds = self._reserve_rounds(rows, choice.max_rounds)
        return StepPlan(scheduled, rows, needs, max_rounds, started, choice.option)

    def _make_way(self) -> list[Sequence]:
        """Takes places and blocks from tenants with several running sequences, for those with none. Returns
        these tenants' first sequences, which go before what else waits."""
        found = [one for one in shut_out(self.waiting, self.running) if self._is_ready(one)]
        for sequence in found:
            may_give_way = all_that_may_give_way(sequence, self.running)
            if may_give_way and self._would_fit(sequence, may_give_way):
                while not self._has_room_for(sequence):
                    last = next_to_give_way(sequence, self.running)
                    if last is None:
                        break
                    self._put_back(last)
                    self.num_yields += 1
        return found

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence could start, whatever the cache has of it."""
        return len(self.running) < self.max_num_sequences and all(
            pool.can_begin([], sequence.length_after(sequence.num_speculative_tokens))
            for pool, _ in self._shares(sequence)
        )

    def _would_fit(self, sequence: Sequence, others: Sequences[Sequence]) -> bool:
        """Tells whether there would certainly be blocks for it without ``others``: nobody gives way
        in vain."""
        num_tokens = sequence.length_after(sequence.num_speculative_tokens)
        given: dict[int, list[BlockTable]] = {}
        for other in others:
            for pool, table in self._shares(other):
                given.setdefault(id(pool), []).append(table)
        return all(pool.would_hold(num_tokens, given.get(id(pool), [])) for pool, _ in self._shares(sequence))

    def _plan_prompts(self, budget: int, newcomers: Sequences[Sequence]) -> list[ScheduledSequence]:
        """Plans what is left of prompts, and admits waiting sequences, within ``budget`` tokens.

        Long prompts share what they get evenly among their tenants, and leave a part to those that wait and
        are short, or whose tenants have nothing running.
        """
        long = self.pace.within(self.max_num_batched_tokens) // LONG_PART
        has_place = len(self.running) < self.max_num_sequences
        is_awaited = has_place and (newcomers or any(len(one.token_ids) <= long for one in self.waiting))
        kept = budget // LONG_PART if is_awaited else 0
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        short_ones = [sequence for sequence in prompts if sequence.num_uncomputed_tokens <= long]
        long_ones = firsts_first(one for one in prompts if one.num_uncomputed_tokens > long)
        unserved = {sequence.tenant for sequence in long_ones}
        scheduled: list[ScheduledSequence] = []
        for sequence in [*short_ones, *long_ones]:
            most = budget
            if sequence.num_uncomputed_tokens > long:
                num_shares = len(unserved) if sequence.tenant in unserved else 1
                most = -(-(budget - kept) // num_shares)
                unserved.discard(sequence.tenant)
            if most > 0:
                scheduled.append(part := self._plan(sequence, most, None))
                budget -= part.num_tokens
        if not has_place:
            return scheduled
        ends = {sequence.request_id: False for sequence in prompts}  # does its prompt end in this step?
        ends |= {part.sequence.request_id: part.completes for part in scheduled}
        for sequence in [*newcomers, *(one for one in self.waiting if one not in newcomers)]:
            if budget <= 0 or len(self.running) >= self.max_num_sequences:
                break
            is_newcomer = len(sequence.token_ids) <= long or sequence in newcomers
            most = budget if is_newcomer else budget - kept
            shares_prompt = sequence.request_id in ends and self._uses_prefix_cache(sequence)
            if shares_prompt and ends[sequence.request_id]:
                break  # it starts with the next step, when the prompt is there
            if most <= 0 or shares_prompt or not self._is_ready(sequence):
                continue  # it waits for a prompt that takes longer, which others need not wait for
            admitted = self._admit(sequence, most)
            if admitted is None:
                break
            scheduled.append(admitted)
            num_tokens = admitted.num_tokens + admitted.draft.num_first_drafts
            budget -= num_tokens
            kept -= min(kept, num_tokens) if is_newcomer else 0
            if not sequence.is_decoding:
                ends[sequence.request_id] = admitted.completes
        return scheduled

    def _reserve_rounds(self, rows: list[ScheduledSequence], max_rounds: int) -> int:
        """Makes room for all rounds that the planner's choice stands for, if no sequence has to give way for
        it; else for one, which has been reserved. Returns how many there is room for."""
        if max_rounds > 1:
            num_tokens = max_rounds * (1 + max(part.draft.max_num_drafts for part in rows))
            if not all(self._reserve_ahead(part, num_tokens) for part in rows):
                return 1
        return max_rounds

    def _admit(self, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        """Starts a waiting sequence with what the cache has of it; returns None if there are no blocks."""
        sequence.unfollowed = self._lagging_followers(sequence)
        found = self._find_prefix(sequence)
        # The whole prompt is reserved at once: half-admitted prompts could block each other.
        num_tokens = sequence.length_after(sequence.num_speculative_tokens)
        for (pool, _), hashes in zip(self._shares(sequence), found, strict=True):
            if not pool.can_begin(hashes, num_tokens):
                return None
        for (pool, table), hashes in zip(self._shares(sequence), found, strict=True):
            pool.take_over(table, hashes)
            pool.reserve(table, num_tokens)
        self._count_prefix(sequence)
        if sequence.queue_seconds is None:  # else it was preempted
            sequence.queue_seconds = time.monotonic() - sequence.arrived
        self.waiting.remove(sequence)
        if self.restoring is not None:
            self.restoring.forget(sequence)
        self.running.append(sequence)
        return self._plan(sequence, budget, None)

    def _lagging_followers(self, sequence: Sequence) -> frozenset[str]:
        lagging = self.planner.lagging(sequence)
        return frozenset(one.name for one in self._followers if one.name in lagging)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence need not wait for what files have of its beginning."""
        if self.restoring is None or sequence.is_looked_up or not self._uses_prefix_cache(sequence):
            return True
        sequence.unfollowed = self._lagging_followers(sequence)
        return self.restoring.is_ready(sequence, self._shares(sequence), _num_shareable(sequence))

    def rest(self) -> None:
        """Waits a moment for files: there is nothing to do before they have been read."""
        if self.restoring is not None:
            self.restoring.wait()

    def forget_prefixes(self) -> Future[str] | None:
        """Forgets what the caches have published, what files keep of it, and texts that drafts come from. The
        result says why files could not be forgotten; None if there are none."""
        self.planner.forget_texts()
        pools = [self.target_pool, *self.draft_pools]
        if self.restoring is not None:
            self.restoring.forget_all()
        for pool in pools:
            pool.forget_all()
        files = self.target_pool.files
        return None if files is None or self.restoring is None else self.restoring.clear(files)

    def _let_go(self) -> None:
        """Lets followers forget the sequences that they need not follow any more."""
        for proposer in self._followers:
            for sequence in self.running:
                if sequence.is_followed_by(proposer.name) and proposer.name in self.planner.lagging(sequence):
                    for pool, table in proposer.tables(sequence):
                        pool.release(table)
                    sequence.unfollowed |= {proposer.name}

    def _find_prefix(self, sequence: Sequence) -> list[list[bytes]]:
        """Finds for each pool hashes of the blocks to take over. At least one token is left to compute. A
        proposer takes over no more than the target, and one that follows no less: it does not follow
        if that takes much and no request insists on it."""
        shares = self._shares(sequence)
        last, salt = _num_shareable(sequence), sequence.prefix_salt
        if not self._uses_prefix_cache(sequence) or last == 0:
            return [[] for _ in shares]
        found = [
            (pool, pool.find(sequence.prefix_ids(last + pool.lookahead), salt, table.beginning))
            for pool, table in shares
        ]
        for (pool, table), (_, hashes) in zip(shares, found, strict=True):
            pool.expect_shared(table, hashes, pool.usable(hashes))
        bound = {id(pool) for proposer in self._followers for pool in proposer.pools}
        alike = [(pool, hashes) for pool, hashes in found if pool is self.target_pool or id(pool) in bound]
        longest = longest_usable(alike, last)
        if (longest_usable(alike[:1], last) - longest) * self.target_pool.block_size > MAX_PROMPT_TOKENS:
            names = [one.name for one in self._followers if not sequence.insists_on(one.name)]
            if any(map(sequence.is_followed_by, names)):
                sequence.unfollowed |= frozenset(names)
                return self._find_prefix(sequence)
        return [pool.usable(hashes[:longest]) for pool, hashes in found]

    def _count_prefix(self, sequence: Sequence) -> None:
        if self._uses_prefix_cache(sequence) and sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.target_blocks.num_computed_tokens
            self.num_prefix_queries += sequence.num_prompt_tokens
            self.num_prefix_hits += sequence.num_cached_tokens
            self.num_restored_hits += min(sequence.num_cached_tokens, sequence.num_restored_tokens)

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        return self.prefix_caching and sequence.cache_prompt

    def _plan(self, sequence: Sequence, budget: int, draft: DraftChoice | None) -> ScheduledSequence:
        num_uncomputed = sequence.num_uncomputed_tokens
        if sequence.must_encode:
            return ScheduledSequence(sequence, num_uncomputed)
        if not sequence.is_decoding:
            lagging, table = self.planner.lagging(sequence), sequence.target_blocks
            num_tokens = min(num_uncomputed, budget)
            if (num_shared := table.num_shared_tokens - table.num_computed_tokens) > 0:
                num_tokens = min(num_tokens, num_shared)  # its states are kept there
            return ScheduledSequence(sequence, num_tokens, lagging=lagging)
        if draft is None:
            draft = self.planner.choose_for_prompt(sequence)
        draft = draft.within(budget - 1)
        num_catch_up_tokens = min(draft.num_missing, self._catch_up_budget) if draft.num_first_drafts else 0
        self._catch_up_budget -= num_catch_up_tokens
        if num_catch_up_tokens < draft.num_missing:
            # All of it would stall the others; the rest comes in the next steps.
            draft = replace(draft, num_tokens=0)
        return ScheduledSequence(sequence, 1, draft, num_catch_up_tokens)

    def _reserve_or_preempt(self, sequence: Sequence, part: ScheduledSequence) -> bool:
        """Makes room for ``part``, taking blocks from the last in order; returns False if that was itself."""
        num_tokens = len(sequence.token_ids) + part.draft.num_first_drafts
        growing = [
            (pool, table)
            for pool, table in self._shares(sequence)
            if pool.blocks_for(num_tokens) > len(table.block_ids)
        ]
        while growing and not all(pool.can_reserve(table, num_tokens) for pool, table in growing):
            last = self.running[-1]
            self._put_back(last)
            self.num_preemptions += 1
            if last is sequence:
                return False
        for pool, table in growing:
            pool.reserve(table, num_tokens)
        return True

    def _reserve_ahead(self, part: ScheduledSequence, num_tokens: int) -> bool:
        """Makes room for ``num_tokens`` more, as far as it may grow, if no other sequence has to give way."""
        sequence = part.sequence
        num_tokens = sequence.length_after(num_tokens)
        shares = self._shares(sequence)
        written = [(self.target_pool, sequence.target_blocks)]
        for proposer in self.proposers:
            if proposer.name == part.draft.source:
                written += proposer.tables(sequence)
        has_room = all(pool.can_reserve(table, num_tokens) for pool, table in shares)
        if not has_room or not all(pool.can_extend(table, num_tokens) for pool, table in written):
            return False
        for pool, table in shares:
            pool.reserve(table, num_tokens)
        for pool, table in written:
            pool.extend(table, num_tokens)
        return True

    def _extend(self, part: ScheduledSequence) -> None:
        """Prepares tables for what the step computes of ``part``. Where a draft's cache lacks so much of a
        prompt that its windows have no room for it, it lags."""
        sequence, table, num_drafts = part.sequence, part.sequence.target_blocks, part.draft.num_first_drafts
        end = table.num_computed_tokens + part.num_tokens
        self.target_pool.extend(table, end + num_drafts)
        for proposer in self.proposers:
            is_prompt = part.kind is not Kind.DECODE and part.is_prefilled_by(proposer.name)
            if not is_prompt and part.draft.source != proposer.name:
                continue
            for pool, own in proposer.tables(sequence):
                num_stored = own.num_computed_tokens
                if not is_prompt:
                    pool.extend(own, num_stored + part.num_catch_up_tokens + 1 + num_drafts)
                elif (num_missing := end - part.num_tokens - num_stored) <= self._catch_up_budget:
                    self._catch_up_budget -= num_missing
                    pool.extend(own, end)
                elif isinstance(pool, WindowedPool):
                    part.lagging = {*part.lagging, proposer.name}

    def _put_back(self, sequence: Sequence) -> None:
        """Preempts a running sequence: it waits, without blocks, to be computed anew."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.is_looked_up = False
        insort(self.waiting, sequence, key=order)

    def _release(self, sequence: Sequence) -> None:
        for pool, table in self._shares(sequence):
            pool.release(table)

    def _shares(self, sequence: Sequence) -> list[tuple[BlockPool, BlockTable]]:
        """Returns the pools that hold this sequence, each with its table there; the target's first."""
        shares = [(self.target_pool, sequence.target_blocks)]
        for proposer in self.proposers:
            if sequence.is_followed_by(proposer.name):
                shares += proposer.tables(sequence)
        return shares

    def _needs(self, scheduled: list[ScheduledSequence]) -> Needs:
        """Returns the needs of the whole step: those of its rows, and what they have to compute in it."""
        needs = set[Need]()
        num_prompt_tokens = 0
        for part in scheduled:
            needs |= part.sequence.needs
            if part.kind is not Kind.DECODE:
                needs.add(Need.PROMPT)
                num_prompt_tokens += part.num_tokens
                is_whole = part.completes and not part.sequence.wants_prompt_logprobs
                if not is_whole or num_prompt_tokens > MAX_PROMPT_TOKENS:
                    needs.add(Need.LONG_PROMPT)
            if part.draft.num_tokens:
                needs.add(self._need_of[part.draft.source])
            if part.num_catch_up_tokens > (MAX_CATCH_UP_TOKENS if part.draft.num_first_drafts else 0):
                needs.add(Need.CATCH_UP)
        return needs


def _num_shareable(sequence: Sequence) -> int:
    """Returns how many of its first tokens it may take over: those that it need not compute for what they
    say."""
    last = len(sequence.token_ids) - 1
    return min(last, sequence.next_scoring_row) if sequence.wants_prompt_logprobs else last


def longest_usable(found: Sequences[tuple[BlockPool, list[bytes]]], most: int) -> int:
    """Returns how many of the first ``most`` blocks that pools have found all of them can begin with."""
    # States are kept at some places only, which need not be the same in all pools.
    while (common := min(len(pool.usable(hashes[:most])) for pool, hashes in found)) < most:
        most = common
    return most
