"""Runs rounds as captured passes: one message to the device, two launches for each drafted token, two for the
target's pass and the verdicts, and one read.

Penalties, biases, masks and rules of rows change their logits between the pass and the verdicts, and
log-probabilities are kept from before that: no row makes the others pay for a second pass. Nor do prompts and
traced rows, which go by phases in the same step: the target passes over all of them at once, uncaptured. A
batch that no graph holds drafts fewer tokens, or goes in two halves.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from operator import add
from typing import TypeVar

import torch

from truedraft.engine.core.needs import Need
from truedraft.engine.core.proposer import Observation
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Kind, PhaseSeconds, Round, ScheduledSequence, StepPlan, StepResult
from truedraft.engine.memory.batch import Span, folded_after
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.rounds.capture.adjuster import Adjuster, KeptLogits
from truedraft.engine.rounds.capture.capture import Mark
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.capture.joint_pass import score_together
from truedraft.engine.rounds.capture.rows import DRAFT, TARGET
from truedraft.engine.rounds.capture.shapes import MAX_READ_ONCE, Shape, Stage
from truedraft.engine.rounds.round import PhaseRunner
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.logprobs import token_logprobs

T = TypeVar("T")

# A draft model that does not exist counts as having this in its cache for a sequence.
NO_TABLE = BlockTable()
# Such a row gets a verdict that nobody reads.
UNJUDGED = LoneText(SamplingParams(max_tokens=1, temperature=0), Rule.EXACT_MATCH, seed=0)


@dataclass(slots=True)  # The class is not frozen, as one is made in every round.
class _Held:
    """Describes the part of a round that graphs hold: the number of drafts of each row, and how many of them
    the draft model draws. The target's pass includes ``guests``, whose verdicts are given elsewhere."""

    lengths: list[int]
    drawn: list[int]
    verdicts: Stage
    draft: Stage | None
    guests: list[Span]

    def stored(self, parts: list[ScheduledSequence]) -> list[tuple[BlockTable, int, int]]:
        """Returns for each row how many tokens the pass stores, and how many are certain after it."""
        rows = [
            (part.sequence.target_blocks, 1 + length, len(part.sequence))
            for part, length in zip(parts, self.lengths, strict=True)
        ]
        return rows + [(span.table, len(span.token_ids), span.certain) for span in self.guests]


