"""``/v1/decisions`` over the wire, on the fake worker, whose log-probabilities are known."""

import math
from typing import Any

import openai
import pytest

from tests.fake_worker import given_logprob, logprob_at
from tests.server.conftest import StartServer
from tests.server.refusals import refused
from tests.server.running import MODEL, RunningServer
from truedraft.server.generation.scoring import Tree
from truedraft.server.schemas.decisions import DecisionRequest
from truedraft.server.text.decisions import Asked, ask, labels_of, normalised, question_text
from truedraft.server.text.prompt import PromptLimits
from truedraft.server.text.tokenizer import Tokenizer

DECISIONS = "/v1/decisions"
PREDICATE = {"type": "predicate", "instructions": "It rains."}
CHOICE = {"type": "choice", "instructions": "Where?", "choices": [{"value": "here"}, {"value": "there"}]}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "high"}]}
LIMITS = PromptLimits(10_000, 5000, "", 260)


def asked(tokenizer: Tokenizer, *questions: dict[str, Any], text: Any = "A text.") -> list[Asked]:
    request = DecisionRequest.model_validate({"model": "m", "input": text, "questions": [*questions]})
    return ask(request, tokenizer, LIMITS)


def choice(*values: str | bool) -> dict[str, Any]:
    return {"type": "choice", "instructions": "Which?", "choices": [{"value": value} for value in values]}


def bytes_of(text: str) -> list[int]:
    return [*text.encode()]


def fake_logprob(prompt: list[int], label: list[int]) -> float:
    """Returns what the fake worker says of a label: its first and last token are asked for by their ids."""
    first, *rest = label
    total = given_logprob(first, len(prompt))
    if rest:
        end = len(prompt) + len(label) - 1
        total += sum(logprob_at(place) for place in range(len(prompt) + 1, end))
        total += given_logprob(rest[-1], end)
    return total


