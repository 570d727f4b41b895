"""Gaps between two texts: ``suffix`` on completions, and llama.cpp's ``/infill``."""

import json
from typing import Any

import pytest

from tests.server.refusals import refused
from tests.server.running import RunningServer
from truedraft.engine.formats.gguf_tokenizer import FILL_TEXTS, known_fill_ids
from truedraft.server.errors import UnsupportedParameterError
from truedraft.server.text.infill import Extra, infill_tokens
from truedraft.server.text.tokenizer import Tokenizer, load_tokenizer

INFILL, COMPLETIONS = "/infill", "/v1/completions"
PRE, SUF, MID = 1, 2, 3  # the tests' tokenizer has these
BEGIN = "Hello, w"  # what the fake worker says first


def ids(text: str) -> list[int]:
    return [*text.encode()]


def test_a_prompt_has_both_sides_and_the_model_s_own_tokens(tokenizer: Tokenizer) -> None:
    found = infill_tokens(tokenizer, "ab", "cd", param="suffix")
    assert found == [PRE, *ids("ab"), SUF, *ids("cd"), MID]
    assert infill_tokens(tokenizer, ids("ab"), "", param="suffix", begun="x") == [
        PRE,
        *ids("ab"),
        SUF,
        MID,
        ord("x"),
    ]


def test_other_files_come_first(tokenizer: Tokenizer) -> None:
    extra = [Extra("a.py", "one"), Extra("b.py", "two")]
    gap = [PRE, *ids("p"), SUF, *ids("s"), MID]
    plain = infill_tokens(tokenizer, "p", "s", param="suffix", extra=extra)
    assert plain == ids("one\ntwo\n") + gap
    tokenizer.fill_ids = {**tokenizer.fill_ids, "fim_rep": 4, "fim_sep": 5}
    try:
        whole = infill_tokens(tokenizer, "p", "s", param="suffix", extra=extra)
    finally:
        tokenizer.fill_ids = {"fim_pre": PRE, "fim_suf": SUF, "fim_mid": MID}
    files = [5, *ids("a.py\none\n"), 5, *ids("b.py\ntwo\n"), 5, *ids("filename\n")]
    assert whole == [4, *ids("myproject\n"), *files, *gap]


def test_tokens_are_known_by_their_texts() -> None:
    for number in range(len(FILL_TEXTS["fim_pre"])):
        texts = [FILL_TEXTS[name][number] for name in ("fim_pre", "fim_suf", "fim_mid")]
        assert known_fill_ids(lambda text, known=texts: known.index(text) if text in known else None) == {
            "fim_pre": 0,
            "fim_suf": 1,
            "fim_mid": 2,
        }


def test_a_model_without_them_is_refused_with_the_reason(model_folder: Any) -> None:
    without = load_tokenizer(str(model_folder))
    assert without.fill_ids == {}
    with pytest.raises(
        UnsupportedParameterError, match="'suffix' is not supported: this model's tokenizer"
    ) as info:
        infill_tokens(without, "a", "b", param="suffix")
    assert info.value.param == "suffix"


def test_suffix_on_completions(server: RunningServer) -> None:
    body = {"prompt": ["ab", "x"], "suffix": "cd", "max_tokens": 8, "return_token_ids": True}
    choices = server.post(COMPLETIONS, body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        [PRE, *ids("ab"), SUF, *ids("cd"), MID],
        [PRE, *ids("x"), SUF, *ids("cd"), MID],
    ]
    assert [choice["text"] for choice in choices] == [BEGIN] * 2
    tokens = server.post(COMPLETIONS, body | {"prompt": ids("ab")}).json()["choices"][0]
    assert tokens["prompt_token_ids"] == choices[0]["prompt_token_ids"]
    plain = server.post(COMPLETIONS, body | {"prompt": "ab", "suffix": ""}).json()["choices"][0]
    assert plain["prompt_token_ids"] == ids("ab")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"suffix": "x", "echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "x", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"suffix": "x" * 600}, "prompt"),
        (COMPLETIONS, {"suffix": 3}, "suffix"),
        ("/v1/chat/completions", {"suffix": "x"}, "suffix"),
        (INFILL, {"samplers": ["top_k", "infill"]}, "samplers"),
        (INFILL, {"n_predict": -2}, "n_predict"),
        (INFILL, {"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        (INFILL, {"max_tokens": 3}, "max_tokens"),
        (INFILL, {"input_suffix": "x" * 600}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused(server: RunningServer, path: str, fields: dict[str, Any], param: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "x"},
        INFILL: {"input_prefix": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    assert refused(server, path, bodies[path] | fields)["param"] == param


def test_infill_answers_as_llama_cpp_does(server: RunningServer) -> None:
    body = {"input_prefix": "ab", "input_suffix": "cd", "prompt": "e", "n_predict": 8}
    answer = server.client.post(INFILL, json=body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == (BEGIN, True, "limit")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (8, 8)
    stopped = server.client.post(INFILL, json=body | {"stop": [","], "n_predict": -1}).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("Hello", "word", ",")


def test_infill_in_a_stream(server: RunningServer) -> None:
    body = {"input_prefix": "ab", "n_predict": 8, "stream": True}
    with server.client.stream("POST", INFILL, json=body) as response:
        parts = [
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data")
        ]
    assert "".join(part["content"] for part in parts) == BEGIN
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["stop_type"] == "limit"
    assert [token for part in parts for token in part["tokens"]] == ids(BEGIN)
