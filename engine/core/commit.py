"""Ends a step: the tokens of its rounds are appended, counted and reported, and the caches are truncated.

Everything that counts counts rounds: a step of several rounds counts as several. Counters run since the
engine started; their readers derive rates.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from itertools import accumulate

from msgspec.structs import replace

from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import ScheduledSequence, StepPlan, StepResult
from truedraft.engine.messages import (
    DraftCounts,
    DraftVocabulary,
    Failed,
    PredictionUse,
    RoundOrigin,
    RoundTrace,
    TokenLogprob,
    TokenOutput,
)

MAX_POSITIONS = 32


class EngineStats:
    """Counts what the engine has done. ``phase_seconds`` are wall time by phase. Verdicts are counted by
    lengths: sums by position are made when they are asked for."""

    def __init__(self) -> None:
        self.num_rows: Counter[str] = Counter()  # keys are runners; values are rows of all their rounds
        self.phase_seconds = dict.fromkeys(("draft", "score", "verify", "host"), 0.0)
        self._verdicts: Counter[tuple[str, int, int]] = Counter()  # keys are (source, drafted, accepted)

    def count_draft(self, source: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one row's verdict in one round, if it drafted something."""
        self._verdicts[source, num_draft_tokens, num_accepted_tokens] += 1

    def count_step(self, result: StepResult) -> None:
        """Counts a step's rows and its seconds."""
        self.num_rows.update(result.num_rows)
        seconds = self.phase_seconds
        parts = [one.seconds for one in result.rounds]
        if result.prompt_seconds is not None:
            parts.append(result.prompt_seconds)
        for part in parts:
            seconds["draft"] += part.draft
            seconds["score"] += part.score
            seconds["verify"] += part.verify
        seconds["host"] += result.host_seconds

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafted * count for (_, drafted, _), count in self._verdicts.items())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(accepted * count for (_, _, accepted), count in self._verdicts.items())

    @property
    def draft_tokens_per_position(self) -> list[int]:
        return _by_position((drafted, count) for (_, drafted, _), count in self._verdicts.items())

    @property
    def accepted_tokens_per_position(self) -> list[int]:
        return _by_position((accepted, count) for (_, _, accepted), count in self._verdicts.items())

    @property
    def drafts(self) -> dict[str, DraftCounts]:
        """Returns the counts of each source."""
        counts: dict[str, DraftCounts] = {}
        for (source, drafted, accepted), count in self._verdicts.items():
            of_source = counts.setdefault(source, DraftCounts())
            of_source.num_drafts += count
            of_source.num_draft_tokens += drafted * count
            of_source.num_accepted_tokens += accepted * count
        return counts


def commit(
    plan: StepPlan, result: StepResult, scheduler: Scheduler, stats: EngineStats
) -> list[TokenOutput | Failed]:
    """Returns outputs by row. Both caches keep all tokens of a sequence but the pending one, and nothing of
    one that has ended. The step's seconds are counted; ``result.host_seconds`` is known from here on."""
    for part in plan.scheduled:
        if not part.completes:
            scheduler.publish(part.sequence)
    outputs: list[TokenOutput | Failed] = []
    failed_requests: set[str] = set()
    failed = result.rounds[-1].failed if result.rounds else None
    for row, part in enumerate(plan.rows):
        sequence = part.sequence
        if sequence.request_id in failed_requests:
            continue  # Another choice of its request has just failed.
        if failed is not None and failed[row]:
            failed_requests.add(sequence.request_id)
            if len(result.rounds) > 1:  # It has emitted tokens in earlier rounds.
                before = dataclasses.replace(result, rounds=result.rounds[:-1])
                outputs.append(_commit_row(row, part, before, stats))
            scheduler.abort({sequence.request_id})
            outputs.append(_failure(sequence))
            continue
        outputs.append(_commit_row(row, part, result, stats))
        scheduler.settle(sequence)
    result.host_seconds = time.perf_counter() - plan.started - result.seconds
    stats.count_step(result)
    return outputs


