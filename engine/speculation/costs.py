"""Says what a round takes: it is measured at start, and corrected by the rounds themselves.

``seconds(shape) = exp(level + correction[rows, option]) * base(shape) + overhead(rows) / rounds in a step``

``base`` is what calibration says of the passes. ``level`` is the machine's speed, for all rounds alike.
``correction`` is what calibration has not seen of an option. A round that takes longer than expected may have
either reason; as in a Kalman filter, each of the two takes a share of the surprise by its uncertainty. An
option that has hardly run moves its own correction, one that has often run moves the level. ``overhead`` is
what the host takes in a step, and what the first round takes more than those after it: it finds the caches
full of what the host did, and the front end busy with what the step before has emitted.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from truedraft.engine.speculation.routing import Routing

# Options: draft lengths from 0 to the maximum, and whatever has other drafts in it.
MAX_LENGTH, MIXED = 8, 9
# The most rounds that share a step.
MAX_ROUNDS = 16
# Tokens of prompts that share a pass of the draft model, about.
PROMPT_PASS = 64
# Variances of logarithms of seconds: a measured round's; the level's and a correction's at start; what every
# measurement adds to the level's; and the least of a correction.
NOISE, FIRST_LEVEL, FIRST_CORRECTION = 0.02, 1.0, 0.04
LEVEL_DRIFT, LEAST_CORRECTION = 0.001, 0.001
# Standard deviations at which a surprise, the logarithm of measured over expected seconds, is clipped: a
# process that was descheduled says nothing about its model.
MAX_DEVIATIONS = 1.5
# Share of a surprise by which the overhead moves; a surprise counts as 1 at most.
OVERHEAD_RATE = 0.05
# Overhead until it is measured, for each row and for three more: what the host takes, and what the first
# round of a step takes more, which is never measured where rounds do not share steps.
HOST_SECONDS_PER_ROW, FIRST_ROUND_SECONDS_PER_ROW = 3e-5, 3e-6


class Curve:
    """Returns seconds by a number, linear between calibrated points. ``start``: seconds at none. No number
    takes longer than a larger one: a point above later ones was measured at a busy moment."""

    def __init__(self, points: Mapping[int, float], start: float | None = None) -> None:
        numbers = sorted(points)
        least = list(accumulate([max(points[number], 1e-9) for number in reversed(numbers)], min))
        self._points = dict(zip(numbers, reversed(least), strict=True))
        self._numbers, self._seconds = list(self._points), list(self._points.values())
        if start is not None:
            self._numbers.insert(0, 0)
            self._seconds.insert(0, start)

    def __call__(self, number: float) -> float:
        """Returns the first point's time before it; after the last one the last slope goes on."""
        numbers, seconds = self._numbers, self._seconds
        right = bisect_left(numbers, number)
        if right == 0 or len(numbers) == 1:
            return seconds[0] * max(1.0, number / max(numbers[0], 1))
        right = min(right, len(numbers) - 1)
        left, low = numbers[right - 1], seconds[right - 1]
        return low + (seconds[right] - low) * (number - left) / (numbers[right] - left)

    def state(self) -> dict[str, float]:
        """Returns milliseconds by the number, at the calibrated points."""
        return {str(number): round(1000 * seconds, 4) for number, seconds in self._points.items()}


class PassCosts:
    """Returns seconds of a model's pass: by its number of tokens, and what the tokens in the caches of its
    rows add (``by_stored``) if each row has one new token. Each further one adds ``share_per_query`` of
    that. Rows beyond those that ``by_tokens`` was measured with, as ``measured_rows`` tells, add
    ``row_seconds`` each."""

    def __init__(
        self,
        by_tokens: Mapping[int, float],
        by_stored: Mapping[int, float] | None = None,
        share_per_query: float = 0.0,
        row_seconds: float = 0.0,
        measured_rows: Callable[[float], float] = lambda num_tokens: num_tokens,
    ) -> None:
        self.by_tokens = Curve(by_tokens)
        self.by_stored = Curve(by_stored or {}, start=0.0)
        self.share_per_query = share_per_query
        self.row_seconds = row_seconds
        self.measured_rows = measured_rows

    def __call__(
        self,
        num_tokens: float,
        num_stored: float = 0.0,
        num_rows: float = 1.0,
        num_unlike: float | None = None,
    ) -> float:
        """Returns seconds of a pass over ``num_tokens`` of ``num_rows``, with ``num_stored`` in the cache.
        ``num_unlike``: they read as many experts as that many that have nothing in common."""
        if num_tokens <= 0:
            return 0.0
        more_queries = max(0.0, num_tokens / num_rows - 1)
        attention = self.by_stored(num_stored) * (1 + self.share_per_query * more_queries)
        measured = num_tokens if num_unlike is None else num_unlike
        more_rows = max(0.0, num_rows - self.measured_rows(measured)) if self.row_seconds else 0.0
        return self.by_tokens(measured) + attention + self.row_seconds * more_rows


