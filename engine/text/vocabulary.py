"""Reads the exact bytes of every token from the vocabulary, instead of decoding, and a text for each.

A token may be part of a character only, and decoding such a token alone loses its bytes. Byte-level
vocabularies (GPT-2's alphabet) and those with byte fallback (``<0x0A>``) tell them.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

SPACE_MARK = "▁"  # This is SentencePiece's space.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Knows one tokenizer's tokens. A token's bytes are worked out when it is first asked for, then kept."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._added = {
            token_id: token.content.encode() for token_id, token in fast.get_added_tokens_decoder().items()
        }
        self._decoder_types = set(_decoder_types(fast))
        # Is true where a text is its tokens' bytes in a row, with nothing done to it afterwards.
        self.is_byte_level = self._decoder_types == {"ByteLevel"}
        self._known: dict[int, bytes | None] = {}
        self.special = {
            token.content: token_id
            for token_id, token in fast.get_added_tokens_decoder().items()
            if token.special
        }
        # Added tokens such as <tool_call> are text.
        self.tags = {
            token.content: token_id
            for token_id, token in fast.get_added_tokens_decoder().items()
            if token.content.startswith("<") and token.content.endswith(">")
        }
        self._special_ids = set(self.special.values())
        # Maps token ids to bytes, for vocabularies with byte fallback.
        self.fallback_bytes: dict[int, bytes] = {}
        if "ByteFallback" in self._decoder_types:
            ids = {fast.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
            self.fallback_bytes = {token_id: byte for token_id, byte in ids.items() if token_id is not None}

    def bytes_of(self, token_id: int) -> bytes | None:
        """Returns a token's bytes; None for an id without a token: models pad their vocabularies."""
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def is_without_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        return (skip_special_tokens and token_id in self._special_ids) or self.bytes_of(token_id) is None

    def text_of(self, token_id: int, mark: str = "") -> str:
        r"""Returns a token's text: ``mark`` and ``\xf0\x9f`` for a part of one, ``token_id:7`` for none.

        This is how OpenAI writes them, with the mark ``bytes:`` on completions and none on chats.
        """
        raw = self.bytes_of(token_id)
        if raw is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return mark + "".join(f"\\x{byte:02x}" for byte in raw)

    def _read(self, token_id: int) -> bytes | None:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return None
        if "ByteLevel" in self._decoder_types:
            # The decoder takes whatever is written in its alphabet for bytes, added tokens too.
            is_bytes = all(character in BYTES for character in token)
            return bytes(map(BYTES.__getitem__, token)) if is_bytes else str(token).encode()
        if token_id in self._added:
            return self._added[token_id]
        if "ByteFallback" in self._decoder_types and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._decoder_types & {"Metaspace", SPACE_MARK}:
            return str(token).replace(SPACE_MARK, " ").encode()
        return str(self._fast.decode([token_id], skip_special_tokens=False)).encode()


def _decoder_types(fast: FastTokenizer) -> Iterator[str]:
    """Returns the types of all decoders, those inside a sequence too; the space mark stands for its
    replacement."""
    pending: list[Any] = [json.loads(fast.decoder.__getstate__())] if fast.decoder is not None else []
    while pending:
        decoder = pending.pop()
        yield decoder["type"]
        if decoder["type"] == "Replace" and decoder["pattern"] == {"String": SPACE_MARK}:
            yield SPACE_MARK
        pending += decoder.get("decoders", [])


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for characters from 256
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTES = _byte_alphabet()
