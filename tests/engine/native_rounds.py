"""Plans made by hand for ``NativeRunner``, and the same rounds one by one from the parts of the phases."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from engine.batch import Span
from engine.core.block_pool import BlockPool, BlockTable
from engine.core.engine import EngineCore
from engine.core.sequence import RowNeeds, Sequence
from engine.core.step import (
    CONFIDENCE_BINS,
    EarlyExit,
    PhaseSeconds,
    Round,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from engine.messages import SamplingParams, TokenLogprob
from engine.models.decoder_only import DecoderModel
from engine.native.decoder import NativeDecoder
from engine.native.draws import native_draws
from engine.native.runner import NativeRunner
from engine.sampling.adjust import History
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import DraftDraw, Drafts, Row, Rule, Sampler
from tests.engine.native_pair import draft_model

CPU = torch.device("cpu")
LONG = 1000.0


@dataclass(slots=True)
class MaskedPart(ScheduledSequence):
    mask: torch.Tensor | None = None


@dataclass
class RowPlan:
    """What a row asks for. ``draft_ids`` and ``mask``: of a step's first round, by its sequence's length."""

    params: SamplingParams
    prompt: list[int]
    num_draft_tokens: int = 3
    num_missing: int = 0  # tokens that the draft model has not computed at the start
    early_exit: EarlyExit | None = None
    draft_ids: dict[int, list[int]] = field(default_factory=dict)
    mask_seed: int | None = None
    max_num_tokens: int = 60
    stop_token_ids: frozenset[int] = frozenset()


def _tables(sequence: Sequence) -> tuple[BlockTable, BlockTable]:
    return sequence.target_blocks, sequence.draft_blocks


class NoPhases:
    supports = RowNeeds.NONE

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult([])


class Side:
    """Models, pools and sequences; both sides reserve alike, so that their caches can be compared."""

    def __init__(self, core: EngineCore, rows: Sequences[RowPlan]) -> None:
        self.target, self.draft = core.target, draft_model(core)
        assert core.scheduler.draft_pool is not None
        self.pools: tuple[BlockPool, BlockPool] = core.scheduler.target_pool, core.scheduler.draft_pool
        self.sequences = [self._sequence(number, row) for number, row in enumerate(rows)]
        self.plans = dict(zip(self.sequences, rows, strict=True))

    def _sequence(self, number: int, row: RowPlan) -> Sequence:
        params = row.params
        sequence = Sequence(
            request_id=str(number),
            index=0,
            params=params,
            seed=params.seed or number,
            verification=params.verification or "coupled",
            sources=("draft_model",),
            num_speculative_tokens=row.num_draft_tokens,
            fixed_draft_length=True,
            stop_token_ids=row.stop_token_ids,
            token_ids=list(row.prompt),
            num_prompt_tokens=len(row.prompt),
            max_num_tokens=row.max_num_tokens,
        )
        self._reserve(sequence, 0)
        with torch.inference_mode():
            self._prefill(self.target, sequence.target_blocks, row.prompt[:-1])
            self._prefill(
                self.draft, sequence.draft_blocks, row.prompt[: len(row.prompt) - 1 - row.num_missing]
            )
        return sequence

    def _prefill(self, model: DecoderModel, table: BlockTable, token_ids: list[int]) -> None:
        known = [min(token_id, model.vocab_size - 1) for token_id in token_ids]
        for start in range(0, len(known), 16):
            model.forward([Span(table, known[start : start + 16], 0)])

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        for pool, table in zip(self.pools, _tables(sequence), strict=True):
            pool.reserve(table, min(len(sequence) + num_tokens, sequence.max_num_tokens))

    def plan(self, max_rounds: int) -> StepPlan:
        parts = [self._part(sequence) for sequence in self.sequences]
        if any(part.draft_ids or part.mask is not None for part in parts):
            max_rounds = 1
        needs = RowNeeds.NONE
        for part in parts:
            needs |= part.sequence.needs
            if part.num_draft_tokens and not part.draft_ids:
                needs |= RowNeeds.DRAFT_MODEL
            if part.mask is not None:
                needs |= RowNeeds.MASK
            self._reserve(part.sequence, max_rounds * (part.num_draft_tokens + 1))
        scheduled: list[ScheduledSequence] = list(parts)
        return StepPlan(scheduled, scheduled, needs, max_rounds, 0.0)

    def _part(self, sequence: Sequence) -> MaskedPart:
        row, length = self.plans[sequence], len(sequence)
        given = row.draft_ids.get(length - len(row.prompt), [])
        room = sequence.max_num_tokens - length - 1
        num_draft_tokens = min(len(given) or row.num_draft_tokens, room)
        mask = None
        if row.mask_seed is not None:
            generator = torch.Generator().manual_seed(row.mask_seed + length)
            words = -(-self.target.vocab_size // 32)
            mask = torch.randint(-(2**31), 2**31, (num_draft_tokens + 1, words), generator=generator).int()
        return MaskedPart(
            sequence,
            num_tokens=1,
            completes=True,
            num_draft_tokens=num_draft_tokens,
            source="ngram" if given else "draft_model",
            num_catch_up_tokens=length - 1 - sequence.draft_blocks.num_computed_tokens,
            early_exit=row.early_exit,
            draft_ids=given[:num_draft_tokens],
            mask=mask,
        )

    def commit(self, rounds: list[Round]) -> None:
        """All rows' tokens, and both caches back to them. Sequences that have ended leave."""
        for number, sequence in enumerate(self.sequences):
            for one in rounds:
                sequence.append(one.emitted[number])
            for pool, table in zip(self.pools, _tables(sequence), strict=True):
                pool.truncate(table, len(sequence) - 1)
        for sequence in self.sequences:
            if sequence.finish_reason:
                for pool, table in zip(
                    self.pools, (sequence.target_blocks, sequence.draft_blocks), strict=True
                ):
                    pool.release(table)
        self.sequences = [sequence for sequence in self.sequences if not sequence.finish_reason]

    def stored(self) -> list[torch.Tensor]:
        """What the caches hold of all sequences."""
        found = []
        for sequence in self.sequences:
            for model, table in zip((self.target, self.draft), _tables(sequence), strict=True):
                assert model.cache is not None
                slots = [
                    block * model.block_size + offset
                    for block in table.block_ids
                    for offset in range(model.block_size)
                ][: table.num_computed_tokens]
                found += [layer[slots] for layer in (*model.cache.keys, *model.cache.values)]
        return found


