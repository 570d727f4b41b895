"""What real clients send and no server of text can honour: answered, and reported in a header."""

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.server.conftest import StartServer
from tests.server.refusals import CHAT, COMPLETIONS, refused
from tests.server.running import RunningServer
from tests.server.test_tools import SAID, TEMPLATE, flat, prompt_of, saying, tokenizer_of, tool
from tests.server.wire import answers
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.text.prompt import response_options, template_options

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}

# OpenAI's coding agent sends this to any model.
AGENT: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [
        flat("shell", strict=False, parameters={"type": "object", "properties": {"command": {}}}),
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "namespace", "name": "mcp", "tools": [flat("inner")]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "flex",
    "prompt_cache_key": "0",
    "client_metadata": {"originator": "cli"},
    "text": {"verbosity": "low"},
}
LEFT_OUT = "service_tier, include.0, reasoning.summary, text.verbosity, client_metadata"
OTHER_TOOLS = "tools.1, tools.2, tools.3, tools.4"
# What it sends back in its second turn, also of another model's calls.
TURNS: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_0", "summary": [], "encrypted_content": "gAAAA", "content": None},
    {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "c1"},
    {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
    {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "patch", "input": "*** P"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Done"}]},
    {
        "type": "local_shell_call",
        "id": None,
        "call_id": "c3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"]},
    },
    {"type": "local_shell_call_output", "call_id": "c3", "output": "b"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "So."}, {"type": "refusal", "refusal": "No."}],
    },
    {"role": "user", "content": "y"},
]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with saying(tmp_path_factory.mktemp, "Well.", TEMPLATE) as running:
        yield running


