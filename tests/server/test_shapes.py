"""Shapes that other vendors and their clients send are read, or refused with the endpoint they belong to."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import CHAT, COMPLETIONS, error_of, refused, refused_raw
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.test_allowed_hosts import is_allowed
from tests.server.test_leniency import ASK, BY_SWITCH, ignored, speaking
from tests.server.test_tools import TEMPLATE, flat, prompt_of, tokenizer_of, tool
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.leniency import Leniency
from truedraft.server.schemas import foreign_parts
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.text.prompt import template_options
from truedraft.server.text.tokenizer import load_tokenizer

__all__ = ["speaking"]

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "x"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TO: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}


def tools_for(path: str, number: int, name: str = "f") -> list[dict[str, Any]]:
    names = [f"{name}{index or ''}" for index in range(number)]
    if path == MESSAGES:
        return [{"name": each, "input_schema": SCHEMA} for each in names]
    write = tool if path in (CHAT, "/tokenize") else flat
    return [write(each, parameters=SCHEMA) for each in names]


# Limits are settings.


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its context has room for many tools; a token is a byte."""
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=TEMPLATE)
    log = tmp_path_factory.mktemp("log")
    with run_server(
        folder, load_tokenizer(str(folder)), log, "--once", "--max-model-len", "1000000"
    ) as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_many_tools(roomy: RunningServer, path: str) -> None:
    """An agent with a dozen of MCP servers has some hundreds."""
    limit = {MESSAGES: {"max_tokens": 9}}.get(path, {})
    assert roomy.post(path, TO[path] | limit | {"tools": tools_for(path, 259)}).status_code == 200
    error = refused(roomy, path, TO[path] | {"tools": tools_for(path, 1025)})
    assert "1025 tools, but at most 1024 are allowed (max_tools)" in error["message"]


def test_counting_has_the_same_limit(start_server: StartServer) -> None:
    with start_server(max_tools=2) as server:
        for path, like in ((f"{MESSAGES}/count_tokens", MESSAGES), ("/tokenize", "/tokenize")):
            body = {"messages": [USER], "tools": tools_for(like, 3)}
            assert "max_tools" in refused(server, path, body)["message"]
        body = {"input": "x", "tools": tools_for(RESPONSES, 3)}
        assert "max_tools" in refused(server, f"{RESPONSES}/input_tokens", body)["message"]


def test_metadata_and_choices(server: RunningServer, start_server: StartServer) -> None:
    many = {f"key {number}" * 10: "v" * 600 for number in range(20)}
    answer = server.post(RESPONSES, TO[RESPONSES] | {"max_output_tokens": 1, "metadata": many})
    assert answer.json()["metadata"] == many
    with start_server(max_metadata=5, max_choices=200) as small:
        error = refused(small, RESPONSES, TO[RESPONSES] | {"metadata": {"abc": "def"}})
        assert "6 characters of metadata, but at most 5 are allowed (max_metadata)" in error["message"]
        assert small.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "n": 150}).status_code == 200
        assert "max_choices" in refused(small, COMPLETIONS, {"prompt": "x", "n": 201})["message"]


# Values that the vendors' packages list.