def make_runner(side: Side, step_seconds: float = LONG, max_draft_len: int = 1000) -> NativeRunner:
    target, draft = side.target.whole_pass, side.draft.whole_pass
    assert isinstance(target, NativeDecoder)
    assert isinstance(draft, NativeDecoder)
    return NativeRunner(target, draft, NoPhases(), True, step_seconds, max_draft_len)


@torch.inference_mode()
def run_phases(side: Side, plan: StepPlan, max_draft_len: int = 1000) -> tuple[Round, list[bool]]:
    """One round of the plan, and whose logits were no distribution."""
    draws = native_draws()
    assert draws is not None
    rows = [_row(part) for part in plan.rows]
    sampler = Sampler(rows, side.target.vocab_size, CPU, lambda: draws)
    drafts, confidences = _draft(side, plan.rows, sampler, max_draft_len)
    spans = [
        Span(part.sequence.target_blocks, [part.sequence.token_ids[-1], *ids], len(ids) + 1)
        for part, ids in zip(plan.rows, drafts.ids, strict=True)
    ]
    logits = side.target.forward(spans)
    verdicts = sampler.verify(logits, drafts)
    emitted = [
        [*ids[: verdict.num_accepted], verdict.next_token]
        for ids, verdict in zip(drafts.ids, verdicts, strict=True)
    ]
    logprobs: list[list[TokenLogprob] | None] = []
    first = 0
    for part, ids, text in zip(plan.rows, drafts.ids, emitted, strict=True):
        num_top = part.sequence.params.logprobs
        kept = logits[first : first + len(text)]
        logprobs.append(None if num_top is None else token_logprobs(kept, text, num_top))
        first += len(ids) + 1
    one = Round(
        drafts.lengths,
        [verdict.num_accepted for verdict in verdicts],
        emitted,
        PhaseSeconds(0.0, 0.0, 0.0),
        confidences=confidences if any(part.early_exit for part in plan.rows) else None,
        logprobs=logprobs if RowNeeds.LOGPROBS in plan.needs else None,
    )
    return one, [verdict.failed for verdict in verdicts]


def _row(part: ScheduledSequence) -> Row:
    sequence = part.sequence
    history = History(
        sequence.params,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        sequence.stop_token_ids,
        mask=getattr(part, "mask", None),
    )
    return Row(Rule.EXACT_MATCH if sequence.greedy else Rule(sequence.verification), sequence.seed, history)


