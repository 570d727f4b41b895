"""The ``truedraft`` object has counts, seeds, the rule that applied, and the trace, also in streams."""

from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.server.wire import answers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ways_to_answer = pytest.mark.parametrize("way", [{}, {"stream": True}, WITH_USAGE], ids=str)


def report(server: RunningServer, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
    """It is in the last chunk, and in no other one."""
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    *chunks, last = answers(server, path, prompt | {"max_tokens": 8} | body)
    assert not any("truedraft" in chunk for chunk in chunks)
    return last["truedraft"]


@ways_to_answer
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_counts(server: RunningServer, way: dict[str, Any], path: str) -> None:
    """The fake worker drafts as many as asked for and gives 4 tokens per step, so 3 are accepted."""
    body = way | {"seed": 1, "speculation": {"num_speculative_tokens": 6}}
    assert report(server, body, path) == {
        "rounds": 2,
        "drafted_tokens": 12,
        "accepted_tokens": 6,
        "acceptance_rate": 0.5,
        "acceptance_length": 4.0,
        "method": "draft_model",
        "verification": "coupled",
        "seeds": [1],
    }
    body = way | {"speculation": {"method": "none"}, "temperature": 0}
    assert report(server, body, path) == {
        "rounds": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "acceptance_rate": None,
        "acceptance_length": 1.0,
        "method": "none",
        "verification": "exact_match",
        "seeds": [1000],
    }


@ways_to_answer
def test_only_for_those_who_speak_of_it(server: RunningServer, way: dict[str, Any]) -> None:
    chunks = answers(server, COMPLETIONS, {"prompt": "x", "max_tokens": 8} | way)
    assert not any("truedraft" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("body", "verification"),
    [
        ({"speculation": {}}, "rejection"),
        ({"speculation": {}, "seed": 5}, "coupled"),
        ({"speculation": {"verification": "block"}, "seed": 5}, "block"),
        ({"speculation": {"verification": "block"}, "top_k": 1}, "exact_match"),
        ({"speculation": {"verification": "block"}, "temperature": 0}, "exact_match"),
    ],
)
def test_rule_in_force(server: RunningServer, body: dict[str, Any], verification: str) -> None:
    assert report(server, body)["verification"] == verification


@ways_to_answer
def test_seeds_of_all_choices(server: RunningServer, way: dict[str, Any]) -> None:
    body = way | {"prompt": ["a", "b"], "n": 2, "speculation": {}}
    assert report(server, body)["seeds"] == [1000, 1001, 1000, 1001]


@ways_to_answer
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_trace(server: RunningServer, way: dict[str, Any], path: str) -> None:
    speculation = {"trace": True, "num_speculative_tokens": 5, "verification": "block"}
    body = way | {"n": 2, "max_tokens": 6, "logit_bias": {"7": -1}, "speculation": speculation}
    traced = report(server, body, path)
    (prompt_token_ids,) = traced["prompt_token_ids"]
    first, second = traced["trace"]
    assert first == second
    assert [(round_["position"], round_["source"], round_["rule"]) for round_ in first] == [
        (len(prompt_token_ids), "draft_model", "block"),
        (len(prompt_token_ids) + 4, "draft_model", "block"),
    ]
    assert first[1]["drafted"][:2] == [
        {"id": ord("o"), "target_prob": 0.5, "draft_prob": 0.25, "accepted": True},
        {"id": 0, "target_prob": 0.5, "draft_prob": 0.25, "accepted": False},
    ]
    assert {round_["draft_vocabulary"] for round_ in first} == {"ab"}
    assert traced["draft_vocabularies"] == {"ab": "BYA="}
    said = [
        token["id"] if token else round_["next_token"]
        for round_ in first
        for token in [*(token for token in round_["drafted"] if token["accepted"]), None]
    ]
    assert bytes(said) == b"Hello,"
    params = traced["sampling_params"]
    assert (params["verification"], params["num_speculative_tokens"]) == ("block", 5)
    assert (params["logit_bias"], params["max_tokens"], params["seed"]) == ({"7": -1.0}, 6, None)
    assert traced["seeds"] == [1000, 1001]


def test_trace_says_what_the_server_chose(server: RunningServer) -> None:
    params = report(server, {"seed": 3, "speculation": {"trace": True}})["sampling_params"]
    assert (params["verification"], params["num_speculative_tokens"]) == ("coupled", None)


def test_no_tokens_no_rounds(server: RunningServer) -> None:
    traced = report(server, {"max_tokens": 0, "speculation": {"trace": True}})
    assert (traced["rounds"], traced["trace"], traced["seeds"]) == (0, [[]], [None])
