"""Shows the algorithm in plain sight: propose, score, verify, observe (Leviathan et al. 2211.17192,
algorithm 1).

One round a step, on any device, whatever rows need. What it draws is a function of the rows' own seeds,
parameters and positions, so that other runners can be compared with it bit for bit.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from truedraft.engine.core.needs import EVERY_NEED, Need
from truedraft.engine.core.proposer import Observation, Proposer
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import PhaseSeconds, Round, ScheduledSequence, StepPlan, StepResult
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.messages import RoundTrace, TokenLogprob
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.known import known_drafts
from truedraft.engine.runtime.history import history_of
from truedraft.engine.sampling.backend import SamplingBackend
from truedraft.engine.sampling.logprobs import token_logprobs
from truedraft.engine.sampling.sampler import Drafts, Row, Rule, Sampler, merge_drafts
from truedraft.engine.sampling.verify import RowVerdict

# Does as ``ModelRunner.forward``, with the taps of those who follow the target.
TargetPass: TypeAlias = Callable[[list[Span]], ForwardOutput]


class PhaseRunner:
    """``proposers`` draft during a step. Other drafts are known when it is planned."""

    supports = EVERY_NEED

    def __init__(self, target: ModelRunner, proposers: Sequences[Proposer], backend: SamplingBackend) -> None:
        self.target = target
        self.proposers = proposers
        self.observers = [proposer for proposer in proposers if not proposer.can_lag]
        num_layers = target.model.num_layers
        self._taps_of = {
            proposer.name: [tap % num_layers if tap < 0 else tap for tap in proposer.taps]
            for proposer in self.observers
        }
        self.taps = sorted({tap for taps in self._taps_of.values() for tap in taps})
        self.backend = backend
        self._rows: WeakKeyDictionary[Sequence, Row] = WeakKeyDictionary()

    @torch.inference_mode()
    def run(self, plan: StepPlan, forward: TargetPass | None = None) -> StepResult:
        """Propose, score, verify, and let those that follow the target observe. ``forward`` takes the place
        of the target's pass; whoever gives it counts its time."""
        clock = _Clock()
        sampler = Sampler(self._rows_of(plan), self.target.vocab_size, self.target.device, self.backend)
        drafts = self._propose(plan, sampler)
        draft_seconds = clock.lap()
        scored = self._score(plan, drafts.ids, forward)
        lap = clock.lap()
        score_seconds = lap if forward is None else 0.0
        verdicts = sampler.verify(scored.logits, drafts)
        verify_seconds = clock.lap()
        if self._is_followed(plan):
            self.observe(list(_standing(plan, scored, verdicts)))
        seconds = PhaseSeconds(draft_seconds + clock.lap(), score_seconds, verify_seconds)
        if not plan.rows:
            return StepResult([], prompt_seconds=seconds)
        done = self._round(plan, sampler, drafts, scored.logits, verdicts, seconds)
        return StepResult([done], {"phases": len(plan.rows)})

    def _rows_of(self, plan: StepPlan) -> list[Row]:
        """A sequence's row serves in all of its steps: it follows the tokens by itself."""
        rows = []
        for part in plan.rows:
            row = self._rows.get(part.sequence)
            if row is None:
                row = self._rows[part.sequence] = self._row(part.sequence)
            rows.append(row)
        return rows

    def _row(self, sequence: Sequence) -> Row:
        rule = Rule.EXACT_MATCH if sequence.greedy else Rule(sequence.verification)
        history = history_of(sequence, self.target.model.rules)
        return Row(rule, sequence.seed, history, sequence.drafts_greedily)

    def _propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        """The proposers' drafts, and those that are known already. Proposers follow prompts, too."""
        parts = []
        for proposer in self.proposers:
            if any(part.draft.source == proposer.name for part in plan.rows):
                parts.append(proposer.propose(plan, sampler))
            elif prompts := [part for part in plan.prompts if part.is_prefilled_by(proposer.name)]:
                proposer.prefill(prompts)
        if any(part.draft.known for part in plan.rows):
            parts.append(known_drafts([part.draft.known_ids for part in plan.rows], sampler.device))
        return merge_drafts(parts, sampler)

    def _score(self, plan: StepPlan, drafted: list[list[int]], forward: TargetPass | None) -> "_Scored":
        """The target's pass over every row's known tokens and its drafts, and over pieces of prompts."""
        drafts = iter(drafted)
        spans, num_row_logits = [], []
        for part in plan.scheduled:
            sequence = part.sequence
            table = sequence.target_blocks
            start = table.num_computed_tokens
            token_ids = sequence.token_ids[start : start + part.num_tokens]
            num_logits = 0
            if part.completes:
                draft = next(drafts)
                token_ids += draft
                num_logits = len(draft) + 1
            num_row_logits.append(num_logits)
            # Log-probabilities of a prompt need the logits of all its tokens.
            wanted = len(token_ids) if sequence.wants_prompt_logprobs else num_logits
            spans.append(Span(table, token_ids, wanted, start + part.num_tokens))
        if forward is None:
            output = self.target.forward(spans, taps=self.taps if self._is_followed(plan) else ())
        else:
            output = forward(spans)
        logits, hidden = output
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
        """Tells those who follow the target what of its pass stands, each with the layers that it taps:
        ``standing`` has the states of all ``taps``."""
        for proposer in self.observers:
            places = [self.taps.index(tap) for tap in self._taps_of[proposer.name]]
            told = [
                replace(one, hidden=None if one.hidden is None else _columns(one.hidden, places))
                for one in standing
                if one.sequence.is_followed_by(proposer.name)
            ]
            if told:
                proposer.observe(told)

    def _round(
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
        """One by row, if any row wants its own."""
        if Need.TRACE not in plan.needs or not sampler.traced:
            return None
        target_probs, draft_probs, next_probs = (
            probs.tolist() for probs in sampler.traced_probs(logits, drafts, verdicts)
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
        """A replay must know that a draft model's translated text was not drawn."""
        names = {proposer.name: proposer.trace_source for proposer in self.proposers}
        return names.get(source, source)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Holds the target's pass: its spans, as scheduled; ``logits`` of every row's pending token and its
    drafts, packed, [sum of (drafts + 1), vocab]; and ``hidden`` as in ``ForwardOutput``, of all tokens."""

    spans: list[Span]
    logits: torch.Tensor
    hidden: torch.Tensor | None


class _Clock:
    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last one."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


def _columns(hidden: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Returns [tokens, places, hidden size] of the tapped states, without a wait for the device."""
    if places == list(range(hidden.shape[1])):
        return hidden
    return hidden.index_select(1, on_device(places, hidden.device))


def _standing(plan: StepPlan, scored: _Scored, verdicts: list[RowVerdict]) -> Iterator[Observation]:
    """Yields what has been computed of each sequence, without the drafts that were rejected."""
    verdict, end = iter(verdicts), 0
    for part, span in zip(plan.scheduled, scored.spans, strict=True):
        start, end = end, end + len(span.token_ids)
        first, num_kept = span.table.num_computed_tokens - len(span.token_ids), part.num_tokens
        if part.completes:
            num_accepted, next_token, failed = next(verdict)
            if failed:
                continue
            num_kept += num_accepted
        else:
            next_token = part.sequence.token_ids[first + num_kept]
        hidden = None if scored.hidden is None else scored.hidden[start : start + num_kept]
        yield Observation(part.sequence, first, span.token_ids[:num_kept], next_token, hidden)


def _output_logprobs(
    plan: StepPlan, drafts: Drafts, logits: torch.Tensor, emitted: list[list[int]]
) -> list[list[TokenLogprob] | None] | None:
    """Returns those of the tokens that rows emitted, where they ask for them, from the raw logits."""
    if Need.LOGPROBS not in plan.needs:
        return None
    result: list[list[TokenLogprob] | None] = []
    first = 0
    for part, length, token_ids in zip(plan.rows, drafts.lengths, emitted, strict=True):
        num_top = part.sequence.params.logprobs
        rows = logits[first : first + len(token_ids)]
        result.append(None if num_top is None else token_logprobs(rows, token_ids, num_top))
        first += length + 1
    return result


def _take_prompt_logprobs(
    scheduled: list[ScheduledSequence], spans: list[Span], num_row_logits: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """Keep the prompts' log-probabilities with their sequences; return the logits of rows alone."""
    of_rows = []
    for part, rows, num_logits in zip(
        scheduled, torch.split(logits, [span.num_logits for span in spans]), num_row_logits, strict=True
    ):
        sequence = part.sequence
        if sequence.wants_prompt_logprobs:
            first = sequence.target_blocks.num_computed_tokens - len(rows)
            # The row of token i predicted token i + 1.
            known = sequence.token_ids[first + 1 : min(first + 1 + len(rows), sequence.num_prompt_tokens)]
            assert sequence.params.prompt_logprobs is not None
            sequence.add_prompt_logprobs(
                first + 1, token_logprobs(rows[: len(known)], known, sequence.params.prompt_logprobs)
            )
        of_rows.append(rows[len(rows) - num_logits :])
    return torch.cat(of_rows)
