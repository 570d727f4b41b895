"""Runs rounds, on any device and whatever rows need: propose, score, adjust, judge, observe (Leviathan et al.
2211.17192, algorithm 1).

What a round draws is a function of the rows' own seeds, parameters and positions. Passes are those of the
models' runners, who replay captured ones where they have them, and draws and verdicts are operations
(``RoundOps``): the round knows neither. On a GPU nothing in it waits for what the device computes until the
verdict is read, but for masks of grammars, whose drafts the host reads while the target scores them.

Where rounds are short, a plan stands for several: they share a step, and emit what they would emit one by
one. ``NativeLoop`` runs such rounds as one call of C, where rows need nothing else.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace

import torch

from truedraft.engine.core.needs import EVERY_NEED, Need
from truedraft.engine.core.proposer import Observation, Proposer
from truedraft.engine.core.step import Known, PhaseSeconds, Round, ScheduledSequence, StepPlan, StepResult
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.messages import RoundTrace, TokenLogprob
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.known import known_drafts, known_tokens
from truedraft.engine.rounds.capture.capture import Mark
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.native_loop import NativeLoop
from truedraft.engine.rows.drafts import Drafts, RowVerdict, merge_drafts
from truedraft.engine.rows.table import Row, RowTable
from truedraft.engine.sampling.adjust import reads_drafts
from truedraft.engine.sampling.logprobs import token_logprobs
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.sampling.torch_ops import RoundOps, TorchOps

# Rows with other needs have one round a step.
SHARED = EVERY_NEED - {Need.PROMPT, Need.LONG_PROMPT, Need.PROPOSER, Need.CATCH_UP, Need.TRACE}


class RoundRunner:
    """Runs the rounds of a step. ``proposers`` draft during it. Other drafts are known when it is planned. No
    round begins that would probably end later than ``step_seconds`` after the step's first one has begun.

    ``graphs`` has the captured passes of a device, if any; then ``when_launched`` is called when the device
    is at work on a round's last pass, and the host would only wait for it.
    """

    when_launched: Callable[[], None]

    def __init__(
        self,
        target: ModelRunner,
        proposers: Sequences[Proposer],
        ops: RoundOps,
        step_seconds: float = 0.0,
        graphs: RoundGraphs | None = None,
    ) -> None:
        self.target = target
        self.proposers = proposers
        self.observers = [proposer for proposer in proposers if not proposer.can_lag]
        num_layers = target.model.num_layers
        self._taps_of = {
            proposer.name: [tap % num_layers if tap < 0 else tap for tap in proposer.taps]
            for proposer in self.observers
        }
        self.taps = sorted({tap for taps in self._taps_of.values() for tap in taps})
        self.ops = ops
        self.step_seconds = step_seconds
        self.loop: NativeLoop | None = None
        self.table = RowTable()
        self.graphs = graphs
        self._scored_by = "phases"
        self._mark: Callable[[], Mark] = HostMark
        if graphs is not None:
            self.when_launched = lambda: None
            self._mark = graphs.capture.mark

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Runs one round, or several where the plan stands for more."""
        rows = self.table.rows_of([part.sequence for part in plan.rows])
        if self.loop is not None and plan.rows and self.loop.runs(plan) and not self._is_followed(plan):
            prompt_seconds = None if plan.is_decode_only else self._prefill(plan)
            rounds = self.loop.run(plan, rows)
            if rounds:
                return StepResult(rounds, {"c": len(rounds) * len(rows)}, prompt_seconds)
        first = self._round(plan, rows)
        if not plan.rows:
            return StepResult([], prompt_seconds=first.seconds)
        rounds = [first]
        if plan.max_rounds > 1 and plan.needs <= SHARED:
            lengths = [len(part.sequence) for part in plan.rows]
            try:
                rounds += self._later_rounds(plan, rows, first)
            finally:
                for part, length in zip(plan.rows, lengths, strict=True):
                    del part.sequence.token_ids[length:]
        return StepResult(rounds, {self._scored_by: len(rounds) * len(rows)})

    def _round(self, plan: StepPlan, rows: list[Row]) -> Round:
        """Runs one round: each of its passes and operations is launched before any is waited for."""
        clock = Clock(self._mark if plan.rows else HostMark)
        sampler = Sampler(rows, self.target.vocab_size, self.target.device, self.ops)
        drafts = self._propose(plan, sampler)
        clock.lap()
        scored = self._score(plan, sampler, drafts)
        clock.lap()
        verdicts = sampler.judge(sampler.adjust(scored.logits, drafts), drafts)
        clock.judged()
        if self._is_followed(plan):
            self.observe(list(_standing(plan, scored, drafts, verdicts)))
        seconds = clock.seconds()
        return self._done(plan, sampler, drafts, scored.logits, verdicts, seconds)

    def _prefill(self, plan: StepPlan) -> PhaseSeconds:
        """Lets proposers store prompts before these are rows of the loop."""
        started = time.perf_counter()
        for proposer in self.proposers:
            proposer.prefill([part for part in plan.prompts if part.is_prefilled_by(proposer.name)])
        return PhaseSeconds(time.perf_counter() - started, 0.0, 0.0)

    def _later_rounds(self, plan: StepPlan, rows: list[Row], last: Round) -> list[Round]:
        """Runs the plan's further rounds. Sequences keep the emitted tokens until the step ends."""
        started, longest = time.perf_counter(), sum(last.seconds)
        rounds: list[Round] = []
        while len(rounds) + 1 < plan.max_rounds and not _has_ended(plan, last):
            took = time.perf_counter() - started
            if took + 2 * longest > self.step_seconds:
                break
            plan = self._next_plan(plan, last)
            last = self._round(plan, rows)
            last.sources = [part.draft.first_source for part in plan.rows]
            longest = max(longest, sum(last.seconds))
            rounds.append(last)
        return rounds

    def _next_plan(self, plan: StepPlan, last: Round) -> StepPlan:
        """Returns the plan of the next round, after the tokens of the last one."""
        parts = []
        for part, emitted in zip(plan.rows, last.emitted, strict=True):
            sequence, draft = part.sequence, part.draft
            sequence.token_ids += emitted
            if sequence.matcher is not None:
                sequence.matcher.advance(emitted)
            own = next((proposer for proposer in self.proposers if proposer.name == draft.source), None)
            tables = [sequence.target_blocks]
            for proposer in self.proposers:
                tables += [table for _, table in proposer.tables(sequence)]
            for table in tables:
                table.num_computed_tokens = min(table.num_computed_tokens, len(sequence) - 1)
            known = None
            if draft.in_round is not None and (ids := draft.in_round.drafts()):
                known = Known(draft.in_round.source, ids)
            room = sequence.max_num_tokens - len(sequence) - 1
            most = 0 if own is None else max(0, min(draft.num_tokens, room, own.max_len - len(sequence)))
            num_missing = own.num_missing(sequence) if own is not None and most and known is None else 0
            draft = replace(draft, num_tokens=most, known=known, num_missing=num_missing).within(max(0, room))
            parts.append(ScheduledSequence(sequence, 1, draft, num_missing))
        return replace(plan, scheduled=parts, rows=parts)

    def _propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        """Returns the proposers' drafts, merged with those that are known already. Proposers follow prompts,
        too."""
        parts = []
        for proposer in self.proposers:
            if any(part.draft.source == proposer.name for part in plan.rows):
                parts.append(proposer.propose(plan, sampler))
            elif prompts := [part for part in plan.prompts if part.is_prefilled_by(proposer.name)]:
                proposer.prefill(prompts)
        if any(part.draft.known for part in plan.rows):
            known = [known_tokens(part.draft.known_ids, sampler.vocab_size) for part in plan.rows]
            parts.append(known_drafts(known, sampler.device))
        return merge_drafts(
            parts, len(plan.rows), sampler.vocab_size, sampler.device, sampler.uses_draft_probs
        )

    def _score(self, plan: StepPlan, sampler: Sampler, drafts: Drafts) -> "_Scored":
        """Runs the target's pass over every row's known tokens and its drafts, and over pieces of prompts."""
        is_late = not self.ops.reads_drafts and drafts.known is None and any(drafts.lengths)
        if not self.ops.reads_drafts and reads_drafts(sampler.rows, self.target.model.rules):
            if is_late:
                drafts.send_early()
            sampler.read_drafts = lambda: drafts.ids
        number, num_tokens = 0, 0
        spans, num_row_logits = [], []
        drawn: list[tuple[int, int]] = []  # where the tokens that only the device knows go, and come from
        for part in plan.scheduled:
            sequence = part.sequence
            table = sequence.target_blocks
            start = table.num_computed_tokens
            token_ids = sequence.token_ids[start : start + part.num_tokens]
            num_logits = 0
            if part.completes:
                length = drafts.lengths[number]
                token_ids += [0] * length if is_late else drafts.ids[number]
                if is_late:
                    at, source = num_tokens + part.num_tokens, number * drafts.token_ids.shape[1]
                    drawn += [(at + place, source + place) for place in range(length)]
                num_logits = length + 1
                number += 1
            num_tokens += len(token_ids)
            num_row_logits.append(num_logits)
            # A prompt's log-probabilities need the logits from the token before the first of them on.
            wanted = num_logits
            if sequence.wants_prompt_logprobs:
                wanted = max(wanted, start + len(token_ids) - max(start, sequence.next_scoring_row))
            spans.append(Span(table, token_ids, wanted, start + part.num_tokens))
        packed_ids = _packed_ids(spans, drawn, drafts.token_ids) if is_late else None
        taps = self.taps if self._is_followed(plan) else ()
        num_fast = self.target.num_fast
        logits, hidden = self.target.forward(spans, packed_ids, taps)
        if self.graphs is not None:
            self._scored_by = "cuda_graphs" if self.target.num_fast > num_fast else "phases"
            self.when_launched()
        if len(logits) != sum(num_row_logits):
            logits = _take_prompt_logprobs(plan.scheduled, spans, num_row_logits, logits)
        return _Scored(spans, logits, hidden)

    def _is_followed(self, plan: StepPlan) -> bool:
        """Tells whether any proposer observes the target's pass."""
        return any(
            part.sequence.is_followed_by(proposer.name)
            for proposer in self.observers
            for part in plan.scheduled
        )

    def observe(self, standing: list[Observation]) -> None:
        """Tells those who follow the target which tokens of its pass stand, each with the layers that it
        taps: ``standing`` has the states of all ``taps``."""
        for proposer in self.observers:
            places = [self.taps.index(tap) for tap in self._taps_of[proposer.name]]
            told = [
                replace(one, hidden=None if one.hidden is None else _columns(one.hidden, places))
                for one in standing
                if one.sequence.is_followed_by(proposer.name)
            ]
            if told:
                proposer.observe(told)

    def _done(
        self,
        plan: StepPlan,
        sampler: Sampler,
        drafts: Drafts,
        logits: torch.Tensor,
        verdicts: list[RowVerdict],
        seconds: PhaseSeconds,
    ) -> Round:
        emitted = [
            [*draft[: verdict.num_accepted], verdict.next_token]
            for draft, verdict in zip(drafts.ids, verdicts, strict=True)
        ]
        failed = [verdict.failed for verdict in verdicts]
        return Round(
            num_drafted=drafts.lengths,
            num_accepted=[verdict.num_accepted for verdict in verdicts],
            emitted=emitted,
            seconds=seconds,
            failed=failed if any(failed) else None,
            logprobs=_output_logprobs(plan, drafts, logits, emitted),
            traces=self._traces(plan, sampler, drafts, logits, verdicts),
        )

    def _traces(
        self,
        plan: StepPlan,
        sampler: Sampler,
        drafts: Drafts,
        logits: torch.Tensor,
        verdicts: list[RowVerdict],
    ) -> list[RoundTrace] | None:
        """Returns a trace for each row, if any row wants one."""
        if Need.TRACE not in plan.needs or not sampler.traced:
            return None
        target_probs, draft_probs, next_probs = (
            probs.tolist()
            for probs in TorchOps().probs_of(sampler, sampler.adjust(logits, drafts), drafts, verdicts)
        )
        sources = [
            part.draft.first_source if length else "none"
            for part, length in zip(plan.rows, drafts.lengths, strict=True)
        ]
        outputs = {proposer.name: proposer.head_output for proposer in self.proposers}
        vocabularies = {proposer.name: proposer.draft_vocabulary for proposer in self.proposers}
        return [
            RoundTrace(
                position=row.position,
                source=self._trace_source(sources[i]),
                rule=row.rule.value,
                draft_ids=drafts.ids[i],
                target_probs=target_probs[i][: drafts.lengths[i]],
                draft_probs=draft_probs[i][: drafts.lengths[i]],
                num_accepted=verdicts[i].num_accepted,
                next_token=verdicts[i].next_token,
                next_target_prob=next_probs[i],
                head_output=outputs.get(sources[i]),
                vocabulary=vocabularies.get(sources[i]),
            )
            for i, row in enumerate(sampler.rows)
        ]

    def _trace_source(self, source: str) -> str:
        """Returns the source for traces: a replay must know that a draft model's translated text was not
        drawn."""
        names = {proposer.name: proposer.trace_source for proposer in self.proposers}
        return names.get(source, source)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Holds the results of the target's pass: its spans, as scheduled; ``logits`` of every row's pending
    token and its drafts, packed, [sum of (drafts + 1), vocab]; and ``hidden`` as in ``ForwardOutput``, of all
    tokens."""

    spans: list[Span]
    logits: torch.Tensor
    hidden: torch.Tensor | None


def _has_ended(plan: StepPlan, last: Round) -> bool:
    """Tells whether a row ends with the last round, or has failed in it."""
    return last.failed is not None or any(
        len(part.sequence) + len(emitted) >= part.sequence.max_num_tokens
        or not part.sequence.stop_token_ids.isdisjoint(emitted)
        for part, emitted in zip(plan.rows, last.emitted, strict=True)
    )


class HostMark:
    """Marks a moment of the host's clock, at which a CPU is done with what it was given."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: "HostMark") -> float:
        """Returns milliseconds."""
        return 1000 * (later.seconds - self.seconds)


