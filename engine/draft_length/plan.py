"""The search itself: how many tokens each row should draft, given survival and costs. A pure function.

A *slot* is one more drafted token of one row. Slots are ranked by survival over the whole batch and added
in that order; the best prefix wins. Every prefix is looked at, not only up to the first that does not pay:
the first slot carries the step from one token to two and the first draft pass, so that one drafted token
can be a loss where four are a gain. A draft accepted to its end leaves its last token for the draft model
to catch up with, which makes the next round's first pass larger.
"""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate

from engine.draft_length.costs import CostModel

# Slots that survive less often than this are not worth the look.
SURVIVAL_FLOOR = 0.02
# Rows of their own lengths must promise this many times what even ones do: estimates of single rows are
# noisy, and the best of many noisy plans looks better than it is. Those in force must go on paying.
UNEVEN_GAIN, UNEVEN_KEPT = 1.05, 1.01


@dataclass(slots=True)
class RowOutlook:
    """One row as the search sees it: ``fill`` is the share of the tokens asked for that are drafted.
    ``accepted`` are the tokens expected of drafts of 1, 2, ... tokens: the sums of ``survival`` times
    ``factors``, as far as there are some."""

    survival: list[float]
    fill: float
    uses_model: bool
    factors: InitVar[Sequence[float]] = ()
    accepted: list[float] = field(init=False)

    def __post_init__(self, factors: Sequence[float]) -> None:
        self.accepted = list(accumulate(self.survival))
        last = factors[-1] if factors else 1.0
        for i, expected in enumerate(self.accepted):
            self.accepted[i] = expected * (factors[i] if i < len(factors) else last)


@dataclass(slots=True)
class Plan:
    """Draft lengths by row, with the tokens and seconds that one step of them is expected to take."""

    lengths: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Search:
    """``best`` may draft nothing; ``best_drafting`` is the best that does, None if nobody can; ``best_even``
    the best in which all rows draft alike."""

    plain: Plan
    best: Plan
    best_drafting: Plan | None
    best_even: Plan | None = None


def plain_plan(num_rows: int, costs: CostModel, num_prompt_tokens: int) -> Plan:
    seconds = costs.score(num_rows + num_prompt_tokens)
    return Plan([0] * num_rows, num_rows, seconds + costs.host(num_rows, seconds))


def search(
    rows: Sequence[RowOutlook],
    costs: CostModel,
    num_prompt_tokens: int,
    may_be_uneven: bool = True,
    uneven_gain: float = UNEVEN_GAIN,
) -> Search:
    """``may_be_uneven``: whether plans of different lengths are looked at too, which takes longest. Rows may
    share one outlook, which takes least."""
    plain = plain_plan(len(rows), costs, num_prompt_tokens)
    if not any(row.survival for row in rows):
        return Search(plain, plain, None)
    drafting = even = _best_even(rows, costs, num_prompt_tokens)
    if may_be_uneven and len(rows) > 1:
        uneven = evaluate(rows, _best_uneven(rows, costs, num_prompt_tokens, plain), costs, num_prompt_tokens)
        if uneven.rate >= uneven_gain * even.rate:
            drafting = uneven
    return Search(plain, drafting if drafting.rate > plain.rate else plain, drafting, even)


def _best_uneven(
    rows: Sequence[RowOutlook], costs: CostModel, num_prompt_tokens: int, plain: Plan
) -> list[int]:
    """Lengths of the best of the plans that add slots in the order of their survival."""
    slots = [
        (-chance, position, i) for i, row in enumerate(rows) for position, chance in enumerate(row.survival)
    ]
    slots.sort()
    draft, score, score_tokens = costs.draft, costs.score, float(len(rows) + num_prompt_tokens)
    overhead = costs.lookup_seconds * sum(not row.uses_model for row in rows)
    host_seconds = costs.host(len(rows), math.inf)
    draft_seconds = [costs.draft(size) for size in range(len(rows) + 1)]
    num_active = [0] * (1 + max((len(row.survival) for row in rows), default=0))
    tokens, drafting_seconds, lag = plain.tokens, 0.0, 0.0
    best_rate, best_count, longest = 0.0, 0, 0
    for count, (chance, position, i) in enumerate(slots, start=1):
        row = rows[i]
        if row.uses_model:
            active = num_active[position] = num_active[position] + 1
            if position > 0:
                drafting_seconds += draft_seconds[active] - draft_seconds[active - 1]
                lag -= row.survival[position - 1]
            lag -= chance
        score_tokens += row.fill
        tokens -= chance * row.fill
        longest = max(longest, position + 1)
        padded = score_tokens + padding(costs, longest, len(rows), count)
        seconds = overhead + drafting_seconds + score(padded)
        if num_active[0]:
            seconds += costs.draft_start + draft(num_active[0] + lag)
        seconds += host_seconds / costs.sharing(seconds)
        if tokens > best_rate * seconds:
            best_rate, best_count = tokens / seconds, count
    lengths = [0] * len(rows)
    for _, _, i in slots[:best_count]:
        lengths[i] += 1
    return lengths