def _commit_row(row: int, part: ScheduledSequence, result: StepResult, stats: EngineStats) -> TokenOutput:
    sequence = part.sequence
    is_first = len(sequence.token_ids) == sequence.num_prompt_tokens
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None if sequence.params.logprobs is None else []
    origins: list[RoundOrigin] | None = [] if sequence.params.origins else None
    num_drafted = num_accepted = 0
    for one in result.rounds:
        emitted = sequence.append(one.emitted[row])
        token_ids += emitted
        # A stop inside the accepted run ends the sequence there: later tokens of the run were never emitted.
        accepted = min(one.num_accepted[row], len(emitted))
        if one.num_drafted[row]:
            stats.count_draft(one.source(row, part), one.num_drafted[row], accepted)
            num_drafted += one.num_drafted[row]
            num_accepted += accepted
        if origins is not None and emitted:
            origins.append(RoundOrigin(one.source(row, part), one.num_drafted[row], accepted, len(emitted)))
        if logprobs is not None:
            logprobs += one.logprobs_of(row)[: len(emitted)]
    _follow_grammar(sequence)
    return TokenOutput(
        request_id=sequence.request_id,
        index=sequence.index,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        num_rounds=len(result.rounds),
        seed=sequence.seed,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        queue_seconds=sequence.queue_seconds if is_first else None,
        logprobs=logprobs,
        prompt_logprobs=sequence.prompt_logprobs if is_first else None,
        trace=_trace_of(sequence, row, result.rounds[-1].traces),
        prediction=_follow_prediction(part, token_ids, num_drafted),
        origins=origins,
        budget_spent=sequence.matcher is not None and sequence.matcher.budget_spent,
    )


def _trace_of(sequence: Sequence, row: int, traces: Sequences[RoundTrace | None] | None) -> RoundTrace | None:
    """Returns the round's trace if the sequence asks for it; a vocabulary's tokens come only once."""
    trace = traces[row] if traces is not None and sequence.params.trace else None
    if trace is None or trace.vocabulary is None:
        return trace
    digest = trace.vocabulary.digest
    if digest == sequence.traced_vocabulary:
        return replace(trace, vocabulary=DraftVocabulary(digest, None))
    sequence.traced_vocabulary = digest
    return trace


def _follow_grammar(sequence: Sequence) -> None:
    """Moves the matcher over the output that it has not read."""
    if sequence.matcher is not None and sequence.finish_reason is None:
        sequence.matcher.advance(sequence.token_ids[sequence.num_prompt_tokens + sequence.matcher.num_read :])


def _follow_prediction(part: ScheduledSequence, emitted: list[int], num_drafted: int) -> PredictionUse | None:
    """Moves the cursor over the emitted tokens, and reports how many of them the prediction knew."""
    cursor = part.sequence.prediction
    if cursor is None:
        return None
    first = cursor.place
    return PredictionUse(
        cursor.follow(emitted), first, num_drafted if part.draft.first_source == "prediction" else 0
    )


def _failure(sequence: Sequence) -> Failed:
    """Returns the error of a sequence for which the model gave no distribution, or its grammar no tokens."""
    if sequence.matcher is not None and sequence.matcher.error:
        return Failed(
            sequence.request_id, "invalid_grammar", f"the grammar gave up: {sequence.matcher.error}"
        )
    return Failed(
        request_id=sequence.request_id,
        code="invalid_logits",
        message=f"the model gave no distribution (NaN, infinity or nothing allowed) after "
        f"{len(sequence)} tokens",
    )


def _by_position(lengths_and_counts: Iterable[tuple[int, int]]) -> list[int]:
    """Counts how many drafts have a token at each position."""
    of_length = [0] * (MAX_POSITIONS + 1)
    for length, count in lengths_and_counts:
        of_length[length] += count
    return list(accumulate(reversed(of_length[1:])))[::-1]