@pytest.mark.parametrize("effort", ["max", "xhigh", "none"])
def test_efforts(speaking: RunningServer, effort: str) -> None:
    assert f"({effort})" in prompt_of(speaking, CHAT, TO[CHAT] | {"reasoning_effort": effort})
    assert f"({effort})" in prompt_of(speaking, RESPONSES, TO[RESPONSES] | {"reasoning": {"effort": effort}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_of_no_tokens(server: RunningServer, stream: bool) -> None:
    response = server.post(MESSAGES, {"messages": [USER], "max_tokens": 0, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        answer = response.json()
        assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
        assert answer["usage"]["output_tokens"] == 0
    else:
        assert '"stop_reason":"max_tokens"' in response.text
        assert "message_stop" in response.text


CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {
            "type": "local_shell_call",
            "id": "i",
            "call_id": "c",
            "action": {"type": "exec"},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "c", "output": "ok"},
        'assistant:<tool_call>{"name": "local_shell", "arguments": {"type": "exec"}};tool:ok=local_shell;',
    ),
    (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "environment": None},
        {
            "type": "shell_call_output",
            "call_id": "c",
            "output": [{"stdout": "a", "stderr": "", "outcome": {}}],
        },
        'assistant:<tool_call>{"name": "shell", "arguments": {"commands": ["ls"]}};'
        'tool:[{"stdout": "a", "stderr": "", "outcome": {}}]=shell;',
    ),
    (
        {
            "type": "apply_patch_call",
            "call_id": "c",
            "operation": {"type": "delete_file"},
            "status": "completed",
        },
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        'assistant:<tool_call>{"name": "apply_patch", "arguments": {"type": "delete_file"}};'
        "tool:failed=apply_patch;",
    ),
]


@pytest.mark.parametrize(("call", "output", "written"), CALLS)
def test_calls_of_other_models(
    speaking: RunningServer, call: dict[str, Any], output: dict[str, Any], written: str
) -> None:
    body = {"input": [USER, call, output]}
    assert prompt_of(speaking, RESPONSES, body) == f"user:x;{written}a:"
    assert ignored(speaking, RESPONSES, body) == ""


def test_a_call_of_another_server(speaking: RunningServer) -> None:
    call = {"type": "mcp_call", "id": "m", "server_label": "s", "name": "look", "arguments": '{"a": 1}'}
    for result, written in (({"output": "found"}, "found"), ({"error": {"code": 5}}, 'Error: {"code": 5}')):
        body = {"input": [USER, call | result, USER]}
        assert prompt_of(speaking, RESPONSES, body) == (
            'user:x;assistant:<tool_call>{"name": "look", "arguments": {"a": 1}};'
            f"tool:{written}=look;user:x;a:"
        )


@pytest.mark.parametrize(("kind", "name"), [("shell_call", "action"), ("apply_patch_call", "operation")])
def test_calls_without_what_was_asked(server: RunningServer, kind: str, name: str) -> None:
    error = refused(server, RESPONSES, {"input": [{"type": kind, "call_id": "c"}]})
    assert f"'{name}' is missing" in error["message"]


@pytest.mark.parametrize(
    ("kind", "written"), [("disabled", "(False)"), ("enabled", "(True)"), ("adaptive", ""), ("auto", "")]
)
def test_a_switch_in_the_form_of_other_vendors(kind: str, written: str) -> None:
    request = ChatRequest.model_validate(ASK | {"model": "m", "thinking": {"type": kind}})
    options = template_options(request, tokenizer_of(BY_SWITCH), Leniency(strict=False))
    assert {"(True)": True, "(False)": False}.get(written) == options.get("enable_thinking")


def test_both_names_of_one_limit(server: RunningServer) -> None:
    for fields in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        answer = server.post(COMPLETIONS, {"prompt": "x"} | fields).json()
        assert answer["usage"]["completion_tokens"] == 3
    fields = {"max_completion_tokens": 3, "max_tokens": 4}
    assert "same limit" in refused(server, COMPLETIONS, {"prompt": "x"} | fields)["message"]


# Names of tools.

GOOD = ["mcp/ctx/resolve", "get.user", "functions.x:0", "naïve_日本", "a b", "x" * 200, "a-b@c#1"]


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_names_of_tools(speaking: RunningServer, path: str, name: str) -> None:
    assert speaking.post(path, TO[path] | {"tools": tools_for(path, 1, name)}).status_code == 200


@pytest.mark.parametrize("name", ["", 'a"b', "a\\b", "a<b", "a>b", "a\nb", " a", "a'b", "\x7f", "a\u200bb"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_names_that_no_form_can_write(speaking: RunningServer, path: str, name: str) -> None:
    error = refused(speaking, path, TO[path] | {"tools": tools_for(path, 1, name)})
    assert "printable text without quotes" in error["message"]


# Parts of other vendors.


def said_by_assistant(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": [*parts], **fields}, USER]}


TEXT = {"type": "text", "text": "So."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "p", "input": "*"}}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
WRITTEN = 'So.<tool_call>{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("parts", "more", "written"),
    [
        ([{"type": "thinking", "thinking": "Hm.", "signature": "s"}, TEXT], {}, ["Hm.", "So."]),
        ([{"type": "reasoning", "text": "Hm."}, TEXT], {}, ["Hm.", "So."]),
        ([{"type": "reasoning", "summary": [{"text": "Hm."}]}, TEXT], {}, ["Hm.", "So."]),
        ([{"type": "redacted_thinking", "data": "x"}, TEXT], {}, ["So."]),
        ([TEXT, USED | {"input": {"a": 1}}], {}, [WRITTEN]),
        (
            [TEXT, {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}],
            {},
            [WRITTEN],
        ),
        ([TEXT, USED], {"tool_calls": [CALL]}, [WRITTEN]),
        ([TEXT], {"tool_calls": [CUSTOM]}, ['So.<tool_call>{"name": "p", "arguments": {"input": "*"}}']),
        ([{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, TEXT], {}, ["So."]),
    ],
)
def test_parts_of_an_assistant(
    speaking: RunningServer, parts: list[Any], more: dict[str, Any], written: list[str]
) -> None:
    prompt = prompt_of(speaking, CHAT, said_by_assistant(*parts, **more))
    for piece in written:
        assert prompt.count(piece) == 1
    assert "signature" not in prompt


def test_what_is_left_out_is_reported(speaking: RunningServer) -> None:
    body = said_by_assistant({"type": "redacted_thinking", "data": "x"}, TEXT)
    assert ignored(speaking, CHAT, body) == "messages.1.content.0"
    body = {"messages": [USER | {"content": [{"type": "thinking", "thinking": "Hm."}, TEXT]}]}
    assert ignored(speaking, CHAT, body) == "messages.0.content.0"
    assert "Hm." not in prompt_of(speaking, CHAT, body)


@pytest.mark.parametrize("role", ["user", "system"])
def test_only_an_assistant_calls(server: RunningServer, role: str) -> None:
    part = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    refused(server, CHAT, {"messages": [{"role": role, "content": [part]}, USER]})


def test_results_as_parts_of_a_users_message(speaking: RunningServer) -> None:
    body = said_by_assistant({"type": "tool_use", "id": "c", "name": "f", "input": {}})
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}
    body["messages"][2] = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    assert "tool:3=f;user:And?;" in prompt_of(speaking, CHAT, body)


DOCUMENT = {
    "type": "document",
    "title": "T",
    "source": {"type": "text", "media_type": "text/plain", "data": "Words."},
}
FOUND = {
    "type": "search_result",
    "title": "T",
    "source": "http://a",
    "content": [{"type": "text", "text": "Words."}],
}


@pytest.mark.parametrize(("block", "text"), [(DOCUMENT, "T\nWords."), (FOUND, "T\nhttp://a\nWords.")])
def test_documents_that_are_text(speaking: RunningServer, block: dict[str, Any], text: str) -> None:
    for path in (CHAT, MESSAGES):
        body = TO[path] | {"messages": [{"role": "user", "content": [block]}]}
        assert prompt_of(speaking, path, body) == f"user:{text};a:"
        assert ignored(speaking, path, body) == ""
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    body = {"messages": [USER, called, {"role": "user", "content": [result]}], "max_tokens": 9}
    assert f"tool:{text}=f;" in prompt_of(speaking, MESSAGES, body)
    pdf = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
    }
    assert (
        "put the file's text"
        in refused(speaking, MESSAGES, TO[MESSAGES] | {"messages": [{"role": "user", "content": [pdf]}]})[
            "message"
        ]
    )


def test_blocks_of_anthropics_own_tools(speaking: RunningServer) -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
        {"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "n", "input": {"a": 1}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m",
            "is_error": False,
            "content": [{"type": "text", "text": "3"}],
        },
        {"type": "text", "text": "Three."},
    ]
    body = {"messages": [USER, {"role": "assistant", "content": blocks}, USER], "max_tokens": 9}
    assert ignored(speaking, MESSAGES, body) == "messages.1.content.0, messages.1.content.1"
    assert prompt_of(speaking, MESSAGES, body) == (
        'user:x;assistant:<tool_call>{"name": "look", "arguments": {"a": 1}};'
        "tool:3=look;assistant:Three.;user:x;a:"
    )