class Clock:
    """Takes the time of a round. What a device has passed over it tells once the verdict has been read."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._started = self._judged = time.perf_counter()
        self._marks = [mark()]

    def lap(self) -> None:
        self._marks.append(self._mark())

    def judged(self) -> None:
        self._judged = time.perf_counter()

    def seconds(self) -> PhaseSeconds:
        """Returns the seconds of two laps, and the rest before the verdict; what follows is drafting."""
        started, drafted, scored = self._marks
        draft, score = started.elapsed_time(drafted) / 1000, drafted.elapsed_time(scored) / 1000
        verify = max(0.0, self._judged - self._started - draft - score)
        return PhaseSeconds(draft + time.perf_counter() - self._judged, score, verify)


def _packed_ids(spans: list[Span], drawn: list[tuple[int, int]], drafted: torch.Tensor) -> torch.Tensor:
    """Returns the ids of the spans' tokens on the device, with what it has ``drafted`` in its places."""
    known = [token_id for span in spans for token_id in span.token_ids]
    into, taken = zip(*drawn, strict=True)
    numbers = on_device([*known, *into, *taken], drafted.device)
    ids, places, sources = numbers.split_with_sizes((len(known), len(into), len(taken)))
    return ids.index_copy(0, places, drafted.reshape(-1).index_select(0, sources))


