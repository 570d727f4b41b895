"""Properties of one choice's deltas: however rounds cut the tokens, the same text and the same logprobs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.engine.messages import (
    FinishReason,
    PredictionUse,
    RoundOrigin,
    RoundTrace,
    TokenLogprob,
    TokenOutput,
)
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.engine.text.stop_strings import StopStrings
from truedraft.server.text.chat_parts import whole_message
from truedraft.server.text.choice import ChoiceDelta, ChoiceReader, FinishedChoice
from truedraft.server.text.families import CALL_FORMATS, REASONING_MARKS
from truedraft.server.text.message_parser import MessageFormat, MessageParser
from truedraft.server.text.tokenizer import ChatTemplates, Tokenizer

EOS = 256


def deltas_of(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    sizes: Sequence[int],
    stops: Sequence[str],
    *,
    include_stop: bool = False,
    min_tokens: int = 0,
) -> list[ChoiceDelta]:
    """The last token ends the sequence; if it is the eos token it is a stop token."""
    reader = reader_of(tokenizer, stops, include_stop=include_stop, min_tokens=min_tokens)
    deltas: list[ChoiceDelta] = []
    position = number = 0
    while position < len(token_ids) and reader.finish_reason is None:
        end = position + sizes[number % len(sizes)]
        deltas.append(reader.read([output_of(token_ids, position, end)]))
        position, number = end, number + 1
    return deltas


def reader_of(
    tokenizer: Tokenizer, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
) -> ChoiceReader:
    stream = tokenizer.stream(skip_special_tokens=True)
    detokenizer = Detokenizer(
        stream, StopStrings(stops), include_stop_string=include_stop, min_tokens=min_tokens
    )
    return ChoiceReader(0, detokenizer, include_stop_string=include_stop, text_start=0)


def output_of(token_ids: Sequence[int], start: int, end: int) -> TokenOutput:
    emitted = list(token_ids[start:end])
    reason: FinishReason = "stop" if token_ids[-1] == EOS else "length"
    scored = [TokenLogprob(token_id, -float(at), []) for at, token_id in enumerate(emitted, start)]
    return TokenOutput("r-0", 0, emitted, reason if end >= len(token_ids) else None, 0, 0, logprobs=scored)


def eventful(output: TokenOutput, number: int) -> TokenOutput:
    """With all that an output can have, different in each."""
    length = len(output.token_ids)
    return msgspec.structs.replace(
        output,
        num_rounds=1 + number % 3,
        num_draft_tokens=number % 4 * length,
        num_accepted_tokens=number % 4,
        seed=7,
        prompt_logprobs=[None, TokenLogprob(1, -1.0, [])] if number == 0 else None,
        trace=RoundTrace(number, "ngram", "rejection", output.token_ids, [], [], 0, 0),
        prediction=PredictionUse([number * 10 + at for at in range(length)], number * 10, 9),
    )


def joined(deltas: Sequence[ChoiceDelta]) -> FinishedChoice:
    choice = FinishedChoice(0)
    for delta in deltas:
        choice.add(delta)
    return in_one_piece(choice)


def in_one_piece(choice: FinishedChoice) -> FinishedChoice:
    return replace(choice, _texts=[choice.text], _parts=choice.parts)


tokens = st.lists(
    st.one_of(st.sampled_from([*"ab😀é".encode()]), st.integers(0, 259)), min_size=1, max_size=30
)
texts = st.text("ab😀é", min_size=1, max_size=20).map(lambda text: [*text.encode(), EOS])
step_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
stop_lists = st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3)
minimums = st.integers(0, 10)


@given(
    token_ids=st.one_of(tokens, texts),
    sizes=step_sizes,
    stops=stop_lists,
    include=st.booleans(),
    minimum=minimums,
)
def test_rounds_do_not_matter(
    tokenizer: Tokenizer,
    token_ids: list[int],
    sizes: list[int],
    stops: list[str],
    include: bool,
    minimum: int,
) -> None:
    def read(sizes: Sequence[int]) -> list[ChoiceDelta]:
        return deltas_of(tokenizer, token_ids, sizes, stops, include_stop=include, min_tokens=minimum)

    whole = joined(read([len(token_ids)]))
    assert joined(read(sizes)) == whole
    # Every token that counts is scored, once, in order; none after it is.
    assert [scored.logprob for scored in whole.scored] == [-float(at) for at in range(len(whole.token_ids))]
    assert [scored.token_id for scored in whole.scored] == whole.token_ids
    assert whole.token_ids == token_ids[: len(whole.token_ids)]


@given(
    token_ids=st.one_of(tokens, texts),
    sizes=step_sizes,
    together=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    stops=stop_lists,
    include=st.booleans(),
)
def test_what_comes_together_is_read_as_if_it_came_one_by_one(
    tokenizer: Tokenizer,
    token_ids: list[int],
    sizes: list[int],
    together: list[int],
    stops: list[str],
    include: bool,
) -> None:
    outputs: list[TokenOutput] = []
    position = 0
    while position < len(token_ids):
        end = position + sizes[len(outputs) % len(sizes)]
        outputs.append(eventful(output_of(token_ids, position, end), len(outputs)))
        position = end

    def read(counts: Sequence[int]) -> tuple[ChoiceReader, list[ChoiceDelta]]:
        reader, deltas, left = reader_of(tokenizer, stops, include_stop=include), [], list(outputs)
        while left and reader.finish_reason is None:
            count = counts[len(deltas) % len(counts)]
            deltas.append(reader.read(left[:count]))
            left = left[count:]
        return reader, deltas

    alone, one_by_one = read([1])
    reader, deltas = read(together)
    assert joined(deltas) == joined(one_by_one)
    assert reader.finish_reason == alone.finish_reason == deltas[-1].finish_reason
    assert reader.trace == alone.trace == [output.trace for output in outputs[: len(one_by_one)]]
    assert reader.seed == alone.seed
    assert reader.counts == alone.counts
    drafting = [output for output in outputs[: len(one_by_one)] if output.num_draft_tokens]
    assert (reader.counts.rounds, reader.counts.drafted, reader.counts.accepted) == (
        sum(output.num_rounds for output in drafting),
        sum(output.num_draft_tokens for output in drafting),
        sum(output.num_accepted_tokens for output in drafting),
    )
    num_rounds = sum(output.num_rounds for output in outputs[: len(one_by_one)])
    assert sum(delta.num_rounds for delta in deltas) == num_rounds


@given(token_ids=texts, sizes=step_sizes, stops=stop_lists)
def test_a_chunk_scores_the_tokens_whose_text_it_completes(
    tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    released = ""
    num_scored = 0
    for delta in deltas_of(tokenizer, token_ids, sizes, stops):
        released += delta.text
        num_scored += len(delta.scored)
        if delta.finish_reason is None:
            # Every token here is a byte: those of the released text and no others.
            assert num_scored == len(released.encode())


@given(
    token_ids=st.one_of(tokens, texts),
    sizes=step_sizes,
    stops=stop_lists,
    include=st.booleans(),
    accepted=st.integers(0, 6),
)
def test_every_token_has_an_origin_and_their_texts_are_the_text(
    tokenizer: Tokenizer,
    token_ids: list[int],
    sizes: list[int],
    stops: list[str],
    include: bool,
    accepted: int,
) -> None:
    reader, choice = reader_of(tokenizer, stops, include_stop=include), FinishedChoice(0)
    position, kinds = 0, []
    while position < len(token_ids) and reader.finish_reason is None:
        output = output_of(token_ids, position, position + sizes[position % len(sizes)])
        length = len(output.token_ids)
        kept = min(accepted, length - 1)
        kinds += ["accepted"] * kept + ["plain"] + ["recovered"] * (length - kept - 1)
        # One round accepted its whole draft, one had no draft, and others had theirs rejected.
        rounds = [RoundOrigin("ngram", kept, kept, kept)] if kept else []
        rounds += [RoundOrigin("none", 0, 0, 1)] + [RoundOrigin("ngram", 2, 0, 1)] * (length - kept - 1)
        choice.add(reader.read([msgspec.structs.replace(output, origins=rounds)]))
        assert (
            "".join(token.text for token in choice.origins)
            == choice.text[: sum(len(token.text) for token in choice.origins)]
        )
        position += length
    assert "".join(token.text for token in choice.origins) == choice.text
    assert [token.token_id for token in choice.origins] == choice.token_ids
    assert [token.origin for token in choice.origins] == kinds[: len(choice.origins)]


@given(token_ids=texts, sizes=step_sizes)
def test_offsets_are_places_in_the_text(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> None:
    choice = joined(deltas_of(tokenizer, token_ids, sizes, []))
    starts = [place for place, character in enumerate(choice.text) for _ in character.encode()]
    assert [scored.offset for scored in choice.scored] == [*starts, len(choice.text)]


def test_part_of_a_tokens_text_is_held_back(tokenizer: Tokenizer) -> None:
    """A special token waits for the text after it; the last entry waits for the stop string to fail."""
    deltas = deltas_of(tokenizer, [*b"a", 257, *b"<", *b"b", *b"c"], [1], ["<c"])
    assert [delta.text for delta in deltas] == ["a", "", "", "<b", "c"]
    assert [len(delta.scored) for delta in deltas] == [1, 0, 0, 3, 1]
    assert [scored.offset for delta in deltas for scored in delta.scored] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("size", [1, 3, 500])
def test_marks_that_are_spelled_are_text(tmp_path: Path, special: bool, size: int) -> None:
    """Where a mark has a token of its own: a grammar takes nothing else for it either."""
    made = FastTokenizer.from_file(str(write_tokenizer(tmp_path / "model") / "tokenizer.json"))
    tokens = [REASONING_MARKS[0].open, REASONING_MARKS[0].close, "<tool_call>"]
    made.add_tokens([AddedToken(token, special=special) for token in tokens])
    tokenizer = Tokenizer(made, ChatTemplates(None))
    calls = next(each for each in CALL_FORMATS if each.name == "hermes")
    form = MessageFormat(REASONING_MARKS[0], calls, is_reasoning=True)
    form = replace(form, token_ids=tokenizer.grammar_ids(form.literals))
    assert form.token_ids.keys() == {*tokens}
    _, close, call = (made.token_to_id(token) for token in tokens)
    spelled = b'</think>\n<tool_call>\n{"name": "add", "arguments": {}}'
    rest = spelled.partition(b"<tool_call>")[2] + b"\n</tool_call>"
    token_ids = [*spelled, 0xC3, close, *spelled, call, *rest]  # a character that is cut
    detokenizer = Detokenizer(tokenizer.stream(skip_special_tokens=True, marks=form.literals))
    reader = ChoiceReader(
        0, detokenizer, include_stop_string=False, text_start=0, message=MessageParser(form)
    )
    choice = FinishedChoice(0)
    for start in range(0, len(token_ids), size):
        choice.add(reader.read([output_of([*token_ids, EOS], start, start + size)]))
    if reader.finish_reason is None:
        choice.add(reader.read([output_of([*token_ids, EOS], len(token_ids), len(token_ids) + 1)]))
    message = whole_message(choice.parts)
    assert message.reasoning_content == f"{spelled.decode()}\N{REPLACEMENT CHARACTER}"
    assert message.content == spelled.decode()
    assert [call.function.name for call in message.tool_calls or []] == ["add"]
    assert reader.finish_reason == "tool_calls"
