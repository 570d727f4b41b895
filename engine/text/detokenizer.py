"""Turns the token ids of one sequence into text, piece by piece.

It never splits a UTF-8 character over two pieces, never lets a stop string out (unless asked to), and holds
text back while it could still become one. It records where each token stands in the text, and which tokens
have all of their text out. One ``Detokenizer`` reads one sequence; a token costs the same however much text
is held.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from truedraft.engine.text.stop_strings import StopStrings


class TextStream(Protocol):
    """Decodes one sequence incrementally, as ``Tokenizer.stream`` provides it."""

    def step(self, token_id: int) -> str:
        """Returns the text that became complete with this token; empty inside a split character."""
        ...

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns the text of a character that never became complete. If ``is_cut``, the text ends before a
        character of which only the beginning is there.
        """
        ...

    def copy(self) -> Self:
        """Returns a stream with the same text so far, which continues independently."""
        ...


class Piece(NamedTuple):
    """Holds the text that one call released.

    ``offsets`` has the place in the whole text of each token that counted: those up to the one that completed
    a stop string. ``num_shown`` tokens, of this call or earlier ones, now have all text out.
    """

    text: str
    offsets: list[int]
    num_shown: int
    stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None


class Detokenizer:
    """Decodes one sequence. Stop strings count only after the first ``min_tokens`` tokens."""

    def __init__(
        self,
        stream: TextStream,
        stop_strings: StopStrings | None = None,
        *,
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._stop_strings = stop_strings or StopStrings()
        self._include_stop_string = include_stop_string
        self._num_unsearched_tokens = min_tokens
        self._num_characters = 0
        self._pieces: deque[str] = deque()  # the text that is not out
        self._num_out = 0
        # Its ``depth`` is the length of the text's end that could become a stop string.
        self._state = self._stop_strings.start
        self._ends: deque[int] = deque()  # a token is shown once this many characters are out

    @property
    def num_characters(self) -> int:
        """Returns the length of the text so far, including text that is held back: the next token starts
        there."""
        return self._num_characters

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes the next tokens. After ``stopped`` the sequence is over and must not be pushed again."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            text = self._stream.step(token_id)
            # A token without text belongs to the next character: it is a part of it, or a special token.
            self._ends.append(self._num_characters + max(1, len(text)))
            is_searched = self._num_unsearched_tokens == 0
            self._num_unsearched_tokens -= not is_searched
            if self._add(text, is_searched=is_searched):
                return self._end(offsets)
        text = self._release(self._num_characters - self._state.depth)
        return Piece(text, offsets, self._count_shown())

    def finish(self, *, is_cut: bool = False) -> Piece:
        """Releases everything: no further token can complete a character or a stop string.

        ``is_cut`` says that the model would have gone on, so the beginning of a last character is left out.
        """
        self._add(self._stream.flush(is_cut=is_cut), is_searched=True)
        return self._end([])

    def _add(self, text: str, *, is_searched: bool) -> bool:
        """Adds to the text, up to the end of the stop string that is complete first. Tells whether one is.

        The first end decides, and not the first beginning, so that the result does not depend on how the text
        was cut into tokens; of those with the same end the longest wins.
        """
        stops, state = self._stop_strings, self._state
        num_read = len(text)
        if is_searched and not (state is stops.start and stops.are_far_from(text)):
            for place, character in enumerate(text, start=1):
                state = stops.step(state, character)
                if state.stop_length:
                    num_read = place
                    break
            self._state = state
        if num_read:
            self._pieces.append(text[:num_read])
        self._num_characters += len(text)
        return state.stop_length > 0

    def _end(self, offsets: list[int]) -> Piece:
        """Returns the last piece: the text up to the stop string, or all of it."""
        num_shown, length = len(self._ends), self._state.stop_length
        self._ends.clear()
        text = "".join(self._pieces)
        self._pieces.clear()
        if not length:
            return Piece(text, offsets, num_shown)
        found = text[-length:]
        return Piece(text if self._include_stop_string else text[:-length], offsets, num_shown, found)

    def _release(self, end: int) -> str:
        """Returns the part of the text's first ``end`` characters that is not out."""
        released = []
        while self._num_out < end:
            piece = self._pieces.popleft()
            if len(piece) > end - self._num_out:
                self._pieces.appendleft(piece[end - self._num_out :])
                piece = piece[: end - self._num_out]
            released.append(piece)
            self._num_out += len(piece)
        return "".join(released)

    def _count_shown(self) -> int:
        num_shown = 0
        while self._ends and self._ends[0] <= self._num_out:
            self._ends.popleft()
            num_shown += 1
        return num_shown


def longest_stop_prefix(text: str, stop_strings: Sequence[str]) -> int:
    """Returns the length of the longest end of ``text`` that a stop string starts with."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