def test_the_sdk_reads_every_kind_of_answer(server: RunningServer, tokenizer: Tokenizer) -> None:
    questions: list[Any] = [PREDICATE | {"name": "rain"}, CHOICE, SCORE | {"name": "much"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        decision = sdk.decisions.create(model=MODEL, input="A text.", questions=questions)
    assert decision.model == MODEL
    predicate, chosen, score = decision.answers
    assert (predicate.type, chosen.type, score.type) == ("predicate", "choice", "score")
    assert [answer.name for answer in decision.answers] == ["rain", None, "much"]
    expected = [
        normalised([fake_logprob(prompt, label) for label in labels])
        for prompt, labels in asked(tokenizer, *questions)
    ]
    assert predicate.probability == expected[0][0]
    told = [(one.value, one.probability) for one in chosen.probabilities]
    assert told == [*zip(["here", "there"], expected[1], strict=True)]
    assert (chosen.choice, chosen.confidence) == max(told, key=lambda pair: pair[1])
    levels = [(one.value, one.label, one.probability) for one in score.probabilities]
    assert levels == [*zip([0, 1], ["low", "high"], expected[2], strict=True)]
    assert (score.score, score.confidence) == (expected[2][1], max(expected[2]))
    usage, prompts = decision.usage, [prompt for prompt, _ in asked(tokenizer, *questions)]
    shared = next(place for place, ids in enumerate(zip(*prompts, strict=False)) if len({*ids}) > 1)
    assert usage.input_tokens == usage.total_tokens == sum(map(len, prompts)) - 2 * shared
    assert usage.output_tokens == 0


def test_labels_share_sequences_and_the_input_is_computed_first(
    start_server: StartServer, tokenizer: Tokenizer
) -> None:
    """First what all share, then a sequence for each question, then one for each path of a label."""
    with start_server() as server:
        labels = ["ab", "ac", "abd"]  # "ab" begins "abd": each ends with the end of the answer
        questions = [choice(*labels), choice("x", "y")]
        assert server.post(DECISIONS, {"input": "A text.", "questions": questions}).status_code == 200
        server.wait_until_idle()
        assert len(server.messages_to_worker("Generate")) == 1 + 2 + 3
        assert server.metric("truedraft_generation_tokens_total") == 0
        assert server.metric("truedraft_request_success_total", finished_reason="stop") == 1
        (first, second) = asked(tokenizer, *questions)
        assert server.metric("truedraft_prompt_tokens_total") > len(first.prompt_ids)


def test_a_tree_adds_up_all_tokens() -> None:
    tree = Tree([[1], [2, 3], [2, 3, 4], [2, 5]])
    assert tree.next_ids == {(): [1, 2], (2,): [3, 5], (2, 3): [4]}


def test_cached_tokens_are_those_of_the_shared_beginning(start_server: StartServer) -> None:
    body = {"input": "A text of some length. " * 4, "questions": [PREDICATE, CHOICE]}
    with start_server() as server:
        usages = [
            server.post(DECISIONS, body | more).json()["usage"] for more in ({}, {}, {"cache_salt": "s"})
        ]
        details = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
        assert (details[0], details[2]) == (0, 0)
        assert details[1] >= 80
        fresh = server.post(DECISIONS, body | {"cache_prompt": False}).json()["usage"]
        assert fresh["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_values_keep_their_types(tokenizer: Tokenizer) -> None:
    typed = DecisionRequest.model_validate(
        {"model": "m", "input": "x", "questions": [choice(True, "true", '"true"'), choice("true", "false")]}
    )
    quoted, plain = typed.questions
    assert labels_of(quoted) == ["true", '"true"', '"\\"true\\""']
    assert labels_of(plain) == ["true", "false"]
    assert '- true\n- "true"\n' in question_text(quoted)
    assert [*map(len, asked(tokenizer, choice(True, False))[0].labels)] == [4, 5]


def test_a_label_that_begins_another_one_ends_with_the_answer(tokenizer: Tokenizer) -> None:
    (apart,) = asked(tokenizer, choice("1", "2"))
    assert apart.labels == [bytes_of("1"), bytes_of("2")]
    (together,) = asked(tokenizer, choice("1", "10", "2"))
    end = together.labels[0][1:]
    assert len(end) == 1
    assert together.labels == [bytes_of(label) + end for label in ("1", "10", "2")]


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("A text.", 1),
        ([{"role": "user", "content": "A text."}], 1),
        ([{"role": "user", "content": [{"type": "input_text", "text": "A text."}]}], 1),
        ([{"role": "system", "content": "Be just."}, {"role": "user", "content": "A text."}], 2),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A text."}], 3),
    ],
    ids=str,
)
def test_forms_of_the_input(tokenizer: Tokenizer, text: Any, roles: int) -> None:
    """A question is the end of the user's last message, or a message after the conversation."""
    ((prompt, _),) = asked(tokenizer, PREDICATE, text=text)
    written = tokenizer.decode(prompt, skip_special_tokens=False)
    assert written.count("A text.") == written.count("It rains.\n\nIs this true?") == 1
    assert written.index("A text.") < written.index("It rains.")
    plain = tokenizer.decode(asked(tokenizer, PREDICATE)[0].prompt_ids, skip_special_tokens=False)
    assert (written == plain) == (roles == 1)


def test_json_is_read_as_text(tokenizer: Tokenizer) -> None:
    part = {"type": "input_json", "data": {"a": [1, None, "ö"]}}
    ((prompt, _),) = asked(tokenizer, PREDICATE, text=[{"role": "user", "content": [part]}])
    assert '{"a":[1,null,"ö"]}' in tokenizer.decode(prompt, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"questions": []}, "questions", "invalid_value"),
        ({"questions": [{"type": "box", "instructions": "x"}]}, "questions.0", "invalid_type"),
        ({"questions": [{"instructions": "x"}]}, "questions.0", "invalid_type"),
        ({"questions": [PREDICATE, {"type": "predicate"}]}, "questions.1.instructions", None),
        ({"questions": [choice("a")]}, "questions.0.choices", "invalid_value"),
        ({"questions": [choice(*map(str, range(256)))]}, "questions.0.choices", "invalid_value"),
        ({"questions": [PREDICATE, choice("a", "b", "a")]}, "questions.1.choices.2.value", "invalid_value"),
        ({"questions": [choice("a", "")]}, "questions.0.choices.1.value", "invalid_value"),
        ({"questions": [SCORE | {"levels": [{"label": "a"}] * 2}]}, "questions.0.levels.1.label", None),
        (
            {"questions": [SCORE | {"levels": [{"label": 1}] * 2}]},
            "questions.0.levels.0.label",
            "invalid_type",
        ),
        ({"questions": [SCORE | {"choices": []}]}, None, None),
        ({"questions": [CHOICE | {"options": ["a"]}]}, "questions.0.options", "unsupported_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", None),
        (
            {"questions": [PREDICATE | {"instructions": [{"type": "input_image", "image_url": "x"}]}]},
            "questions.0.instructions.0.type",
            "unsupported_parameter",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", None),
        ({"temperature": 0.5}, "temperature", "unsupported_parameter"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_questions_are_named_by_their_path(
    server: RunningServer, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    body = {"input": "x", "questions": [PREDICATE]} | fields
    if param is None:  # a field that means nothing here is reported
        response = server.post(DECISIONS, body)
        assert response.status_code == 200
        assert response.headers["x-truedraft-ignored"]
        return
    error = refused(server, DECISIONS, body)
    assert error["param"] == param
    assert code in (None, error["code"])


def test_limits_are_settings(start_server: StartServer) -> None:
    with start_server(max_questions=2, max_labels=5) as server:
        body = {"input": "x", "questions": [PREDICATE] * 2}
        assert server.post(DECISIONS, body).status_code == 200
        for questions, limit in (
            ([PREDICATE] * 3, "max_questions"),
            ([choice(*"abcd"), PREDICATE], "max_labels"),
        ):
            assert limit in refused(server, DECISIONS, body | {"questions": questions})["message"]


def test_work_is_bounded(tokenizer: Tokenizer) -> None:
    """The input is tokenized with each question."""
    asked(tokenizer, *[PREDICATE] * 30, text="x" * 2000)
    with pytest.raises(Exception, match="fewer questions"):
        asked(tokenizer, *[PREDICATE] * 41, text="x" * 2000)


def test_what_the_engine_refuses_is_told(start_server: StartServer) -> None:
    with start_server("--refuse", "no", "--refusal-code", "invalid_logits") as server:
        response = server.post(DECISIONS, {"input": "x", "questions": [PREDICATE]})
        assert response.status_code >= 400
        server.wait_until_idle()


def test_shares_add_up_to_one_in_float64() -> None:
    assert normalised([-1000.0, -1000.0]) == [0.5, 0.5]
    assert math.fsum(normalised([-3.0, -7.5, -0.25, -900.0])) == pytest.approx(1, abs=1e-15)
