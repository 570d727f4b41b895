"""Wraps a tokenizer for translation: ids with the places in the text at which tokens may be cut.

Special tokens are neither added nor, when decoding, shown; callers handle them.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, processors

# The text cannot be cut here: the next token has bytes of the same character.
NO_CUT = -1
# Decoders write this for bytes that are no character, or not yet one.
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Holds ids with their ``cuts``: cuts[i] is the number of characters up to the end of token i, or
    ``NO_CUT`` inside a character. Cuts rise."""

    ids: list[int]
    cuts: list[int]


class TextTokenizer:
    """Wraps a copy of ``fast`` without post-processing, truncation and padding."""

    def __init__(self, fast: Tokenizer) -> None:
        first = fast.encode("a")
        num_leading = first.special_tokens_mask.index(0) if 0 in first.special_tokens_mask else 0
        # This is a token such as <s> before every text.
        self.leading_ids: list[int] = first.ids[:num_leading]
        self._fast = Tokenizer.from_str(fast.to_str())
        self._fast.no_truncation()
        self._fast.no_padding()
        # Post-processing not only adds tokens: in some tokenizers it also trims spaces off the offsets.
        self._fast.post_processor = processors.TemplateProcessing(
            single="$A", pair="$A $B", special_tokens=[]
        )
        self.special_tokens: dict[int, str] = {
            token_id: token.content
            for token_id, token in self._fast.get_added_tokens_decoder().items()
            if token.special
        }
        self.num_tokens = 1 + max(self._fast.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> Encoded:
        encoding = self._fast.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        cuts = [
            end if next_start >= end else NO_CUT
            for (_, end), (next_start, _) in zip(offsets, offsets[1:], strict=False)
        ]
        return Encoded(list(encoding.ids), cuts + [end for _, end in offsets[-1:]])

    def encode_after(self, tail: str, text: str) -> list[int] | None:
        """Returns ``text`` as it is encoded after ``tail``; None if its tokens cannot be told from those
        before.

        Where the tokenizer would join the end of the tail and the beginning of the text, the text is encoded
        as if it began a line: without the space that some put before the first word.
        """
        for before in (tail, "\n"):
            encoded = self.encode(before + text)
            if not before:
                return encoded.ids
            if len(before) in encoded.cuts:
                return encoded.ids[encoded.cuts.index(len(before)) + 1 :]
        return None

    def decode(self, token_ids: list[int]) -> str:
        return str(self._fast.decode(token_ids, skip_special_tokens=True))


def fast_form(tokenizer: Any) -> Tokenizer | None:
    """Returns the tokenizers library's object of a transformers tokenizer; None if it is written in
    Python."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return fast if isinstance(fast, Tokenizer) else None