class Shape(NamedTuple):
    """Describes a kind of round: the target scores ``num_drafted`` drafts of all rows, and ``draft_sizes``
    are the rows of each draft pass of the proposer ``source``, on average over the rounds.
    Without drafting, it observes ``num_told`` tokens."""

    num_rows: int
    option: int
    num_drafted: float = 0.0
    draft_sizes: tuple[float, ...] = ()
    source: str = ""
    num_told: int = 0

    @property
    def kind(self) -> "Kind":
        """Returns what has a correction of its own: lengths of different proposers have different ones."""
        return (self.source if 1 <= self.option <= MAX_LENGTH else "", self.option)


# What a pass of a proposer takes that was not measured.
FREE = PassCosts({1: 1e-9})
# Proposer and option.
Kind = tuple[str, int]


class Overhead:
    """Returns seconds of a step by its number of rows, corrected by those that were measured."""

    def __init__(self, seconds_per_row: float) -> None:
        self._seconds_per_row = seconds_per_row
        self._level = 0.0

    def __call__(self, num_rows: int) -> float:
        return math.exp(self._level) * self._seconds_per_row * (3 + num_rows)

    def observe(self, num_rows: int, seconds: float) -> None:
        surprise = math.log(max(seconds, 1e-6) / self(num_rows))
        self._level += OVERHEAD_RATE * max(-1.0, min(surprise, 1.0))


