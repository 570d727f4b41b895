"""Patience: rows draft further than planned, and end early where the draft is unsure. When that pays.

It needs the draft's confidence before every token, and gains where that tells much: likely tokens are drafted
on, and unlikely ones take no place in the target's pass.
"""

import random
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Literal, NamedTuple

from engine.draft_length.confidence import Patience
from engine.draft_length.costs import CostModel
from engine.draft_length.learning import Round, replayed_of
from engine.draft_length.plan import Plan, RowOutlook, draft_sizes, evaluate, padding
from engine.draft_length.replays import rounds_of
from engine.draft_length.survival import SequenceAcceptance

# Patience begins where it has gained so much, in so many drafts at least, and ends where it gains too little.
# Where it is off it is tried for some rounds again and again: often while little is known, seldom once it has
# lost, and every time that it loses again the next trial waits twice as long.
LEAST_GAIN, STILL_GAIN, SOME_DRAFTS = 1.02, 1.0, 128
LOSS, KNOWN_DRAFTS = 0.97, 512
CLEAR_LOSSES = ((0.9, 128), (0.96, 256))  # and how many drafts tell that
TRIAL_NEW, TRIAL_EVERY, TRIAL_SELDOM, MOST_SELDOM, PLANNED_EVERY = 128, 256, 2048, 8192, 128
# Up to which round of those. Some are as planned, so that what that takes stays known; some are *open*, and
# none of their tokens is refused: nothing else tells how often unsure ones are accepted.
Mode = Literal["planned", "open", "patient"]
TRIAL_MODES: dict[Mode, int] = {"open": 4, "patient": 32}
PAYING_MODES: dict[Mode, int] = {"planned": 4, "open": 6, "patient": PLANNED_EVERY}
# Tokens more than planned that a row may draft; its last ones are hardly worth the blocks to store them.
FURTHER, OPEN_FURTHER = 3, 1
# Decay of what trials have shown, per draft: texts are alike for a while, and a few hundred say little.
TRIAL_DECAY = 0.9995
# Of the rounds of a look some are compared: so many drafts, or once as many are known fewer, and times.
COMPARE_DRAFTS, COMPARE_FEWER, COMPARE_TIMES = 64, 16, 12


class Compared(NamedTuple):
    """Rounds with patience, and how long the planned lengths would have taken to emit the same."""

    num_drafts: int
    seconds: float
    planned_seconds: float


class PatienceTrial:
    """Whether patience pays for so many rows, by rounds that had it, next to what the planned lengths would
    have made of the same rounds. It is no gain where the draft's confidence tells little, where another token
    costs the target next to nothing, or where drafts of a known length are cheaper."""

    def __init__(self) -> None:
        self.num_drafts = 0  # compared
        self.gain = 1.0
        self.pays = False
        self._trial = self._next_trial = self._wait = 0  # rounds
        self._seconds = self._planned_seconds = 0.0

    def mode(self, current_round: int) -> Mode:
        """Of this round and those after it."""
        if not self.pays and current_round >= self._next_trial:
            self._wait = self._next_wait()
            self._trial, self._next_trial = current_round, current_round + self._wait
        return next((mode for mode, end in self._modes(current_round) if current_round < end), "planned")

    def until(self, current_round: int) -> int:
        """The round from which on that is to be asked again."""
        ends = [end for _, end in self._modes(current_round) if current_round < end]
        return min(ends, default=current_round + 1)

    def _modes(self, current_round: int) -> list[tuple[Mode, int]]:
        """One after the other, each up to a round."""
        if self.pays:
            start, lengths = current_round - current_round % PLANNED_EVERY, PAYING_MODES
        else:
            start, lengths = self._trial, {**TRIAL_MODES, "planned": self._next_trial - self._trial}
        return [(mode, start + end) for mode, end in lengths.items()]

    def _next_wait(self) -> int:
        """Rounds from this trial to the next."""
        if self.num_drafts < next((num for gain, num in CLEAR_LOSSES if self.gain < gain), KNOWN_DRAFTS):
            return TRIAL_NEW
        least, most = (TRIAL_EVERY, TRIAL_SELDOM) if self.gain >= LOSS else (TRIAL_SELDOM, MOST_SELDOM)
        return max(least, min(2 * self._wait, most))

    @property
    def num_needed(self) -> int:
        """Drafts to compare at a look."""
        return COMPARE_DRAFTS if self.num_drafts < KNOWN_DRAFTS else COMPARE_FEWER

    def learn(self, compared: Compared | None) -> None:
        """What rounds with patience came to, and what they would have without; None where none tells."""
        if compared is None:
            return
        decay = TRIAL_DECAY**compared.num_drafts
        self.num_drafts += compared.num_drafts
        self._seconds = decay * self._seconds + compared.seconds
        self._planned_seconds = decay * self._planned_seconds + compared.planned_seconds
        self.gain = self._planned_seconds / self._seconds
        self.pays = self.num_drafts >= SOME_DRAFTS and self.gain > (STILL_GAIN if self.pays else LEAST_GAIN)

    def state(self) -> dict[str, float]:
        """For people."""
        return {"num_drafts": self.num_drafts, "gain": round(self.gain, 3)}


