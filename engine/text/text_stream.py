"""Token ids of one sequence to text as they come, whole characters at a time.

tokenizers' ``DecodeStream`` raises where a later token changes text that it has returned. One byte of invalid
UTF-8 does that to the whole run of ``<0x0A>`` tokens around it, so bytes above ASCII never reach it here.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from truedraft.engine.text.detokenizer import TextStream
from truedraft.engine.text.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Takes the place of bytes above ASCII in the decoder.
STAND_IN = "<0x41>"


class TokenTextStream:
    """``step`` returns the text that a token completes; ``flush`` what is left at the end.

    Together they make up the text of decoding all ids at once, whose decoder may be of any kind but for byte
    fallback.
    """

    def __init__(self, fast: FastTokenizer, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._fast = fast
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decode_stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_characters = 0

    def step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        try:
            text = self._decode_stream.step(self._fast, token_id) or ""
        except Exception:  # it has no type of its own: the decoder changed text that is out
            self._decode_stream = DecodeStream(self._token_ids, skip_special_tokens=self._skip_special_tokens)
            text = self.flush()
        self._num_characters += len(text)
        return text

    def flush(self, *, is_cut: bool = False) -> str:
        full = str(self._fast.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens))
        text = full[self._num_characters :]
        return text.removesuffix(REPLACEMENT) if is_cut and self._ends_inside_character() else text

    def _ends_inside_character(self) -> bool:
        """Tells whether the last bytes are the beginning of a character, which has four at most."""
        tail = b""
        for token_id in reversed(self._token_ids):
            tail = (self._vocabulary.bytes_of(token_id) or b"") + tail
            if len(tail) >= 4:
                break
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(tail)
        return bool(utf8.getstate()[0])


class ByteFallbackTextStream:
    """The same for vocabularies with a token for each byte, as SentencePiece makes them.

    A character is returned with its last byte, and a byte that is no part of one becomes one replacement
    character. Decoding all ids at once gives the same wherever the bytes are UTF-8; elsewhere it also
    replaces the valid neighbours of an invalid byte, which are out already.
    """

    def __init__(self, fast: FastTokenizer, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._fast = fast
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decode_stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace_each_byte")
        self._stand_in = fast.token_to_id(STAND_IN)
        self._is_inside_bytes = False

    def step(self, token_id: int) -> str:
        byte = self._vocabulary.fallback_bytes.get(token_id)
        if byte is not None and byte >= b"\x80":
            return self._enter_bytes() + self._utf8.decode(byte)
        if self._vocabulary.is_without_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        return self._leave_bytes() + (self._decode_stream.step(self._fast, token_id) or "")

    def flush(self, *, is_cut: bool = False) -> str:
        text = self._enter_bytes()
        if is_cut:
            self._utf8.reset()
        return text + self._leave_bytes()

    def _enter_bytes(self) -> str:
        """The text that the decoder holds. A stand-in for the bytes keeps a space after them."""
        if self._is_inside_bytes:
            return ""
        self._is_inside_bytes = True
        text = self._decode_stream.step(self._fast, self._stand_in) or ""
        return text.removesuffix("A")

    def _leave_bytes(self) -> str:
        self._is_inside_bytes = False
        return self._utf8.decode(b"", final=True)


class MarkedTextStream:
    """Another stream, with the text of some special tokens that it leaves out. A character that is not
    complete before one of them never will be, and a new stream starts after it."""

    def __init__(self, make: Callable[[], TextStream], marks: Mapping[int, str]) -> None:
        self._make = make
        self._stream = make()
        self._marks = marks

    def step(self, token_id: int) -> str:
        text = self._stream.step(token_id)
        if (mark := self._marks.get(token_id)) is None:
            return text
        if cut := self._stream.flush():
            self._stream = self._make()
        return text + cut + mark

    def flush(self, *, is_cut: bool = False) -> str:
        return self._stream.flush(is_cut=is_cut)


def text_stream(fast: FastTokenizer, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> TextStream:
    """Starts a text of the kind that the vocabulary needs."""
    kind = ByteFallbackTextStream if vocabulary.fallback_bytes else TokenTextStream
    return kind(fast, vocabulary, skip_special_tokens=skip_special_tokens)


def continued(stream: TextStream, fast: FastTokenizer, after: Sequence[int]) -> TextStream:
    """Lets a stream continue the tokens ``after``: a decoder may drop a space before its first one."""
    for token_id in _end_of(fast, after):
        stream.step(token_id)
    return stream


def _end_of(fast: FastTokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """Returns the last tokens, as many as have some text that no decoder drops; all if none has."""
    length = 8
    while length < len(token_ids):
        (text,) = fast.decode_batch([list(token_ids[-length:])], skip_special_tokens=True)
        if text.strip().strip(REPLACEMENT):
            break
        length *= 2
    return token_ids[-length:]


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("replace_each_byte", _replace_each_byte)