class Costs:
    """``drafts`` are those of proposers whose passes were measured, by their names: others are taken to be
    free until rounds tell. Rounds of less than half of ``step_seconds`` share steps. ``routing`` is that of a
    target with experts."""

    def __init__(
        self,
        score: PassCosts,
        drafts: Mapping[str, PassCosts] | None = None,
        step_seconds: float = 0.0,
        routing: Routing | None = None,
    ) -> None:
        self.score = score
        self.routing = routing
        self.drafts = drafts or {}
        self.step_seconds = step_seconds
        self.stored_per_row = 0.0  # tokens in the cache, set before each step
        self._level, self._level_variance = 0.0, FIRST_LEVEL
        self.host = Overhead(HOST_SECONDS_PER_ROW)
        self.first_round = Overhead(FIRST_ROUND_SECONDS_PER_ROW)
        # Each bucket of rows has for each kind of round the correction and its variance.
        self._corrections: dict[int, dict[Kind, tuple[float, float]]] = {}

    @classmethod
    def uncalibrated(cls, sources: Iterable[str] = (), step_seconds: float = 0.0) -> "Costs":
        """Makes costs for fixed lengths, to compare sources: scoring a token takes 2 %, a draft pass 20 %."""
        score, draft = PassCosts({1: 0.01, 2: 0.0102}), PassCosts({1: 0.002, 2: 0.002})
        return cls(score, dict.fromkeys(sources, draft), step_seconds)

    def model_seconds(self, shape: Shape) -> float:
        """Returns the expected seconds of drafting, scoring and verifying."""
        num_rows, _, num_drafted, draft_sizes, source, num_told = shape
        stored = self.stored_per_row
        unlike = None if self.routing is None else self.routing.tokens(num_rows, num_drafted)
        base = self.score(num_rows + num_drafted, stored * num_rows, num_rows, unlike)
        base += self._of_many(source, num_told)
        if draft_sizes:
            draft = self.drafts.get(source, FREE)
            base += sum([draft(size, stored * size, size) for size in draft_sizes])
        return math.exp(self._level + self._correction(num_rows, shape.kind)[0]) * base

    def overhead(self, num_rows: int) -> float:
        """Returns the expected seconds of a step, however many rounds it has."""
        return self.host(num_rows) + self.first_round(num_rows)

    def rounds_per_step(self, model_seconds: float, num_rows: int) -> float:
        """A step begins another round while that would end in time, taking as long as the first one. The time
        that is left then is half a round's on average."""
        left = self.step_seconds - 2 * (model_seconds + self.first_round(num_rows))
        return max(1.0, min(1.5 + left / model_seconds, MAX_ROUNDS))

    def seconds(self, shape: Shape) -> float:
        """Returns the expected seconds of a round, with its share of the step's overhead."""
        seconds = self.model_seconds(shape)
        return seconds + self.overhead(shape.num_rows) / self.rounds_per_step(seconds, shape.num_rows)

    def catch_up_seconds(self, source: str, num_tokens: int) -> float:
        """Expected seconds in which a proposer computes what its cache misses."""
        return math.exp(self._level) * self.drafts.get(source, FREE)(num_tokens)

    def draft_prompt_seconds(self, source: str, num_tokens: float) -> float:
        """Expected seconds in which a proposer computes ``num_tokens`` of prompts, passes of many."""
        return math.exp(self._level) * self._of_many(source, num_tokens)

    def _of_many(self, source: str, num_tokens: float) -> float:
        """Returns what a proposer takes for ``num_tokens`` in passes of many, as calibration says."""
        return self.drafts.get(source, FREE)(PROMPT_PASS) * num_tokens / PROMPT_PASS

    @staticmethod
    def bucket(num_rows: int) -> int:
        """Returns what similar numbers of rows have in common: the same corrections."""
        return round(2 * math.log2(num_rows))

    def _correction(self, num_rows: int, kind: Kind) -> tuple[float, float]:
        """Returns it and its variance. One that was never measured is that of the nearest number of rows, or
        of the nearest length that drafts."""
        bucket = self.bucket(num_rows)
        measured = self._corrections.get(bucket)
        if measured is not None and kind in measured:
            return measured[kind]
        source, option = kind
        for near in sorted(self._corrections, key=lambda near: abs(near - bucket)):
            measured = self._corrections[near]
            if kind in measured:
                return measured[kind][0], FIRST_CORRECTION
            lengths = [length for whose, length in measured if whose == source and 1 <= length <= MAX_LENGTH]
            if 1 <= option <= MAX_LENGTH and lengths:
                nearest = min(lengths, key=lambda length: abs(length - option))
                return measured[source, nearest][0], FIRST_CORRECTION
        return 0.0, FIRST_CORRECTION

    def uncertainty(self, shape: Shape) -> float:
        """Returns the standard deviation of the logarithm of what sets such rounds apart from others."""
        return math.sqrt(self._correction(shape.num_rows, shape.kind)[1])

    def observe(self, shape: Shape, model_seconds: float) -> None:
        """Learns that a round took ``model_seconds``."""
        surprise = math.log(max(model_seconds, 1e-9) / self.model_seconds(shape))
        correction, variance = self._correction(shape.num_rows, shape.kind)
        level = self._level_variance
        total = level + variance + NOISE
        most = MAX_DEVIATIONS * math.sqrt(total)
        gain = max(-most, min(surprise, most)) / total
        self._level += gain * level
        self._level_variance = level - level * level / total + LEVEL_DRIFT
        variance, correction = variance - variance * variance / total, correction + gain * variance
        measured = self._corrections.setdefault(self.bucket(shape.num_rows), {})
        # Mixed rounds are of many kinds: what one of them took says little about the next one or the level.
        least = FIRST_CORRECTION if shape.option == MIXED else LEAST_CORRECTION
        measured[shape.kind] = correction, max(variance, least)

    def observe_step(self, shape: Shape, first: float | None, later: Sequence[float], host: float) -> None:
        """Learns from the seconds of a step's first round, or None if it did something else, too, of those
        after it, and of the host."""
        num_rows = shape.num_rows
        self.host.observe(num_rows, host)
        if later:
            # The mean is geometric: a median of few rounds has in it what other processes take, of many not.
            seconds = math.exp(fmean([math.log(max(one, 1e-9)) for one in later]))
            if first is not None:
                self.first_round.observe(num_rows, first - seconds)
        else:
            assert first is not None
            # Alone, it does not say what of it is overhead.
            seconds = max(first - self.first_round(num_rows), first / 2)
        self.observe(shape, seconds)

    def state(self) -> dict[str, object]:
        """Returns milliseconds, and the level as a factor."""
        routing = {} if self.routing is None else {"experts": self.routing.state()}
        return {
            **routing,
            "draft_ms_by_tokens": {name: draft.by_tokens.state() for name, draft in self.drafts.items()},
            "score_ms_by_tokens": self.score.by_tokens.state(),
            "score_ms_by_stored": self.score.by_stored.state(),
            "level": round(math.exp(self._level), 3),
            "overhead_ms_of_a_row": round(1000 * self.overhead(1), 4),
        }