def with_part(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def ignored(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return str(response.headers.get("x-truedraft-ignored", ""))


def test_a_coding_agent_has_its_turns(speaking: RunningServer) -> None:
    assert ignored(speaking, RESPONSES, AGENT) == f"{LEFT_OUT}, {OTHER_TOOLS}"
    first = "[shell](medium)system:You are a coding agent.\n\nBe brief.;user:x;"
    assert prompt_of(speaking, RESPONSES, AGENT) == f"{first}a:"
    second = AGENT | {"input": AGENT["input"] + TURNS}
    assert ignored(speaking, RESPONSES, second) == f"{LEFT_OUT}, input.9, {OTHER_TOOLS}"
    assert prompt_of(speaking, RESPONSES, second) == (
        f'{first}assistant:<tool_call>{{"name": "shell", "arguments": {{"command": "ls"}}}};'
        'tool:a.txt=shell;assistant:<tool_call>{"name": "patch", "arguments": {"input": "*** P"}};'
        'tool:Done=patch;assistant:<tool_call>{"name": "local_shell", "arguments": '
        '{"type": "exec", "command": ["ls"]}};tool:b=local_shell;assistant:So.\nNo.;user:y;a:'
    )


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (RESPONSES, {"include": ["file_search_call.results", "message.output_text.logprobs"]}, "include.0"),
        (RESPONSES, {"reasoning": {"summary": "detailed", "generate_summary": "auto"}},
         "reasoning.summary, reasoning.generate_summary"),
        (RESPONSES, {"max_tool_calls": 3, "moderation": {"model": "m"}}, "max_tool_calls, moderation"),
        (RESPONSES, {"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        (RESPONSES, {"store": True}, "store"),
        (CHAT, {"service_tier": "priority", "verbosity": "low"}, "service_tier, verbosity"),
        (COMPLETIONS, {"store": True, "cache_control": {"type": "ephemeral"}}, "store, cache_control"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools.0"),
        (CHAT, {"tools": [tool(), {"type": "web_search_preview"}]}, "tools.1"),
        (CHAT, {"tools": [tool(cache_control={"type": "e"}) | {"defer_loading": True}]},
         "tools.0.defer_loading, tools.0.function.cache_control"),
        (RESPONSES, {"tools": [flat(defer_loading=True)]}, "tools.0.defer_loading"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True, "odd": 1}}, "stream_options.odd"),
        (CHAT, {"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
        (CHAT, {"speculation": {"odd": 1}, "logit_bias": None, "odd": None}, "speculation.odd"),
        (CHAT, {"structured_outputs": {"choice": ["a"], "odd": 1}}, "structured_outputs.odd"),
        ("/tokenize", {"odd": 1}, "odd"),
    ],
)  # fmt: skip
def test_extra_output_and_metadata_never_cost_the_answer(
    speaking: RunningServer, path: str, fields: dict[str, Any], names: str, start_server: StartServer
) -> None:
    ask: dict[str, Any] = {CHAT: ASK, RESPONSES: {"input": "x"}}.get(path, {"prompt": "x"})
    assert ignored(speaking, path, ask | fields) == names


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include.0"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0"),
        (CHAT, {"messages": with_part({"text": "x", "odd": 1})}, "messages.0.content.0.odd"),
        (CHAT, {"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"format": "odd"}}}},
         "response_format.json_schema.schema.format"),
        (CHAT, {"max_tokens": 10_000}, "max_tokens"),
        ("/tokenize", {"prompt": "x", "odd": 1}, "odd"),
        ("/detokenize", {"tokens": [1], "odd": 1}, "odd"),
    ],
)  # fmt: skip
def test_strict_servers_refuse_all_of_it(
    start_server: StartServer, path: str, fields: dict[str, Any], name: str
) -> None:
    ask: dict[str, Any] = {CHAT: ASK, RESPONSES: {"input": "x"}}.get(path, {})
    with start_server(strict_fields=True) as strict:
        assert refused(strict, path, ask | fields)["param"] == name


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (RESPONSES, {"type": "web_search"}),
        (RESPONSES, {"type": "custom", "name": "apply_patch"}),
        (RESPONSES, {"type": "function", "name": "apply_patch"}),
        (CHAT, {"type": "custom", "custom": {"name": "apply_patch"}}),
        (CHAT, "required"),
        (RESPONSES, "required"),
    ],
)
def test_a_tool_that_is_left_out_cannot_be_forced(speaking: RunningServer, path: str, choice: Any) -> None:
    others = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    ask: dict[str, Any] = ASK if path == CHAT else {"input": "x"}
    error = refused(speaking, path, ask | {"tools": others, "tool_choice": choice})
    assert error["param"].startswith("tool_choice")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"a": 1, ', {"a": 1}),
        ("{", {}),
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1}{"b": 2}', {"arguments": '{"a": 1}{"b": 2}'}),
        ("[1]", {"arguments": "[1]"}),
        ("ls -l", {"arguments": "ls -l"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
    ],
)
def test_a_call_that_was_cut_is_accepted_back(
    speaking: RunningServer, arguments: str, written: dict[str, Any]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    items = [
        {"role": "user", "content": "x"},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "add",
            "arguments": arguments,
            "status": "incomplete",
        },
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    shown = json.dumps(written)
    expected = f'user:x;assistant:<tool_call>{{"name": "add", "arguments": {shown}}};tool:2=add;a:'
    assert prompt_of(speaking, CHAT, {"messages": messages}) == expected
    assert prompt_of(speaking, RESPONSES, {"input": items}) == expected


def test_whole_answers_are_accepted_back(server: RunningServer) -> None:
    """With every field that this server or its relatives write."""
    first = server.post(CHAT, ASK | {"max_tokens": 3}).json()["choices"][0]["message"]
    more = {"audio": None, "function_call": None, "annotations": [], "tool_calls": [], "refusal": None}
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot."}
    messages = [*ASK["messages"], first | more, refusal, {"role": "user", "content": "y"}]
    assert ignored(server, CHAT, {"messages": messages, "max_tokens": 1}) == ""
    asked = {"input": "x", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    output = server.post(RESPONSES, asked | {"speculation": {"origins": True}}).json()["output"]
    items = [{"role": "user", "content": "x"}, *output, {"role": "user", "content": "y"}]
    assert ignored(server, RESPONSES, {"input": items, "max_output_tokens": 1}) == ""


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}, "cache_control"),
        ({"type": "text", "text": "x", "prompt_cache_breakpoint": None}, ""),
        ({"text": "x"}, ""),
        ({"type": None, "text": "x"}, ""),
        ({"type": "input_text", "text": "x"}, ""),
    ],
)
def test_keys_of_parts(server: RunningServer, part: dict[str, Any], name: str) -> None:
    answer = ignored(server, CHAT, {"messages": with_part(part), "max_tokens": 1})
    assert answer == (f"messages.0.content.0.{name}" if name else "")
    answer = ignored(server, RESPONSES, {"input": with_part(part), "max_output_tokens": 1})
    assert answer == (f"input.0.content.0.{name}" if name else "")


