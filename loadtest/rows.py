"""Repeats of one load to one row of a table: medians of rates, percentiles of pooled latencies."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from truedraft.loadtest.client import BenchmarkError
from truedraft.loadtest.counters import DraftCounters
from truedraft.loadtest.generator import LoadResult

# The generator's own lateness, beyond which it measured itself: 99 of 100 sends and wake-ups.
MAX_LAG_SECONDS = 0.02


def load_row(name: str, results: Sequence[LoadResult], drafts: DraftCounters | None) -> dict[str, Any]:
    """Milliseconds. Errors are counted, and their requests are in no other number."""
    good = [reply for result in results for reply in result.good]
    errors = [error for result in results for error in result.errors]
    if not good:
        raise BenchmarkError(f"Every request failed. The first said: {errors[0]}")
    if drafts is None or drafts.draft_tokens == 0:
        # The answers' own counts, if the server gives any.
        drafts = DraftCounters(
            0, sum(r.num_draft_tokens for r in good), sum(r.num_accepted_tokens for r in good)
        )
    return {
        "load": name,
        "requests": len(good),
        "errors": len(errors),
        "tokens/s": statistics.median(result.tokens_per_second for result in results),
        "requests/s": statistics.median(len(result.good) / result.seconds for result in results),
        **_percentiles("first", (reply.first_text_seconds for reply in good)),
        **_percentiles("gap", _gaps(results)),
        **_percentiles("token", (reply.seconds_per_token for reply in good)),
        **_percentiles("all", (reply.seconds for reply in good)),
        "all_mean": 1000 * statistics.fmean(reply.seconds for reply in good),
        "acceptance": drafts.accepted_tokens / drafts.draft_tokens if drafts.draft_tokens else None,
        "lag_p99": 1000 * lag(results),
    }


def lag(results: Sequence[LoadResult]) -> float:
    """Seconds by which requests were sent late, or the event loop woke up late: the worse 99th percentile."""
    late = [reply.lag for result in results for reply in result.replies]
    ticks = [tick for result in results for tick in result.ticks]
    return max(float(np.percentile(values, 99)) for values in (late, ticks) if values)


def _gaps(results: Sequence[LoadResult]) -> Iterable[float]:
    for result in results:
        for reply in result.good:
            for earlier, later in zip(reply.text_times, reply.text_times[1:], strict=False):
                yield later - earlier


def _percentiles(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = [value for value in seconds if value is not None]
    return {
        f"{name}_p{percent}": 1000 * float(np.percentile(values, percent)) if values else None
        for percent in (50, 90, 99)
    }
