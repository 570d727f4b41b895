"""Text between two tokenizers: never half a character, the same text on both sides after every addition."""

import re
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.other_tokenizers import TEXT, TOKENIZERS
from truedraft.engine.proposers.translated.draft_text import DraftText
from truedraft.engine.proposers.translated.target_text import TargetText
from truedraft.engine.proposers.translated.tokenizer import NO_CUT, TextTokenizer

LOSSLESS = ["coarse", "fine", "metaspace"]
NAMES = st.sampled_from(LOSSLESS)
# Any characters, and pieces of the text that the tokenizers were trained on.
PIECES = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.tuples(st.integers(0, len(TEXT)), st.integers(0, 30)).map(lambda at: TEXT[at[0] : sum(at)]),
    ),
    max_size=12,
)


@cache
def tokenizer(name: str) -> TextTokenizer:
    return TextTokenizer(TOKENIZERS[name]())


def cut_up(ids: list[int], sizes: list[int]) -> list[list[int]]:
    ends = [0]
    for size in sizes:
        ends.append(min(len(ids), ends[-1] + size))
    return [ids[start:end] for start, end in pairwise([*ends, len(ids)])]


def one_mark(text: str) -> str:
    """Broken bytes are grouped differently when they come one by one: a run of marks counts as one."""
    return re.sub("\ufffd+", "\ufffd", text)


SIZES = st.lists(st.integers(1, 9), max_size=30)


@given(st.sampled_from(["coarse", "fine"]), st.data(), SIZES)
def test_any_tokens_give_the_text_of_all_of_them(name: str, data: st.DataObject, sizes: list[int]) -> None:
    """Random ids are mostly broken UTF-8."""
    target = tokenizer(name)
    ids = data.draw(st.lists(st.integers(1, target.num_tokens - 1), max_size=60))
    text, stream, seen = "", TargetText(target, {}), 0
    for part in cut_up(ids, sizes):
        text += stream.extend(part)
        seen += len(part)
        assert one_mark(text + target.decode(stream.pending)) == one_mark(target.decode(ids[:seen]))
        assert one_mark(target.decode(ids[: seen - len(stream.pending)])).endswith(one_mark(stream.tail))
        assert len(stream.pending) <= 3


@given(NAMES, PIECES, SIZES)
def test_text_survives_in_any_portions(name: str, pieces: list[str], sizes: list[int]) -> None:
    target, text = tokenizer(name), "".join(pieces)
    stream = TargetText(target, {})
    released = "".join(stream.extend(part) for part in cut_up(target.encode(text).ids, sizes))
    assert released + target.decode(stream.pending) == text


def test_a_split_character_waits_for_its_last_byte() -> None:
    target = tokenizer("fine")
    ids = target.encode("a🐢").ids
    stream = TargetText(target, {})
    assert [stream.extend([token_id]) for token_id in ids] == ["a", *[""] * (len(ids) - 2), "🐢"]


@pytest.mark.parametrize(("special_text", "expected"), [("", "ab"), ("<|end|>", "a<|end|>b")])
def test_special_tokens_are_left_out_or_carried_over(special_text: str, expected: str) -> None:
    target = tokenizer("coarse")
    (end,) = target.special_tokens
    stream = TargetText(target, {end: special_text})
    ids = [*target.encode("a").ids, end, *target.encode("b").ids]
    assert stream.extend(ids[:2]) + stream.extend(ids[2:]) == expected
    assert stream.tail == "b"


@given(NAMES, PIECES)
def test_the_draft_has_the_same_text_after_every_addition(name: str, pieces: list[str]) -> None:
    draft = tokenizer(name)
    text, state = "", DraftText(draft)
    for piece in pieces:
        before = list(state.ids)
        num_same = state.append(piece)
        text += piece
        assert draft.decode(state.ids) == text
        assert state.ids[:num_same] == before[:num_same]
        assert (
            num_same == len(before) or state.ids[num_same : num_same + 1] != before[num_same : num_same + 1]
        )


@given(st.sampled_from([*LOSSLESS, "characters"]), st.lists(st.integers(1, 20), max_size=40))
def test_the_tokens_are_those_of_the_whole_text(name: str, sizes: list[int]) -> None:
    """However it came, ordinary text is cut as if it had come at once: the draft model expects that."""
    draft, state, start = tokenizer(name), DraftText(tokenizer(name)), 0
    for size in sizes:
        state.append(TEXT[start : start + size])
        start += size
    if start:
        assert state.ids == draft.leading_ids + draft.encode(TEXT[:start]).ids


@settings(max_examples=200)
@given(st.sampled_from(["coarse", "fine"]), NAMES, st.data(), SIZES)
def test_both_sides_agree_whatever_the_target_says(
    target_name: str, draft_name: str, data: st.DataObject, sizes: list[int]
) -> None:
    target, draft = tokenizer(target_name), tokenizer(draft_name)
    known = st.sampled_from(target.encode(TEXT).ids)
    ids = data.draw(st.lists(known | st.integers(1, target.num_tokens - 1), max_size=80))
    text, stream, state = "", TargetText(target, {}), DraftText(draft)
    for part in cut_up(ids, sizes):
        piece = stream.extend(part)
        state.append(piece)
        text += piece
        assert draft.decode(state.ids) == text


@given(NAMES, PIECES, PIECES)
def test_text_behind_text_is_encoded_alone(name: str, before: list[str], pieces: list[str]) -> None:
    target, tail, text = tokenizer(name), "".join(before), "".join(pieces)
    ids = target.encode_after(tail, text)
    if ids is not None and tail:
        everything = target.encode(tail).ids + ids
        assert target.decode(everything) == tail + text


def test_words_are_joined_only_within_what_is_new() -> None:
    """The target has said " walk" in two tokens; what follows starts where that ends."""
    target = tokenizer("coarse")
    whole = target.encode(" walked").ids
    assert target.encode_after(" walk", "ed slowly") == target.encode("ed slowly").ids
    assert target.encode_after("The", " walked") == whole
    llama = tokenizer("metaspace")
    assert llama.decode(llama.encode("The").ids + (llama.encode_after("The", "re") or [])) == "There"


def test_cuts_never_split_a_character() -> None:
    for name in LOSSLESS:
        encoded = tokenizer(name).encode(TEXT)
        cuts = [cut for cut in encoded.cuts if cut != NO_CUT]
        assert cuts == sorted(cuts)
        assert cuts[-1] == len(TEXT)
        for index, cut in enumerate(encoded.cuts):
            assert cut == NO_CUT or tokenizer(name).decode(encoded.ids[: index + 1]) == TEXT[:cut]


@pytest.mark.parametrize("name", [*LOSSLESS, "characters"])
def test_an_addition_costs_the_same_in_a_long_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    honest = TextTokenizer.encode

    def encode(self: TextTokenizer, text: str) -> object:
        lengths.append(len(text))
        return honest(self, text)

    state = DraftText(tokenizer(name))
    state.append(TEXT * 20)
    monkeypatch.setattr(TextTokenizer, "encode", encode)
    for start in range(0, len(TEXT), 5):
        state.append(TEXT[start : start + 5])
    assert max(lengths) < 150
