"""Token ids of one sequence to text, piece by piece.

Never splits a UTF-8 character over two pieces, never lets a stop string out (unless asked to), and holds
text back while it could still become one. Records where each token stands in the text, and which
tokens have all of their text out. One ``Detokenizer`` reads one sequence; a token costs the same however much
is held.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from truedraft.engine.text.stop_strings import StopStrings


class TextStream(Protocol):
    """Incremental decoding of one sequence, as ``Tokenizer.stream`` gives it."""

    def step(self, token_id: int) -> str:
        """The text that became complete with this token; empty inside a split character."""
        ...

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns what was held back because its character never became complete.

        A text that ``is_cut`` ends before a character that it has only the beginning of.
        """
        ...

    def copy(self) -> Self:
        """Returns the same text so far, which goes on in its own way."""
        ...


class Piece(NamedTuple):
    """Holds what one call released.

    ``offsets`` has the place in the whole text of each token that counted: those up to the one that
    completed a stop string. ``num_shown`` tokens, of this call or earlier ones, now have all text out.
    """

    text: str
    offsets: list[int]
    num_shown: int
    stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None


class Detokenizer:
    """Stop strings count in what follows the first ``min_tokens`` tokens only."""

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
        self._pieces: deque[str] = deque()  # what is not out
        self._num_out = 0
        # Its ``depth`` is the length of the text's end that could become a stop string.
        self._state = self._stop_strings.start
        self._ends: deque[int] = deque()  # a token is shown once that many characters are out

    @property
    def num_characters(self) -> int:
        """Returns the length of the text so far, held back or not: the next token starts there."""
        return self._num_characters

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next tokens. After ``stopped`` the sequence is over and must not be pushed again."""
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

        ``is_cut``: the model would have gone on, so what it wrote of a last character is left out.
        """
        self._add(self._stream.flush(is_cut=is_cut), is_searched=True)
        return self._end([])

    def _add(self, text: str, *, is_searched: bool) -> bool:
        """Adds to the text, up to the end of the stop string that is complete first. Tells whether one is.

        Counting from the first end, and not from the first beginning, makes it independent of how the text
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
        """Returns what is not out of the text's first ``end`` characters."""
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
    """Length of the longest end of ``text`` that a stop string starts with."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
