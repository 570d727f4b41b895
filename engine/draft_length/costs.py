"""What a round costs: seconds of a draft pass, of a target pass and of the host's share.

A round's drafts also cost something once, however many they are (``draft_start``): what comes before and
after the passes, and that the first one finds the processor's caches full of the target's weights.

Each is a curve over its size, measured at a few points at start and followed by moving averages while the
engine runs. Nothing is assumed about a curve's shape except that more never costs less: on a CPU the step
from one token to two is large and the next ones small, on a GPU nothing changes until a ridge.

Stored tokens are a term of their own (``CostCurve.stored_seconds``). Most of it is reading them, once for all
new tokens of a row: the longer the texts, the cheaper is another token by comparison. A busy machine shows up
in the moving averages.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# A moving average's share of the newest measurement, once there were some.
RATE = 0.1
# How a surprise is split. The same size taking longer than before says that the machine has become slower,
# for a while or for good: that is followed fast, and for all sizes, so that they stay comparable; at first
# some of it is believed of the size, as what is measured at start does not contain everything. Each is the
# share of one round's surprise.
SHARED = 0.5
SAME_COMMON, SAME_POINT = 0.04, 0.001
# Another size than before tells how they compare, the less the less steady the machine is, as the same size
# tells, and the better it is known: a Kalman filter for every size, by variances of logarithms. What was
# measured at start is good to some per cent, sizes in between are a guess.
OTHER_COMMON = 0.04
MEASURED, GUESSED, DRIFT = 0.08**2, 0.2**2, 0.03**2
# Mean deviation of the same size, to which one measurement counts at most three times that. Others come from
# other moments: they are taken to be off by twice as much.
DEVIATION, DEVIATION_RATE, MOST_DEVIATIONS, UNSTEADY = 0.04, 0.1, 3, 2
# A median of some rounds weighs as much as so many at most.
FULL_ROUNDS = 8
# A measurement moves the average as if it were off by at most this factor's logarithm: a process that was
# descheduled takes ten times longer, and that is no news about the model. A median of some rounds is.
MAX_SURPRISE, MAX_MEDIAN_SURPRISE = 0.25, 1.0
# Sizes that differ by less share a point: up to ten tokens each has its own, later there are a few dozen.
NEAR = 0.1
# Rows of different lengths are padded to the longest for attention, and gathered and scattered around it:
# what a token of padding costs, in tokens.
PADDING = 0.5
# Of a row; more new tokens than these are a prompt's, which have their own.
MAX_QUERIES = 9
# How much of what a round's drafts took longer than expected is put down to their start, as if it were so
# many passes: where drafts have always the same length, nobody can tell the two apart.
START_WEIGHT = 3
# Rounds that share a step, at most.
MAX_SHARING = 16
# Per step and per row, until measured.
HOST_SECONDS, HOST_SECONDS_PER_ROW = 1e-4, 3e-5


class CostCurve:
    """Seconds by size, linear between points and never falling; zero at size 0."""

    def __init__(self, points: dict[int, float]) -> None:
        self._sizes: list[float] = sorted(points)
        seconds = [max(points[size], 1e-9) for size in sorted(points)]
        # Where measurements contradict each other, half-way between trusting the lower and the higher ones.
        rising = accumulate(seconds, max)
        falling = reversed(list(accumulate(reversed(seconds), min)))
        self._seconds = [math.sqrt(high * low) for high, low in zip(rising, falling, strict=True)]
        self._scale = 1.0  # of all points: what makes all of them slower touches one number
        # Of a stored token that one new one looks at, and the share of it that each further one adds.
        self.seconds_per_stored = self.share_per_query = 0.0
        self._num_stored, self._num_rows = 0, 1
        self._num_measured = [0] * len(self._sizes)
        self._variances = [MEASURED] * len(self._sizes)
        self._deviation = DEVIATION
        self._last_size = 0.0  # of no probe

    def __call__(self, size: float) -> float:
        return self._of_size(size) + self.stored_seconds(size) if size > 0 else 0.0

    def look_at(self, num_stored: int, num_rows: int) -> None:
        """The passes asked about are of ``num_rows`` texts with so many stored tokens together."""
        self._num_stored, self._num_rows = num_stored, num_rows

    def stored_seconds(self, size: float) -> float:
        queries = min(max(size / self._num_rows, 1.0), MAX_QUERIES)
        return self.seconds_per_stored * self._num_stored * (1 + self.share_per_query * (queries - 1))

    def _of_size(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        right = bisect_left(sizes, size)
        if right == 0:
            return self._scale * seconds[0]
        if right == len(sizes):
            return self._scale * self._beyond(size)
        left = right - 1
        share = (size - sizes[left]) / (sizes[right] - sizes[left])
        return self._scale * (seconds[left] + share * (seconds[right] - seconds[left]))

    def _beyond(self, size: float) -> float:
        """Past the last point the last slope goes on; a single point is taken to be proportional."""
        last_size, last = self._sizes[-1], self._seconds[-1]
        if len(self._sizes) == 1:
            return last * size / last_size
        slope = (last - self._seconds[-2]) / (last_size - self._sizes[-2])
        return last + slope * (size - last_size)

    def follow(self, size: float, surprise: float, num_rounds: int = 1, is_probe: bool = False) -> None:
        """Passes of this size took exp(``surprise``) times what the curve says, by their median. Those of a
        probe stand alone among others."""
        surprise = _believable(surprise, num_rounds)
        index = self._point(size)
        num = self._num_measured[index]
        weight = min(num_rounds, FULL_ROUNDS)
        if self._last_size and self._sizes[index] != self._last_size:
            # Single rounds tell less than the medians whose noise is known.
            noise = (UNSTEADY * self._deviation) ** 2 * math.sqrt(FULL_ROUNDS / weight)
            gain = self._variances[index] / (self._variances[index] + noise)
            self._variances[index] = (1 - gain) * self._variances[index] + DRIFT
            common, own = OTHER_COMMON * surprise, gain * surprise
        else:
            common = max(SHARED / (2 + num), weight * SAME_COMMON) * surprise
            own = max(SHARED / (2 + num), weight * SAME_POINT) * surprise
            if num > 1:
                told = min(abs(surprise), MOST_DEVIATIONS * self._deviation)
                self._deviation += DEVIATION_RATE * (told - self._deviation)
        if not is_probe:
            self._last_size = self._sizes[index]
        share = self.stored_seconds(size) / self(size)
        self.seconds_per_stored *= math.exp(common * share)
        self._num_measured[index] += 1
        self._scale *= math.exp(common)
        self._seconds[index] *= math.exp(own)
        self._keep_rising(index)

    def _point(self, size: float) -> int:
        """Where measurements of this size go: a point of its own, or one that is near in proportion."""
        index = bisect_left(self._sizes, size)
        near = [i for i in (index - 1, index) if 0 <= i < len(self._sizes)]
        closest = min(near, key=lambda i: abs(self._sizes[i] - size))
        if abs(self._sizes[closest] - size) <= NEAR * size:
            return closest
        seconds = self._of_size(size) / self._scale
        self._sizes.insert(index, size)
        self._seconds.insert(index, seconds)
        self._num_measured.insert(index, 0)
        self._variances.insert(index, GUESSED)
        return index

    def _keep_rising(self, index: int) -> None:
        """The point just measured is right; neighbours that contradict it give way."""
        seconds, value = self._seconds, self._seconds[index]
        for right in range(index + 1, len(seconds)):
            if seconds[right] >= value:
                break
            seconds[right] = value
        for left in range(index - 1, -1, -1):
            if seconds[left] <= value:
                break
            seconds[left] = value

    def points(self) -> dict[float, float]:
        return {size: self._scale * seconds for size, seconds in zip(self._sizes, self._seconds, strict=True)}


class CostModel:
    """``draft`` and ``score`` are seconds by the tokens packed into one pass, ``host`` by rows.

    ``score`` includes verification, ``draft`` drawing: live measurements bring both in. ``padding`` is what
    a token costs by which a row's draft is shorter than the longest, in tokens. Rounds of less than half of
    ``step_seconds`` share steps, and what the host takes for one; 0: none do.
    """

    def __init__(self, draft: dict[int, float], score: dict[int, float], padding: float = PADDING) -> None:
        self.padding = padding
        self.draft = CostCurve(draft or {1: 1e-9})
        self.score = CostCurve(score)
        self.step_seconds = 0.0
        self._host = CostCurve({rows: HOST_SECONDS + HOST_SECONDS_PER_ROW * rows for rows in (1, 64)})
        self._usual_seconds = math.inf  # of a round
        self.draft_start = 0.0
        self.lookup_seconds = 0.0  # of a row that drafts without a model
        self._num_starts = 0

    def look_at(self, num_stored: int, num_rows: int) -> None:
        """The rows of the next rounds have so many tokens in the cache, together."""
        for curve in (self.draft, self.score):
            curve.look_at(num_stored, num_rows)

    def host(self, num_rows: float, seconds: float | None = None) -> float:
        """The host's share of a round in which the models take so many ``seconds``, or of one as they are."""
        return self._host(num_rows) / self.sharing(self._usual_seconds if seconds is None else seconds)

    def sharing(self, seconds: float) -> float:
        """How many rounds have a step together."""
        return 1.0 if 2 * seconds > self.step_seconds else min(self.step_seconds / seconds, MAX_SHARING)

    def observe_rounds(
        self,
        num_rounds: int,
        is_probe: bool,
        draft_sizes: Sequence[float],
        num_lookups: int,
        num_rows: int,
        num_score_tokens: float,
        draft_seconds: float,
        score_seconds: float,
        host_seconds: float,
    ) -> None:
        """Steps without prompts that were alike, by their medians. ``draft_sizes`` are the tokens of each
        draft pass, catching up included."""
        if draft_sizes:
            seconds = draft_seconds - num_lookups * self.lookup_seconds
            self._follow_drafts(draft_sizes, seconds, num_rounds, is_probe)
        elif num_lookups:
            # Half a millisecond is far beyond any look-up: the process was descheduled.
            seconds = min(draft_seconds / num_lookups, 5e-4)
            self.lookup_seconds += RATE * (seconds - self.lookup_seconds)
        surprise = _surprise(score_seconds, self.score(num_score_tokens))
        self.score.follow(num_score_tokens, surprise, num_rounds, is_probe)
        if is_probe and self.step_seconds:
            return  # A step with a look in it, and of any number of rounds.
        self._usual_seconds = draft_seconds + score_seconds
        surprise = _surprise(self.sharing(self._usual_seconds) * host_seconds, self._host(num_rows))
        self._host.follow(num_rows, surprise, num_rounds, is_probe)

    def _follow_drafts(self, sizes: Sequence[float], seconds: float, num_rounds: int, is_probe: bool) -> None:
        """Normalised least mean squares: start and passes share the error by their weights squared."""
        passes = sum(map(self.draft, sizes))
        expected = self.draft_start + passes
        surprise = _believable(_surprise(seconds, expected), num_rounds)
        error = expected * (math.exp(surprise) - 1)
        of_start = START_WEIGHT**2 / (START_WEIGHT**2 + len(sizes) ** 2)
        rate = max(RATE, 1 / (2 + self._num_starts))
        self._num_starts += 1
        self.draft_start = max(0.0, self.draft_start + rate * of_start * error)
        surprise = _surprise(passes + (1 - of_start) * error, passes)
        for size in set(sizes):
            self.draft.follow(size, surprise * sizes.count(size) / len(sizes), num_rounds, is_probe)

    def state(self) -> dict[str, object]:
        """Milliseconds, for people."""
        return {
            "draft_start_ms": round(1000 * self.draft_start, 4),
            "draft_ms_by_tokens": _milliseconds(self.draft),
            "score_ms_by_tokens": _milliseconds(self.score),
            "score_ms_per_1000_stored": round(1e6 * self.score.seconds_per_stored, 4),
            "host_ms_by_rows": _milliseconds(self._host),
            "lookup_ms": round(1000 * self.lookup_seconds, 4),
        }


def _believable(surprise: float, num_rounds: int) -> float:
    most = MAX_SURPRISE if num_rounds < FULL_ROUNDS else MAX_MEDIAN_SURPRISE
    return max(-most, min(most, surprise))


def _surprise(measured: float, expected: float) -> float:
    return math.log(max(measured, 1e-9) / expected)


def _milliseconds(curve: CostCurve) -> dict[str, float]:
    return {f"{size:g}": round(1000 * seconds, 4) for size, seconds in curve.points().items()}
