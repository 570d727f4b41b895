"""Tells how many tokens a text has at least, where that is certain without tokenizing it.

A text that cannot fit is refused by it. Tokenizers that drop characters, or take a whole run of unknown ones
for one token, allow no such statement.
"""

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from truedraft.engine.text.vocabulary import BYTES

# Bytes of which NFC makes one, at most.
COMPOSED = 4
KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


class FewestTokens:
    """``__call__`` gives 0 where nothing is certain."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._longest, self._dropped = 0, b""  # bytes of a token; bytes that no token writes
        normalizers, pre_tokenizers = _parts(fast.normalizer), _parts(fast.pre_tokenizer)
        if not isinstance(fast.model, BPE) or not _keep_everything(fast, normalizers, pre_tokenizers):
            return
        vocabulary, longest = fast.get_vocab(), 0
        if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
            self._dropped = bytes(byte for character, byte in BYTES.items() if character not in vocabulary)
            longest = max(map(len, vocabulary))
        elif fast.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            longest = max(len(token.encode()) for token in vocabulary)
        composes = any(part["type"] == "NFC" for part in normalizers)
        if not (composes and self._dropped):
            self._longest = longest * (COMPOSED if composes else 1)

    def __call__(self, text: str) -> int:
        if not self._longest:
            return 0
        return -(-len(text.encode().translate(None, self._dropped)) // self._longest)


def _keep_everything(
    fast: FastTokenizer, normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]
) -> bool:
    """Tells whether what comes before the model leaves no character out."""
    if any(token.lstrip or token.rstrip for token in fast.get_added_tokens_decoder().values()):
        return False
    if any(part["type"] not in KEEPING or part.get("behavior") == "Removed" for part in pre_tokenizers):
        return False
    return all(part["type"] in ("NFC", "Prepend") or _only_grows(part) for part in normalizers)


def _only_grows(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace" or "String" not in normalizer["pattern"]:
        return False
    return len(normalizer["content"].encode()) >= len(normalizer["pattern"]["String"].encode())


def _parts(component: Any) -> list[dict[str, Any]]:
    """The declarations of a normalizer or pre-tokenizer, those of a sequence one by one."""
    if component is None:
        return []
    declared = json.loads(component.__getstate__())
    return list(declared.get("normalizers") or declared.get("pretokenizers") or [declared])
