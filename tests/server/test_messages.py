"""These tests read ``/v1/messages`` off the wire: what the model gets, what comes back, what is refused.

The official SDK reads the same in ``test_messages_sdk``.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic_core import from_json

from tests.server.conftest import StartServer
from tests.server.refusals import error_of
from tests.server.running import MODEL, RunningServer
from tests.server.test_tools import CALL, SAID, TEMPLATE, grammar_of, saying
from tests.server.test_tools import prompt_of as prompt_on

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "x"}
ASK: dict[str, Any] = {"messages": [USER], "max_tokens": 300}
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
INPUT = {"a": 1, "b": "ü"}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def tool_use(call_id: str = "toolu_1") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": 1}}


def result(call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def read(body: str) -> list[dict[str, Any]]:
    """Returns the events off the wire, which are named by their type, and nothing else."""
    *blocks, end = body.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a stream makes up. Blocks come one after the other, each opened and closed."""
    start, *rest = events
    assert start["type"] == "message_start"
    message = dict(start["message"])
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open, written = False, ""
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, written = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        written += delta["partial_json"]
            case "content_block_stop":
                assert is_open
                is_open = False
                if written:
                    message["content"][-1]["input"] = from_json(written, allow_partial=True)
            case "message_delta":
                assert not is_open
                message |= event["delta"] | {"usage": event["usage"]}
            case kind:
                assert kind in ("ping", "message_stop")
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def answer(server: RunningServer, body: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    response = server.post(PATH, body | ({"stream": True} if stream else {}))
    assert response.status_code == 200, response.text
    return put_together(read(response.text)) if stream else dict(response.json())


def prompt_of(server: RunningServer, fields: dict[str, Any]) -> str:
    return prompt_on(server, PATH, ASK | {"max_tokens": 1} | fields)


def refused(
    server: RunningServer, body: dict[str, Any], path: str = PATH, status: int = 400
) -> dict[str, Any]:
    num_before = len(server.messages_to_worker("Generate"))
    response = server.post(path, body)
    assert response.status_code == status, response.text
    assert server.messages_to_worker("Generate")[num_before:] == []
    return error_of(response)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """This server's model thinks, speaks and calls twice."""
    with saying(tmp_path_factory.mktemp, SAID, TEMPLATE) as server:
        yield server


both_ways = pytest.mark.parametrize("stream", [False, True])


@both_ways
def test_a_message_is_split_into_blocks(speaking: RunningServer, stream: bool) -> None:
    message = answer(speaking, ASK | {"tools": [ADD]}, stream=stream)
    thought, said, *calls = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm, 2.", "signature": "unsigned"}
    assert (said["type"], said["text"]) == ("text", "I call.")
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [("tool_use", "add", INPUT)] * 2
    assert len({call["id"] for call in calls}) == 2
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["id"].startswith("msg_")
    assert message["usage"]["output_tokens"] == len(SAID.encode()) + 1
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>\nHm, 2.\n</think>")}


def test_one_step_at_a_time_says_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        saying(tmp_path_factory.mktemp, SAID, TEMPLATE) as server,
        server.one_step_at_a_time(len(SAID.encode()) + 1),
    ):
        message = answer(server, ASK | {"tools": [ADD]}, stream=True)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][1]["text"] == "I call."
    assert [block["input"] for block in message["content"][2:]] == [INPUT, INPUT]


@both_ways
def test_thoughts_that_are_left_out(speaking: RunningServer, stream: bool) -> None:
    body = ASK | {"thinking": {"type": "adaptive", "display": "omitted"}}
    thought, said = answer(speaking, body, stream=stream)["content"]
    assert thought == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert said["text"].startswith("I call.")


