"""The plan in force: what rows are given until the next search, those that come in between too."""

from collections.abc import Hashable, Sequence

from engine.draft_length.costs import CostModel
from engine.draft_length.learning import lag_of
from engine.draft_length.plan import UNEVEN_GAIN, UNEVEN_KEPT, RowOutlook, Search, evaluate
from engine.draft_length.rounds import Candidate

# A new plan replaces the last one when it promises this much more. Little: what it saves is a draft cache
# that lags a token or two, and a loss of some such steps adds up.
HYSTERESIS = 0.005
# Drafting begins when it promises this much more than none: acceptance is known from a few probes only, and
# a draft that loses is noticed later than it is begun.
START_GAIN = 0.02
# Switching on must earn within so many rounds what it takes to bring the draft's cache up to date.
CATCH_UP_ROUNDS = 128


class PlanInForce:
    """A length for all rows, and others for some; ``search`` is where it came from, None at first."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.search: Search | None = None
        self.even_length = 0
        self.own_lengths: dict[Hashable, int] = {}

    @property
    def is_uneven(self) -> bool:
        return bool(self.own_lengths)

    @property
    def uneven_gain(self) -> float:
        """How many times the rate of even lengths uneven ones must promise."""
        return UNEVEN_KEPT if self.is_uneven else UNEVEN_GAIN

    def lengths(self, keys: Sequence[Hashable]) -> list[int]:
        return [self.own_lengths.get(key, self.even_length) for key in keys]

    def follow(
        self, found: Search, rows: Sequence[Candidate], outlooks: Sequence[RowOutlook], num_prompts: int
    ) -> Search:
        """What was ``found`` with the plan to be in force from now on as its best: that, or the one before
        where that is hardly worse."""
        if self.search is not None and all(row.limit <= 0 for row in rows):
            # They are about to end, or draft nothing: that says nothing about those that follow.
            return Search(found.plain, found.plain, None, None)
        before = [
            min(length, len(outlook.survival)) if row.limit > 0 else 0
            for row, length, outlook in zip(
                rows, self.lengths([row.key for row in rows]), outlooks, strict=True
            )
        ]
        found = self._hold_on(found, before, outlooks, num_prompts)
        if any(found.best.lengths) and not any(before) and not self._worth_catching_up(rows, found):
            found = Search(found.plain, found.plain, found.best_drafting, found.best_even)
        self._replace(rows, found)
        return found

    def _hold_on(
        self, found: Search, before: list[int], outlooks: Sequence[RowOutlook], num_prompts: int
    ) -> Search:
        if not any(before):
            is_better = found.best.rate >= (1 + START_GAIN) * found.plain.rate
            best = found.best if is_better else found.plain
        elif before != found.best.lengths:
            kept = evaluate(outlooks, before, self.costs, num_prompts)
            least = max(found.plain.rate, found.best.rate / (1 + HYSTERESIS))
            if self.is_uneven and found.best_even is not None:
                least = max(least, UNEVEN_KEPT * found.best_even.rate)
            best = kept if kept.rate > least else found.best
        else:
            return found
        return Search(found.plain, best, found.best_drafting, found.best_even)

    def _worth_catching_up(self, rows: Sequence[Candidate], found: Search) -> bool:
        """A draft cache that was left behind costs a long pass, to be earned within some rounds."""
        best = found.best
        lag = lag_of(rows, best.lengths, [row.lag for row in rows])
        seconds = best.seconds + self.costs.draft(lag) / CATCH_UP_ROUNDS
        return best.tokens / seconds > found.plain.rate

    def _replace(self, rows: Sequence[Candidate], found: Search) -> None:
        lengths = found.best.lengths
        some = sorted(length for length, row in zip(lengths, rows, strict=True) if row.limit > 0)
        self.even_length = some[len(some) // 2] if some else 0
        self.own_lengths = {
            row.key: length
            for row, length in zip(rows, lengths, strict=True)
            if length != self.even_length and row.limit > 0
        }
        self.search = found
