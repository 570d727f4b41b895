"""Some rounds of speculation as one call of C (``rounds.c``): drafts, the target's passes, the verdicts.

Emits what the same rounds one by one would, bit for bit. Rows with penalties, bias, a trace or the block rule
take those.
"""

from array import array
from collections.abc import Sequence as Sequences
from ctypes import addressof, byref
from dataclasses import dataclass

from engine.batch import MAX_GROUPED_QUERIES
from engine.core.sequence import Sequence
from engine.draft_length.confidence import PatientDraft
from engine.draft_length.rounds import RoundSeconds
from engine.native.decoder import NativeDecoder
from engine.native.draft import Drawing, address, can_draw
from engine.native.library import Rounds
from engine.sampling.sampler import Rule, Sampler

ROW_NUMBERS = 9  # of a Row in rounds.c
VERDICT_NUMBERS = 4


@dataclass(slots=True)
class Round:
    """What became of one round, by row. ``next_right``: whether a greedy draft accepted to its end would have
    been right about the token that followed, as the next round tells; None: nobody knows. ``patient``: drafts
    as they went, if rows have patience."""

    num_drafted: list[int]
    num_accepted: list[int]
    next_right: list[bool | None]
    patient: list[PatientDraft] | None
    draft_seconds: float
    score_seconds: float
    verify_seconds: float

    def told(self, host: float) -> RoundSeconds:
        """As a planner is told; ``host`` seconds have passed outside the models."""
        return RoundSeconds(self.draft_seconds, self.score_seconds + self.verify_seconds, host)


@dataclass(slots=True)
class RoundsDone:
    """``emitted`` by row, in all rounds together; only in the last one may a row have ended.
    ``draft_stored``: tokens of each row that the draft model's cache holds now."""

    rounds: list[Round]
    emitted: list[list[int]]
    draft_stored: list[int]


def can_run(
    target: NativeDecoder,
    draft: NativeDecoder | None,
    sequences: Sequences[Sequence],
    limits: Sequences[int],
    sampler: Sampler,
) -> bool:
    """Whether C can draw and judge what these rows are to draft with ``draft``, up to ``limits`` tokens each;
    None: nothing."""
    if Rule.BLOCK in sampler.groups or target.vocab_size != sampler.vocab_size:
        return False
    if draft is None:
        return can_draw(target, sampler)
    missing = [
        len(sequence) - sequence.draft_blocks.num_computed_tokens
        for sequence, limit in zip(sequences, limits, strict=True)
        if limit
    ]
    return can_draw(draft, sampler) and min(missing) > 0 and max(missing) <= MAX_GROUPED_QUERIES


def run_rounds(
    target: NativeDecoder,
    draft: NativeDecoder | None,
    sequences: Sequences[Sequence],
    limits: Sequences[int],
    patient: list[PatientDraft] | None,
    sampler: Sampler,
    num_rounds: int,
    seconds: float,
    looks_back: bool,
) -> RoundsDone | None:
    """Up to so many rounds that ``can_run``, as long as another one would probably end within ``seconds``,
    until a row ends; None if not even one could be judged. Each drafts ``limits`` tokens a row; with patience
    up to so many, and ``patient`` are the drafts of the first round, to be made. ``looks_back``: somebody
    wants to know ``Round.next_right``.

    The tables must have room for all of it. They and the sequences are left as they are.
    """
    num_rows, longest = len(sequences), max(limits)
    rows, token_ids, blocks, stops = array("q"), array("q"), array("q"), array("q")
    known = []
    for sequence, limit in zip(sequences, limits, strict=True):
        length, draft_stored = len(sequence), sequence.draft_blocks.num_computed_tokens
        first_known = draft_stored if limit else length - 1
        known.append(sequence.token_ids[first_known:])
        first_block, first_stop = len(blocks), len(stops)
        blocks.extend(sequence.target_blocks.block_ids)
        draft_first_block = len(blocks)
        blocks.extend(sequence.draft_blocks.block_ids)
        stops.extend(sequence.stop_token_ids)
        num_stops = len(stops) - first_stop
        rows.extend((length, draft_stored, sequence.max_num_tokens, limit, first_known))
        rows.extend((first_block, draft_first_block, first_stop, num_stops))
    width = max(map(len, known)) + num_rounds * (longest + 1)
    for ids in known:
        token_ids.extend(ids)
        token_ids.extend([0] * (width - len(ids)))
    rules = [None] * num_rows if patient is None else [row.patience for row in patient]
    drawing = Drawing(sampler, longest, sampler.vocab_size if draft is None else draft.vocab_size, rules)
    span_of_row = array("q", range(num_rows))
    drawing.rows.span = address(span_of_row)
    drawing.rows.probs = address(rows) if sampler.uses_draft_probs else None  # only says so
    drawing.rows.hindsight = address(rows) if looks_back and num_rounds > 1 else None
    verdicts = array("q", bytes(8 * VERDICT_NUMBERS * num_rounds * num_rows))
    confidence = array("f", bytes(4 * num_rounds * num_rows * longest if drawing.needs_confidence else 0))
    times = array("d", bytes(8 * 3 * num_rounds))
    num_done = target.library.run_rounds(
        byref(target.decoder),
        None if draft is None else byref(draft.decoder),
        byref(
            Rounds(
                *(num_rows, num_rounds, longest, width, seconds),
                *map(address, (rows, token_ids, blocks, stops)),
                addressof(drawing.rows),
                address(verdicts),
                address(confidence) if drawing.needs_confidence else None,
                address(times),
            )
        ),
    )
    if num_done == 0:
        return None
    done = RoundsDone([], [], list(rows[1::ROW_NUMBERS]))
    for row, (sequence, ids) in enumerate(zip(sequences, known, strict=True)):
        start = row * width + len(ids)
        num_emitted = rows[row * ROW_NUMBERS] - len(sequence)
        done.emitted.append(list(token_ids[start : start + num_emitted]))
    for number in range(num_done):
        start = number * num_rows
        numbers = verdicts[VERDICT_NUMBERS * start : VERDICT_NUMBERS * (start + num_rows)].tolist()
        drafted, accepted, drawn, was_right = (numbers[i::VERDICT_NUMBERS] for i in range(VERDICT_NUMBERS))
        if number:
            last = done.rounds[-1]
            last.next_right = [
                bool(right) if right >= 0 and num_drafted == num_accepted else None
                for right, num_drafted, num_accepted in zip(
                    was_right, last.num_drafted, last.num_accepted, strict=True
                )
            ]
        if patient is not None:
            patient = patient if number == 0 else [PatientDraft(row.patience) for row in patient]
            first = start * longest
            for row_draft, num_drawn in zip(patient, drawn, strict=True):
                row_draft.confidences = confidence[first : first + num_drawn]
                first += longest
        nobody_knows: list[bool | None] = [None] * num_rows
        done.rounds.append(
            Round(drafted, accepted, nobody_knows, patient, *times[3 * number : 3 * number + 3])
        )
    return done