@both_ways
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 30}, "max_tokens", None),
        ({"stop_sequences": ["call", "zzz"]}, "stop_sequence", "call"),
        ({"stop_sequences": ['"b"'], "tools": [ADD]}, "stop_sequence", '"b"'),
        ({"stop_sequences": []}, "end_turn", None),
        ({"stop_token_ids": [ord("c")]}, "end_turn", None),
        ({"tools": [ADD], "tool_choice": {"type": "none"}}, "end_turn", None),
    ],
)
def test_why_it_ends(
    speaking: RunningServer, fields: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    message = answer(speaking, ASK | fields, stream=stream)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_call_that_is_cut_has_what_it_begins_with(speaking: RunningServer) -> None:
    """Its input is an object all the same, so that it can be given back."""
    for length, given in ((SAID.index('"b"'), {"a": 1}), (SAID.index("ü"), {"a": 1, "b": ""})):
        message = answer(speaking, ASK | {"tools": [ADD], "max_tokens": length})
        assert (message["stop_reason"], message["content"][-1]["input"]) == ("max_tokens", given)
        conversation = [USER, {"role": "assistant", "content": message["content"]}]
        conversation.append({"role": "user", "content": [result(message["content"][-1]["id"], content="2")]})
        assert f'"arguments": {json.dumps(given)}' in prompt_of(speaking, {"messages": conversation})


def test_conversations_reach_the_template(speaking: RunningServer) -> None:
    messages = [
        {"role": "user", "content": [text("x"), text("y", cache_control={"type": "ephemeral"})]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "unsigned"},
                text("I call.", citations=None),
                tool_use("1"),
                tool_use("2"),
            ],
        },
        {
            "role": "user",
            "content": [
                result("1", content="3"),
                result("2", content=[text("4"), text("5")], is_error=True),
                text("z"),
            ],
        },
    ]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}'
    written = (
        f"[add]system:s\nt;user:x\ny;assistant:<think>Hm</think>I call.{call}{call};"
        "tool:3=add;tool:Error: 4\n5=add;user:z;a:"
    )
    system = [text("s", cache_control={"type": "ephemeral"}), text("t")]
    body = {"system": system, "messages": messages, "tools": [ADD]}
    assert prompt_of(speaking, body) == written
    assert prompt_of(speaking, body | {"system": "s\nt"}) == written
    assert "[add]" not in prompt_of(speaking, body | {"tool_choice": {"type": "none"}})
    tokens = speaking.post(COUNT, body).json()
    assert tokens == {"input_tokens": len(written.encode())}


def test_messages_of_one_role_are_one(speaking: RunningServer) -> None:
    said = [USER, USER, {"role": "assistant", "content": [text("b"), text("")]}]
    said += [{"role": "assistant", "content": "c"}, {"role": "system", "content": "s"}, USER]
    assert prompt_of(speaking, {"messages": said}) == "user:x\nx;assistant:b\nc;system:s;user:x;a:"
    both = {"system": "s", "messages": [{"role": "system", "content": "t"}, USER]}
    assert prompt_of(speaking, both) == "system:s\nt;user:x;a:"


def test_results_that_say_nothing(speaking: RunningServer) -> None:
    for fields, said in (
        ({}, ""),
        ({"content": ""}, ""),
        ({"is_error": True}, "Error"),
        ({"content": []}, ""),
    ):
        messages = [USER, {"role": "assistant", "content": [tool_use()]}]
        messages.append({"role": "user", "content": [result(**fields)]})
        assert prompt_of(speaking, {"messages": messages}).endswith(f"tool:{said}=add;a:")


