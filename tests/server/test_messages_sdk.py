"""Anthropic's official SDK uses ``/v1/messages``: messages, streams, tools, counts, errors."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer
from tests.server.test_messages import ADD, INPUT, USER
from tests.server.test_tools import SAID, TEMPLATE, saying

anthropic = pytest.importorskip("anthropic")

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": [USER]}


def connect(server: RunningServer, **options: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0} | options
    return anthropic.Anthropic(base_url=server.url, _strict_response_validation=True, **options)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with saying(tmp_path_factory.mktemp, SAID, TEMPLATE) as server:
        yield server


@pytest.fixture
def sdk(speaking: RunningServer) -> Iterator[Any]:
    with connect(speaking) as client:
        yield client


def check(message: Any) -> None:
    thought, said, *calls = message.content
    assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "Hm, 2.", True)
    assert (said.type, said.text) == ("text", "I call.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "add", INPUT)] * 2
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "tool_use", None)
    assert message.usage.output_tokens == len(SAID.encode()) + 1
    assert message.usage.output_tokens_details.thinking_tokens == len("<think>\nHm, 2.\n</think>")


def test_a_message(sdk: Any) -> None:
    message = sdk.messages.create(**ASK, tools=[ADD])
    check(message)
    assert message._request_id.startswith("req_")


def test_a_stream(sdk: Any) -> None:
    with sdk.messages.stream(**ASK, tools=[ADD]) as stream:
        kinds = [event.type for event in stream]
        check(stream.get_final_message())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"text", "thinking", "input_json", "signature"} <= set(kinds)
    with sdk.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream).startswith("I call.")


def test_the_raw_events(sdk: Any) -> None:
    events = list(sdk.messages.create(**ASK, tools=[ADD], stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert events[0].message.usage.input_tokens > 0
    assert (events[-2].delta.stop_reason, events[-1].type) == ("tool_use", "message_stop")


def test_an_answer_goes_back_with_its_results(sdk: Any) -> None:
    message = sdk.messages.create(**ASK, tools=[ADD])
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "2"} for call in calls]
    conversation = [USER, {"role": "assistant", "content": message.content}]
    conversation.append({"role": "user", "content": results})
    asked = ASK | {"messages": conversation, "tool_choice": {"type": "any"}}
    check(sdk.messages.create(**asked, tools=[ADD]))


def test_the_tool_runner(sdk: Any) -> None:
    """It runs the tools, and asks again with what they returned. First it wants the server to keep the
    conversation, and it sends all of it where the server says that it does not."""
    ran = []

    @anthropic.beta_tool
    def add(a: int, b: str) -> str:
        """Adds.

        Args:
            a: A number.
            b: A text.
        """
        ran.append((a, b))
        return "2"

    runner = sdk.beta.messages.tool_runner(**ASK, tools=[add], max_iterations=2)
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use"] * 2
    assert ran[:2] == [(1, "ü")] * 2


def test_tokens_are_counted(sdk: Any) -> None:
    counted = sdk.messages.count_tokens(model=MODEL, messages=[USER], tools=[ADD], system="s")
    message = sdk.messages.create(**ASK, tools=[ADD], system="s")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_stop_sequences_and_lengths(sdk: Any) -> None:
    message = sdk.messages.create(**ASK, stop_sequences=["call"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "call")
    assert message.content[-1].text == "I "
    assert sdk.messages.create(**ASK | {"max_tokens": 3}).stop_reason == "max_tokens"


def test_errors_are_the_sdks(sdk: Any) -> None:
    for kind, fields, name, code in (
        (anthropic.BadRequestError, {"extra_body": {"top_p": 9}}, "invalid_request_error", "invalid_value"),
        (anthropic.NotFoundError, {"model": "another"}, "not_found_error", "model_not_found"),
    ):
        with pytest.raises(kind) as raised:
            sdk.messages.create(**ASK | fields)
        error: Any = raised.value
        assert (error.type, error.error_code) == (name, code)
        assert error.request_id.startswith("req_")


def test_keys(start_server: StartServer) -> None:
    with start_server(api_keys=["one"]) as server:
        with connect(server) as stranger, pytest.raises(anthropic.AuthenticationError) as raised:
            stranger.messages.create(**ASK)
        assert raised.value.type == "authentication_error"
        with connect(server, api_key=None, auth_token="one") as client:
            assert client.messages.create(**ASK).role == "assistant"
        with connect(server, api_key="one") as client:
            assert client.messages.create(**ASK).role == "assistant"


def test_an_error_in_a_stream(start_server: StartServer) -> None:
    with start_server() as server, connect(server) as client:
        server.worker.at_most(2)
        events = client.messages.create(**ASK, stream=True)
        assert next(iter(events)).type == "message_start"
        server.worker.die()
        with pytest.raises(anthropic.APIStatusError) as raised:
            list(events)
        assert raised.value.type == "overloaded_error"


def test_not_ready_is_overloaded(start_server: StartServer) -> None:
    with start_server(wait=False) as server, connect(server) as client:
        with pytest.raises(anthropic.APIStatusError) as raised:
            client.messages.create(**ASK)
        assert (raised.value.status_code, raised.value.type) == (503, "overloaded_error")