def _best_even(rows: Sequence[RowOutlook], costs: CostModel, num_prompt_tokens: int) -> Plan:
    """The best of the plans in which every row drafts the same number of tokens, as far as it may."""
    outlooks = _distinct(rows)
    longest = max(len(row.survival) for row, _ in outlooks)
    seconds_before = costs.lookup_seconds * sum(count for row, count in outlooks if not row.uses_model)
    host_seconds = costs.host(len(rows), math.inf)
    score_tokens = float(len(rows))
    num_by_model = sum(count for row, count in outlooks if row.uses_model and row.survival)
    other_passes = 0.0
    best_rate, best_length, best_tokens, best_seconds = 0.0, 1, score_tokens, 1.0
    for length in range(1, longest + 1):
        num_reaching = num_drafting = 0
        lag, tokens = 0.0, float(len(rows))
        for row, count in outlooks:
            survival = row.survival
            if survival:
                tokens += count * row.fill * row.accepted[min(length, len(survival)) - 1]
            if len(survival) >= length:
                num_reaching += count
                score_tokens += count * row.fill
                if row.uses_model:
                    num_drafting += count
                    lag += count * survival[length - 1]
            elif row.uses_model and survival:
                lag += count * survival[-1]
        score_tokens += costs.padding * (len(rows) - num_reaching)
        if length > 1:
            other_passes += costs.draft(num_drafting)
        seconds = seconds_before + costs.score(score_tokens + num_prompt_tokens)
        if num_by_model:
            seconds += costs.draft_start + costs.draft(num_by_model + lag) + other_passes
        seconds += host_seconds / costs.sharing(seconds)
        if tokens > best_rate * seconds:
            best_rate, best_length, best_tokens, best_seconds = tokens / seconds, length, tokens, seconds
    return Plan([min(best_length, len(row.survival)) for row in rows], best_tokens, best_seconds)


def _distinct(rows: Sequence[RowOutlook]) -> list[tuple[RowOutlook, int]]:
    """Outlooks, with the number of rows that share each."""
    if len(rows) == 1:
        return [(rows[0], 1)]
    counts: dict[int, int] = {}
    for row in rows:
        counts[id(row)] = counts.get(id(row), 0) + 1
    by_id = {id(row): row for row in rows}
    return [(by_id[name], count) for name, count in counts.items()]


def evaluate(
    rows: Sequence[RowOutlook],
    lengths: list[int],
    costs: CostModel,
    num_prompt_tokens: int,
    lag: int | None = None,
) -> Plan:
    """What a step of these lengths gives. ``lag`` are tokens the draft has to catch up with first; None:
    as many as there will be if it goes on like that, one of every draft that was accepted to its end."""
    tokens = score_tokens = float(len(rows))
    usual_lag = 0.0
    model_lengths = []
    sums: dict[tuple[int, int], float] = {}
    for row, length in zip(rows, lengths, strict=True):
        survival = row.survival
        expected = sums.get((id(row), length))
        if expected is None:
            likely = row.accepted[min(length, len(survival)) - 1] if length and survival else 0.0
            expected = sums[id(row), length] = row.fill * likely
        tokens += expected
        score_tokens += row.fill * length
        if row.uses_model:
            model_lengths.append(length)
            if 0 < length <= len(survival):
                usual_lag += survival[length - 1]
    score_tokens += padding(costs, max(lengths, default=0), len(rows), sum(lengths))
    seconds = costs.score(score_tokens + num_prompt_tokens)
    sizes = draft_sizes(model_lengths, usual_lag if lag is None else lag)
    if sizes:
        seconds += costs.draft_start + sum(map(costs.draft, sizes))
    return Plan(lengths, tokens, seconds + costs.host(len(rows), seconds))


def padding(costs: CostModel, longest: int, num_rows: int, num_drafted: int) -> float:
    """What it costs to pad ``num_drafted`` tokens to ``longest`` in every row, in tokens."""
    return costs.padding * (longest * num_rows - num_drafted)


def draft_sizes(lengths: list[int], lag: float) -> list[float]:
    """Tokens of each draft pass; the first one also catches up."""
    sizes: list[float] = [
        sum(length > position for length in lengths) for position in range(max(lengths, default=0))
    ]
    if sizes:
        sizes[0] += lag
    return sizes