def test_system_messages_within_a_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Claude Code sends one after what the user says first; not every template can write it there."""
    said = [USER, {"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}, USER]
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
    )
    strict += "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with saying(tmp_path_factory.mktemp, "x", strict) as server:
        assert prompt_of(server, {"messages": said}) == "user:x\ns;assistant:b;user:x;"
        with_system = prompt_of(server, {"messages": said, "system": "t"})
        assert with_system == "system:t;user:x\ns;assistant:b;user:x;"


def test_a_last_message_of_the_assistant_goes_on(speaking: RunningServer) -> None:
    def begun(content: Any) -> dict[str, Any]:
        return {"messages": [USER, {"role": "assistant", "content": content}]}

    assert prompt_of(speaking, begun("Once")) == "user:x;assistant:Once"
    assert prompt_of(speaking, begun([text("Once")]) | {"tools": [ADD]}) == "[add]user:x;assistant:Once"
    for nothing in ("", [], [text("")]):
        assert prompt_of(speaking, begun(nothing)) == "user:x;a:"
    for last, words in (
        ("Once ", "trailing whitespace"),
        ([tool_use()], "tool_result"),
        ([{"type": "thinking", "thinking": "Hm"}], "thinking block"),
    ):
        assert words in refused(speaking, ASK | begun(last))["message"]
    assert (
        "nothing to answer"
        in refused(speaking, ASK | {"messages": [{"role": "assistant", "content": ""}]})["message"]
    )


@pytest.mark.parametrize(
    ("thinking", "end"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, "a:<think>"),
        ({"type": "disabled"}, "a:<think></think>"),
        ({"type": "adaptive"}, "a:"),
    ],
)
def test_thinking_is_the_templates(speaking: RunningServer, thinking: dict[str, Any], end: str) -> None:
    assert prompt_of(speaking, {"thinking": thinking}).endswith(end)


def test_effort_and_budget_reach_templates_that_use_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{{ reasoning_effort }}/{{ thinking_budget }}/{{ thinking }}/{{ messages[0].content }}"
    asked: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 99}}
    asked["output_config"] = {"effort": "low"}
    with saying(tmp_path_factory.mktemp, "x", template) as server:
        response = server.post(PATH, ASK | asked)
        assert "x-truedraft-ignored" not in response.headers
        assert prompt_of(server, asked) == "low/99/True/x"


def test_what_a_template_cannot_do_is_reported(tmp_path_factory: pytest.TempPathFactory) -> None:
    with saying(tmp_path_factory.mktemp, "x", "{{ messages[0].content }}") as server:
        _check_reports(server)


def _check_reports(server: RunningServer) -> None:
    body = ASK | {
        "max_tokens": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
    }
    for path in (PATH, COUNT):
        asked = body if path == PATH else {name: body[name] for name in body if name != "max_tokens"}
        response = server.post(path, asked)
        assert response.status_code == 200
        reported = response.headers["x-truedraft-ignored"]
        # A budget is of the answer's tokens.
        budget = {"thinking.budget_tokens"} if path == PATH else set()
        assert set(reported.split(", ")) == {"thinking.type", "output_config.effort"} | budget
    off = server.post(PATH, ASK | {"max_tokens": 1, "thinking": {"type": "disabled"}})
    assert "x-truedraft-ignored" not in off.headers


def test_what_is_left_out_is_reported(speaking: RunningServer) -> None:
    body = ASK | {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("y", mood=1)]},
            USER | {"mood": 1},
        ],
        "tools": [ADD | {"defer_loading": True}, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "between_tools", "display": "updates"},
        "bogus": 1,
    }
    response = speaking.post(PATH, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-truedraft-ignored"].split(", ") == [
        "bogus",
        "messages.1.content.0",
        "messages.1.content.1.mood",
        "messages.2.mood",
        "tools.0.defer_loading",
        "tools.1",
        "thinking.type",
        "thinking.display",
    ]
    assert response.headers["x-truedraft-tool-form"] == "hermes"


def test_metadata_is_accepted(speaking: RunningServer) -> None:
    body = ASK | {
        "metadata": {"user_id": "u"},
        "service_tier": "standard_only",
        "cache_control": {"type": "ephemeral"},
        "tools": [ADD | {"cache_control": {"type": "ephemeral"}, "type": "custom", "description": "Adds."}],
        "top_k": 5,
        "top_p": 0.9,
        "temperature": 0.5,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    response = speaking.post(PATH, body, headers=headers)
    assert response.status_code == 200, response.text
    assert "x-truedraft-ignored" not in response.headers


def test_choices_become_grammars(speaking: RunningServer) -> None:
    two = ASK | {"tools": [ADD | {"name": "one"}, ADD | {"name": "two"}]}
    for choice, names in (
        ({"type": "auto"}, ["one", "two"]),
        ({"type": "any"}, ["one", "two"]),
        ({"type": "tool", "name": "two"}, ["two"]),
    ):
        grammar = grammar_of(speaking, two | {"tool_choice": choice}, PATH)
        assert [name for name in ("one", "two") if f'"{name}' in grammar] == names
        assert ("TEXT" in grammar) is (choice["type"] == "auto")
    once = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    assert grammar_of(speaking, two | {"tool_choice": {"type": "any"}}, PATH).count(" call ") == 2
    assert grammar_of(speaking, two | once, PATH).count(" call ") == 1
    schema = {"output_config": {"format": {"type": "json_schema", "schema": {"const": "zyx"}}}}
    assert "zyx" in grammar_of(speaking, ASK | schema, PATH)
    long_name = ASK | {"tools": [ADD | {"name": "n" * 128}]}
    assert "n" * 128 in grammar_of(speaking, long_name, PATH)


@pytest.mark.parametrize(
    ("fields", "words", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [USER | {"role": "tool"}]}, "messages.0.role", "invalid_value"),
        (
            {"messages": [USER | {"content": 5}]},
            "messages.0.content: Input should be a string or a list",
            None,
        ),
        ({"messages": [USER | {"content": [{"text": "x"}]}]}, "messages.0.content.0.type", None),
        (
            {"messages": [USER | {"content": [{"type": "image", "source": {}}]}]},
            "'messages.0.content.0.type' is not supported as 'image': the model sees no pictures here; "
            "describe the image in a text part.",
            "unsupported_parameter",
        ),
        ({"messages": [USER | {"content": [{"type": "document"}]}]}, "'document'", "unsupported_parameter"),
        ({"system": [{"type": "image"}]}, "system.0", "unsupported_parameter"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [tool_use()]},
                    USER | {"content": [result(content=[{"type": "image"}])]},
                ]
            },
            "messages.1.content.0.content.0",
            "unsupported_parameter",
        ),
        ({"messages": [USER | {"content": [result("9")]}]}, "no tool_use with the id '9'", "invalid_value"),
        ({"messages": [USER | {"content": [tool_use()]}]}, "role 'assistant'", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": [result()]}]}, "role 'user'", "invalid_value"),
        ({"messages": [USER | {"content": [{"type": "thinking", "thinking": ""}]}]}, "'assistant'", None),
        ({"tools": [{"name": "a\\b", "input_schema": {}}]}, "tools.0.name", "invalid_value"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "missing_required_parameter"),
        ({"tools": [ADD, ADD]}, "two tools named 'add'", "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "b"}}, "'b'", "invalid_value"),
        (
            {
                "tools": [ADD, {"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice names 'bash', which is not among the functions",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
            "tool_choice is only allowed with tools that can be called",
            "invalid_value",
        ),
        ({"stop_sequences": [""]}, "stop_sequences.0", "invalid_value"),
        ({"stop_sequences": ["x"] * 1000}, "max_stop_strings", "invalid_value"),
        ({"stop_sequences": ["x" * 20_000]}, "max_stop_characters", "invalid_value"),
        ({"stop": ["x"]}, "'stop'", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "'response_format'", "unsupported_parameter"),
        ({"speculation": {"origins": True}}, "speculation.origins", "unsupported_parameter"),
        ({"thread": {"type": "create"}}, "send the whole conversation", "thread_unsupported_request"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/none"}}}},
            "output_config.format.schema.$ref cannot be used",
            "invalid_grammar",
        ),
    ],
)
def test_refusals(speaking: RunningServer, fields: dict[str, Any], words: str, code: str | None) -> None:
    error = refused(speaking, ASK | fields)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert code in (None, error["code"])


def test_refusals_of_the_count(speaking: RunningServer) -> None:
    assert (
        "messages.0.content.0"
        in refused(speaking, {"messages": [USER | {"content": [{"type": "image"}]}]}, COUNT)["message"]
    )
    assert "two tools" in refused(speaking, {"messages": [USER], "tools": [ADD, ADD]}, COUNT)["message"]


def test_more_tokens_than_fit_are_as_many_as_fit(speaking: RunningServer) -> None:
    response = speaking.post(PATH, ASK | {"max_tokens": 10**6})
    assert response.headers["x-truedraft-adjusted"].startswith("max_tokens=")


def test_a_conversation_that_is_too_long_is_counted(speaking: RunningServer) -> None:
    long = [USER | {"content": "x" * 100_000}]
    assert refused(speaking, ASK | {"messages": long})["message"].startswith("prompt is too long: ")
    assert speaking.post(COUNT, {"messages": long}).json()["input_tokens"] > 100_000


def test_strict_parameters(start_server: StartServer) -> None:
    with start_server(strict_fields=True) as server:
        for fields in (
            {"bogus": 1},
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            {"thinking": {"type": "between_tools"}},
        ):
            assert refused(server, ASK | fields)["code"] in (
                "unknown_parameter",
                "unsupported_parameter",
            )


def test_our_own_fields(server: RunningServer) -> None:
    body = ASK | {"max_tokens": 4, "speculation": {}, "min_p": 0.1}
    whole, streamed = answer(server, body), server.post(PATH, body | {"stream": True})
    assert whole["truedraft"]["acceptance_length"] >= 1
    assert read(streamed.text)[-2]["truedraft"].keys() == whole["truedraft"].keys()


def test_cached_tokens_are_counted_apart(start_server: StartServer) -> None:
    with start_server() as server:
        messages = [USER | {"content": "y" * 100}]
        totals = []
        for _ in range(2):
            usage = answer(server, {"messages": messages, "max_tokens": 1})["usage"]
            totals.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
        assert usage["cache_read_input_tokens"] > 0
        assert totals[0] == totals[1] == server.post(COUNT, {"messages": messages}).json()["input_tokens"]


def test_keys(start_server: StartServer) -> None:
    """Anthropic's header for keys is as good as OpenAI's, everywhere."""
    with start_server(api_keys=["one", "two"]) as server:
        error = refused(server, ASK, status=401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for headers in ({"x-api-key": "no"}, {"x-api-key": ""}, {"authorization": "two"}):
            assert server.post(PATH, ASK, headers=headers).status_code == 401
        for headers in (
            {"x-api-key": "two"},
            {"authorization": "Bearer two"},
            {"authorization": "Bearer no", "x-api-key": "two"},
        ):
            for path in (PATH, "/v1/chat/completions"):
                assert server.post(path, ASK | {"max_tokens": 1}, headers=headers).status_code == 200
        assert server.post("/v1/chat/completions", ASK).json()["error"]["code"] == "invalid_api_key"


def test_errors_of_every_kind_have_the_shape(start_server: StartServer) -> None:
    with start_server(max_body_size=300, root_path="/proxy") as server:
        for path in (PATH, COUNT, f"/proxy{PATH}"):
            error = refused(server, {"messages": "x" * 400}, path, 413)
            assert error["type"] == "request_too_large"
            response = server.get(path)
            assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
        assert refused(server, ASK | {"model": "b"}, status=404)["type"] == "not_found_error"
        assert server.get(f"{PATH}/batches").json()["error"]["type"] == "not_found_error"
        other = server.post("/v1/chat/completions", ASK | {"model": "b"})
        assert other.json()["error"]["code"] == "model_not_found"
        assert "request-id" not in other.headers


def test_a_full_queue(start_server: StartServer) -> None:
    with start_server(max_queued_sequences=1) as server:
        server.worker.at_most(0)
        with server.unanswered(PATH, ASK):
            server.wait_for_messages("Generate", 1)
            error = refused(server, ASK, status=429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


def test_while_loading(start_server: StartServer) -> None:
    with start_server(wait=False) as server:
        for path in (PATH, COUNT):
            response = server.post(path, ASK if path == PATH else {"messages": [USER]})
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert response.json()["error"]["type"] == "overloaded_error"


def test_failure_in_a_stream_is_an_event(start_server: StartServer) -> None:
    with start_server() as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(10)
        answering = threads.submit(server.post, PATH, ASK | {"stream": True})
        server.wait_for_tokens(40)
        server.worker.die()
        response = answering.result()
        *events, last = read(response.text)
        assert "message_stop" not in [event["type"] for event in events]
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
        assert last["error"]["details"] == {"error_code": "worker_lost"}
        assert last["request_id"] == response.headers["request-id"]


def test_silence_is_filled_with_events(start_server: StartServer) -> None:
    """Anthropic's API sends no comments, so its clients need not know them."""
    with start_server() as server:
        server.worker.at_most(1)
        with server.client.stream("POST", PATH, json={"model": MODEL, "stream": True} | ASK) as response:
            lines = response.iter_lines()
            for line in lines:
                if line.startswith('data: {"type":"content_block_delta"'):
                    break
            server.pass_time(20)
            assert next(line for line in lines if line) == "event: ping"
            assert next(lines) == 'data: {"type":"ping"}'


def test_client_that_leaves_frees_its_sequence(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.at_most(1)
        with server.client.stream("POST", PATH, json={"model": MODEL, "stream": True} | ASK) as response:
            next(response.iter_lines())
        server.wait_for_messages("Abort", 1)


def test_a_template_without_tools(server: RunningServer) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": [tool_use()]},
        USER | {"content": [result(content="2")]},
    ]
    prompt = prompt_of(server, {"messages": messages})
    assert CALL.split('"arguments"')[0] in prompt
    assert "<tool_response>\n2\n</tool_response>" in prompt
