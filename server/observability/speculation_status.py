"""``GET /speculation``: what drafts, how much is accepted, what it gains, and why it is on or off.

Put together from the settings, the worker's counts and what its draft-length policy reports.
"""

from collections.abc import Mapping
from typing import Any

from truedraft.engine.messages import Ready, Stats
from truedraft.server.schemas.operate import PositionAcceptance, SpeculationStatus, Speedup
from truedraft.server.settings import Settings


def speculation_status(
    settings: Settings, worker: Ready | None, stats: Stats | None, policy: Mapping[str, Any]
) -> SpeculationStatus:
    drafted = sum(counts.num_draft_tokens for counts in stats.drafts.values()) if stats else 0
    accepted = sum(counts.num_accepted_tokens for counts in stats.drafts.values()) if stats else 0
    is_on, why = _on_and_why(worker, stats, policy)
    return SpeculationStatus(
        proposer=worker.method if worker else None,
        proposers=worker.methods if worker else None,
        verification=settings.verification,
        num_speculative_tokens=settings.num_speculative_tokens,
        on=is_on,
        why=why,
        draft_length=stats.num_speculative_tokens if stats else None,
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_by_position=_by_position(stats) if stats else [],
        speedup=Speedup(predicted=policy.get("predicted_speedup"), achieved=achieved_speedup(policy)),
        phase_seconds=stats.phase_seconds if stats else {},
        decoded_rows=stats.num_rows if stats else {},
        policy=dict(policy),
    )


def _on_and_why(
    worker: Ready | None, stats: Stats | None, policy: Mapping[str, Any]
) -> tuple[bool | None, str]:
    """The policy's own words, or those for a fixed length."""
    if worker is None or stats is None:
        return None, "no step has run yet"
    if "why" in policy:
        return policy.get("on"), str(policy["why"])
    if worker.method == "none":
        return False, "off: no draft source is configured; a request may still ask for one"
    if not stats.num_speculative_tokens:
        return False, "off: num_speculative_tokens is 0"
    return True, (
        "on: the draft length is fixed; only with num_speculative_tokens 'auto' are costs measured, "
        "a speed-up estimated, and drafting stopped where it does not pay"
    )


def _by_position(stats: Stats) -> list[PositionAcceptance]:
    counts = zip(stats.draft_tokens_per_position, stats.accepted_tokens_per_position, strict=True)
    return [
        PositionAcceptance(position=position, drafted=drafted, accepted=accepted, rate=accepted / drafted)
        for position, (drafted, accepted) in enumerate(counts)
        if drafted
    ]


def achieved_speedup(policy: Mapping[str, Any]) -> float | None:
    """Returns the speed-up over plain decoding of the same rows, as far as that has been measured."""
    rates = policy.get("tokens_per_second", {})
    return round(rates["achieved"] / rates["plain"], 3) if rates.get("plain") else None