def test_tools_that_a_search_has_found(speaking: RunningServer) -> None:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}]}
    found = [{"type": "tool_reference", "tool_name": "get_weather"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": found}
    body = {"messages": [USER, called, {"role": "user", "content": [result]}], "max_tokens": 9}
    assert "tool:get_weather=find;" in prompt_of(speaking, MESSAGES, body)


def test_the_tests_of_parts_can_fail(speaking: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_parts.OtherPart, "text", property(lambda self: None))
    with pytest.raises(AssertionError):
        test_documents_that_are_text(speaking, DOCUMENT, "T\nWords.")
    monkeypatch.setattr(foreign_parts.OtherPart, "call", property(lambda self: None))
    with pytest.raises(AssertionError):
        test_blocks_of_anthropics_own_tools(speaking)


# Paths, and what says which endpoint was meant.


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/messages", MESSAGES),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/v1/v1/responses", RESPONSES),
        ("/v1/chat/completions/", CHAT),
        ("/v1//chat//completions", CHAT),
        ("//v1/completions", COMPLETIONS),
        ("/chat/completions", CHAT),
        ("/messages", MESSAGES),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/metrics", "/metrics"),
        ("/openai/v1/chat/completions", CHAT),
        ("/api/v1/responses", RESPONSES),
        ("/api/chat/completions", CHAT),
        ("/V1/Chat/Completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/v1/messages/count_tokens", f"{MESSAGES}/count_tokens"),
    ],
)
def test_near_paths(server: RunningServer, path: str, meant: str) -> None:
    response = server.client.post(f"{server.url}{path}", json={})
    assert response.status_code == 404
    body = response.json()
    assert f"Did you mean {meant}?" in body["error"]["message"]
    assert ("request_id" in body) is ("v1/messages" in path)


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "/v1/v1/models", "/models"])
def test_near_paths_of_lists(server: RunningServer, path: str) -> None:
    response = server.client.get(f"{server.url}{path}")
    assert response.status_code == 404
    assert "Did you mean /v1/models?" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/nothing", "/wp-login.php", "/", "/api/tags"])
