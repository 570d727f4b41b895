"""Decides in which order sequences go, who gives way to whom, and how many tokens of prompts a step takes.

No tenant shuts another out, and nobody waits long for a step to end. A tenant is whoever a front end keeps
apart from others, such as an API key; the name means nothing here. The scheduler carries out these decisions.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequences

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Kind, StepPlan, StepResult

# A step takes at least this many tokens of prompts, if there are any.
FEWEST_TOKENS = 16
# The first steps take this many; few steps are needed to learn the right number.
FIRST_TOKENS = 256


def order(sequence: Sequence) -> tuple[int, int, int]:
    """Returns the sort key of a sequence: lower goes first."""
    return sequence.priority, sequence.place, sequence.arrival


def firsts_first(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Returns sequences in order, but each tenant's first one before all others of the same priority."""
    found = sorted(sequences, key=order)
    firsts: dict[str, Sequence] = {}
    for sequence in found:
        firsts.setdefault(sequence.tenant, sequence)
    if len(firsts) < 2:
        return found
    return sorted(
        found,
        key=lambda sequence: (sequence.priority, firsts[sequence.tenant] is not sequence),
    )


def shut_out(waiting: Sequences[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
    """Returns the first of ``waiting``, which is in order, of each tenant that has nothing running, unless
    one with a better priority waits."""
    if not waiting:
        return []
    seen = {sequence.tenant for sequence in running}
    found = []
    for sequence in waiting:
        if sequence.priority > waiting[0].priority:
            break
        if sequence.tenant not in seen:
            seen.add(sequence.tenant)
            found.append(sequence)
    return found


def next_to_give_way(sequence: Sequence, running: Sequences[Sequence]) -> Sequence | None:
    """Returns the sequence that gives its place to a shut out ``sequence``: the last one of the tenant that
    has most running. A tenant keeps one sequence, and one with a better priority stays, too."""
    counts = Counter(other.tenant for other in running)
    may = [other for other in running if counts[other.tenant] > 1 and other.priority >= sequence.priority]
    return max(may, key=lambda other: (counts[other.tenant], order(other)), default=None)


def all_that_may_give_way(sequence: Sequence, running: Sequences[Sequence]) -> list[Sequence]:
    """Returns the sequences that ``next_to_give_way`` would name one after the other."""
    left, found = list(running), []
    while (other := next_to_give_way(sequence, left)) is not None:
        left.remove(other)
        found.append(other)
    return found


class PromptPace:
    """Limits prompts to ``seconds`` of a step, or to the time of decoding if that is longer; 0: no limit.

    The times of the last steps decide, so a step may take up to twice as long where costs change.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._most = FIRST_TOKENS
        self._decoding = 0.0  # seconds of a round without prompts

    def within(self, budget: int) -> int:
        """Returns how many of the budget's tokens prompts may have."""
        return min(budget, self._most) if self.seconds else budget

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step, after ``commit``."""
        seconds = result.seconds + result.host_seconds
        if plan.is_decode_only:
            self._decoding = seconds / max(1, len(result.rounds))
            return
        num_tokens = sum(part.num_tokens for part in plan.scheduled if part.kind is not Kind.DECODE)
        decoding = self._decoding if len(plan.prompts) < len(plan.scheduled) else 0.0
        allowed = max(self.seconds, decoding)
        taken = max(seconds - decoding, 1e-6)
        if taken > allowed:
            fewer = int(num_tokens * max(allowed / taken, 0.25))
            self._most = max(FEWEST_TOKENS, min(self._most, fewer) // 16 * 16)
        elif num_tokens >= self._most and taken < allowed / 2:
            self._most *= 2
