"""Rounds that are one call of C from the drafts to the verdict, and several of them in a step where they are
short.

A small model's round takes a millisecond, and planning, accounting and sending another quarter of one. So
rounds share a step as far as little can change between them: the same rows, which only decode, drafts from
the draft model or from nobody, and a draft length that stands. (A look-up that becomes worth more than the
draft model is noticed a step later.) What they emit is what they would emit one by one, and phase by phase.
"""

from math import inf

from engine.core.scheduler import Scheduled, Scheduler
from engine.core.sequence import Sequence
from engine.core.stats import EngineStats
from engine.messages import Failed, TokenOutput
from engine.models.decoder_only import DecoderModel
from engine.native.decoder import NativeDecoder
from engine.native.rounds import RoundsDone, can_run, run_rounds
from engine.proposers.draft_model import DraftModelProposer
from engine.round_report import outcome
from engine.sampling.sampler import Sampler

# No step has more. Memory for all of them is reserved, and given back.
MAX_ROUNDS = 16
# Of the first so many is told how long they took.
MAX_TIMED = 8


class WholeRounds:
    """Rounds of less than half of ``step_seconds`` share steps of about that time, others have their own."""

    def __init__(
        self,
        target: DecoderModel,
        proposer: DraftModelProposer | None,
        scheduler: Scheduler,
        stats: EngineStats,
        step_seconds: float,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.scheduler = scheduler
        self.stats = stats
        self.step_seconds = step_seconds
        self.last_seconds = inf  # of the last round
        self._seconds: dict[tuple[int, int], float] = {}  # of the last one, by rows and tokens to draft

    def step(
        self, parts: list[Scheduled], sampler: Sampler, host: float
    ) -> list[TokenOutput | Failed] | None:
        """All of a step whose planning took ``host`` seconds; ``parts`` are all that runs. None if C has
        no such rounds; nothing has happened then."""
        done = self._run(parts, sampler)
        if done is None:
            return None
        outputs: list[TokenOutput | Failed] = [
            self._commit(part, row, done) for row, part in enumerate(parts)
        ]
        rounds = done.rounds
        host += self.stats.end_rounds(
            draft=sum(one.draft_seconds for one in rounds),
            score=sum(one.score_seconds for one in rounds),
            verify=sum(one.verify_seconds for one in rounds),
        )
        self._observe(parts, done, host / len(rounds))
        return outputs

    def _run(self, parts: list[Scheduled], sampler: Sampler) -> RoundsDone | None:
        target = self.target.whole_pass
        if not isinstance(target, NativeDecoder):
            return None
        if not all(map(_tells_tokens_only, parts)) or not all(row.is_plain for row in sampler.rows):
            return None
        sequences = [part.sequence for part in parts]
        limits = [part.num_draft_tokens for part in parts]
        draft: NativeDecoder | None = None
        if any(limits):
            if self.proposer is None:
                return None
            if not isinstance(self.proposer.model.whole_pass, NativeDecoder):
                return None
            draft = self.proposer.model.whole_pass
        if not can_run(target, draft, sequences, limits, sampler):
            return None
        num_rounds = 1
        # The last round may have been of another kind: between long ones short ones are tried.
        if 2 * self._seconds.get(_kind(parts), self.last_seconds) <= self.step_seconds:
            num_rounds = min(MAX_ROUNDS, self.scheduler.planner.most_rounds)
        if num_rounds > 1 and not self._make_room(sequences, num_rounds * (max(limits) + 1)):
            num_rounds = 1  # for that there is room: it was scheduled
        patient = [part.patient_draft for part in parts if part.patient_draft is not None]
        if patient and len(patient) < len(parts):
            return None
        return run_rounds(
            target,
            draft,
            sequences,
            limits,
            patient or None,
            sampler,
            num_rounds,
            self.step_seconds,
            looks_back=self.scheduler.planner.policy is not None,
        )

    def _make_room(self, sequences: list[Sequence], num_tokens: int) -> bool:
        """For so many more of each, where no other sequence has to give way for it."""
        if self.proposer is not None:
            longest = max(sequence.length_after(num_tokens) for sequence in sequences)
            if longest > self.proposer.max_len:
                return False
        return all(self.scheduler.reserve_ahead(sequence, num_tokens) for sequence in sequences)

    def _commit(self, part: Scheduled, row: int, done: RoundsDone) -> TokenOutput:
        """Append what a row has said, and bring both caches back to it."""
        sequence, said = part.sequence, done.emitted[row]
        sequence.target_blocks.num_computed_tokens += len(said)
        sequence.draft_blocks.num_computed_tokens = done.draft_stored[row]
        emitted = sequence.append(said)
        num_drafted = num_accepted = 0
        for one in done.rounds:
            drafted, accepted = one.num_drafted[row], one.num_accepted[row]
            if one is done.rounds[-1]:
                # A stop inside the accepted run ends the sequence there: what follows was never said.
                accepted = min(accepted, accepted + 1 - (len(said) - len(emitted)))
            if drafted:
                self.stats.count_draft(part.source, drafted, accepted)
            num_drafted += drafted
            num_accepted += accepted
        self.scheduler.settle(sequence)
        return TokenOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=emitted,
            finish_reason=sequence.finish_reason,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_rounds=len(done.rounds),
            seed=sequence.seed,
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )

    def _observe(self, parts: list[Scheduled], done: RoundsDone, host: float) -> None:
        """Tell the planner of every round; ``host`` seconds each have passed outside the models."""
        planner = self.scheduler.planner
        # The first of several rounds finds the processor's caches full of what the host did, later ones ever
        # better filled ones. Lengths are compared by those that probes have, too.
        first = min(1, len(done.rounds) - 1)
        for number, one in enumerate(done.rounds):
            outcomes = [
                outcome(part, drafted, accepted, next_right, may_have_ended=one is done.rounds[-1])
                for part, drafted, accepted, next_right in zip(
                    parts, one.num_drafted, one.num_accepted, one.next_right, strict=True
                )
            ]
            if number:
                planner.go_on(one.patient)
            planner.observe(outcomes, one.told(host) if first <= number < MAX_TIMED else None)
        last = done.rounds[-1].told(host)
        self.last_seconds = self._seconds[_kind(parts)] = last.draft + last.score + last.host


def _kind(parts: list[Scheduled]) -> tuple[int, int]:
    return len(parts), sum(part.num_draft_tokens for part in parts)


def _tells_tokens_only(part: Scheduled) -> bool:
    """Whether a sequence's part in a step is a plain round, of which nothing but tokens is told, and nobody
    is asked who may find something to draft in the next one."""
    sequence = part.sequence
    return (
        part.only_decodes
        and (part.source == "draft_model" or not sequence.sources)
        and len(sequence) > sequence.num_prompt_tokens
        and sequence.prediction is None
    )
