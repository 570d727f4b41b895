"""Properties of text streams on every kind of decoder: nothing raises, nothing is lost or taken back."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from tests.growth import num_lines
from tests.server.tiny_tokenizer import byte_characters
from truedraft.engine.text import text_stream as text_streams
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.engine.text.stop_strings import StopStrings
from truedraft.engine.text.text_stream import CONTEXT, continued, ending, text_stream
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


def byte_level(decoder: decoders.Decoder) -> Tokenizer:
    """Makes a tokenizer like GPT-2's, without merges: token id = byte. Of the added tokens some are written
    in the alphabet of the bytes, and some are not."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.decoder = decoder
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.add_tokens([AddedToken(text) for text in ("<call>", "é", "Ġé", "é b", "｜é｜")])
    return Tokenizer(fast, ChatTemplates(None))


TOKENIZERS = {model: byte_fallback(model) for model in ("bpe", "unigram")}
BYTE_LEVEL = byte_level(decoders.ByteLevel())
# Its bytes go through a decoder that might change the text.
BYTES_AND_MORE = byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))


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
    piece = Detokenizer(TOKENIZERS[model].stream(skip_special_tokens=True), StopStrings(["\n"])).push(
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
    tokenizer = TOKENIZERS[model]
    stream = continued(tokenizer.stream(skip_special_tokens=skip), tokenizer.ending(before))
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
    byte_ids = [BYTE_IDS[0x41], BYTE_IDS[0xFF]]
    for tokenizer, ids in (
        (TOKENIZERS["bpe"], byte_ids),
        (BYTE_LEVEL, [0x41, 0xFF]),
        (BYTES_AND_MORE, [0x41, 0xFF]),
    ):
        stream = tokenizer.stream(skip_special_tokens=True)
        assert "".join(map(stream.step, ids)) + stream.flush(is_cut=True) == "A\ufffd"


def plain(decoder: decoders.Decoder | None) -> Tokenizer:
    """Makes a tokenizer whose decoder looks at neighbours, at the beginning or at nothing."""
    words = ["[UNK]", "▁", "▁the", "a", "##a", ".", "'", "ab</w>", "é", "�"]
    fast = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    if decoder is not None:
        fast.decoder = decoder
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(fast, ChatTemplates(None))


DECODERS = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "word pieces": decoders.WordPiece("##", True),
    "strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
    "suffixes": decoders.BPEDecoder("</w>"),
    "byte level and fuse": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
}


@pytest.mark.parametrize("kind", DECODERS)
@given(token_ids=st.lists(st.integers(0, 11) | st.just(1), max_size=60), skip=st.booleans())
@example(token_ids=[3, *[1] * 40, 2, 2], skip=True)
def test_the_text_is_that_of_all_ids_for_every_decoder(kind: str, token_ids: list[int], skip: bool) -> None:
    tokenizer = plain(DECODERS[kind])
    assert streamed(tokenizer, token_ids, skip) == tokenizer.decode(token_ids, skip_special_tokens=skip)


some_bytes = st.sampled_from([*"é€😀".encode(), 0x41, 0xFF, 0xC0, 0xE0, 0x80, 0xED, 0xF4])


