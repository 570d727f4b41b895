"""What a round takes: measured at start, corrected by the rounds themselves.

``seconds(shape) = exp(level + correction[rows][option]) * base(shape) + overhead(rows) / rounds in a step``

``base`` is what calibration says of the passes. ``level`` is the machine's speed: when the same kind of
round takes longer than before, all kinds do. ``correction`` is what calibration has not seen of an option: it
moves when that one runs after another (an exploration, a switch), at the machine's present speed.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

# Options beside the draft lengths 0..8.
MAX_LENGTH = 8
EARLY_EXIT, LOOKUP, NUM_OPTIONS = 9, 10, 11
# Share of a surprise by which the level moves, and the least share by which a correction does, which starts
# at two thirds; both are logarithms.
LEVEL_RATE, CORRECTION_RATE = 0.4, 0.1
# Surprises are clipped: a descheduled process says nothing about the model.
MAX_SURPRISE, MAX_FIRST_SURPRISE = 0.3, 1.0
# Host seconds of a step, and of each of its rows, until measured.
HOST_SECONDS, HOST_SECONDS_PER_ROW = 1e-4, 3e-5
# The most rounds that share a step.
MAX_ROUNDS = 16


class PassCosts:
    """Seconds of a model's pass: linear between calibrated numbers of tokens, zero at none.

    ``per_stored`` seconds are added for every token in the cache that a new one attends to, and
    ``share_per_query`` of them for each further new token of its row.
    """

    def __init__(
        self, by_tokens: dict[int, float], per_stored: float = 0.0, share_per_query: float = 0.0
    ) -> None:
        self._tokens = sorted(by_tokens)
        self._seconds = [max(by_tokens[tokens], 1e-9) for tokens in self._tokens]
        self.per_stored = per_stored
        self.share_per_query = share_per_query

    def __call__(self, tokens: float) -> float:
        """Seconds of a pass over short texts."""
        if tokens <= 0:
            return 0.0
        right = bisect_left(self._tokens, tokens)
        if right == 0:
            return self._seconds[0]
        if len(self._tokens) == 1:
            return self._seconds[0] * tokens / self._tokens[0]
        right = min(right, len(self._tokens) - 1)  # behind the last one the last slope goes on
        left, low = self._tokens[right - 1], self._seconds[right - 1]
        slope = (self._seconds[right] - low) / (self._tokens[right] - left)
        return low + slope * (tokens - left)

    def stored(self, num_stored: float, queries_per_row: float) -> float:
        """What ``num_stored`` tokens add, of rows that bring ``queries_per_row`` new ones each."""
        return self.per_stored * num_stored * (1 + self.share_per_query * (queries_per_row - 1))

    def state(self) -> dict[str, float]:
        """Milliseconds by tokens."""
        points = zip(self._tokens, self._seconds, strict=True)
        return {f"{tokens:g}": round(1000 * seconds, 4) for tokens, seconds in points}


class Shape(NamedTuple):
    """A kind of round. ``num_drafted``: drafts that the target scores, of all rows together.
    ``draft_sizes``: tokens of each draft pass."""

    num_rows: int
    option: int
    num_drafted: float = 0.0
    draft_sizes: tuple[float, ...] = ()


def even_shape(num_rows: int, num_drafting: int, length: int) -> Shape:
    """``num_drafting`` of the rows draft ``length`` tokens each."""
    return Shape(num_rows, length, num_drafting * length, (num_drafting,) * length)


class Costs:
    """``draft`` is None without a draft model. Rounds of less than half of ``step_seconds`` share steps.

    ``is_calibrated`` is False where nothing was measured: then the costs of a draft pass follow the rounds.
    """

    def __init__(
        self,
        score: PassCosts,
        draft: PassCosts | None = None,
        step_seconds: float = 0.0,
        is_calibrated: bool = True,
    ) -> None:
        self.score = score
        self.draft = draft or PassCosts({1: 1e-9})
        self.step_seconds = step_seconds
        self.is_calibrated = is_calibrated
        self.stored_per_row = 0.0
        self.level = 0.0
        self._overhead_level = 0.0
        self._draft_level = 0.0
        # By bucket of rows: correction of each option, and how often it was measured.
        self._corrections: dict[int, list[float]] = {}
        self._counts: dict[int, list[int]] = {}

    @classmethod
    def uncalibrated(cls, step_seconds: float = 0.0) -> "Costs":
        """For fixed lengths: a round is a round, a scored token takes 2 % of it and a draft pass a fifth."""
        return cls(PassCosts({1: 0.01, 2: 0.0102}), PassCosts({1: 0.002, 2: 0.002}), step_seconds, False)

    def base(self, shape: Shape) -> float:
        """Calibrated seconds of drafting and scoring."""
        num_rows = shape.num_rows
        num_stored = num_rows * self.stored_per_row
        num_scored = num_rows + shape.num_drafted
        seconds = self.score(num_scored) + self.score.stored(num_stored, num_scored / num_rows)
        drafting = sum(map(self.draft, shape.draft_sizes))
        if self.draft.per_stored:
            drafting += self.draft.per_stored * self.stored_per_row * sum(shape.draft_sizes)
        return seconds + math.exp(self._draft_level) * drafting

    def model_seconds(self, shape: Shape) -> float:
        """Expected seconds of drafting, scoring and verifying."""
        return math.exp(self.level + self.correction(shape.num_rows, shape.option)) * self.base(shape)

    def overhead(self, num_rows: int) -> float:
        """Expected seconds of a step outside its rounds."""
        return math.exp(self._overhead_level) * (HOST_SECONDS + HOST_SECONDS_PER_ROW * num_rows)

    def rounds_per_step(self, model_seconds: float) -> float:
        if 2 * model_seconds > self.step_seconds:
            return 1.0
        return min(self.step_seconds / model_seconds, MAX_ROUNDS)

    def seconds(self, shape: Shape) -> float:
        """Expected seconds of a round, its share of the step's overhead included."""
        model_seconds = self.model_seconds(shape)
        return model_seconds + self.overhead(shape.num_rows) / self.rounds_per_step(model_seconds)

    def catch_up_seconds(self, num_tokens: int) -> float:
        """Expected seconds of a draft pass that computes what its cache misses."""
        return math.exp(self.level) * self.draft(num_tokens)

    @staticmethod
    def bucket(num_rows: int) -> int:
        """Numbers of rows that differ by less than a fifth share their corrections."""
        return round(2 * math.log2(num_rows))

    def correction(self, num_rows: int, option: int) -> float:
        """The option's own if it was measured, else that of the nearest drafting length, in the nearest
        number of rows for which there is one."""
        bucket = self.bucket(num_rows)
        for near in sorted(self._counts, key=lambda other: abs(other - bucket)):
            counts, corrections = self._counts[near], self._corrections[near]
            if counts[option]:
                return corrections[option]
            if 0 < option <= EARLY_EXIT:
                measured = [other for other in range(1, EARLY_EXIT) if counts[other]]
                if measured:
                    return corrections[min(measured, key=lambda other: abs(other - option))]
        return 0.0

    def is_measured(self, num_rows: int, option: int) -> bool:
        """Whether rounds of this kind, or of about as many rows, have run."""
        bucket = self.bucket(num_rows)
        return any(self._counts[near][option] for near in self._counts if abs(near - bucket) <= 1)

    def observe(self, shape: Shape, model_seconds: float, is_same: bool) -> None:
        """A round took ``model_seconds``; ``is_same``: the one before was of the same kind."""
        bucket = self.bucket(shape.num_rows)
        surprise = math.log(max(model_seconds, 1e-9) / self.model_seconds(shape))
        if is_same and shape.option != LOOKUP:
            self.level += LEVEL_RATE * _clip(surprise, MAX_SURPRISE)
            return
        if bucket not in self._counts:
            self._counts[bucket], self._corrections[bucket] = [0] * NUM_OPTIONS, [0.0] * NUM_OPTIONS
        counts, corrections = self._counts[bucket], self._corrections[bucket]
        before = self.correction(shape.num_rows, shape.option)
        rate = max(CORRECTION_RATE, 1 / (counts[shape.option] + 1.5))
        most = MAX_SURPRISE if counts[shape.option] else MAX_FIRST_SURPRISE
        corrections[shape.option] = before + rate * _clip(surprise, most)
        counts[shape.option] += 1

    def observe_overhead(self, num_rows: int, seconds: float) -> None:
        """A step took ``seconds`` outside its rounds."""
        surprise = math.log(max(seconds, 1e-6) / self.overhead(num_rows))
        self._overhead_level += CORRECTION_RATE * _clip(surprise, 1.0)

    def observe_passes(self, draft_share: float, num_passes: int, num_rows: int) -> None:
        """Without calibration: ``draft_share`` is the time of ``num_passes`` draft passes over scoring's."""
        expected = num_passes * self.draft(num_rows) / self.score(num_rows)
        surprise = math.log(max(draft_share, 1e-6) / expected) - self._draft_level
        self._draft_level += CORRECTION_RATE * _clip(surprise, 1.0)

    def state(self) -> dict[str, object]:
        """Milliseconds."""
        return {
            "draft_ms_by_tokens": self.draft.state(),
            "score_ms_by_tokens": self.score.state(),
            "score_ms_per_1000_stored": round(1e6 * self.score.per_stored, 4),
            "level": round(math.exp(self.level), 3),
            "host_ms_of_a_step": {str(rows): round(1000 * self.overhead(rows), 4) for rows in (1, 16)},
        }


def _clip(surprise: float, most: float) -> float:
    return max(-most, min(most, surprise))
