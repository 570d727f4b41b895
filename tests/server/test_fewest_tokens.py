"""A text is refused untokenized only where no tokens of the vocabulary could make it fit."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.server.tiny_tokenizer import byte_characters
from truedraft.server.text.fewest_tokens import FewestTokens

BYTES = {character: byte for byte, character in enumerate(byte_characters())}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}
TEXT = 'aä漢 \u0301\u0323\n"<x>0'


def byte_level(
    normalizer: normalizers.Normalizer | None = None, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab=BYTES | {"aa": 256, "aaaa": 257}, merges=[("a", "a"), ("aa", "aa")]))
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*([pre_tokenizer] if pre_tokenizer else []), own])
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def fallback() -> Tokenizer:
    vocab = FALLBACK | {"<unk>": 256, "a": 257, "▁": 258}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def missing_bytes() -> Tokenizer:
    """Published vocabularies are like this: a text of nothing but such characters has no token at all."""
    made = byte_level()
    vocab = {character: number for character, number in BYTES.items() if number not in (ord("a"), ord(" "))}
    made.model = models.BPE(vocab=vocab, merges=[])
    return made


@pytest.mark.parametrize(
    ("made", "bytes_per_token"),
    [
        (byte_level(), 4),
        (byte_level(normalizers.NFC()), 16),
        (byte_level(None, pre_tokenizers.Split(" ", "isolated")), 4),
        (byte_level(None, pre_tokenizers.Digits(individual_digits=True)), 4),
        (fallback(), 6),
        (missing_bytes(), 1),
    ],
)
def test_no_text_has_fewer(made: Tokenizer, bytes_per_token: int) -> None:
    fewest = FewestTokens(made)
    assert fewest("b" * 16 * 100) == 16 * 100 // bytes_per_token or bytes_per_token == 6
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice(TEXT) * rng.choice([1, 1, 9]) for _ in range(rng.randrange(30)))
        assert fewest(text) <= len(made.encode(text).ids)


def with_token(**options: bool) -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<x>", **options)])
    return made


@pytest.mark.parametrize(
    "made",
    [
        with_token(rstrip=True),
        with_token(lstrip=True),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace("aaaaaaaaaa", "a")),
        byte_level(None, pre_tokenizers.Split(" ", "removed")),
        byte_level(None, pre_tokenizers.Whitespace()),
        Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>", fuse_unk=True)),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    ],
)
def test_where_any_text_may_fit(made: Tokenizer) -> None:
    assert FewestTokens(made)("b" * 10_000) == 0
