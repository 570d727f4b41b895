"""OpenAI's defaults, and what a request's fields become for the engine."""

from typing import Any

import msgspec
import pytest

from truedraft.engine.messages import Ready, SamplingParams
from truedraft.server.generation.sampling_params import build_sampling_params
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.settings import RequestSettings

LENIENT = Leniency(strict=False)
WITH_DRAFT = Ready(
    "target", "draft", "cpu", "float32", 100, 50, 4, 4, 16, ["draft_model", "ngram"], "draft_model"
)
WITHOUT_DRAFT = Ready("target", None, "cpu", "float32", 100, 50, 4, 0, 16, ["ngram"], "none")


def completion(*, worker: Ready = WITH_DRAFT, **fields: Any) -> SamplingParams:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p"} | fields)
    return build_sampling_params(
        request,
        num_prompt_tokens=10,
        worker=worker,
        limits=RequestSettings(),
        leniency=Leniency(strict=False),
    )


def chat(**fields: Any) -> SamplingParams:
    messages = [{"role": "user", "content": "p"}]
    request = ChatRequest.model_validate({"model": "m", "messages": messages} | fields)
    return build_sampling_params(
        request,
        num_prompt_tokens=10,
        worker=WITH_DRAFT,
        limits=RequestSettings(),
        leniency=Leniency(strict=False),
    )


def test_defaults() -> None:
    assert completion() == SamplingParams(max_tokens=16)
    assert chat() == SamplingParams(max_tokens=40)


def test_null_means_default() -> None:
    names = ["temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos"]
    names += ["max_tokens", "stream", "stream_options", "speculation", "logit_bias", "min_tokens", "logprobs"]
    names += ["presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs"]
    names += ["truncate_prompt_tokens"]
    nulls: dict[str, Any] = dict.fromkeys(names)
    assert completion(**nulls) == completion()


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 2}, "temperature", 2.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": -(2**63)}, "seed", -(2**63)),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"stop_token_ids": [1, 2]}, "stop_token_ids", [1, 2]),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"max_tokens": 40}, "max_tokens", 40),
        ({"speculation": {}}, "num_speculative_tokens", None),
        ({"speculation": {"num_speculative_tokens": "auto"}}, "num_speculative_tokens", None),
        ({"speculation": {"num_speculative_tokens": 0}}, "num_speculative_tokens", 0),
        (
            {"speculation": {"num_speculative_tokens": 7}},
            "num_speculative_tokens",
            7,
        ),
        ({"speculation": {"method": "none"}}, "num_speculative_tokens", 0),
        ({"speculation": {"verification": "coupled"}}, "verification", "coupled"),
        ({"speculation": {"verification": "block"}}, "verification", "block"),
        (
            {"speculation": {"verification": "exact_match"}, "temperature": 0},
            "verification",
            "exact_match",
        ),
        ({"speculation": {"verification": "exact_match"}, "top_k": 1}, "verification", "exact_match"),
        ({"speculation": {"draft_sample_method": "greedy"}}, "draft_sample_method", "greedy"),
        (
            {"speculation": {"draft_sample_method": "probabilistic"}, "temperature": 0},
            "draft_sample_method",
            "probabilistic",
        ),
        (
            {"speculation": {"draft_sample_method": "probabilistic", "method": "none"}},
            "draft_sample_method",
            "probabilistic",
        ),
        ({"speculation": {"trace": True}}, "trace", True),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 1.5}, "frequency_penalty", 1.5),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"logit_bias": {"0": 1, "99": -100}}, "logit_bias", {0: 1.0, 99: -100.0}),
        ({"logit_bias": {}}, "logit_bias", {}),
        ({"min_tokens": 16}, "min_tokens", 16),
        ({"prompt_logprobs": 20}, "prompt_logprobs", 20),
    ],
)
def test_fields_reach_the_engine(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(completion(**fields), name) == value
    assert getattr(chat(**fields), name) == value


def test_both_names_of_the_chat_limit() -> None:
    assert chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3


def test_logprobs() -> None:
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_echo_asks_for_the_prompts_logprobs_too() -> None:
    assert completion(logprobs=2).prompt_logprobs is None
    assert completion(echo=True).prompt_logprobs is None
    assert completion(logprobs=2, echo=True).prompt_logprobs == 2
    assert completion(logprobs=2, echo=True, prompt_logprobs=7).prompt_logprobs == 7
    assert completion(logprobs=2, echo=True, prompt_logprobs=1).prompt_logprobs == 2


def test_draft_model_must_exist_if_asked_for() -> None:
    with pytest.raises(Exception, match="cannot draft by"):
        completion(worker=WITHOUT_DRAFT, speculation={"method": "draft_model"})
    assert completion(worker=WITHOUT_DRAFT, speculation={"method": "auto"}).num_speculative_tokens is None


RECOMMENDED = msgspec.structs.replace(
    WITH_DRAFT,
    default_sampling={
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 30,
    },
)


def test_generation_config_gives_the_defaults() -> None:
    expected = SamplingParams(
        max_tokens=16, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
    )
    assert completion(worker=RECOMMENDED) == expected
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "p"}]})
    params = build_sampling_params(
        request,
        num_prompt_tokens=10,
        worker=RECOMMENDED,
        limits=RequestSettings(),
        leniency=Leniency(strict=False),
    )
    assert params == msgspec.structs.replace(expected, max_tokens=30)
    params = build_sampling_params(
        request,
        num_prompt_tokens=35,
        worker=RECOMMENDED,
        limits=RequestSettings(),
        leniency=Leniency(strict=False),
    )
    assert params.max_tokens == 15  # no more than fits


def test_a_request_wins_over_the_generation_config() -> None:
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert completion(worker=RECOMMENDED, **neutral) == completion()
    assert completion(worker=RECOMMENDED, temperature=0, max_tokens=40).temperature == 0
    assert completion(worker=RECOMMENDED, max_tokens=40).max_tokens == 40
    partly = msgspec.structs.replace(WITH_DRAFT, default_sampling={"top_k": 7})
    assert completion(worker=partly) == SamplingParams(max_tokens=16, top_k=7)