def test_paths_that_are_near_to_none(server: RunningServer, path: str) -> None:
    assert "Did you mean" not in server.client.delete(f"{server.url}{path}").text


@pytest.mark.parametrize("path", [RESPONSES, CHAT])
def test_websockets_are_told_to_use_http(server: RunningServer, path: str) -> None:
    headers = {
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-key": "eA==",
        "sec-websocket-version": "13",
    }
    response = server.get(path, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (426, "websocket_unsupported")
    assert response.headers["upgrade"]
    assert server.get(path).status_code == 405


ANY, NAMED = {"type": "any"}, {"type": "tool", "name": "f"}


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (CHAT, {"messages": ["x"]}, "messages.0: Input should be an object"),
        (CHAT, {"messages": [USER | {"content": ["x"]}]}, "messages.0.content.0: Input should be an object"),
        (RESPONSES, {"input": ["x"]}, "input.0: Input should be an object"),
        (MESSAGES, {"messages": [5], "max_tokens": 1}, "messages.0: Input should be an object"),
        (CHAT, [], "body: Input should be an object"),
        (CHAT, None, "body: There is none"),
        (CHAT, TO[CHAT] | {"stop": 5}, "stop: Input should be a string or a list of strings"),
        (COMPLETIONS, TO[COMPLETIONS] | {"stop": {}}, "stop: Input should be a string or a list of strings"),
        (CHAT, TO[CHAT] | {"logit_bias": []}, "logit_bias: Input should be an object"),
        (CHAT, {"input": "x"}, "messages: Field required; 'input' belongs to /v1/responses"),
        (CHAT, {"prompt": "x"}, "'prompt' belongs to /v1/completions"),
        (COMPLETIONS, {"messages": [USER]}, "'messages' belongs to /v1/chat/completions"),
        (RESPONSES, {"messages": [USER]}, "'messages' belongs to /v1/chat/completions"),
        (MESSAGES, {"prompt": "x", "max_tokens": 1}, "'prompt' belongs to /v1/completions"),
        (CHAT, TO[CHAT] | {"tools": [flat()]}, "form of /v1/responses"),
        (CHAT, TO[CHAT] | {"tools": tools_for(MESSAGES, 1)}, "form of /v1/messages"),
        (CHAT, TO[CHAT] | {"tools": [{"name": "a", "inputSchema": {}}]}, "form of MCP"),
        (RESPONSES, TO[RESPONSES] | {"tools": [tool()]}, "form of /v1/chat/completions"),
        (RESPONSES, TO[RESPONSES] | {"tools": tools_for(MESSAGES, 1)}, "use 'parameters'"),
        (MESSAGES, TO[MESSAGES] | {"tools": [tool()]}, "form of /v1/chat/completions"),
        (MESSAGES, TO[MESSAGES] | {"tools": [flat()]}, "form of /v1/responses"),
        (CHAT, TO[CHAT] | {"tools": [tool()], "tool_choice": ANY}, "write 'required' here"),
        (CHAT, TO[CHAT] | {"tools": [tool()], "tool_choice": {"type": "auto"}}, "write 'auto' here"),
        (CHAT, TO[CHAT] | {"tools": [tool()], "tool_choice": NAMED}, '"function": {"name"'),
        (RESPONSES, TO[RESPONSES] | {"tools": [flat()], "tool_choice": ANY}, "write 'required' here"),
        (MESSAGES, TO[MESSAGES] | {"tool_choice": "required"}, '{"type": "any"}'),
    ],
)  # fmt: skip
def test_errors_speak_of_the_request(server: RunningServer, path: str, content: Any, words: str) -> None:
    if isinstance(content, dict):
        content = {"model": "tiny-model"} | content
    raw = b"" if content is None else json.dumps(content).encode()
    message = refused_raw(server, raw, path)["message"]
    assert words in message
    for name in ("Message", "OtherPart", "ChatRequest", "instance of", "dictionary"):
        assert name not in message


