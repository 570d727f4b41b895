"""Counters of the engine since it started; rates are derived by whoever reads them."""

import time

from engine.messages import DraftCounts

MAX_POSITIONS = 32


class EngineStats:
    """``drafts`` counts by source; ``phase_seconds`` are wall time by phase."""

    def __init__(self) -> None:
        self.drafts: dict[str, DraftCounts] = {}
        self.draft_tokens_per_position = [0] * MAX_POSITIONS
        self.accepted_tokens_per_position = [0] * MAX_POSITIONS
        self.phase_seconds = dict.fromkeys(("draft", "score", "verify", "host"), 0.0)
        self._since = 0.0

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.draft_tokens_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_tokens_per_position)

    def count_draft(self, source: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """One row's verdict, if it drafted something."""
        counts = self.drafts.get(source)
        if counts is None:
            counts = self.drafts[source] = DraftCounts()
        counts.num_drafts += 1
        counts.num_draft_tokens += num_draft_tokens
        counts.num_accepted_tokens += num_accepted_tokens
        for position in range(num_draft_tokens):
            self.draft_tokens_per_position[position] += 1
        for position in range(num_accepted_tokens):
            self.accepted_tokens_per_position[position] += 1

    def start_step(self) -> None:
        self._since = time.perf_counter()

    def end_phase(self, name: str) -> float:
        """A step's phases follow one another: what has passed since the last one's end was ``name``'s."""
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        self.phase_seconds[name] += seconds
        return seconds

    def end_rounds(self, draft: float, score: float, verify: float) -> float:
        """Some rounds took so long in each phase; what else has passed since the last phase's end was the
        host's."""
        rounds = draft + score + verify
        rest = self.end_phase("host") - rounds
        self.phase_seconds["host"] -= rounds
        self.phase_seconds["draft"] += draft
        self.phase_seconds["score"] += score
        self.phase_seconds["verify"] += verify
        return rest
