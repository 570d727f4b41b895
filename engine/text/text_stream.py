"""Turns the token ids of one sequence into text as they come, whole characters at a time.

Where tokens stand for bytes, these are decoded; else a window over the last tokens is, so that a token costs
the same wherever it stands.
"""

import codecs
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

from tokenizers import Tokenizer as FastTokenizer

from truedraft.engine.text.detokenizer import TextStream
from truedraft.engine.text.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# This takes the place of bytes above ASCII in the decoder.
STAND_IN = "<0x41>"
# This many tokens decide how the next ones are decoded: more than a character has bytes, and more than the
# spaces that a decoder drops at the beginning of a text.
CONTEXT = 8


class TokenTextStream:
    """Decodes with any decoder except byte fallback. ``step`` returns the text that a token completes;
    ``flush`` the rest at the end.

    Together they make up the text of decoding all ids at once. Text that a decoder would change because of a
    later token stays as it is.
    """

    def __init__(self, fast: FastTokenizer, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._fast = fast
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the last tokens
        # This many characters of the window's text are out.
        self._num_characters = 0

    def step(self, token_id: int) -> str:
        if self._vocabulary.is_without_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        if len(self._window) >= 2 * CONTEXT:
            self._shorten()
        self._window.append(token_id)
        return self._take(self._decoded(), is_cut=True)

    def flush(self, *, is_cut: bool = False) -> str:
        return self._take(self._decoded(), is_cut=is_cut)

    def copy(self) -> Self:
        other = copy(self)
        other._window = self._window.copy()
        return other

    def _take(self, text: str, *, is_cut: bool) -> str:
        """Returns the text that is not out yet, without the beginning of a character if ``is_cut``."""
        is_held = is_cut and text.endswith(REPLACEMENT) and self._ends_inside_character()
        new = text[self._num_characters : len(text) - is_held]
        self._num_characters += len(new)
        return new

    def _shorten(self) -> None:
        num_left = len(self._decoded()) - self._num_characters
        del self._window[:-CONTEXT]
        self._num_characters = len(self._decoded()) - num_left

    def _decoded(self) -> str:
        return str(self._fast.decode(self._window, skip_special_tokens=self._skip_special_tokens))

    def _ends_inside_character(self) -> bool:
        """Tells whether the last bytes are the beginning of a character, which has four at most."""
        tail = b""
        for token_id in reversed(self._window):
            tail = (self._vocabulary.bytes_of(token_id) or b"") + tail
            if len(tail) >= 4:
                break
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(tail)
        return bool(utf8.getstate()[0])


class ByteLevelTextStream:
    """Decodes vocabularies like GPT-2's, whose tokens are bytes, without asking the decoder."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        if self._vocabulary.is_without_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        return self._utf8.decode(self._vocabulary.bytes_of(token_id) or b"")

    def flush(self, *, is_cut: bool = False) -> str:
        if is_cut:
            self._utf8.reset()
        return self._utf8.decode(b"", final=True)

    def copy(self) -> Self:
        other = copy(self)
        other._utf8 = _copied(self._utf8)
        return other


class ByteFallbackTextStream:
    """Decodes vocabularies with a token for each byte, as SentencePiece makes them.

    A character is returned with its last byte, and a byte that is no part of one becomes one replacement
    character. Decoding all ids at once gives the same wherever the bytes are UTF-8; elsewhere it also
    replaces the valid neighbours of an invalid byte, which are out already.
    """

    def __init__(self, fast: FastTokenizer, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._text = TokenTextStream(fast, vocabulary, skip_special_tokens=skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace_each_byte")
        self._stand_in = fast.token_to_id(STAND_IN)
        self._is_inside_bytes = False

    def step(self, token_id: int) -> str:
        byte = self._vocabulary.fallback_bytes.get(token_id)
        if byte is not None and byte >= b"\x80":
            return self._enter_bytes() + self._utf8.decode(byte)
        if self._vocabulary.is_without_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        return self._leave_bytes() + self._text.step(token_id)

    def flush(self, *, is_cut: bool = False) -> str:
        text = self._enter_bytes()
        if is_cut:
            self._utf8.reset()
        return text + self._leave_bytes()

    def copy(self) -> Self:
        other = copy(self)
        other._text = self._text.copy()
        other._utf8 = _copied(self._utf8)
        return other

    def _enter_bytes(self) -> str:
        """Returns the text that the decoder holds. A stand-in for the bytes keeps a space after them."""
        if self._is_inside_bytes:
            return ""
        self._is_inside_bytes = True
        assert self._stand_in is not None  # The space is a token like those of all bytes.
        return self._text.step(self._stand_in).removesuffix("A")

    def _leave_bytes(self) -> str:
        self._is_inside_bytes = False
        return self._utf8.decode(b"", final=True)


class MarkedTextStream:
    """Adds to another stream the text of some special tokens that it leaves out. A character that is not
    complete before one of them never will be, and a new stream starts after it."""

    def __init__(self, stream: TextStream, marks: Mapping[int, str]) -> None:
        self._stream = stream
        self._new = stream.copy()
        self._marks = marks

    def step(self, token_id: int) -> str:
        text = self._stream.step(token_id)
        if (mark := self._marks.get(token_id)) is None:
            return text
        if cut := self._stream.flush():
            self._stream = self._new.copy()
        return text + cut + mark

    def flush(self, *, is_cut: bool = False) -> str:
        return self._stream.flush(is_cut=is_cut)

    def copy(self) -> Self:
        other = copy(self)
        other._stream = self._stream.copy()
        return other


def text_stream(fast: FastTokenizer, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> TextStream:
    """Starts a text of the kind that the vocabulary needs."""
    if vocabulary.is_byte_level:
        return ByteLevelTextStream(vocabulary, skip_special_tokens=skip_special_tokens)
    kind = ByteFallbackTextStream if vocabulary.fallback_bytes else TokenTextStream
    return kind(fast, vocabulary, skip_special_tokens=skip_special_tokens)


def ending(vocabulary: Vocabulary, token_ids: Sequence[int]) -> list[int]:
    """Returns the last tokens that decide how a text goes on after them, however many there are.

    Those with text decide; of the others, which may be shown, only the very last.
    """
    found: list[int] = []
    num_with_text = 0
    for place, token_id in enumerate(reversed(token_ids)):
        has_text = not vocabulary.is_without_text(token_id, skip_special_tokens=True)
        if has_text or place < CONTEXT:
            found.append(token_id)
        num_with_text += has_text
        if num_with_text == CONTEXT:
            break
    return found[::-1]


def continued(stream: TextStream, before: Sequence[int]) -> TextStream:
    """Lets a stream continue the tokens ``before``, as a decoder may drop a space before its first token."""
    for token_id in before:
        stream.step(token_id)
    return stream


def _copied(utf8: codecs.IncrementalDecoder) -> codecs.IncrementalDecoder:
    other = codecs.getincrementaldecoder("utf-8")(utf8.errors)
    other.setstate(utf8.getstate())
    return other


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("replace_each_byte", _replace_each_byte)
