"""Counters of the engine since it started; rates are derived by their readers."""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from truedraft.engine.core.step import StepResult
from truedraft.engine.messages import DraftCounts

MAX_POSITIONS = 32


class EngineStats:
    """``phase_seconds`` are wall time by phase. Verdicts are counted by lengths: sums by position are made
    when they are asked for."""

    def __init__(self) -> None:
        self.num_rows: Counter[str] = Counter()  # keys: runners; rows of all their rounds
        self.phase_seconds = dict.fromkeys(("draft", "score", "verify", "host"), 0.0)
        self._verdicts: Counter[tuple[str, int, int]] = Counter()  # keys: source, drafted, accepted

    def count_draft(self, source: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one row's verdict in one round, if it drafted something."""
        self._verdicts[source, num_draft_tokens, num_accepted_tokens] += 1

    def count_step(self, result: StepResult) -> None:
        """Counts a step's rows and its seconds."""
        self.num_rows.update(result.num_rows)
        seconds = self.phase_seconds
        parts = [one.seconds for one in result.rounds]
        if result.prompt_seconds is not None:
            parts.append(result.prompt_seconds)
        for part in parts:
            seconds["draft"] += part.draft
            seconds["score"] += part.score
            seconds["verify"] += part.verify
        seconds["host"] += result.host_seconds

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafted * count for (_, drafted, _), count in self._verdicts.items())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(accepted * count for (_, _, accepted), count in self._verdicts.items())

    @property
    def draft_tokens_per_position(self) -> list[int]:
        return _by_position((drafted, count) for (_, drafted, _), count in self._verdicts.items())

    @property
    def accepted_tokens_per_position(self) -> list[int]:
        return _by_position((accepted, count) for (_, _, accepted), count in self._verdicts.items())

    @property
    def drafts(self) -> dict[str, DraftCounts]:
        """Returns the counts of each source."""
        counts: dict[str, DraftCounts] = {}
        for (source, drafted, accepted), count in self._verdicts.items():
            of_source = counts.setdefault(source, DraftCounts())
            of_source.num_drafts += count
            of_source.num_draft_tokens += drafted * count
            of_source.num_accepted_tokens += accepted * count
        return counts


def _by_position(lengths_and_counts: Iterable[tuple[int, int]]) -> list[int]:
    """Counts how many drafts have a token at each position."""
    of_length = [0] * (MAX_POSITIONS + 1)
    for length, count in lengths_and_counts:
        of_length[length] += count
    return list(accumulate(reversed(of_length[1:])))[::-1]