def _columns(hidden: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Returns [tokens, places, hidden size] of the tapped states, without a wait for the device."""
    if places == list(range(hidden.shape[1])):
        return hidden
    return hidden.index_select(1, on_device(places, hidden.device))


def _standing(
    plan: StepPlan, scored: _Scored, drafts: Drafts, verdicts: list[RowVerdict]
) -> Iterator[Observation]:
    """Yields what has been computed of each sequence, without the drafts that were rejected."""
    judged, end = zip(verdicts, drafts.ids, strict=True), 0
    for part, span in zip(plan.scheduled, scored.spans, strict=True):
        start, end = end, end + len(span.token_ids)
        first, kept = span.table.num_computed_tokens - len(span.token_ids), span.token_ids[: part.num_tokens]
        if part.completes:
            (num_accepted, next_token, failed), draft = next(judged)
            if failed:
                continue
            kept += draft[:num_accepted]
        else:
            next_token = part.sequence.token_ids[first + len(kept)]
        hidden = None if scored.hidden is None else scored.hidden[start : start + len(kept)]
        yield Observation(part.sequence, first, kept, next_token, hidden)


def _output_logprobs(
    plan: StepPlan, drafts: Drafts, logits: torch.Tensor, emitted: list[list[int]]
) -> list[list[TokenLogprob] | None] | None:
    """Returns the log-probabilities of emitted tokens, for rows that ask for them, from the raw logits."""
    if Need.LOGPROBS not in plan.needs:
        return None
    result: list[list[TokenLogprob] | None] = []
    first = 0
    for part, length, token_ids in zip(plan.rows, drafts.lengths, emitted, strict=True):
        params = part.sequence.params
        rows = logits[first : first + len(token_ids)]
        result.append(
            None
            if params.logprobs is None
            else token_logprobs(rows, token_ids, params.logprobs, params.logprob_token_ids)
        )
        first += length + 1
    return result


def _take_prompt_logprobs(
    scheduled: list[ScheduledSequence], spans: list[Span], num_row_logits: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """Stores the prompts' log-probabilities with their sequences; returns the logits of rows alone."""
    of_rows = []
    for part, rows, num_logits in zip(
        scheduled, torch.split(logits, [span.num_logits for span in spans]), num_row_logits, strict=True
    ):
        sequence = part.sequence
        if sequence.wants_prompt_logprobs and len(rows):
            first = sequence.target_blocks.num_computed_tokens - len(rows)
            # The logits after token i predicted token i + 1.
            known = sequence.token_ids[first + 1 : min(first + 1 + len(rows), sequence.num_prompt_tokens)]
            assert sequence.params.prompt_logprobs is not None
            sequence.add_prompt_logprobs(
                first + 1, token_logprobs(rows[: len(known)], known, sequence.params.prompt_logprobs)
            )
        of_rows.append(rows[len(rows) - num_logits :])
    return torch.cat(of_rows)