def test_input_tokens(speaking: RunningServer) -> None:
    path = f"{RESPONSES}/input_tokens"
    body = {"instructions": "Be brief.", "input": [USER], "tools": [flat("f")], "truncation": "disabled"}
    counted = speaking.post(path, body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    assert counted["input_tokens"] == speaking.post(RESPONSES, body).json()["usage"]["input_tokens"]
    long = speaking.post(path, {"input": "x" * 2000})
    assert long.json()["input_tokens"] > 2000  # more than the context


# Connections of HTTP/1.0, which know no chunks.


@pytest.mark.parametrize(("version", "chunked"), [("1.0", False), ("1.1", True)])
def test_streams_of_old_clients_end_by_closing(server: RunningServer, version: str, chunked: bool) -> None:
    body = json.dumps({"model": "tiny-model", "prompt": "x", "max_tokens": 9, "stream": True}).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    headers, _, events = received.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in headers.lower()) is chunked
    assert b"connection: close" in headers.lower()
    if not chunked:
        lines = events.decode().split("\n\n")
        assert all(line.startswith(("data: ", ": ")) for line in lines[:-1])
        assert lines[-2:] == ["data: [DONE]", ""]


def test_whole_answers_of_old_clients(server: RunningServer) -> None:
    address = urlsplit(server.url)
    for method in ("GET", "HEAD"):
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(f"{method} /version HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            received = b""
            while piece := connection.recv(65536):
                received += piece
        headers, _, content = received.partition(b"\r\n\r\n")
        assert b" 200 " in headers
        assert b"content-length" in headers.lower()
        assert (method == "HEAD") is (content == b"")


# Names of hosts that cannot be an attacker's.


def test_names_of_private_networks() -> None:
    own = socket.gethostname().lower()
    for name in ("host.docker.internal", "mybox.local", "gateway.internal", "nas.home.arpa", own):
        assert is_allowed(name), name
    for name in (
        "internal",
        "local.evil.example",
        "evil.local.example",
        "evillocal",
        "a.internal.example",
        "arpa",
    ):
        assert not is_allowed(name), name
    assert not is_allowed("mybox.local", allowed_hosts=["api.example"])
