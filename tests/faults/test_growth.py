"""Requests cost what they weigh: all shapes of all fields, four times as large as in ``tests.server``."""

from tests.server.test_growth import SMALL, Watched, all_cases, faults, watched

__all__ = ["watched"]


def test_work_grows_no_faster_than_any_field(watched: Watched) -> None:
    assert not faults(watched, all_cases(watched.server), small=4 * SMALL)
