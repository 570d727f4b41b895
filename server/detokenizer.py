"""Token ids of one sequence to text, piece by piece.

Never splits a UTF-8 character over two pieces, never lets a stop string out (unless asked to), and holds
text back while it could still become one. Knows nothing of HTTP or of the engine; ``server.generation``
keeps one ``Detokenizer`` per choice.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TextStream(Protocol):
    """Incremental decoding of one sequence, as ``Tokenizer.stream`` gives it."""

    def step(self, token_id: int) -> str:
        """The text that became complete with this token; empty inside a split character."""
        ...

    def flush(self) -> str:
        """What was held back because its character never became complete."""
        ...


class StopMatch(NamedTuple):
    start: int
    end: int


class Piece(NamedTuple):
    """What one call of ``push`` released. ``num_tokens`` counts up to the token that completed a stop."""

    text: str
    num_tokens: int
    stopped: bool


class Detokenizer:
    def __init__(
        self, stream: TextStream, stop_strings: Sequence[str] = (), *, include_stop_string: bool = False
    ) -> None:
        self._stream = stream
        self._stop_strings = stop_strings
        self._include_stop_string = include_stop_string
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next tokens. After ``stopped`` the sequence is over and must not be pushed again."""
        for position, token_id in enumerate(token_ids, start=1):
            self._held += self._stream.step(token_id)
            match = find_stop(self._held, self._stop_strings)
            if match is not None:
                return Piece(self._cut(match), position, stopped=True)
        return Piece(self._release(), len(token_ids), stopped=False)

    def finish(self) -> Piece:
        """Release everything: no further token can complete a character or a stop string."""
        self._held += self._stream.flush()
        match = find_stop(self._held, self._stop_strings)
        text = self._held if match is None else self._cut(match)
        self._held = ""
        return Piece(text, 0, stopped=match is not None)

    def _cut(self, match: StopMatch) -> str:
        text = self._held[: match.end if self._include_stop_string else match.start]
        self._held = ""
        return text

    def _release(self) -> str:
        split = len(self._held) - longest_stop_prefix(self._held, self._stop_strings)
        text, self._held = self._held[:split], self._held[split:]
        return text


def find_stop(text: str, stop_strings: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first when ``text`` is read character by character.

    Choosing the earliest end makes the result independent of how the text was cut into tokens; of those
    with the same end the longest wins.
    """
    matches = [
        StopMatch(text.find(stop), text.find(stop) + len(stop)) for stop in stop_strings if stop in text
    ]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def longest_stop_prefix(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string starts with."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
