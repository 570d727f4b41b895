"""Structured outputs through the official SDK and HTTP, from the real server with the bundled pair."""

import re
from typing import Any, Literal

import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel, Field

from tests.integration import random_schemas
from tests.integration.conftest import Server

MODEL = "truedraft-demo"
ASK: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Tell me about your pet."}]


class Pet(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


class Home(BaseModel):
    pets: list[Pet] = Field(max_length=2)


def test_chats_are_parsed(server: Server) -> None:
    with server.openai as sdk:
        answer = sdk.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Home, max_tokens=300, seed=3
        )
        assert isinstance(answer.choices[0].message.parsed, Home)
        with sdk.chat.completions.stream(
            model=MODEL, messages=ASK, response_format=Home, max_tokens=300, seed=3
        ) as stream:
            streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


def test_responses_are_parsed(server: Server) -> None:
    with server.openai as sdk:
        answer = sdk.responses.parse(model=MODEL, input="Your pet?", text_format=Pet, max_output_tokens=300)
        with sdk.responses.stream(
            model=MODEL, input="Your pet?", text_format=Pet, max_output_tokens=300
        ) as stream:
            streamed = stream.get_final_response()
    assert isinstance(answer.output_parsed, Pet)
    assert isinstance(streamed.output_parsed, Pet)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


def test_every_complete_answer_to_a_random_schema_is_valid(server: Server) -> None:
    reasons = random_schemas.check(server.url, 40)
    assert reasons.keys() <= {"stop", "length"}
    assert reasons["stop"] > 20


CASES: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": r"[A-Z][a-z]{2,5} \d{2}"}}, r"[A-Z][a-z]{2,5} \d{2}"),
    ({"structured_outputs": {"choice": ["yes", 'a "b"\n\\ü']}}, r'yes|a "b"\n\\ü'),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: /[xy]{3}/'}}, "a[xy]{3}"),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
    ({"structured_outputs": {"json": {"const": {"ä": [1]}}}}, r'\{"ä":\[1\]\}'),
    ({"structured_outputs": {"regex": "[☃☄]"}}, "[☃☄]"),
]


@pytest.mark.parametrize(("fields", "pattern"), CASES)
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_completions_match(server: Server, fields: dict[str, Any], pattern: str, verification: str) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 60, "n": 2, **fields}
    plain, drafted = (
        server.post("/v1/completions", body | {"seed": 5, "speculation": {"method": method, **how}}).json()
        for method, how in (("none", {}), ("auto", {}))
    )
    assert [choice["text"] for choice in plain["choices"]] == [c["text"] for c in drafted["choices"]]
    answer = server.post("/v1/completions", body | {"speculation": {"verification": verification}}).json()
    for choice in [*plain["choices"], *answer["choices"]]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])


def test_forced_tokens_save_rounds(server: Server) -> None:
    body = {
        "model": MODEL,
        "messages": ASK,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pet", "schema": Pet.model_json_schema()},
        },
        "speculation": {"method": "grammar"},
    }
    report = server.post("/v1/chat/completions", body).json()["truedraft"]
    assert report["accepted_tokens"] == report["drafted_tokens"] > 0
    assert report["acceptance_length"] > 1.2


def test_a_grammar_without_tokens_is_refused_by_the_worker(server: Server) -> None:
    """Only the worker has the model's tokens, and knows that nothing matches."""
    body = {
        "model": MODEL,
        "prompt": "x",
        "structured_outputs": {"grammar": "start: <|no_such_token|>"},
    }
    for stream in (False, True):
        response = server.post("/v1/completions", body | {"stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_grammar"
