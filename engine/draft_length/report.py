"""What the policy does and why, for people."""

from collections.abc import Sequence

from engine.draft_length.learning import Round
from engine.draft_length.plan import Plan, Search

# Decay of the sums over recent rounds: about the last fifty.
DECAY = 0.98


class Report:
    def __init__(self) -> None:
        self._tokens = self._seconds = self._plain_tokens = self._plain_seconds = 0.0
        self._rows = self._lengths = 0.0

    def count(self, found: Search, rounds: Sequence[Round]) -> None:
        """Some steps; those with prompts say nothing about speed."""
        for one in rounds:
            if one.seconds is None:
                continue
            self._tokens = DECAY * self._tokens + one.num_emitted
            self._seconds = DECAY * self._seconds + one.seconds.draft + one.seconds.score + one.seconds.host
            self._plain_tokens = DECAY * self._plain_tokens + found.plain.tokens
            self._plain_seconds = DECAY * self._plain_seconds + found.plain.seconds
            self._rows = DECAY * self._rows + len(one.outcomes)
            self._lengths = DECAY * self._lengths + one.num_drafted

    def state(self, found: Search | None, lengths: list[int]) -> dict[str, object]:
        """``plain`` is what the same steps would give without drafts, from their measured cost."""
        if found is None:
            return {"on": None, "why": "no step has run yet"}
        return {
            "on": any(found.best.lengths),
            "why": why(found),
            "draft_length": {
                "last": list(lengths),
                "recent_mean": round(self._lengths / self._rows, 2) if self._rows else 0.0,
            },
            "predicted_speedup": round(found.best.rate / found.plain.rate, 3),
            "tokens_per_second": {
                "achieved": _rate(self._tokens, self._seconds),
                "plain": _rate(self._plain_tokens, self._plain_seconds),
            },
        }


def why(found: Search) -> str:
    drafting = found.best if any(found.best.lengths) else found.best_drafting
    if drafting is None:
        return "off: no row may draft, or no draft would be accepted"
    num_rows, num_drafted = len(drafting.lengths), sum(drafting.lengths)
    trade = (
        f"drafting {num_drafted} {'token' if num_drafted == 1 else 'tokens'} for {num_rows} "
        f"{'row' if num_rows == 1 else 'rows'} is expected to give {_times(drafting, found.plain, 'tokens')} "
        f"times the tokens of a plain step in {_times(drafting, found.plain, 'seconds')} times its time"
    )
    if drafting is found.best:
        return f"on: {trade}"
    return f"off: the best draft does not pay; {trade}"


def _times(plan: Plan, plain: Plan, what: str) -> str:
    return f"{getattr(plan, what) / getattr(plain, what):.2f}"


def _rate(tokens: float, seconds: float) -> float:
    return round(tokens / seconds, 1) if seconds else 0.0
