"""Finds stop strings in a text that comes piece by piece, in one pass however many there are.

This is the automaton of Aho and Corasick: a state is the longest end of the text that some stop string begins
with. A state is made when a text first comes to it, so strings that never occur cost nothing.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Self


class State:
    """``first`` to ``end`` are the sorted stop strings that begin with this state's ``depth`` characters.

    ``suffix`` is the next shorter end of the text that one begins with; that of the empty text is itself.
    ``stop_length`` is the length of the longest stop string that the text ends with here, 0 if there is none.
    """

    __slots__ = ("depth", "end", "first", "following", "stop_length", "suffix")

    def __init__(self, depth: int, first: int, end: int, suffix: Self | None, stop_length: int) -> None:
        self.depth = depth
        self.first = first
        self.end = end
        self.suffix = suffix or self
        self.stop_length = stop_length
        self.following: dict[str, Self | None] = {}


class StopStrings:
    """Holds the stop strings of a request, which the texts of its choices share. Two threads must not use it
    at once."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._strings = sorted(set(strings))
        self._first_characters = {string[0] for string in self._strings}
        self.start = State(0, 0, len(self._strings), None, 0)

    def are_far_from(self, text: str) -> bool:
        """Tells whether no stop string begins in ``text``."""
        return self._first_characters.isdisjoint(text)

    def step(self, state: State, character: str) -> State:
        """Returns the state after one more character."""
        made: list[State] = []  # the suffix of each new state is found after the one before it
        found, at = self.start, state
        while True:
            is_known = character in at.following
            following = at.following[character] if is_known else self._make(at, character)
            if following is not None and is_known:
                found = following
                break
            at.following[character] = following
            if following is not None:
                made.append(following)
            if at is self.start:
                break
            at = at.suffix
        for each in reversed(made):
            each.suffix = found
            each.stop_length = each.stop_length or found.stop_length
            found = each
        return found

    def _make(self, state: State, character: str) -> State | None:
        """Returns the state after one more character, where a stop string continues in that way."""
        strings, depth = self._strings, state.depth

        def here(string: str) -> str:
            return string[depth : depth + 1]

        first = bisect_left(strings, character, state.first, state.end, key=here)
        end = bisect_right(strings, character, first, state.end, key=here)
        if first == end:
            return None
        is_whole = len(strings[first]) == depth + 1
        return State(depth + 1, first, end, self.start, depth + 1 if is_whole else 0)
