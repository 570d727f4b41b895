"""Fields and routes that clients of other servers use: honoured, or refused by name."""

from typing import Any

import openai
import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import CHAT, COMPLETIONS, refused
from tests.server.running import MODEL, RunningServer
from tests.server.wire import answers
from truedraft.server.schemas.chat import Message
from truedraft.server.text.prompt import _template_message

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]


def rendered(server: RunningServer, **fields: Any) -> str:
    """The prompt of a chat, as the template wrote it; /tokenize must agree."""
    body = {"messages": MESSAGES} | fields
    answer = server.post(CHAT, body | {"max_tokens": 1, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["prompt_token_ids"]
    assert server.post("/tokenize", body).json()["tokens"] == tokens
    return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])


def test_how_the_template_ends(server: RunningServer) -> None:
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell<|im_end|>\n"
    assert rendered(server) == f"{whole}<|im_start|>assistant\n"
    assert rendered(server, add_generation_prompt=True, continue_final_message=False) == rendered(server)
    assert rendered(server, add_generation_prompt=False) == whole
    assert rendered(server, continue_final_message=True) == whole.removesuffix("<|im_end|>\n")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    error = refused(server, CHAT, {"messages": MESSAGES} | both)
    assert "cannot be used together" in error["message"]


def test_variables_of_the_template(server: RunningServer) -> None:
    assert rendered(server, chat_template_kwargs={"enable_thinking": False}).startswith("<no thoughts>")
    assert rendered(server, chat_template_kwargs={"enable_thinking": True}) == rendered(server)
    documents = [{"title": "a", "text": "b"}, {"title": "c"}]
    assert rendered(server, documents=documents).startswith("[a][c]")
    for name in ("tokenize", "chat_template", "tools", "documents"):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: "{{ 1 }}"}}
        error = refused(server, CHAT, body)
        assert error["param"] == "chat_template_kwargs"
        assert f"'{name}'" in error["message"]


def test_undeclared_fields_of_messages_do_not_reach_the_template(server: RunningServer) -> None:
    """They are reported as ignored, so they must be."""
    message = {"role": "user", "content": "hi", "secret": "s"}
    answer = server.post(CHAT, {"messages": [message], "max_tokens": 1})
    assert answer.headers["x-truedraft-ignored"] == "messages.0.secret"
    assert _template_message(Message(**message)) == {"role": "user", "content": "hi"}
    thought = Message(role="assistant", content="a", reasoning_content="r", name="n")
    assert _template_message(thought) == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "name": "n",
    }


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_message_without_content(server: RunningServer, role: str) -> None:
    error = refused(server, CHAT, {"messages": [{"role": role}]})
    assert (error["param"], error["code"]) == ("messages.0.content", "missing_required_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", "root ::= x"),
        ("json_schema", {}),
        ("regex", "a+"),
        ("ebnf", "root ::= x"),
        ("add_special_tokens", False),
        ("typical_p", 0.5),
        ("repeat_penalty", 1.2),
        ("no_repeat_ngram_size", 3),
        ("max_new_tokens", 5),
        ("n_predict", 5),
        ("stop_regex", "a"),
        ("logits_processors", ["x"]),
        ("truncation_side", "right"),
        ("thinking_budget_tokens", 5),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("return_tokens_as_token_ids", True),
        ("custom_logit_processor", "x"),
        ("include_reasoning", False),
        ("n_probs", 2),
        ("reasoning_format", "none"),
        ("samplers", ["top_k"]),
        ("separate_reasoning", False),
        ("thinking", {"type": "disabled"}),
        ("reasoning_budget", 5),
        ("top_n_sigma", 1),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
