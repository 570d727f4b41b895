"""Rounds that the host reads once: drafts stay on the device until their verdict is there.

``whole_rounds`` has their counterpart on a CPU. Everything but the order of launches and reads is as phase by
phase, and so is what is emitted.
"""

from dataclasses import dataclass

from engine.core.scheduler import Scheduled
from engine.models.captured_round import CapturedRound
from engine.models.round_inputs import RoundBucket
from engine.proposers.routed import RoutedProposer
from engine.sampling.captured_draw import DrawRow, draw_rows
from engine.sampling.sampler import Sampler
from engine.sampling.verify import RowVerdict


@dataclass(slots=True)
class JudgedRound:
    """A round's drafts and verdicts by row, and the device's seconds for drafting and for the rest of it."""

    drafted: list[list[int]]
    verdicts: list[RowVerdict]
    draft_seconds: float
    score_seconds: float


def run_captured(
    rounds: CapturedRound | None, proposer: RoutedProposer, scheduled: list[Scheduled], sampler: Sampler
) -> JudgedRound | None:
    """Draft, score and judge a step in which all of ``scheduled``, ``sampler``'s rows, only decode. None if
    that cannot be captured or is not; nothing has happened then."""
    if rounds is None or not all(part.only_decodes for part in scheduled):
        return None
    rows = draw_rows(sampler)
    if rows is None:
        return None
    tables = [part.sequence.target_blocks for part in scheduled]
    bucket = rounds.find(tables, [part.num_draft_tokens for part in scheduled], rows)
    if bucket is None:
        return None
    return _run(rounds, bucket, rows, proposer, scheduled, sampler)


def _run(
    rounds: CapturedRound,
    bucket: RoundBucket,
    rows: list[DrawRow],
    proposer: RoutedProposer,
    scheduled: list[Scheduled],
    sampler: Sampler,
) -> JudgedRound:
    capture, sequences = rounds.capture, [part.sequence for part in scheduled]
    started = capture.mark()
    drafts = proposer.propose(scheduled, sampler)
    drafted = capture.mark()
    tables = [sequence.target_blocks for sequence in sequences]
    pending = [sequence.token_ids[-1] for sequence in sequences]
    rounds.launch(bucket, tables, pending, drafts.token_ids, drafts.lengths, rows)
    judged = capture.mark()
    ids, verdicts = rounds.read(bucket, drafts.lengths)
    return JudgedRound(ids, verdicts, capture.seconds(started, drafted), capture.seconds(drafted, judged))