FORMAT: dict[str, Any] = {"type": "json_schema"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": with_part({"type": "text", "text": 5})}, "messages.0.content.0.text"),
        ({"messages": with_part({"type": "text"})}, "messages.0.content.0.text"),
        ({"messages": with_part({"text": "x", "type": 5})}, "messages.0.content.0.type"),
        (
            {"response_format": FORMAT | {"json_schema": {"name": 5, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": FORMAT | {"json_schema": {"name": "x", "schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools.0.function.name"),
    ],
)
def test_errors_name_the_key_that_is_wrong(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    error = refused(server, CHAT, ASK | fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_names_of_alternatives_are_no_keys(server: RunningServer) -> None:
    mixed = {"type": "json_schema", "name": 5, "schema": {}, "json_schema": {"name": "x"}}
    error = refused(server, RESPONSES, {"input": "x", "text": {"format": mixed}})
    assert error["param"] == "text.format.name"


def test_what_is_ignored_of_a_tool_does_not_reach_the_template() -> None:
    written = {"type": "function", "function": {"name": "add", "description": "d"}}
    odd = tool(description="d", odd=1, strict=None) | {"odd": 2}
    request = ChatRequest.model_validate(ASK | {"model": "m", "tools": [odd, {"type": "web_search"}]})
    assert request.template_options()["tools"] == [written]
    given = {"model": "m", "input": "x", "tools": [flat(description="d", odd=1), {"type": "web_search"}]}
    options = response_options(
        ResponsesRequest.model_validate(given), tokenizer_of(NEVER), Leniency(strict=False)
    )
    assert options["tools"] == [written]


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("image_url", "describe the image in a text part"),
        ("input_image", "describe the image in a text part"),
        ("input_audio", "write down what is said in a text part"),
        ("file", "put the file's text into a text part"),
        ("video_url", "reads and writes text only"),
    ],
)
def test_other_parts_name_what_to_send(server: RunningServer, kind: str, instead: str) -> None:
    error = refused(server, CHAT, {"messages": with_part({"type": kind})})
    assert error["param"] == "messages.0.content.0.type"
    assert instead in error["message"]
    assert kind in error["message"]


def test_leading_system_messages_are_one(speaking: RunningServer) -> None:
    """Many templates refuse a second one."""
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "c"},
    ]
    assert prompt_of(speaking, CHAT, {"messages": messages}) == "system:a\n\nb;user:x;system:c;a:"
    given = {"instructions": "a", "input": messages[1:3]}
    assert prompt_of(speaking, RESPONSES, given) == "system:a\n\nb;user:x;a:"
    tokens = speaking.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert speaking.post("/detokenize", {"tokens": tokens}).json()["prompt"].startswith("system:a\n\nb;")


BY_SWITCH = (
    "{% if enable_thinking is defined %}({{ enable_thinking }}){% endif %}{{ messages[0].content }}<think>"
)
BY_THINKING = BY_SWITCH.replace("enable_thinking", "thinking")
BY_EFFORT = (
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}{{ messages[0].content }}<think></think>"
)
ALWAYS, NEVER = "{{ messages[0].content }}<think></think>", "{{ messages[0].content }}"
KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "fields", "written", "names"),
    [
        (BY_SWITCH, {"reasoning_effort": "none"}, "(False)", ""),
        (BY_SWITCH, {"reasoning_effort": "high"}, "(True)", ""),
        (BY_SWITCH, {"enable_thinking": False}, "(False)", ""),
        (BY_SWITCH, {KWARGS: {"enable_thinking": True}, "reasoning_effort": "none"}, "(True)", ""),
        (BY_SWITCH, {KWARGS: {"thinking": False}}, "(False)", ""),
        (BY_SWITCH, {KWARGS: {"other": 1}}, "", "chat_template_kwargs.other"),
        (BY_THINKING, {"enable_thinking": False}, "(False)", ""),
        (BY_THINKING, {"reasoning_effort": "low"}, "(True)", ""),
        (BY_EFFORT, {"enable_thinking": False}, "(none)", ""),
        (BY_EFFORT, {"enable_thinking": True}, "", ""),
        (BY_EFFORT, {KWARGS: {"enable_thinking": False}, "reasoning_effort": "low"}, "(low)", ""),
        (ALWAYS, {"reasoning_effort": "low"}, "", "reasoning_effort"),
        (ALWAYS, {"reasoning_effort": "none"}, "", "reasoning_effort"),
        (ALWAYS, {"enable_thinking": False}, "", "enable_thinking"),
        (NEVER, {"reasoning_effort": "none", "enable_thinking": False}, "", ""),
        (NEVER, {"reasoning_effort": "high"}, "", "reasoning_effort"),
        (NEVER, {KWARGS: {"enable_thinking": True}}, "", "chat_template_kwargs.enable_thinking"),
    ],
)  # fmt: skip
def test_how_much_to_reason(template: str, fields: dict[str, Any], written: str, names: str) -> None:
    """It is written as the template can, and else reported."""
    leniency = Leniency(strict=False)
    request = ChatRequest.model_validate(ASK | {"model": "m"} | fields)
    options = template_options(request, tokenizer_of(template), leniency)
    options = {name: value for name, value in options.items() if "thinking" in name or "effort" in name}
    environment = ImmutableSandboxedEnvironment()
    text = environment.from_string(template).render(messages=ASK["messages"], **options)
    assert text.partition("x")[0] == written
    assert leniency.headers().get("x-truedraft-ignored", "") == names


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")],
)
def test_longer_answers_than_fit(
    server: RunningServer, start_server: StartServer, path: str, name: str
) -> None:
    ask: dict[str, Any] = ASK if path == CHAT else {"input": "x"}
    response = server.post(path, ask | {name: 100_000, "temperature": 0})
    usage = response.json()["usage"]
    written = usage["completion_tokens" if path == CHAT else "output_tokens"]
    assert usage["total_tokens"] == 512
    assert response.headers["x-truedraft-adjusted"] == f"{name}={written}"
    assert "x-truedraft-adjusted" not in server.post(path, ask | {name: written}).headers
    long: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 600}], "input": "x" * 600}
    error = refused(server, path, {field: long[field] for field in ask} | {name: 5})
    assert error["code"] == "context_length_exceeded"
    with start_server(clamp_max_tokens=False) as exact:
        error = refused(exact, path, ask | {name: written + 1})
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


