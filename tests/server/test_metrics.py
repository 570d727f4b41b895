"""The histogram of what every token is observed by has the samples of the library's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from truedraft.server.observability import metrics
from truedraft.server.observability.metrics import LATENCY_BUCKETS, FrequentHistogram

# The order of additions may change the last digits of a sum, so values are compared approximately.
seconds = st.sampled_from([0.0, *LATENCY_BUCKETS, 1 / 8, 3.25, 10.5, 1e6])
observations = st.lists(st.tuples(seconds, st.sampled_from([0, 1, 2, 4, 8])), max_size=20)


def samples_of(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    """Returns what a scrape reads, the time of a histogram's creation apart."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [
        (family.type + sample.name, sample.labels, pytest.approx(sample.value))
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


@given(observations=observations)
def test_it_shows_what_the_librarys_histogram_shows(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    frequent = FrequentHistogram(ours, "x_seconds", "Text.", LATENCY_BUCKETS)
    histogram = Histogram("x_seconds", "Text.", buckets=LATENCY_BUCKETS, registry=theirs)
    assert samples_of(ours) == samples_of(theirs)
    for each, times in observations:
        frequent.observe(each * times, times)
        for _ in range(times):
            histogram.observe(each)
    assert samples_of(ours) == samples_of(theirs)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(*bounds, math.inf)", "(*bounds, 1e5)"),
        ("total / times)] += times", "total / times)] += 1"),
        ("self._sum += total", "self._sum += total / times"),
        ("accumulate(self._counts)", "iter(self._counts)"),
        ("counts[bisect_left(", "counts[bisect_right("),
    ],
)
def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    source = (
        Path(metrics.__file__).read_text().replace("import bisect_left", "import bisect_left, bisect_right")
    )
    assert source.count(right) == 1
    planted: dict[str, Any] = {}
    exec(compile(source.replace(right, wrong), "planted", "exec"), planted)
    monkeypatch.setitem(globals(), "FrequentHistogram", planted["FrequentHistogram"])
    gate: Callable[[], None] = test_it_shows_what_the_librarys_histogram_shows
    with pytest.raises((AssertionError, ExceptionGroup, IndexError)):
        gate()
