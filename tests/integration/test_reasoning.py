"""A real worker reasons before a structured output: the grammar starts exactly after the reasoning."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken, Tokenizer

from tests.integration.conftest import Server, serving
from tests.models import save_random_llama
from tests.server.tiny_tokenizer import write_tokenizer

MODEL = "thinker"
TEMPLATE = """\
{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}|\
{% if enable_thinking %}<think>
{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"number": {"enum": [1, 22, 333]}, "letters": {"type": "string", "pattern": "^[ab]{1,4}$"}},
    "required": ["number", "letters"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
CHAT = "/v1/chat/completions"
SEEDS = range(12)
CLOSE = "</think>"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, int]]]:
    """A random model of bytes and the marks, and the marks' tokens."""
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", CLOSE)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {mark: tokenizer.token_to_id(mark) for mark in ("<think>", CLOSE)}
    size = tokenizer.get_vocab_size()
    save_random_llama(folder, 5, vocab_size=size, hidden=64, eos_token_id=256)
    with serving(tmp_path_factory.mktemp("log"), "--target", str(folder), "--method", "ngram") as server:
        yield server, ids


def body(ids: dict[str, int], seed: int, *, opens: bool, **fields: Any) -> dict[str, Any]:
    """Returns a request whose thoughts are mostly letters and a brace, and end soon."""
    likely = {ord("a"): 9, ord("b"): 9, ord("{"): 8, ids[CLOSE]: 8} | ({} if opens else {ids["<think>"]: 12})
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "abab"}],
        "chat_template_kwargs": {"enable_thinking": opens},
        "response_format": FORMAT,
        "logit_bias": {str(token): bias for token, bias in likely.items()},
        "max_tokens": 120,
        "seed": seed,
        "return_token_ids": True,
        **fields,
    }


def whole(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    response = server.post(CHAT, asked)
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(server: Server, asked: dict[str, Any]) -> tuple[str, str]:
    reasoning = content = ""
    with server.stream(CHAT, asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    reasoning += choice["delta"].get("reasoning_content") or ""
                    content += choice["delta"].get("content") or ""
    return reasoning, content


@pytest.mark.parametrize("opens", [True, False])
def test_the_grammar_starts_after_the_reasoning(thinker: tuple[Server, dict[str, int]], opens: bool) -> None:
    """This holds with and without drafts, and when the mark lies inside a draft."""
    server, ids = thinker
    num_complete, inside, thoughts = 0, 0, ""
    for seed in SEEDS:
        asked = body(ids, seed, opens=opens)
        plain = whole(server, asked | {"speculation": {"method": "none"}})["choices"][0]
        said = server.post("/detokenize", {"tokens": plain["token_ids"]}).json()["prompt"]
        predicted = {
            "prediction": {"type": "content", "content": said},
            "speculation": {"method": "prediction", "num_speculative_tokens": 8, "trace": True},
        }
        looked_up, drafted = whole(server, asked), whole(server, asked | predicted)
        for answer in (looked_up, drafted):
            assert answer["choices"][0]["token_ids"] == plain["token_ids"]
        message = plain["message"]
        assert streamed(server, asked) == (message.get("reasoning_content") or "", message["content"])
        for each in drafted["truedraft"]["trace"][0]:
            inside += ids[CLOSE] in [token["id"] for token in each["drafted"][:-1] if token["accepted"]]
        is_thinking = ids[CLOSE] not in plain["token_ids"] and (opens or ids["<think>"] in plain["token_ids"])
        if plain["finish_reason"] == "stop" and not is_thinking:
            num_complete += 1
            Draft202012Validator(SCHEMA).validate(json.loads(message["content"]))
        thoughts += message.get("reasoning_content") or ""
    assert num_complete >= len(SEEDS) // 2
    assert inside >= len(SEEDS) // 4
    assert {"{{", "{a", "{b"} & {*map("".join, pairwise(thoughts))}, "no thought that is no beginning of JSON"


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("fields", [{}, {"response_format": None}], ids=["a schema", "free"])
def test_a_budget_closes_the_reasoning(
    thinker: tuple[Server, dict[str, int]], opens: bool, fields: dict[str, Any]
) -> None:
    """After so many tokens comes the closing mark, and no text changes that ends its reasoning before."""
    server, ids = thinker
    close, budget = ids[CLOSE], 4
    num_spent = 0
    for seed in SEEDS:
        free = whole(server, body(ids, seed, opens=opens, **fields))["choices"][0]["token_ids"]
        by_name = {}
        for name in ("thinking_budget", "thinking_token_budget"):
            for method in ("none", "auto"):
                more = {name: budget, "speculation": {"method": method}}
                answer = whole(server, body(ids, seed, opens=opens, **fields, **more))
                by_name[name, method] = answer["choices"][0]["token_ids"]
        (bound,) = {tuple(text) for text in by_name.values()}
        first = 0 if opens else 1 if free[0] == ids["<think>"] else None
        end = free.index(close) if close in free else len(free)
        is_spent = answer["usage"]["completion_tokens_details"]["thinking_budget_spent"]
        if first is None or end - first < budget:
            assert list(bound) == free
            assert not is_spent
            continue
        num_spent += 1
        assert list(bound[: first + budget]) == free[: first + budget]
        assert bound[first + budget] == close
        assert is_spent
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == first + budget + 1
        if not fields:
            Draft202012Validator(SCHEMA).validate(json.loads(answer["choices"][0]["message"]["content"]))
    assert num_spent > 0


def test_a_budget_has_other_names(thinker: tuple[Server, dict[str, int]]) -> None:
    server, ids = thinker
    asked = body(ids, 1, opens=True, thinking_budget=0)
    text = whole(server, asked)["choices"][0]["token_ids"]
    assert text[0] == ids[CLOSE]
    del asked["thinking_budget"]
    switch = {"type": "adaptive", "budget_tokens": 0}
    assert whole(server, asked | {"thinking": switch})["choices"][0]["token_ids"] == text
    refused = server.post(CHAT, asked | {"thinking_budget": 1, "thinking": switch})
    assert refused.status_code == 400
    assert "same limit" in refused.json()["error"]["message"]
    messages = {"model": MODEL, "messages": asked["messages"], "max_tokens": 40, "seed": 1}
    messages |= {"thinking": {"type": "enabled", "budget_tokens": 0}, "logit_bias": asked["logit_bias"]}
    answer = server.post("/v1/messages", messages).json()
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 1, "thinking_budget_spent": True}
    closed = {"enable_thinking": False, "thinking_budget": 3}
    response = server.post("/v1/responses", {"model": MODEL, "input": "ab", "max_output_tokens": 4} | closed)
    assert response.status_code == 200
    assert "thinking_budget_spent" in response.json()["usage"]["output_tokens_details"]