def rules(
    best: Plan, planned: int, sequences: Sequence[SequenceAcceptance], costs: CostModel
) -> list[Patience]:
    """For rows of which ``planned`` tokens each are drafted in the plan ``best``. What a token's place in the
    target's pass and a draft pass cost at its rate; rows share a pass and what it costs."""
    num_rows = len(sequences)
    # Sizes that are measured: about as many are drafted with patience.
    fewest, most = num_rows + 1, num_rows * (2 + planned)
    score_seconds = (costs.score(most) - costs.score(fewest)) / (most - fewest)
    to_score, to_draft = best.rate * score_seconds, best.rate * costs.draft(num_rows) / num_rows
    tables = [sequence.group.confidence for sequence in sequences]
    by_table = {
        table: Patience(table, to_score, table.least_to_draft(to_score, to_draft)) for table in tables
    }
    return [by_table[table] for table in tables]


def compare(
    rounds: Sequence[Round],
    planned: Sequence[int],
    sequences: Sequence[SequenceAcceptance],
    costs: CostModel,
    rng: random.Random,
    most: int = COMPARE_DRAFTS,
) -> Compared | None:
    """Of rounds with patience: drafts, seconds, and what drafts of ``planned`` lengths would have taken to
    emit the same texts. All rounds are of the same rows, in the order of the others. About ``most`` drafts
    are enough.

    Planned rounds are counted over the verdicts: they would begin elsewhere, and fall into step with a text
    as those with patience do not (``replays``). Seconds are what the costs say, but for the host's and the
    drafts' own. Drafts are looked at one by one: times the median of what some of them took to that. Nothing
    else differs, and a mood of the machine must not look like a gain. The costs ``look_at`` those rounds from
    then on.
    """
    told = [one for one in rounds if _tells(one)]
    timed = [one.seconds for one in told if one.seconds is not None][:COMPARE_TIMES]
    if not timed:
        return None
    num_rows, num_rounds = len(planned), len(told)
    # Planned rounds for one with patience, of some rows.
    places = [(told[0].num_stored + i) % num_rows for i in range(max(1, min(num_rows, most // num_rounds)))]
    ratios = []
    for place in places:
        drafts = [replayed_of(one, place, sequences[place]) for one in told]
        text = [one for one in drafts if one is not None]
        if text:
            ratios.append(rounds_of(text, planned[place], rng) / len(text))
    if not ratios:
        return None
    some = told[:: -(-num_rounds * num_rows // most)]
    costs.look_at(sum(one.num_stored for one in some) // len(some), num_rows)
    draft, score = cache(costs.draft), cache(costs.score)

    def draft_seconds(one: Round) -> float:
        num_passes = [len(row.confidences) for row in one.patient or ()]
        return costs.draft_start + sum(map(draft, draft_sizes(num_passes, sum(one.lags))))

    ratio = median(
        one.seconds.draft / draft_seconds(one) for one in told[: 2 * COMPARE_TIMES] if one.seconds is not None
    )
    chances = [sequence.survival(max(planned), 0.0) for sequence in sequences]
    plan = evaluate([RowOutlook(row, 1.0, True) for row in chances], list(planned), costs, 0)
    seconds = len(some) * median([one.host for one in timed])
    for one in some:
        lengths = [outcome.num_draft_tokens for outcome in one.outcomes]
        num_drafted = sum(lengths)
        size = num_rows + num_drafted + padding(costs, max(lengths), num_rows, num_drafted)
        seconds += ratio * draft_seconds(one) + score(size)
    planned_seconds = len(some) * sum(ratios) / len(ratios) * plan.seconds
    return Compared(len(some) * num_rows, seconds, planned_seconds)


def _tells(one: Round) -> bool:
    """Whether all rows have drafted by their rules, and were judged."""
    if one.patient is None or len(one.outcomes) < len(one.rows):
        return False
    is_judged = not any(outcome.ended for outcome in one.outcomes)
    return is_judged and all(row.confidences and not row.patience.is_open for row in one.patient)
