"""Bytes and texts of single tokens, for the kinds of vocabularies there are."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from truedraft.engine.text.vocabulary import Vocabulary
from truedraft.server.text.tokenizer import Tokenizer as ServerTokenizer


def test_byte_level(tokenizer: ServerTokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    assert [vocabulary.bytes_of(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.bytes_of(256) == b"<|endoftext|>"
    assert vocabulary.bytes_of(260) is None


def test_texts(tokenizer: ServerTokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    assert vocabulary.text_of(ord("a"), "bytes:") == "a"
    assert vocabulary.text_of(0xF0) == "\\xf0"
    assert vocabulary.text_of(0xF0, "bytes:") == "bytes:\\xf0"
    assert vocabulary.text_of(999, "bytes:") == "token_id:999"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
    ids=["replace", "metaspace"],
)
def test_byte_fallback(decoder: decoders.Decoder) -> None:
    tokens = ["<unk>", "▁Once", "<0xF0>", "é", "▁▁"]
    fast = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    fast.decoder = decoder
    fast.add_special_tokens([AddedToken("<unk>", special=True)])
    vocabulary = Vocabulary(fast)
    raw = [vocabulary.bytes_of(token_id) for token_id in range(5)]
    assert raw == [b"<unk>", b" Once", b"\xf0", "é".encode(), b"  "]
    assert vocabulary.text_of(2) == "\\xf0"


def test_other_kinds_are_decoded() -> None:
    fast = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    assert Vocabulary(fast).bytes_of(1) == b"play"
    fast.decoder = decoders.WordPiece()
    assert Vocabulary(fast).bytes_of(1) == b"play"
