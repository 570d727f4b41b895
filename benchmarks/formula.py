"""Compares the speed-up that theory promises for measured acceptance and costs with the achieved one.

Leviathan et al. 2022 (arXiv:2211.17192), theorem 3.8, with the measured tokens per round in place of those
of a constant acceptance, and with the cost of scoring k + 1 tokens measured instead of taken as that of one:

    predicted = tokens per round / (k c + v)

c is a drafted token's cost and v that of a round's scoring, both in units of the target's pass in plain
decoding. The host and verification cost nothing in it; the achieved speed-up, from the same steps, has both.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Run, StepTimes


def phases(runs: Sequence[Run]) -> dict[str, Any]:
    """Median milliseconds of a step by phase, and the host's share; from full steps only."""
    steps = _steps(runs)
    row: dict[str, Any] = {"round_ms": _median([1000 * s.seconds / s.num_rounds for s in steps])}
    for name in ("draft", "score", "verify", "host"):
        row[f"{name}_ms"] = _median([1000 * getattr(s, name) / s.num_rounds for s in steps])
    row["host_share"] = _median([s.host / s.seconds for s in steps])
    row["tokens_a_round"] = _median([s.tokens_per_round for s in steps])
    return row


def speedup(plain: Sequence[Run], speculative: Sequence[Run]) -> dict[str, Any] | None:
    """Predicted and achieved over the same full steps, medians over repeats; None if nothing was drafted."""
    rows = [
        _speedup(before, after)
        for before, after in zip(_steps(plain), _steps(speculative), strict=True)
        if after.num_draft_tokens
    ]
    if not rows:
        return None
    return {name: _median([row[name] for row in rows]) for name in rows[0]}


def _speedup(plain: StepTimes, speculative: StepTimes) -> dict[str, float]:
    target_pass = plain.score / plain.num_rounds
    drafts_a_round = speculative.num_draft_tokens / (speculative.num_rounds * speculative.num_rows)
    draft_cost = speculative.draft / speculative.num_rounds / drafts_a_round / target_pass
    score_cost = speculative.score / speculative.num_rounds / target_pass
    predicted = speculative.tokens_per_round / (drafts_a_round * draft_cost + score_cost)
    plain_rate, rate = plain.num_tokens / plain.seconds, speculative.num_tokens / speculative.seconds
    return {
        "drafts_a_round": drafts_a_round,
        "tokens_a_round": speculative.tokens_per_round,
        "draft_cost_c": draft_cost,
        "score_cost_v": score_cost,
        "predicted": predicted,
        "achieved": rate / plain_rate,
        "achieved_to_predicted": rate / plain_rate / predicted,
    }


def _steps(runs: Sequence[Run]) -> list[StepTimes]:
    steps = [run.steps for run in runs if run.steps is not None and run.steps.num_rounds]
    if not steps:
        raise ValueError("these runs have no full steps: they are too short, or not the engine's")
    return steps


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
