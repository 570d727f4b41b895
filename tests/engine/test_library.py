"""What the library does with text: stop strings, several completions, schemas, conversations, streams."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_text_stream import BYTE_LEVEL, TOKENIZERS
from truedraft import LLM, Completion, RequestError, SamplingParams
from truedraft.engine.library.chat_template import ChatTemplate
from truedraft.engine.library.completion import DeltaReader
from truedraft.engine.library.params import checked_params
from truedraft.engine.messages import TokenOutput
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.engine.text.stop_strings import StopStrings
from truedraft.server.text.tokenizer import Tokenizer

STORY = "Once upon a time"
ASK = [{"role": "user", "content": "Tell me a story."}]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
SCHEMA = {
    "title": "A title that no llguidance needs",
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return LLM(num_speculative_tokens=3, cache_memory="64MiB", num_threads=1)


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    yield loaded
    assert not loaded.core.has_work
    assert loaded.core.scheduler.target_pool.usage == 0


def text_of(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return llm.generate(prompt, params)[0].text


def test_a_stop_string_ends_the_text_where_it_begins(llm: LLM) -> None:
    whole = text_of(llm, STORY, GREEDY)
    for length in (1, 2, 5):
        for start in range(0, len(whole) - length, 7):
            stop = whole[start : start + length]
            params = SamplingParams(max_tokens=24, temperature=0, stop=["~", stop], logprobs=0)
            (completion,) = llm.generate(STORY, params)
            assert completion.text == whole[: whole.index(stop)]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            # The tokens are those up to the one that completes it.
            before, ids = llm.tokenizer.encode(STORY), completion.token_ids
            assert stop in llm.decode([*before, *ids])[len(STORY) :]
            assert stop not in llm.decode([*before, *ids[:-1]])[len(STORY) :]
            assert len(completion.logprobs) == len(ids)


def test_a_stop_string_can_stay(llm: LLM) -> None:
    stop = text_of(llm, STORY, GREEDY)[9:12]
    kept, left = (
        SamplingParams(max_tokens=24, temperature=0, stop=stop, include_stop_str_in_output=keep)
        for keep in (True, False)
    )
    assert text_of(llm, STORY, kept) == text_of(llm, STORY, left) + stop


def test_a_stop_token_is_no_part_of_the_text(llm: LLM) -> None:
    ids = llm.generate(STORY, GREEDY)[0].token_ids
    (completion,) = llm.generate(STORY, SamplingParams(max_tokens=24, temperature=0, stop_token_ids=[ids[5]]))
    assert completion.token_ids == ids[:6]
    assert completion.stop_reason == ids[5]
    assert completion.text == text_of(llm, STORY, SamplingParams(max_tokens=5, temperature=0))


def test_stop_strings_do_not_count_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, stop=[" ", "e"], min_tokens=10)
    (completion,) = llm.generate(STORY, params)
    assert len(completion.token_ids) > 10


def test_one_text_of_a_batch_stops_and_others_go_on(llm: LLM) -> None:
    prompts = [STORY, "The sea", "A fox"]
    whole = [completion.text for completion in llm.generate(prompts, GREEDY)]
    stop = whole[1][3:6]
    params = [GREEDY, SamplingParams(max_tokens=24, temperature=0, stop=stop), GREEDY]
    texts = [completion.text for completion in llm.generate(prompts, params)]
    assert texts == [whole[0], whole[1][: whole[1].index(stop)], whole[2]]


def test_a_text_that_stops_leaves_the_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    running = []
    honest = llm.core.step

    def step() -> Any:
        running.append(len(llm.core.scheduler.running) + len(llm.core.scheduler.waiting))
        return honest()

    monkeypatch.setattr(llm.core, "step", step)
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    stopping = SamplingParams(max_tokens=400, temperature=0, stop=["e"], ignore_eos=True)
    llm.generate([STORY, "The sea"], [stopping, long])
    assert running[0] == 2
    assert running[-1] == 1


def test_what_comes_after_a_stop_string_is_not_looked_at(llm: LLM) -> None:
    """Another call may take steps while a stream is not read."""
    texts = [one.text for one in llm.generate(STORY, SamplingParams(max_tokens=30, seed=5, n=2))]
    stop = next(word for word in texts[0].split() if word not in texts[1])
    stream = llm.stream(STORY, SamplingParams(max_tokens=30, seed=5, n=2, stop=stop))
    deltas = [next(stream)]
    llm.generate("The sea", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    deltas += stream
    found = ["".join(delta.text for delta in deltas if delta.index == number) for number in (0, 1)]
    assert found == [texts[0].split(stop)[0], texts[1]]


def test_n_completions_follow_each_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=5, n=3)
    completions = llm.generate([STORY, "The sea"], params)
    assert [completion.index for completion in completions] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in completions}) == 6
    assert [one.token_ids for one in llm.generate("The sea", params)] == [
        one.token_ids for one in completions[3:]
    ]


def test_one_of_n_stops_and_others_go_on(llm: LLM) -> None:
    whole = llm.generate(STORY, SamplingParams(max_tokens=20, seed=5, n=3))
    stop = next(word for word in whole[1].text.split() if all(word not in whole[i].text for i in (0, 2)))
    cut = llm.generate(STORY, SamplingParams(max_tokens=20, seed=5, n=3, stop=[stop]))
    assert [one.text for one in cut] == [whole[0].text, whole[1].text.split(stop)[0], whole[2].text]


@pytest.mark.parametrize("source", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_a_schema(llm: LLM, source: Any) -> None:
    for completion in llm.generate(STORY, SamplingParams(max_tokens=60, seed=2, n=4, json_schema=source)):
        if completion.finish_reason == "stop":
            value = json.loads(completion.text)
            assert value.keys() == {"name", "age"}
            assert re.fullmatch("[a-z]{1,6}", value["name"])
            assert isinstance(value["age"], int)


def test_a_regex_is_of_the_whole_text(llm: LLM) -> None:
    for completion in llm.generate(
        STORY, SamplingParams(max_tokens=20, seed=3, n=4, regex=r"[a-c]{2}-\d{3}")
    ):
        assert re.fullmatch(r"[a-c]{2}-[0-9]{3}", completion.text)


def test_choices(llm: LLM) -> None:
    choice = ["yes", 'a "quoted" one', "no"]
    for completion in llm.generate(STORY, SamplingParams(max_tokens=20, seed=4, n=8, choice=choice)):
        assert completion.text in choice


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"json_schema": {"type": "string", "pattern": "(?=a)"}},
            "json_schema.pattern cannot be used: .*pattern",
        ),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema|grammar"),
        ({"json_schema": "{"}, "json_schema cannot be used"),
        ({"regex": "("}, "grammar|regex"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice exclude each other"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex and grammar exclude each other"),
        ({"choice": []}, "choice has no text"),
        ({"stop": ["a", ""]}, "stop has an empty string"),
        ({"stop": 7}, "stop: expected"),
        ({"n": 0}, "n is 0, but must be 1 to 128"),
        ({"n": 129}, "n is 129"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(STORY, SamplingParams(max_tokens=9, **params))


def test_a_prediction_is_drafted_from_and_changes_nothing(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=24, temperature=0, method="none")
    (expected,) = llm.generate(STORY, plain)
    params = SamplingParams(max_tokens=24, temperature=0, method="prediction", prediction=expected.text)
    (predicted,) = llm.generate(STORY, params)
    assert predicted.token_ids == expected.token_ids
    assert predicted.num_rounds < expected.num_rounds / 2


def test_conversations_are_answered_together(llm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
    together = llm.chat([ASK, other], GREEDY)
    assert [one.text for one in together] == [llm.chat(each, GREEDY)[0].text for each in (ASK, other)]
    assert llm.chat([], GREEDY) == llm.generate([], GREEDY) == []


def test_a_bad_conversation_is_named(llm: LLM) -> None:
    for bad, words in (
        ([], "no messages"),
        (["x"], "list of messages"),
        ([{"role": "user", "content": "x" * 9000}], "tokens"),
    ):
        with pytest.raises(RequestError, match=f"^prompt 1: .*{words}"):
            llm.chat([ASK, bad], GREEDY)  # type: ignore[list-item]


def test_a_stream_is_the_completion(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(max_tokens=24, temperature=0, stop=["e s", "zz"])):
        deltas = list(llm.stream(STORY, params))
        (expected,) = llm.generate(STORY, params)
        found = Completion()
        for delta in deltas:
            found.add_delta(delta)
        # Times decide how much is drafted.
        expected.num_draft_tokens, expected.num_accepted_tokens = (
            found.num_draft_tokens,
            found.num_accepted_tokens,
        )
        expected.num_rounds = found.num_rounds
        assert found == expected
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is not None
    assert "".join(delta.text for delta in llm.stream_chat(ASK, GREEDY)) == llm.chat(ASK, GREEDY)[0].text


class Template:
    """A tokenizer that has a template and no more."""

    special_tokens_map: dict[str, str] = {}

    def __init__(self, source: str | None) -> None:
        self.chat_template = source

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        options.pop("tokenize")
        rendered, _ = render_jinja_template([messages], chat_template=self.chat_template, **options)
        return str(rendered[0])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens  # the template writes them
        return list(text.encode())


def rendered(source: str | None, **options: Any) -> str:
    return bytes(ChatTemplate(Template(source)).token_ids(ASK, options)).decode()


def test_templates() -> None:
    assert rendered("{{ messages[0].content }}|{{ mood }}", mood="glad") == "Tell me a story.|glad"
    parts = "{% for part in messages[0].content if part is mapping %}{{ part.text }}{% endfor %}"
    assert rendered(parts) == "Tell me a story."  # it would write nothing of a plain text
    with pytest.raises(RequestError, match="refused the messages: no"):
        rendered("{{ raise_exception('no') }}")
    with pytest.raises(RequestError, match="has no chat template; continue a text with generate"):
        rendered(None)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, *TOKENIZERS.values()], ids=["byte level", *TOKENIZERS])
@given(text=st.text(min_size=1, max_size=12), cuts=st.lists(st.integers(1, 3)), stop=st.text(max_size=2))
def test_no_delta_ends_inside_a_character(
    tokenizer: Tokenizer, text: str, cuts: list[int], stop: str
) -> None:
    """However many tokens a step gives."""
    first = 0 if tokenizer is BYTE_LEVEL else 6
    ids = [byte + first for byte in text.encode()]
    reader = DeltaReader(
        Detokenizer(tokenizer.stream(skip_special_tokens=True), StopStrings([stop] if stop else [])),
        [],
        include_stop=False,
    )
    pieces, place = [], 0
    for size in [*cuts, len(ids)]:
        step = ids[place : place + size]
        place += size
        reason = "length" if place >= len(ids) else None
        delta = reader.read(TokenOutput("", 0, step, reason, 0, 0))  # type: ignore[arg-type]
        pieces.append(delta.text)
        assert "\ufffd" not in delta.text or "\ufffd" in text
        if delta.finish_reason:
            break
    written = text.removeprefix(" ") if first else text
    assert "".join(pieces) == (written.split(stop)[0] if stop else written)


def test_parameters_of_the_engine_are_taken_as_they_are() -> None:
    from truedraft.engine import messages

    assert checked_params(messages.SamplingParams(max_tokens=3, top_k=-1)) == SamplingParams(max_tokens=3)


def test_a_bar_for_several_prompts_in_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = []
    for prompts, progress in ((["A", "B"], True), (["A"], True), (["A", "B"], False)):
        monkeypatch.setattr("sys.stderr", out := Terminal())
        llm.generate(prompts, GREEDY, progress=progress)
        shown.append("2/2" in out.getvalue() or "tokens/s" in out.getvalue())
    assert shown == [True, False, False]