def _draft(
    side: Side, parts: Sequences[ScheduledSequence], sampler: Sampler, max_draft_len: int
) -> tuple[Drafts, list[list[float] | None]]:
    """As ``DraftModelProposer`` by its loop, and drafts that are known."""
    vocab_size, lengths = side.target.vocab_size, []
    for part in parts:
        limit = part.num_draft_tokens
        if not part.draft_ids:
            limit = max(0, min(limit, max_draft_len - len(part.sequence)))
        lengths.append(limit)
    token_ids = torch.zeros(len(parts), max(lengths), dtype=torch.int64)
    probs = torch.zeros(*token_ids.shape, vocab_size) if sampler.uses_draft_probs else None
    confidences: list[list[float] | None] = [[] if part.early_exit else None for part in parts]
    survival = [1.0] * len(parts)
    active = []
    for row, part in enumerate(parts):
        if part.draft_ids:
            token_ids[row, : lengths[row]] = torch.tensor(part.draft_ids)
            if probs is not None:
                probs[row] = F.one_hot(token_ids[row], vocab_size).float()
        elif lengths[row]:
            active.append(row)
    for position in range(max(lengths)):
        if not active:
            break
        spans = []
        for row in active:
            table = parts[row].sequence.draft_blocks
            text = parts[row].sequence.token_ids[table.num_computed_tokens :]
            new = [int(token_ids[row, position - 1])] if position else text
            spans.append(Span(table, [min(token, side.draft.vocab_size - 1) for token in new], 1))
        logits = _in_width(side.draft.forward(spans), vocab_size)
        with_confidence = any(part.early_exit is not None for part in parts)
        drafted = token_ids[active, :position]
        draw = sampler.select(active).draw_drafts(logits, drafted, with_confidence)
        token_ids[active, position] = draw.ids
        if probs is not None and draw.probs is not None:
            probs[active, position] = draw.probs
        active = _going_on(parts, lengths, confidences, survival, active, position, draw)
    longest = max(lengths)
    return Drafts(token_ids[:, :longest], None if probs is None else probs[:, :longest], lengths), confidences


def _going_on(
    parts: Sequences[ScheduledSequence],
    lengths: list[int],
    confidences: list[list[float] | None],
    survival: list[float],
    active: list[int],
    position: int,
    draw: DraftDraw,
) -> list[int]:
    for i, row in enumerate(active):
        rule, met = parts[row].early_exit, confidences[row]
        if rule is None or met is None:
            continue
        assert draw.confidence is not None
        met.append(float(draw.confidence[i]))
        bin_ = max(number for number, low in enumerate(CONFIDENCE_BINS) if met[-1] >= low)
        survival[row] *= rule.rates[bin_]
        if survival[row] < rule.threshold:
            lengths[row] = position
    return [row for row in active if lengths[row] > position + 1]


def _in_width(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]


def compare(
    native: Side, phases: Side, max_rounds: int, max_draft_len: int = 1000, max_steps: int = 200
) -> list[Round]:
    """Both to their ends: the rounds, the texts, the caches. Returns the rounds."""
    runner = make_runner(native, max_draft_len=max_draft_len)
    done: list[Round] = []
    for _ in range(max_steps):
        if not native.sequences:
            return done
        plan = native.plan(max_rounds)
        theirs = phases.plan(max_rounds)
        rounds = runner.run(plan).rounds
        assert rounds
        assert len(rounds) <= plan.max_rounds
        for number, one in enumerate(rounds):
            other, failed = run_phases(phases, theirs, max_draft_len)
            assert not any(failed)
            same_round(one, other)
            is_last = number == len(rounds) - 1
            ends = _commit_one(phases, other)
            assert not ends or is_last
            if not is_last:
                parts = [replace(part, num_draft_tokens=_limit(part), draft_ids=[]) for part in theirs.rows]
                theirs = replace(theirs, rows=parts)
        native.commit(rounds)
        phases.commit([])
        assert [sequence.token_ids for sequence in native.sequences] == [
            sequence.token_ids for sequence in phases.sequences
        ]
        for mine, other_sequence in zip(native.sequences, phases.sequences, strict=True):
            for ours, other_table in zip(_tables(mine), _tables(other_sequence), strict=True):
                assert ours.num_computed_tokens == other_table.num_computed_tokens
                assert ours.block_ids == other_table.block_ids
        for a, b in zip(native.stored(), phases.stored(), strict=True):
            assert torch.equal(a, b)
        done += rounds
    raise AssertionError("rows do not come to an end")


def _limit(part: ScheduledSequence) -> int:
    sequence = part.sequence
    return min(part.num_draft_tokens, sequence.max_num_tokens - len(sequence) - 1)


def _commit_one(side: Side, one: Round) -> bool:
    """Append a round's tokens, keeping all blocks; whether a sequence has ended."""
    for number, sequence in enumerate(side.sequences):
        sequence.append(one.emitted[number])
        for table in _tables(sequence):
            table.num_computed_tokens = min(table.num_computed_tokens, len(sequence) - 1)
    return any(sequence.finish_reason for sequence in side.sequences)


def same_round(one: Round, other: Round) -> None:
    assert one.num_drafted == other.num_drafted
    assert one.num_accepted == other.num_accepted
    assert one.emitted == other.emitted
    assert one.logprobs == other.logprobs
    assert (one.confidences is None) == (other.confidences is None)
    if one.confidences is not None and other.confidences is not None:
        ours = [None if row is None else list(row) for row in one.confidences]
        assert ours == [None if row is None else list(row) for row in other.confidences]
