"""Properties of text streams on every kind of decoder: nothing raises, nothing is lost or taken back."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from tests.server.tiny_tokenizer import byte_characters
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.server.text.tokenizer import ChatTemplates, Tokenizer

WORDS = ["<unk>", "▁", "▁the", "a", "é", "▁▁"]
BYTE_IDS = range(len(WORDS), len(WORDS) + 256)
SPECIAL = len(WORDS) + 256
NUM_IDS = SPECIAL + 2  # one id without a token


def byte_fallback(model: str) -> Tokenizer:
    """Makes a vocabulary like SentencePiece's: Llama's BPE, or a Unigram model."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = FastTokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
        if model == "bpe"
        else models.Unigram([(token, -1.0) for token in tokens], unk_id=0, byte_fallback=True)
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(fast, ChatTemplates(None))


def byte_level() -> Tokenizer:
    """Makes a tokenizer like GPT-2's, without merges: token id = byte."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast, ChatTemplates(None))


TOKENIZERS = {model: byte_fallback(model) for model in ("bpe", "unigram")}
BYTE_LEVEL = byte_level()


def byte_of(token_id: int) -> int | None:
    return token_id - BYTE_IDS.start if token_id in BYTE_IDS else None


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool) -> str:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return "".join([*map(stream.step, token_ids), stream.flush()])


def expected(token_ids: Sequence[int], skip: bool) -> str:
    """Returns the text by its definition: runs of bytes are UTF-8, and each byte that is not is replaced."""
    kept = [token_id for token_id in token_ids if token_id < SPECIAL or (token_id == SPECIAL and not skip)]
    text = ""
    for is_byte, run in itertools.groupby(kept, lambda token_id: token_id in BYTE_IDS):
        if is_byte:
            raw = bytes(token_id - BYTE_IDS.start for token_id in run)
            text += raw.decode(errors="surrogateescape")
        else:
            text += "".join("<s>" if i == SPECIAL else WORDS[i].replace("▁", " ") for i in run)
    return "".join(
        "\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text
    ).removeprefix(" ")


lone_bytes = st.sampled_from([*b"A\n ", *"é€😀".encode(), 0xFF, 0xC0]).map(BYTE_IDS.start.__add__)
token_lists = st.lists(st.integers(0, NUM_IDS - 1) | lone_bytes, max_size=30)


@pytest.mark.parametrize("model", TOKENIZERS)
@given(token_ids=token_lists, skip=st.booleans())
@example(token_ids=[BYTE_IDS[0x41], BYTE_IDS[0xFF], 3], skip=True)
def test_any_ids_become_text(model: str, token_ids: list[int], skip: bool) -> None:
    assert streamed(TOKENIZERS[model], token_ids, skip) == expected(token_ids, skip)


@pytest.mark.parametrize("model", TOKENIZERS)
@given(
    parts=st.lists(st.integers(0, SPECIAL) | st.text(min_size=1, max_size=3), max_size=20), skip=st.booleans()
)
def test_the_text_is_that_of_all_ids_where_bytes_are_utf8(
    model: str, parts: list[int | str], skip: bool
) -> None:
    tokenizer = TOKENIZERS[model]
    token_ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            token_ids += [BYTE_IDS[byte] for byte in part.encode()]
        elif part not in BYTE_IDS:
            token_ids.append(part)
    assert streamed(tokenizer, token_ids, skip) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20))
def test_a_text_survives_encoding_and_streaming(text: str) -> None:
    tokenizer = TOKENIZERS["bpe"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, ids, skip=True) == text.replace("▁", " ")


@pytest.mark.parametrize("model", TOKENIZERS)
def test_a_character_is_out_with_its_last_byte(model: str) -> None:
    """A newline is one of those bytes, and a common stop string."""
    stream = TOKENIZERS[model].stream(skip_special_tokens=True)
    assert [stream.step(BYTE_IDS[byte]) for byte in "a\né".encode()] == ["a", "\n", "", "é"]
    piece = Detokenizer(TOKENIZERS[model].stream(skip_special_tokens=True), ["\n"]).push(
        [3, BYTE_IDS[0x0A], BYTE_IDS[0xFF]]
    )
    assert (piece.text, len(piece.offsets), piece.stop_string) == ("a", 2, "\n")


def test_a_decoder_that_changes_its_text_ends_no_stream() -> None:
    fast = FastTokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    fast.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])
    tokenizer = Tokenizer(fast, ChatTemplates(None))
    assert streamed(tokenizer, [2, 0, 1, 2, 0, 2], skip=True) == "cacac"[:2] + "cac"


@pytest.mark.parametrize("model", TOKENIZERS)
@given(before=token_lists, token_ids=token_lists, skip=st.booleans())
@example(before=[3], token_ids=[2], skip=True)
@example(before=[3, *[SPECIAL] * 20], token_ids=[2], skip=True)
@example(before=[1, 5, 1, 1, 5, 1, 1, 1, 1], token_ids=[2], skip=True)
def test_a_text_goes_on_with_what_was_before(
    model: str, before: list[int], token_ids: list[int], skip: bool
) -> None:
    """A decoder drops a space before the first token, and this is not the first one."""
    stream = TOKENIZERS[model].stream(skip_special_tokens=skip, after=before)
    text = "".join([*map(stream.step, token_ids), stream.flush()])
    whole = expected([*before, *token_ids], skip)
    first = streamed(TOKENIZERS[model], before, skip)
    if not first.endswith("\ufffd"):  # else the tokens may complete a character
        assert first + text == whole


@pytest.mark.parametrize("model", [*TOKENIZERS, "byte level"])
@given(text=st.text(max_size=4), cut=st.integers(1, 3), skip=st.booleans())
def test_a_cut_text_ends_before_the_character_that_is_not_complete(
    model: str, text: str, cut: int, skip: bool
) -> None:
    raw = text.encode()
    ids = [BYTE_IDS[byte] for byte in raw] if model in TOKENIZERS else [*raw]
    stream = (TOKENIZERS | {"byte level": BYTE_LEVEL})[model].stream(skip_special_tokens=skip)
    whole = (
        raw[: max(0, len(raw) - cut)].decode(errors="ignore").removeprefix(" " if model in TOKENIZERS else "")
    )
    out = "".join(map(stream.step, ids[: max(0, len(raw) - cut)]))
    assert out + stream.flush(is_cut=True) == whole


def test_bytes_that_begin_no_character_stay() -> None:
    for tokenizer, ids in ((TOKENIZERS["bpe"], [BYTE_IDS[0x41], BYTE_IDS[0xFF]]), (BYTE_LEVEL, [0x41, 0xFF])):
        stream = tokenizer.stream(skip_special_tokens=True)
        assert "".join(map(stream.step, ids)) + stream.flush(is_cut=True) == "A\ufffd"