class CudaRunner:
    """Runs captured rounds. ``phases`` runs everything that is not captured. ``drafting`` is the proposer
    whose model's passes are captured, if any."""

    supports = frozenset(
        {
            *(Need.DRAFT_MODEL, Need.HEAD, Need.CATCH_UP, Need.SAMPLING, Need.BLOCK_RULE),
            *(Need.BIAS, Need.PENALTIES, Need.RULES, Need.MASK, Need.LOGPROBS),
        }
    )

    def __init__(
        self, graphs: RoundGraphs, drafting: DraftModelProposer | HeadProposer | None, phases: PhaseRunner
    ) -> None:
        self.graphs = graphs
        self.draft = graphs.draft
        self.head = drafting if isinstance(drafting, HeadProposer) and graphs.head is not None else None
        self.model = drafting if isinstance(drafting, DraftModelProposer) and self.draft is not None else None
        self.drafting = self.head or self.model
        self.phases = phases
        self.when_launched: Callable[[], None] = lambda: None
        self._adjuster = Adjuster(graphs)
        self.table = phases.table

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        parts = [part for part in plan.rows if self._is_captured(part)]
        groups = self._groups(parts) if parts else None
        if groups is None:
            self.graphs.num_misses += bool(parts) and self.graphs.enabled
            return self.phases.run(plan)
        ours = {part.sequence for part in parts}
        others = [part for part in plan.scheduled if part.sequence not in ours]
        *first, last = groups
        launched = [self._launch(group) for group in first]

        def forward(spans: list[Span]) -> ForwardOutput:
            launched.append(self._launch(last, spans))
            assert launched[-1].of_others is not None
            return launched[-1].of_others

        if others:
            rows = [part for part in plan.rows if part.sequence not in ours]
            by_phases = self.phases.run(replace(plan, scheduled=others, rows=rows), forward)
        else:
            launched.append(self._launch(last))
            self.when_launched()
            by_phases = StepResult([])
        done = _joined([each.read() for each in launched])
        if self.phases.observers:
            self.phases.observe(list(_standing(parts, done, launched)))
        if by_phases.rounds:
            done = _merged([part.sequence in ours for part in plan.rows], done, by_phases.rounds[0])
        elif by_phases.prompt_seconds is not None:
            done.seconds = PhaseSeconds(*map(add, done.seconds, by_phases.prompt_seconds))
        # Phases count the same time by the host's clock.
        share = min(1.0, (time.perf_counter() - started) / max(sum(done.seconds), 1e-9))
        done.seconds = PhaseSeconds(*(share * seconds for seconds in done.seconds))
        return StepResult([done], {"cuda_graphs": len(parts), **by_phases.num_rows})

    def _is_captured(self, part: ScheduledSequence) -> bool:
        draft, rows = part.draft, self.graphs.rows
        if part.kind is not Kind.DECODE or not part.sequence.needs <= self.supports:
            return False
        if draft.known or not draft.num_tokens + part.num_catch_up_tokens:
            return len(draft.known_ids) <= rows.max_drafts
        return self._drafts(part) and draft.num_tokens <= self.graphs.max_drawn

    def _drafts(self, part: ScheduledSequence) -> bool:
        """Tells whether the captured draft model or the head drafts for the row, or catches up."""
        return self.drafting is not None and part.draft.first_source == self.drafting.name

    def _groups(self, parts: list[ScheduledSequence]) -> list[list[ScheduledSequence]] | None:
        """Returns the rows in groups that captured passes hold, all together if one does; None if none
        does."""
        draws_drafts = any(part.draft.num_tokens and not part.draft.known for part in parts)
        models = [1, None] if draws_drafts else [1]
        if all(self.graphs.find(len(parts), queries) for queries in models):
            return [parts]
        half = len(parts) // 2
        halves = [self._groups(some) for some in (parts[:half], parts[half:])] if half else [None]
        return None if None in halves else [group for some in halves for group in some or []]

    def _launch(self, parts: list[ScheduledSequence], others: list[Span] | None = None) -> "_Launched":
        """Launches a round of rows that captured passes hold. If there are ``others``, the target's pass
        covers them, too, and is not captured where no graph holds them all."""
        graphs, held = self.graphs, self._held(parts, others or [])
        score, of_others = held.verdicts.shape, None
        started = graphs.capture.mark()
        self._catch_up(parts)
        table_rows = self.table.rows_of([part.sequence for part in parts])
        rows, places = self._send(parts, table_rows, held)
        if held.draft is not None:
            self._feed_head(parts, rows, held)
            graphs.replay_drafts(held.draft, max(held.drawn))
        drafted = graphs.capture.mark()
        if others is not None:
            self.when_launched()
        if others is None or held.guests:
            graphs.replay(score)
            for table, length, num_certain in held.stored(parts):
                table.num_computed_tokens += length
                table.num_folded_tokens = folded_after(table, num_certain)
            if others is not None:
                of_others = graphs.output_of(held.guests, places)
        else:
            spans = [_span(part, length) for part, length in zip(parts, held.lengths, strict=True)]
            of_others = score_together(graphs, score, others, spans, rows, held.drawn)
        kept = self._adjuster.adjust(score, table_rows, rows, held.lengths)
        graphs.replay(held.verdicts)
        return _Launched(graphs, score, rows, held.lengths, kept, started, drafted, of_others)

    def _held(self, parts: list[ScheduledSequence], guests: list[Span]) -> "_Held":
        """Returns the part of a round that graphs hold: as many drafts as fit, and all ``guests``, or none of
        them where the pass would be mostly padding."""
        graphs = self.graphs
        wanted = [_num_wanted(part, self.head) for part in parts]
        most = graphs.most_queries(len(parts), max(wanted) + 1) - 1
        lengths = [min(length, most) for length in wanted]
        drawn = [0 if part.draft.known else length for part, length in zip(parts, lengths, strict=True)]
        queries, draws = max(lengths) + 1, any(drawn)
        found = self._stages(len(parts), queries, draws)
        assert found is not None
        if guests:
            longest = max(queries, *(len(span.token_ids) for span in guests))
            holding = self._stages(len(parts) + len(guests), longest, draws)
            most_tokens = max(MAX_READ_ONCE, 2 * found[0].shape.num_tokens)
            if holding is not None and holding[0].shape.num_tokens <= most_tokens:
                return _Held(lengths, drawn, *holding, guests)
        return _Held(lengths, drawn, *found, [])

    def _stages(self, num_rows: int, queries: int, draws: bool) -> tuple[Stage, Stage | None] | None:
        """Returns verdicts and, if any row ``draws`` drafts, draws for this many rows; None if they are not
        captured."""
        verdicts = self.graphs.find(num_rows, queries)
        draft = self.graphs.find(num_rows, None) if draws else None
        return None if verdicts is None or (draws and draft is None) else (verdicts, draft)

    def _send(
        self, parts: list[ScheduledSequence], table_rows: list[Row], held: "_Held"
    ) -> tuple[list[int], list[range]]:
        """Sends the rows' message. Returns the places of the rows of ``parts``, and those of the guests'
        tokens."""
        rows, score = self.graphs.rows, held.verdicts.shape
        num_rows = [score.rows] if held.draft is None else [score.rows, held.draft.shape.rows]
        # A guest's row belongs to nobody in the next round.
        keys = [*(part.sequence for part in parts), *(object() for _ in held.guests)]
        places = rows.rows_for(keys, min(num_rows))
        ours, theirs = places[: len(parts)], [row for row, _ in places[len(parts) :]]
        rows.begin()
        columns = zip(parts, table_rows, ours, held.drawn, held.lengths, strict=True)
        for part, own, (row, is_new), num_drawn, length in columns:
            self._set_row(part, row, length, num_drawn)
            if is_new:
                rows.set_sampling(row, own)
        guests = self.graphs.set_spans(score, held.guests, theirs)
        for row in theirs:
            rows.set_sampling(row, *self.table.rows_of([UNJUDGED]))
        rows.send(max(num_rows))
        return [row for row, _ in ours], guests

    def _set_row(self, part: ScheduledSequence, row: int, length: int, num_drawn: int) -> None:
        """Sets what a row scores: ``length`` drafts, all of which the model draws, or none. The number of
        drafts in the model's own cache is updated."""
        sequence, rows = part.sequence, self.graphs.rows
        last = len(sequence.token_ids) - 1
        before = sequence.token_ids[last - 1] if last else 0
        known = [before, sequence.token_ids[last], *part.draft.known_ids[:length]]
        table = self._draft_table(sequence)
        has_before = table.num_computed_tokens >= last
        rows.set_row(row, last, known, length, num_drawn, int(has_before))
        rows.set_table(TARGET, row, sequence.target_blocks)
        rows.set_states(TARGET, row, sequence.target_blocks, len(sequence))
        if num_drawn and self.head is not None:
            rows.set_table(DRAFT, row, self.head.cache.table(sequence))
        elif num_drawn:
            rows.set_table(DRAFT, row, table)
            rows.set_states(DRAFT, row, table, len(sequence))
            table.num_computed_tokens = last + num_drawn
            table.num_folded_tokens = folded_after(table, len(sequence))

    def _feed_head(self, parts: list[ScheduledSequence], rows: list[int], held: "_Held") -> None:
        """Gives the head the waiting states of the rows that draw, if it is a head that draws."""
        head, passes = self.head, self.graphs.head
        if head is None or passes is None or held.draft is None:
            return
        drawing = [i for i, number in enumerate(held.drawn) if number]
        sequences = [parts[i].sequence for i in drawing]
        head.store(sequences, held.draft.shape.fed)
        passes.feed([rows[i] for i in drawing], head.first_spans(sequences))
        head.take_back(sequences)

    def _draft_table(self, sequence: Sequence) -> BlockTable:
        return NO_TABLE if self.model is None else self.model.cache.table(sequence)

    def _catch_up(self, parts: list[ScheduledSequence]) -> None:
        """Computes the tokens that the draft's cache lacks except the last two, or those that the planner
        asks for."""
        spans = []
        for part in parts:
            if self.model is None or not self._drafts(part):
                continue
            table, token_ids = self._draft_table(part.sequence), part.sequence.token_ids
            start = table.num_computed_tokens
            end = len(token_ids) - 2 if part.draft.num_tokens else start + part.num_catch_up_tokens
            if start < end:
                spans.append(Span(table, token_ids[start:end], 0))
        if spans:
            assert self.draft is not None
            unknown = self.draft.vocab_size
            for span in spans:
                span.token_ids = [min(token_id, unknown - 1) for token_id in span.token_ids]
            self.draft.forward(spans)


