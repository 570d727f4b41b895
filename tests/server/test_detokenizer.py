"""Properties of incremental detokenization: nothing lost, nothing split, no stop string let out."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraft.engine.text.detokenizer import Detokenizer, longest_stop_prefix
from truedraft.engine.text.stop_strings import StopStrings
from truedraft.server.text.tokenizer import Tokenizer


def run(detokenizer: Detokenizer, steps: Sequence[Sequence[int]]) -> tuple[list[str], int, bool]:
    """The released pieces, the number of tokens that counted, and whether a stop string ended it."""
    pieces, num_tokens = [], 0
    for step in steps:
        piece = detokenizer.push(step)
        pieces.append(piece.text)
        num_tokens += len(piece.offsets)
        if piece.stopped:
            return pieces, num_tokens, True
    last = detokenizer.finish()
    return [*pieces, last.text], num_tokens, last.stopped


def cut(token_ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut into steps of the given sizes, used round and round."""
    steps, position, number = [], 0, 0
    while position < len(token_ids):
        size = sizes[number % len(sizes)]
        steps.append(list(token_ids[position : position + size]))
        position, number = position + size, number + 1
    return steps


class Match(NamedTuple):
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str]) -> Match | None:
    """Returns the stop string that is complete first, by definition, and of two the longer one."""
    matches = [Match(text.find(stop), text.find(stop) + len(stop)) for stop in stops if stop in text]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


token_lists = st.lists(st.integers(0, 259), max_size=40)
step_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
# Few letters, so that stop strings overlap with the text and with each other.
small_texts = st.text("ab😀", max_size=20)
small_stops = st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=4)


@given(token_ids=token_lists, sizes=step_sizes, skip=st.booleans())
def test_pieces_make_up_the_full_decode(
    tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    pieces, num_tokens, _ = run(
        Detokenizer(tokenizer.stream(skip_special_tokens=skip)), cut(token_ids, sizes)
    )
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert num_tokens == len(token_ids)


@given(text=st.text(max_size=20), sizes=step_sizes)
def test_characters_are_never_split(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    pieces, _, _ = run(
        Detokenizer(tokenizer.stream(skip_special_tokens=True)), cut(list(text.encode()), sizes)
    )
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(text=small_texts, stops=small_stops, sizes=step_sizes, include=st.booleans())
def test_stop_strings_end_the_text_wherever_it_was_cut(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    stream = tokenizer.stream(skip_special_tokens=True)
    detokenizer = Detokenizer(stream, StopStrings(stops), include_stop_string=include)
    pieces, num_tokens, stopped = run(detokenizer, cut(list(text.encode()), sizes))
    match = find_stop(text, stops)
    assert stopped == (match is not None)
    if match is None:
        assert "".join(pieces) == text
    else:
        assert "".join(pieces) == text[: match.end if include else match.start]
        assert num_tokens == len(text[: match.end].encode())


@given(text=small_texts, stops=small_stops)
def test_released_text_never_has_to_be_taken_back(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    """Whatever comes next, what was released stays outside of every stop string."""
    detokenizer = Detokenizer(tokenizer.stream(skip_special_tokens=True), StopStrings(stops))
    released = ""
    for position, token_id in enumerate(text.encode(), start=1):
        piece = detokenizer.push([token_id])
        released += piece.text
        if piece.stopped:
            break
        complete = text.encode()[:position].decode(errors="ignore")
        held = complete.removeprefix(released)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xabc", ["abc"], (1, 4)),
        ("xabc", ["c", "abc"], (1, 4)),
        ("xabc", ["abc", "b"], (2, 3)),
        ("aXbY", ["Y", "X"], (1, 2)),
        ("xyz", ["q"], None),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(
    text: str, stops: list[str], expected: tuple[int, int] | None
) -> None:
    assert find_stop(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello", ["lox"], 2),
        ("aaa", ["aaaa"], 3),
        ("abab", ["ababc", "bx"], 4),
        ("abc", ["x"], 0),
        ("", ["a"], 0),
    ],
)
def test_what_could_become_a_stop_string_is_held(text: str, stops: list[str], expected: int) -> None:
    assert longest_stop_prefix(text, stops) == expected


@given(text=small_texts, stops=small_stops, sizes=step_sizes, minimum=st.integers(0, 12))
def test_stop_strings_count_after_the_minimum_only(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], minimum: int
) -> None:
    raw = text.encode()
    detokenizer = Detokenizer(
        tokenizer.stream(skip_special_tokens=True), StopStrings(stops), min_tokens=minimum
    )
    pieces, _, stopped = run(detokenizer, cut(list(raw), sizes))
    # A character that is complete only after the minimum is searched as a whole.
    unsearched = raw[:minimum].decode(errors="ignore")
    match = find_stop(text[len(unsearched) :], stops)
    assert stopped == (match is not None)
    assert "".join(pieces) == (text if match is None else text[: len(unsearched) + match.start])