def test_completions_are_not_shortened(server: RunningServer) -> None:
    error = refused(server, COMPLETIONS, {"prompt": "x", "max_tokens": 512})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_many_stop_strings(server: RunningServer, start_server: StartServer, path: str) -> None:
    ask: dict[str, Any] = {CHAT: ASK, RESPONSES: {"input": "x"}}.get(path, {"prompt": "x"})
    stops = [f"stop {number}" for number in range(63)]
    answer = server.post(path, ask | {"stop": [*stops, "wör"]})
    assert '"Hello, "' in answer.text
    error = refused(server, path, ask | {"stop": [*stops, "a", "b"]})
    assert (error["param"], error["code"]) == ("stop", "invalid_value")
    with start_server(max_stop_strings=4) as few:
        assert few.post(path, ask | {"stop": stops[:4]}).status_code == 200
        assert "max_stop_strings" in refused(few, path, ask | {"stop": stops[:5]})["message"]
    assert server.post(path, ask | {"stop": ["x" * 8192, "y" * 8192]}).status_code == 200
    error = refused(server, path, ask | {"stop": ["x" * 8192, "y" * 8193]})
    assert "16385 characters" in error["message"]
    assert "max_stop_characters" in error["message"]


def test_idle_connections_outlive_the_pools_of_clients(
    server: RunningServer, start_server: StartServer
) -> None:
    def is_kept(running: RunningServer, seconds: float) -> bool:
        address = urlsplit(running.url)
        connection = HTTPConnection(str(address.hostname), address.port)
        with closing(connection):
            for _ in range(2):
                connection.auto_open = connection.sock is None
                try:
                    connection.request("GET", "/health")
                    connection.getresponse().read()
                except (OSError, HTTPException):
                    return False
                running.pass_time(seconds)
                running.get("/health")  # after which the timers that are due have been
        return True

    assert is_kept(server, 95)
    with start_server(keep_alive_timeout=10) as short:
        assert is_kept(short, 9)
        assert not is_kept(short, 11)


def test_a_page_may_call_the_private_network(start_server: StartServer) -> None:
    origin = "https://a.example"
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
        "access-control-request-private-network": "true",
    }
    with start_server(cors_origins=[origin], api_keys=["one"]) as server:
        response = server.client.options(CHAT, headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["access-control-allow-private-network"] == "true"
        other = server.client.options(CHAT, headers=headers | {"origin": "https://b.example"})
        assert other.status_code == 400


def test_a_chunk_has_one_kind_of_delta(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Reasoning, text and calls that come in one round are chunks of their own."""
    with saying(tmp_path_factory.mktemp, SAID, TEMPLATE) as running:
        body = ASK | {"tools": [tool()], "stream": True, "logprobs": True, "return_token_ids": True}
        choices = [chunk["choices"][0] for chunk in answers(running, CHAT, body)]
    deltas = [choice["delta"] for choice in choices]
    kinds = [
        [kind for kind in ("content", "reasoning_content", "tool_calls") if delta.get(kind)]
        for delta in deltas
    ]
    assert max(map(len, kinds)) == 1
    assert max(len(delta.get("tool_calls") or []) for delta in deltas) == 1
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, 2."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I call."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert sum(len(choice.get("token_ids") or []) for choice in choices) == len(SAID.encode()) + 1
