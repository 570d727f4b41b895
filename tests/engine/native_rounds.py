"""Plans made by hand for rounds that share a step, and the same rounds one by one."""

from collections.abc import Sequence as Sequences
from ctypes import memmove
from dataclasses import dataclass, field, replace

import torch

from tests.engine.native_pair import LONG
from tests.engine.planners import draft_cache, phases_of
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import Need
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import DraftChoice, Kind, Known, Round, ScheduledSequence, StepPlan
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.model_runner import ModelRunner

MAX_STEPS = 200


@dataclass
class RowPlan:
    """A sequence, and what it asks for in each step. ``draft_ids``: drafts from outside, by the length of its
    output. ``num_missing``: tokens that the draft model has not computed at the start. ``num_uncomputed``:
    of the prompt, by either model."""

    params: SamplingParams
    prompt: list[int]
    num_draft_tokens: int = 3
    num_missing: int = 0
    num_uncomputed: int = 1
    draft_ids: dict[int, list[int]] = field(default_factory=dict)
    mask_seed: int | None = None
    max_num_tokens: int = 60
    stop_token_ids: frozenset[int] = frozenset()


def make_sequence(number: int, row: RowPlan) -> Sequence:
    params = row.params
    return Sequence(
        request_id=str(number),
        index=0,
        params=params,
        seed=params.seed or number,
        verification=params.verification or "coupled",
        sources=("draft_model",),
        num_speculative_tokens=row.num_draft_tokens,
        fixed_draft_length=True,
        draft_sample_method=params.draft_sample_method,
        stop_token_ids=row.stop_token_ids,
        token_ids=list(row.prompt),
        num_prompt_tokens=len(row.prompt),
        max_num_tokens=row.max_num_tokens,
    )


