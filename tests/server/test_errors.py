"""Every refusal has OpenAI's shape, the right status, and names the field at fault."""

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.unsupported_fields import REFUSED_IN, UNSUPPORTED
from truedraft.server.text.tokenizer import load_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": "0.5"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1025}, "n", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"stop": ["a"] * 65}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop.0", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"speculation": {"method": "eagle"}}, "speculation.method", "invalid_value"),
        ({"speculation": {"verification": "typical"}}, "speculation.verification", "invalid_value"),
        ({"speculation": {"verification": "exact_match"}}, "speculation.verification", "invalid_value"),
        (
            {"speculation": {"draft_sample_method": "auto"}},
            "speculation.draft_sample_method",
            "invalid_value",
        ),
        (
            {"speculation": {"draft_sample_method": "probabilistic", "method": "ngram"}},
            "speculation.draft_sample_method",
            "invalid_value",
        ),
        ({"speculation": {"trace": "yes"}}, "speculation.trace", "invalid_type"),
        ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"repetition_penalty": 11}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": []}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5.0": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"260": 1}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [260]}, "stop_token_ids", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens", "invalid_value"),
        ({"min_tokens": 512}, "min_tokens", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        (
            {"speculation": {"num_speculative_tokens": 33}},
            "speculation.num_speculative_tokens",
            "invalid_value",
        ),
        (
            {"speculation": {"method": "none", "num_speculative_tokens": 2}},
            "speculation.num_speculative_tokens",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_invalid_values(
    server: RunningServer, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    response = server.post(path, prompt | body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param.split(".")[-1] in error["message"] or param in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_type"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"messages": HELLO, "max_completion_tokens": 3, "max_tokens": 4}, "max_tokens", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "name": "nobody"}]}, "messages", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0.function",
            "missing_required_parameter",
        ),
    ],
)
def test_invalid_chats(server: RunningServer, body: dict[str, Any], param: str, code: str) -> None:
    response = server.post(CHAT, body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (5, "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        ([[]], "prompt"),
        ([1, "a"], "prompt.1"),
        (["a", 1], "prompt.1"),
        ([-1], "prompt.0"),
        ([260], "prompt"),
    ],
)
def test_invalid_prompts(server: RunningServer, prompt: Any, param: str) -> None:
    response = server.post(COMPLETIONS, {"prompt": prompt})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


# Each line of the table has a value here that would really change something.
MEANINGFUL: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "response_format": {"type": "json_object"},
    "use_beam_search": True,
}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - {"thinking"}))
def test_what_is_not_served_is_refused_by_name(server: RunningServer, name: str) -> None:
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        request = ChatRequest if path == CHAT else CompletionRequest
        if name in request.model_fields:
            continue  # it is served here
        for neutral in (None, "", [], *UNSUPPORTED[name].neutral):
            if neutral == -1 and path == COMPLETIONS and name in ("n_predict", "num_predict"):
                continue  # its own default is another length
            response = server.post(path, {**prompt, "max_tokens": 1, name: neutral})
            assert response.status_code == 200
            assert "x-truedraft-ignored" not in response.headers
        meaningful = MEANINGFUL.get(name, {"some": "thing"})
        if meaningful is not None:
            response = server.post(path, {**prompt, name: meaningful})
            assert response.status_code == 400
            error = error_of(response)
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            refused = REFUSED_IN[request][name]
            assert error["message"].endswith(f": {refused.instead}.")


def test_zero_is_not_false(server: RunningServer) -> None:
    response = server.post(CHAT, {"messages": HELLO, "logprobs": 0})
    assert error_of(response)["param"] == "logprobs"


@pytest.mark.parametrize(("best_of", "status"), [(1, 400), (2, 200), (3, 400)])
def test_best_of_must_equal_n(server: RunningServer, best_of: int, status: int) -> None:
    response = server.post(COMPLETIONS, {"prompt": "x", "n": 2, "best_of": best_of})
    assert response.status_code == status


def test_unknown_fields_are_reported(server: RunningServer, start_server: StartServer) -> None:
    message = {"role": "user", "content": "Hi", "mood": "good"}
    body = {"messages": [message], "max_tokens": 1, "wörd": 1, "bogus": 2}
    response = server.post(CHAT, body)
    assert response.status_code == 200
    assert response.headers["x-truedraft-ignored"] == "w\\xf6rd, bogus, messages.0.mood"
    with start_server(strict_fields=True) as strict:
        response = strict.post(CHAT, body)
        assert response.status_code == 400
        assert error_of(response)["code"] == "unknown_parameter"
        assert error_of(response)["param"] == "wörd"