@given(
    token_ids=st.lists(st.integers(0, 263), max_size=60) | st.lists(some_bytes | st.integers(256, 263)),
    skip=st.booleans(),
)
@example(token_ids=[*"€".encode()] * 20, skip=True)
@example(token_ids=[*range(256, 263)], skip=False)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTES_AND_MORE], ids=["alone", "and more"])
def test_bytes_are_replaced_as_the_decoder_does(
    tokenizer: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    """However many come that are no character, and whatever stands between them."""
    assert streamed(tokenizer, token_ids, skip) == tokenizer.decode(token_ids, skip_special_tokens=skip)


KINDS = {
    "byte level": BYTE_LEVEL,
    "byte level and fuse": BYTES_AND_MORE,
    "metaspace": plain(DECODERS["metaspace"]),
} | TOKENIZERS
ENDLESS = {
    "special tokens": [SPECIAL, 10],
    "ids without a token": [10_000],
    "halves of characters": [BYTE_IDS[0xE2], 0xE2],
    "bytes that are none": [BYTE_IDS[0xFF], 0xFF],
    "replacement characters": [*(BYTE_IDS[byte] for byte in b"\xef\xbf\xbd"), *b"\xef\xbf\xbd", 9],
    "spaces": [1, 0x20],
}


class Decodings:
    """Counts the tokens that are decoded, for which Python's lines do not tell."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self.num_tokens = 0

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        self.num_tokens += len(token_ids)
        return str(self._fast.decode(token_ids, **options))

    def __getattr__(self, name: str) -> object:
        return getattr(self._fast, name)


@pytest.mark.parametrize("tokens", ENDLESS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_wherever_it_stands(kind: str, tokens: str) -> None:
    """No text may ever come, and the prompt may have none either."""
    tokenizer = KINDS[kind]

    def work(size: int) -> int:
        counted = Decodings(tokenizer._fast)
        token_ids = ENDLESS[tokens] * size

        def read() -> None:
            stream = text_stream(counted, tokenizer.vocabulary, skip_special_tokens=True)  # type: ignore[arg-type]
            continued(stream, ending(tokenizer.vocabulary, token_ids))
            for token_id in token_ids:
                stream.step(token_id)
            stream.flush()

        return num_lines(read) + counted.num_tokens

    works = [work(size) for size in (100, 200, 400)]
    assert all(later <= 2.2 * earlier for earlier, later in pairwise(works)), works


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=st.lists(st.integers(0, 270), max_size=100))
def test_a_prompts_ending_is_short(kind: str, token_ids: list[int]) -> None:
    tokenizer = KINDS[kind]
    found = tokenizer.ending(token_ids + [10_000] * 50)
    assert len(found) <= 2 * CONTEXT
    assert tokenizer.ending(found) == found


@pytest.mark.parametrize("kind", KINDS)
@given(before=token_lists, first=token_lists, second=token_lists, skip=st.booleans())
def test_copies_go_on_by_themselves(
    kind: str, before: list[int], first: list[int], second: list[int], skip: bool
) -> None:
    stream = KINDS[kind].stream(skip_special_tokens=skip, marks=["<s>"])
    start = "".join(map(stream.step, before))
    copied = stream.copy()
    texts = [
        start + "".join([*map(each.step, rest), each.flush()])
        for each, rest in ((stream, first), (copied, second))
    ]
    for text, rest in zip(texts, (first, second), strict=True):
        alone = KINDS[kind].stream(skip_special_tokens=skip, marks=["<s>"])
        assert text == "".join([*map(alone.step, [*before, *rest]), alone.flush()])


@pytest.mark.parametrize("kind", ["byte level", "byte level and fuse", "bpe"])
def test_a_character_ends_before_a_mark(kind: str) -> None:
    """It is not completed by bytes that come after the mark."""
    tokenizer, (first, second) = KINDS[kind], ("é".encode())
    special = tokenizer._fast.token_to_id("<s>")
    stream = tokenizer.stream(skip_special_tokens=True, marks=["<s>"])
    ids = [BYTE_IDS[first], special, BYTE_IDS[second]] if kind == "bpe" else [first, special, second]
    assert "".join([*map(stream.step, ids), stream.flush()]) == "\ufffd<s>\ufffd"


def every_kind(test: Callable[..., None], **arguments: str) -> None:
    for kind in KINDS:
        test(kind, **arguments)


decoded = partial(test_the_text_is_that_of_all_ids_for_every_decoder, "strip")
replaced = partial(test_bytes_are_replaced_as_the_decoder_does, BYTES_AND_MORE)
copied = partial(every_kind, test_copies_go_on_by_themselves)
cheap = partial(every_kind, test_a_token_costs_the_same_wherever_it_stands)
short = partial(every_kind, test_a_prompts_ending_is_short)


@pytest.mark.parametrize(
    ("right", "wrong", "gate"),
    [
        ("if len(self._window) >= 2 * CONTEXT:", "if False:", partial(cheap, tokens="halves of characters")),
        ("del self._window[:-CONTEXT]", "del self._window[:-1]", decoded),
        ("- num_left", "", replaced),
        ("and self._ends_inside_character()", "", test_bytes_that_begin_no_character_stay),
        ("if vocabulary.is_byte_level:", "if True:", decoded),
        ("other._window = self._window.copy()", "pass", copied),
        ("other.setstate(utf8.getstate())", "pass", copied),
        ("or place < CONTEXT", "or True", short),
        ("num_with_text += has_text", "pass", short),
        (
            "self._stream = self._new.copy()",
            "pass",
            partial(test_a_character_ends_before_a_mark, "byte level and fuse"),
        ),
    ],
)
def test_planted_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, gate: Callable[[], None]
) -> None:
    planted: dict[str, Any] = {}
    source = Path(text_streams.__file__).read_text()
    assert source.count(right) == 1
    exec(compile(source.replace(right, wrong), "planted", "exec"), planted)
    for name in ("text_stream", "ending", "MarkedTextStream"):
        monkeypatch.setattr(f"truedraft.server.text.tokenizer.{name}", planted[name])
        monkeypatch.setitem(globals(), name, planted[name])
    with pytest.raises((AssertionError, ExceptionGroup)):
        gate()
