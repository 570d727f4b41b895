"""Token ids of one sequence to text, piece by piece.

Never splits a UTF-8 character over two pieces, never lets a stop string out (unless asked to), and holds
text back while it could still become one. Records where each token stands in the text, and which
tokens have all of their text out. One ``Detokenizer`` reads one sequence.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol


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


class StopMatch(NamedTuple):
    start: int
    end: int


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
        stop_strings: Sequence[str] = (),
        *,
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._stop_strings = stop_strings
        self._include_stop_string = include_stop_string
        self._num_unsearched_tokens = min_tokens
        self._num_characters = 0
        self._free = ""  # to be released whatever comes
        self._held = ""  # could still hold or become a stop string
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
            match = self._take(token_id)
            if match is not None:
                return self._end(match, offsets)
        text = self._release()
        return Piece(text, offsets, self._count_shown())

    def finish(self, *, is_cut: bool = False) -> Piece:
        """Releases everything: no further token can complete a character or a stop string.

        ``is_cut``: the model would have gone on, so what it wrote of a last character is left out.
        """
        rest = self._stream.flush(is_cut=is_cut)
        self._num_characters += len(rest)
        self._held += rest
        return self._end(find_stop(self._held, self._stop_strings), [])

    def _take(self, token_id: int) -> StopMatch | None:
        text = self._stream.step(token_id)
        # A token without text belongs to the next character: it is a part of it, or a special token.
        self._ends.append(self._num_characters + max(1, len(text)))
        self._num_characters += len(text)
        if self._num_unsearched_tokens > 0:
            self._num_unsearched_tokens -= 1
            self._free += text
            return None
        self._held += text
        return find_stop(self._held, self._stop_strings)

    def _end(self, match: StopMatch | None, offsets: list[int]) -> Piece:
        """Returns the last piece: the text up to the match, or all of it."""
        found = None if match is None else self._held[match.start : match.end]
        end = None if match is None else match.end if self._include_stop_string else match.start
        text, num_shown = self._free + self._held[:end], len(self._ends)
        self._free = self._held = ""
        self._ends.clear()
        return Piece(text, offsets, num_shown, found)

    def _release(self) -> str:
        split = len(self._held) - longest_stop_prefix(self._held, self._stop_strings)
        text = self._free + self._held[:split]
        self._free, self._held = "", self._held[split:]
        return text

    def _count_shown(self) -> int:
        num_released = self._num_characters - len(self._held)
        num_shown = 0
        while self._ends and self._ends[0] <= num_released:
            self._ends.popleft()
            num_shown += 1
        return num_shown


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