def test_harmless_metadata_is_accepted(server: RunningServer) -> None:
    body = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    body |= {"safety_identifier": "x", "prompt_cache_key": "y"}
    response = server.post(CHAT, {"messages": HELLO, "max_tokens": 1} | body)
    assert response.status_code == 200
    assert "x-truedraft-ignored" not in response.headers


def test_context_length(server: RunningServer) -> None:
    too_long = server.post(COMPLETIONS, {"prompt": "x" * 512})
    assert too_long.status_code == 400
    error = error_of(too_long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "512" in error["message"]
    fits = server.post(COMPLETIONS, {"prompt": "x" * 500, "max_tokens": 12})
    assert fits.status_code == 200
    error = error_of(server.post(COMPLETIONS, {"prompt": "x" * 500, "max_tokens": 13}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "500" in error["message"]


def test_number_of_choices_is_limited(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": ["x"] * 9, "n": 128})
    assert response.status_code == 400
    assert error_of(response)["param"] == "n"


def test_unknown_model(server: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as sdk,
        pytest.raises(openai.NotFoundError) as caught,
    ):
        sdk.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert server.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [MODEL]
    assert error_of(server.get("/v1/models/org/other"))["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b'{"model": "\xff"}', "application/json", 400, "invalid_json"),
        (
            b'{"model": "tiny-model", "prompt": "x", "temperature": NaN}',
            "application/json",
            400,
            "invalid_json",
        ),
        (b"[]", "application/json", 400, "invalid_type"),
        (b"", "application/json", 400, "missing_required_parameter"),
        (b"model=tiny-model", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"x" * (9 << 20), "application/json", 413, "request_too_large"),
    ],
    ids=["malformed", "utf-8", "nan", "list", "empty", "form", "large"],
)
def test_bad_bodies(server: RunningServer, content: bytes, content_type: str, status: int, code: str) -> None:
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    assert response.status_code == status
    assert error_of(response)["code"] == code


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    assert server.get("/v1/nothing").status_code == 404
    assert error_of(server.get("/v1/nothing"))["code"] == "not_found"
    assert "Did you mean /v1/completions?" in error_of(server.post("/completions", {}))["message"]
    assert "Did you mean" not in error_of(server.get("/v1/nothing"))["message"]
    response = server.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"


def test_request_id_is_kept_or_made(server: RunningServer) -> None:
    assert server.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert (
        server.get("/health", headers={"x-request-id": "x" * 200}).headers["x-request-id"].startswith("req_")
    )


def test_our_own_bugs_tell_nothing_but_the_id(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_server() as server:
        monkeypatch.setattr(server.model, "loaded", lambda: 1 / 0)
        response = server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "mine-2"})
        assert response.status_code == 500
        error = error_of(response)
        assert error["code"] == "internal_error"
        assert "mine-2" in error["message"]
        assert "division" not in response.text
        assert server.metric("truedraft_request_errors_total", code="internal_error") == 1


def test_full_queue(start_server: StartServer) -> None:
    with start_server(max_queued_sequences=1) as server:
        server.worker.at_most(1)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True}
        with server.client.stream("POST", COMPLETIONS, json=body) as first:
            # Its first token is there, so it no longer waits; the next one does.
            assert first.status_code == 200
            short = {"prompt": "x", "max_tokens": 1}
            second = threading.Thread(target=server.post, args=(COMPLETIONS, short))
            second.start()
            server.wait_for_requests(2)
            refused = server.post(COMPLETIONS, {"prompt": "x"})
        server.worker.go_on()
        second.join()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "queue_full"


def test_authentication(start_server: StartServer) -> None:
    with start_server(api_keys=["one", "two"]) as server:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
            response = server.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        assert server.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200
        assert server.get("/speculation").status_code == 401
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as sdk:
            assert sdk.completions.create(model=MODEL, prompt="x").choices


def test_cors(server: RunningServer, start_server: StartServer) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with start_server(cors_origins=["https://a.example"], api_keys=["one"]) as open_server:
        response = open_server.client.options(COMPLETIONS, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = server.client.options(COMPLETIONS, headers=preflight)
    assert "access-control-allow-origin" not in response.headers


def test_model_without_chat_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tiny-model", chat_template=None)
    with run_server(folder, load_tokenizer(str(folder)), tmp_path) as server:
        error = error_of(server.post(CHAT, {"messages": HELLO}))
        assert (error["param"], error["code"]) == ("messages", "invalid_value")
        assert "'chat_template'" in error["message"]
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_chat_template_from_the_settings(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tiny-model", chat_template=None)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    with run_server(folder, load_tokenizer(str(folder), template), tmp_path) as server:
        answer = server.post(CHAT, {"messages": HELLO, "return_token_ids": True}).json()
        assert bytes(answer["prompt_token_ids"]) == b"Hi!"