class _Launched:
    """Is a round on which the device is at work. ``of_others`` are its pass's results for other rows."""

    def __init__(
        self,
        graphs: RoundGraphs,
        score: Shape,
        rows: list[int],
        lengths: list[int],
        kept: list[KeptLogits | None],
        started: Mark,
        drafted: Mark,
        of_others: ForwardOutput | None,
    ) -> None:
        # Other rounds of the step write the same tensors.
        self.verdicts = graphs.verdicts[: score.rows, : 2 + (score.queries or 0)].clone()
        tapped = graphs.tapped_of(score)
        self.tapped = None if tapped is None else tapped.clone()
        self.rows = rows
        self.lengths = lengths
        self.kept = kept
        self.of_others = of_others
        self.marks = started, drafted, graphs.capture.mark()

    def read(self) -> Round:
        numbers = self.verdicts.tolist()
        started, drafted, scored = self.marks
        draft_seconds = started.elapsed_time(drafted) / 1000
        score_seconds = drafted.elapsed_time(scored) / 1000
        verdicts = [numbers[row] for row in self.rows]
        failed = [bool(verdict[2]) for verdict in verdicts]
        emitted = [[*verdict[3 : 3 + verdict[0]], verdict[1]] for verdict in verdicts]
        logprobs = [
            None
            if kept is None
            else token_logprobs(kept.logits[: len(ids)], ids, kept.num_top, kept.given_ids)
            for kept, ids in zip(self.kept, emitted, strict=True)
        ]
        return Round(
            num_drafted=self.lengths,
            num_accepted=[verdict[0] for verdict in verdicts],
            emitted=emitted,
            seconds=PhaseSeconds(draft_seconds, score_seconds, 0.0),
            failed=failed if any(failed) else None,
            logprobs=logprobs if any(kept is not None for kept in self.kept) else None,
        )


