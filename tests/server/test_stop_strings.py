"""The automaton of a request's stop strings finds what their definition says, with the same work for every
character, whatever the strings are and however much of the text could still become one."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.growth import num_lines
from truedraft.engine.text import stop_strings
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.engine.text.stop_strings import StopStrings

small_texts = st.text("ab", max_size=30)
small_stops = st.lists(st.text("ab", min_size=1, max_size=7), max_size=8)


def states(stops: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Returns what is held after each character, and the length of the stop string that ends there."""
    automaton = StopStrings(stops)
    state, found = automaton.start, []
    for character in text:
        state = automaton.step(state, character)
        found.append((state.depth, state.stop_length))
    return found


@given(text=small_texts, stops=small_stops)
def test_states_are_what_they_are_defined_as(text: str, stops: list[str]) -> None:
    for end, (depth, stop_length) in enumerate(states(stops, text), start=1):
        beginnings = [len(stop) for stop in stops if text[:end].endswith(stop)]
        assert stop_length == max(beginnings, default=0)
        whole = max(
            (n for stop in stops for n in range(len(stop) + 1) if text[:end].endswith(stop[:n])), default=0
        )
        assert depth == whole


@given(first=small_texts, second=small_texts, stops=small_stops)
def test_texts_that_share_it_do_not_change_it(first: str, second: str, stops: list[str]) -> None:
    shared = StopStrings(stops)
    found = []
    for text in (first, second):
        state = shared.start
        found.append([state := shared.step(state, character) for character in text])
    assert [(state.depth, state.stop_length) for state in found[1]] == states(stops, second)


class Letters:
    """A stream whose token ids are characters, or words by their number."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = words

    def step(self, token_id: int) -> str:
        return self._words[token_id] if self._words else chr(token_id)

    def flush(self, *, is_cut: bool = False) -> str:
        return ""

    def copy(self) -> "Letters":
        return self


HOSTILE = {
    "a stop string of the text, others with another beginning": lambda size: (
        [" word" * size, *(f"x{number}" + " word" * size for number in range(20))]
    ),
    "stop strings of one letter's repetition": lambda size: (
        [" word" * size + str(number) for number in range(20)]
    ),
    "stop strings that are ends of others": lambda size: [(" word" * size)[number:] for number in range(20)],
    "a stop string that nearly comes again and again": lambda size: [" word" * (size // 2) + "!"],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_token_costs_the_same_however_much_is_held(kind: str) -> None:
    def work(size: int) -> int:
        detokenizer = Detokenizer(Letters([" word"]), StopStrings(HOSTILE[kind](size)))

        def read() -> None:
            for _ in range(size - 6):
                assert not detokenizer.push([0]).stopped

        return num_lines(read)

    works = [work(size) for size in (50, 100, 200, 400)]
    assert all(later <= 2.2 * earlier for earlier, later in pairwise(works)), works


def test_strings_of_which_nothing_comes_cost_nothing() -> None:
    def work(size: int) -> int:
        def read() -> None:
            detokenizer = Detokenizer(Letters(), StopStrings(["a" * size, "b" * size]))
            for character in "cacbc" * 10:
                detokenizer.push([ord(character)])

        return num_lines(read)

    assert work(100_000) < 1.1 * work(100)  # a few lines of the collector may run in between


def test_many_stop_strings_need_no_deep_recursion() -> None:
    stops = ["a" * number + "b" for number in range(2000, 4000)]
    assert states(stops, "a" * 4000 + "b")[-1] == (4000, 4000)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("each.stop_length or found.stop_length", "each.stop_length"),
        ("each.suffix = found", "pass"),
        ("at = at.suffix", "at = self.start"),
        ("at.following[character] = following", "pass"),
        ("is_whole = len(strings[first]) == depth + 1", "is_whole = len(strings[end - 1]) == depth + 1"),
    ],
)
def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    source = Path(stop_strings.__file__).read_text()
    assert source.count(right) == 1
    planted: dict[str, Any] = {}
    exec(compile(source.replace(right, wrong), "planted", "exec"), planted)
    monkeypatch.setitem(globals(), "StopStrings", planted["StopStrings"])

    def gate() -> None:
        test_states_are_what_they_are_defined_as()
        for kind in HOSTILE:
            test_a_token_costs_the_same_however_much_is_held(kind)

    with pytest.raises((AssertionError, ExceptionGroup)):
        gate()