class RandomMasks:
    """In place of a matcher: which tokens are allowed depends on all those before."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.mask_words = -(-vocab_size // 32)
        self.emitted: list[int] = []

    @property
    def num_read(self) -> int:
        return len(self.emitted)

    def masks(self, draft_ids: list[int], first: int = 0) -> torch.Tensor:
        places = range(first, len(draft_ids) + 1)
        return torch.stack([self._mask([*self.emitted, *draft_ids[:place]]) for place in places])

    def _mask(self, text: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *text)) % 2**32)
        return torch.randint(-(2**31), 2**31, (self.mask_words,), generator=generator).int()

    def write_masks(self, address: int, draft_ids: list[int], first: int = 0) -> bool:
        masks = self.masks(draft_ids, first)
        memmove(address, masks.data_ptr(), masks.nbytes)
        return True

    def forced(self, limit: int) -> list[int]:
        return []

    def advance(self, token_ids: list[int]) -> None:
        self.emitted += token_ids


class Side:
    """Models, pools and sequences. Two sides reserve alike, so that their caches can be compared."""

    def __init__(self, core: EngineCore, rows: Sequences[RowPlan], max_draft_len: int = 1000) -> None:
        self.core = core
        self.max_draft_len = max_draft_len
        self.runner = phases_of(core)
        self.runner.step_seconds = LONG
        self.loop, self.runner.loop = self.runner.loop, None
        assert self.loop is not None
        self.loop.seconds, self.loop.max_draft_len = LONG, max_draft_len
        for proposer in self.runner.proposers:
            proposer.max_len = max_draft_len
        self.models: tuple[ModelRunner, ModelRunner] = core.target, core.draft  # type: ignore[assignment]
        self.draft = draft_cache(core)
        self.pools: tuple[BlockPool, BlockPool] = core.scheduler.target_pool, self.draft.pool
        self.sequences = [self._prefilled(make_sequence(*row), row[1]) for row in enumerate(rows)]
        self.rows = dict(zip(self.sequences, rows, strict=True))

    def _prefilled(self, sequence: Sequence, row: RowPlan) -> Sequence:
        self._reserve(sequence, 0)
        if row.mask_seed is not None:
            sequence.matcher = RandomMasks(row.mask_seed, self.models[0].vocab_size)  # type: ignore[assignment]
        num_known = len(row.prompt) - row.num_uncomputed
        for model, table, count in zip(
            self.models, self.tables(sequence), (num_known, num_known - row.num_missing), strict=True
        ):
            known = [min(token_id, model.vocab_size - 1) for token_id in row.prompt[:count]]
            for start in range(0, count, 16):
                model.forward([Span(table, known[start : start + 16], 0)])
        return sequence

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        for pool, table in zip(self.pools, self.tables(sequence), strict=True):
            pool.reserve(table, sequence.length_after(num_tokens))

    def tables(self, sequence: Sequence) -> tuple[BlockTable, BlockTable]:
        return sequence.target_blocks, self.draft.table(sequence)

    def plan(self, max_rounds: int) -> StepPlan:
        parts = [self._part(sequence) for sequence in self.sequences]
        if any(part.draft.known for part in parts):
            max_rounds = 1
        needs = set[Need]()
        for part in parts:
            needs |= part.sequence.needs
            if part.draft.num_tokens:
                needs.add(Need.DRAFT_MODEL)
            if part.kind is not Kind.DECODE:
                needs.add(Need.PROMPT)
                max_rounds = 1
            if part.sequence.matcher is not None:
                needs.add(Need.MASK)
            self._reserve(part.sequence, max_rounds * (part.draft.num_first_drafts + 1))
        return StepPlan(parts, parts, needs, max_rounds, 0.0)

    def _part(self, sequence: Sequence) -> ScheduledSequence:
        row, length = self.rows[sequence], len(sequence)
        if not sequence.is_decoding:
            return ScheduledSequence(sequence, sequence.num_uncomputed_tokens)
        draft_ids = row.draft_ids.get(length - len(row.prompt), [])
        room = sequence.max_num_tokens - length - 1
        if draft_ids:
            return ScheduledSequence(sequence, 1, DraftChoice(known=Known("ngram", draft_ids)).within(room))
        return self._drawing(sequence, row.num_draft_tokens)

    def _drawing(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """Returns a part that drafts with the model, limited as planners do."""
        room = min(sequence.max_num_tokens - len(sequence) - 1, self.max_draft_len - len(sequence))
        draft = DraftChoice("draft_model", max(0, min(num_tokens, room)))
        num_missing = self.draft.num_missing(sequence)
        return ScheduledSequence(sequence, 1, draft, num_missing if draft.num_tokens else 0)

    def next_round(self, plan: StepPlan) -> StepPlan:
        """Returns what is left of it for the next round alone."""
        rows = [self._drawing(part.sequence, part.draft.num_tokens) for part in plan.rows]
        return replace(plan, scheduled=rows, rows=rows)

    def append(self, one: Round) -> None:
        for sequence, emitted in zip(self.sequences, one.emitted, strict=True):
            sequence.append(emitted)
            if sequence.matcher is not None:
                sequence.matcher.advance(
                    sequence.token_ids[sequence.num_prompt_tokens + sequence.matcher.num_read :]
                )

    def forget_rejected(self) -> None:
        """In the caches, which keep their blocks."""
        for sequence in self.sequences:
            for table in self.tables(sequence):
                table.num_computed_tokens = min(table.num_computed_tokens, len(sequence) - 1)

    def end_step(self) -> None:
        for sequence in self.sequences:
            for pool, table in zip(self.pools, self.tables(sequence), strict=True):
                pool.truncate(table, 0 if sequence.finish_reason else len(sequence) - 1)
        self.sequences = [sequence for sequence in self.sequences if not sequence.finish_reason]

    def stored(self) -> list[torch.Tensor]:
        """What the caches hold of all sequences."""
        found = []
        for sequence in self.sequences:
            for model, table in zip(self.models, self.tables(sequence), strict=True):
                starts = torch.tensor(table.block_ids)[:, None] * model.cache.block_size
                slots = (starts + torch.arange(model.cache.block_size)).flatten()[: table.num_computed_tokens]
                found += [layer[slots] for layer in (*model.cache.keys, *model.cache.values)]
        return found


def compare(
    ours: Side, theirs: Side, max_rounds: int, phases_every: int = 0, in_c: bool = True
) -> list[Round]:
    """Run both to their ends and compare rounds, texts and caches; returns the rounds. Ours share steps, in C
    if ``in_c``, but for every ``phases_every``-th step."""
    done: list[Round] = []
    for step in range(1, MAX_STEPS):
        if not ours.sequences:
            return done
        by_phases = phases_every > 0 and step % phases_every == 0
        plan, their_plan = (side.plan(1 if by_phases else max_rounds) for side in (ours, theirs))
        ours.runner.loop = ours.loop if in_c and not by_phases else None
        result = ours.runner.run(plan)
        rounds = result.rounds
        assert set(result.num_rows) == {"c" if ours.runner.loop is not None else "phases"}
        assert 0 < len(rounds) <= plan.max_rounds
        for one in rounds:
            (other,) = theirs.runner.run(replace(their_plan, max_rounds=1)).rounds
            _assert_same(one, other)
            ours.append(one)
            theirs.append(other)
            theirs.forget_rejected()
            has_ended = any(sequence.finish_reason for sequence in theirs.sequences)
            assert not has_ended or one is rounds[-1]
            if not has_ended:
                their_plan = theirs.next_round(their_plan)
        for side in (ours, theirs):
            side.end_step()
        _assert_same_state(ours, theirs)
        done += rounds
    raise AssertionError("rows do not come to an end")


def _assert_same(one: Round, other: Round) -> None:
    assert one.num_drafted == other.num_drafted
    assert one.num_accepted == other.num_accepted
    assert one.emitted == other.emitted
    assert one.logprobs == other.logprobs
    assert other.failed is None


def _assert_same_state(ours: Side, theirs: Side) -> None:
    for one, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert one.token_ids == other.token_ids
        for table, their_table in zip(ours.tables(one), theirs.tables(other), strict=True):
            assert table.num_computed_tokens == their_table.num_computed_tokens
            assert table.block_ids == their_table.block_ids
    for stored, their_stored in zip(ours.stored(), theirs.stored(), strict=True):
        assert torch.equal(stored, their_stored)