def _num_wanted(part: ScheduledSequence, head: HeadProposer | None) -> int:
    """Returns how many drafts a row should have: none where the head is to draw them and lacks states."""
    draft = part.draft
    if head is not None and draft.num_tokens and not draft.known and not head.is_told(part.sequence):
        return 0
    return draft.num_first_drafts


def _standing(
    parts: list[ScheduledSequence], done: Round, launched: Iterable[_Launched]
) -> Iterator[Observation]:
    """Yields the computed tokens of these parts' rounds, without rejected drafts."""
    tapped = (None if each.tapped is None else each.tapped[row] for each in launched for row in each.rows)
    failed = done.failed or repeat(False)
    for part, emitted, hidden, has_failed in zip(parts, done.emitted, tapped, failed, strict=False):
        if not has_failed:
            token_ids = part.sequence.token_ids
            kept = [token_ids[-1], *emitted[:-1]]
            seen = None if hidden is None else hidden[: len(kept)]
            yield Observation(part.sequence, len(token_ids) - 1, kept, emitted[-1], seen)


def _span(part: ScheduledSequence, length: int) -> Span:
    """Returns a row's pending token and its drafts, as far as the host knows them."""
    sequence = part.sequence
    drafts = part.draft.known_ids[:length] or [0] * length
    return Span(sequence.target_blocks, [sequence.token_ids[-1], *drafts], length + 1, len(sequence))


def _joined(rounds: list[Round]) -> Round:
    """Returns one round of all rows from those of groups of them, one after the other."""
    if len(rounds) == 1:
        return rounds[0]
    first, *others = rounds
    for other in others:
        first = _merged([True] * len(first.emitted) + [False] * len(other.emitted), first, other)
    return first


def _merged(is_ours: list[bool], ours: Round, theirs: Round) -> Round:
    """Returns one round of all rows, in order, made of those of some rows and of the others."""

    def column(first: Iterable[T], second: Iterable[T]) -> list[T]:
        ours, theirs = iter(first), iter(second)
        return [next(ours if own else theirs) for own in is_ours]

    nothing = repeat(None)
    return Round(
        num_drafted=column(ours.num_drafted, theirs.num_drafted),
        num_accepted=column(ours.num_accepted, theirs.num_accepted),
        emitted=column(ours.emitted, theirs.emitted),
        seconds=PhaseSeconds(*map(add, ours.seconds, theirs.seconds)),
        failed=column(ours.failed or repeat(False), theirs.failed or repeat(False)),
        logprobs=None
        if ours.logprobs is theirs.logprobs is None
        else column(ours.logprobs or nothing, theirs.logprobs or nothing),
        traces=None if theirs.traces is None else column(nothing, theirs.traces),
    )