def test_fields_that_would_change_the_output(
    server: RunningServer, path: str, name: str, value: object
) -> None:
    prompt: dict[str, Any] = {"prompt": "x", "messages": MESSAGES, "input": "x"}
    if (path, name) == (CHAT, "thinking"):
        return  # some vendors' chats have it
    field = {CHAT: "messages", COMPLETIONS: "prompt"}.get(path, "input")
    error = refused(server, path, {field: prompt[field], name: value})
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("name", ["documents", "chat_template_kwargs", "add_generation_prompt"])
def test_chat_fields_on_completions(server: RunningServer, name: str) -> None:
    error = refused(server, COMPLETIONS, {"prompt": "x", name: "x"})
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_on_every_chunk(server: RunningServer, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = prompt | {"max_tokens": 9, "stream": True, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in answers(server, path, body)]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    error = refused(server, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert "include_usage" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/v1/models", "/speculation"])
def test_head_wherever_get(server: RunningServer, path: str) -> None:
    head, get = server.client.head(path), server.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert server.client.head(COMPLETIONS).status_code == 405


def test_several_names_of_one_model(start_server: StartServer) -> None:
    with start_server(served_model_name="first, second") as server:
        cards = server.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["first", "second"]
        assert {(card["root"], card["parent"], card["max_model_len"]) for card in cards} == {
            ("tiny-model", None, 512)
        }
        for name in ("first", "second"):
            assert server.get(f"/v1/models/{name}").json()["id"] == name
            answer = server.post(COMPLETIONS, {"model": name, "prompt": "x", "max_tokens": 1})
            assert answer.json()["model"] == name
        assert server.get("/v1/models/tiny-model").status_code == 404
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_ended_the_text(server: RunningServer, path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}

    def stop_reason(**fields: Any) -> object:
        body = prompt | {"max_tokens": 12, "stream": stream} | fields
        return answers(server, path, body)[-1]["choices"][0].get("stop_reason")

    assert stop_reason() is None
    assert stop_reason(stop=["zz", "lo"]) == "lo"
    assert stop_reason(stop=["lo"], include_stop_str_in_output=True) == "lo"
    assert stop_reason(stop_token_ids=[3]) is None  # the fake worker does not know them


def test_a_fingerprint_of_what_seeds_depend_on(server: RunningServer, start_server: StartServer) -> None:
    def fingerprints(running: RunningServer) -> set[str]:
        whole = answers(running, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        chunks = answers(running, CHAT, {"messages": MESSAGES, "max_tokens": 9, "stream": True})
        return {answer["system_fingerprint"] for answer in [*whole, *chunks]}

    (one,) = fingerprints(server)
    assert one.startswith("fp_")
    with start_server(num_speculative_tokens=1, max_num_sequences=3) as other:
        assert fingerprints(other) == {one}  # neither changes what a seed gives
    with start_server(generation_config="none") as other:
        assert fingerprints(other) != {one}


def test_docs_are_open_with_keys(start_server: StartServer) -> None:
    with start_server(api_keys=["one"]) as server:
        for path in ("/docs", "/openapi.json", "/health", "/ready", "/metrics", "/version"):
            assert server.get(path).status_code == 200, path
        for path in ("/v1/models", "/speculation", "/docs/", "/page", "/unknown"):
            assert server.get(path).status_code == 401, path


def test_below_a_path(start_server: StartServer) -> None:
    """A proxy may strip the path or not; both ways the same routes are open."""
    with start_server(api_keys=["one"], root_path="/llm") as server:
        for path in ("/health", "/llm/health", "/llm/docs", "/llm/", "/llm/page/main.js", "/page/main.js"):
            assert server.get(path).status_code == 200, path
        for path in ("/v1/models", "/llm/v1/models"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"authorization": "Bearer one"}).status_code == 200


def test_no_path_of_the_model_is_published(server: RunningServer) -> None:
    folder = str(server.services.settings.target)
    assert folder.startswith("/")
    for path in ("/version", "/v1/models", "/metrics"):
        assert folder not in server.get(path).text


def test_sdk_reads_all_of_it(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        assert sdk.models.list().data[0].id == MODEL
        answer = sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert answer.system_fingerprint
