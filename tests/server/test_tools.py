"""Tools and reasoning over HTTP: what the template gets, how answers are split, what is refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from tests.server.refusals import CHAT, refused
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.tiny_tokenizer import write_tokenizer
from tests.server.wire import answers
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.text.tokenizer import ChatTemplates, Tokenizer, load_tokenizer
from truedraft.server.text.tools import tool_use

RESPONSES = "/v1/responses"
# Short, and of two known families at once. ``enable_thinking`` switches its reasoning off.
TEMPLATE = """\
{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}\
{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}\
{% for m in messages %}{{ m.role }}:\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{% for c in m.tool_calls or [] %}\
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\
{% endfor %}{% if m.role == 'tool' %}={{ m.name }}{% endif %};{% endfor %}\
{% if add_generation_prompt %}a:{% if enable_thinking is false %}<think></think>\
{% elif enable_thinking is true %}<think>{% endif %}{% endif %}"""
THOUGHT = "<think>\nHm, 2.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
SAID = f"{THOUGHT}I call.\n{CALL}\n{CALL}"
ARGUMENTS = '{"a": 1, "b": "ü"}'
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def tool(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def flat(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


STRICT = tool(strict=True, parameters={"contains": {}})


@contextmanager
def saying(
    make_folder: Callable[[str], Path], text: str, template: str, **settings: Any
) -> Iterator[RunningServer]:
    folder = write_tokenizer(make_folder("models") / MODEL, chat_template=template)
    with run_server(
        folder, load_tokenizer(str(folder)), make_folder("log"), "--text", text, "--once", **settings
    ) as server:
        yield server


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model thinks, speaks and calls twice."""
    with saying(tmp_path_factory.mktemp, SAID, TEMPLATE) as server:
        yield server


def prompt_of(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    num_before = len(server.messages_to_worker("Generate"))
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    (line,) = server.messages_to_worker("Generate")[num_before:]
    ids = json.loads(line.partition("prompt_token_ids=")[2].partition("]")[0] + "]")
    return str(server.post("/detokenize", {"tokens": ids}).json()["prompt"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_split(speaking: RunningServer, stream: bool) -> None:
    body = ASK | {"tools": [tool()], "stream": stream}
    choices = [each["choices"][0] for each in answers(speaking, CHAT, body) if each["choices"]]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(message.get("reasoning_content") or "" for message in messages) == "Hm, 2."
    assert "".join(message.get("content") or "" for message in messages) == "I call."
    calls: dict[int, list[Any]] = {}
    for message in messages:
        for number, call in enumerate(message.get("tool_calls") or []):
            calls.setdefault(call.get("index", number), []).append(call)
    assert sorted(calls) == [0, 1]
    for pieces in calls.values():
        assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
        assert [piece["function"].get("name") for piece in pieces] == ["add", *[None] * (len(pieces) - 1)]
        assert [piece.get("type") for piece in pieces] == ["function", *[None] * (len(pieces) - 1)]
    assert len({pieces[0]["id"] for pieces in calls.values()}) == 2
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_every_token_of_a_stream_has_its_log_probability(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Marks have one, too, in chunks that have nothing else."""
    body = ASK | {"tools": [tool()], "stream": True, "logprobs": True}
    with (
        saying(tmp_path_factory.mktemp, SAID, TEMPLATE) as server,
        server.one_step_at_a_time(len(SAID.encode()) + 1),
    ):
        choices = [each["choices"][0] for each in answers(server, CHAT, body)]
    scored = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
    assert "".join(entry["token"] for entry in scored) == SAID.replace("ü", r"\xc3\xbc") + "<|endoftext|>"


def test_reasoning_tokens_are_counted(speaking: RunningServer) -> None:
    for length, reasoning in ((500, len(THOUGHT.rstrip())), (10, 10)):
        usage = speaking.post(CHAT, ASK | {"max_tokens": length}).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == reasoning
        answer = speaking.post(RESPONSES, {"input": "x", "max_output_tokens": length}).json()
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == reasoning


def test_what_is_not_offered_is_not_called(speaking: RunningServer) -> None:
    for body in (ASK, ASK | {"tools": [tool()], "tool_choice": "none"}):
        choice = speaking.post(CHAT, body).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("stop", None)
        assert choice["message"]["content"] == SAID.removeprefix(THOUGHT)


def test_a_call_that_is_cut_ends_with_length(speaking: RunningServer) -> None:
    body = ASK | {"tools": [tool()], "max_tokens": SAID.index('"b"')}
    choice = speaking.post(CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, '


def test_conversations_reach_the_template(speaking: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    items = [
        {"role": "user", "content": "x"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    ]
    written = '[add]user:x;assistant:<think>Hm</think><tool_call>{"name": "add", "arguments": {"a": 1}};'
    written += "tool:2=add;a:"
    assert prompt_of(speaking, CHAT, {"messages": messages, "tools": [tool()]}) == written
    assert prompt_of(speaking, RESPONSES, {"input": items, "tools": [flat()]}) == written
    assert prompt_of(speaking, CHAT, ASK | {"tools": [tool()], "tool_choice": "none"}) == "user:x;a:"
    asked = {"input": "x", "tools": [flat()], "tool_choice": "none"}
    assert prompt_of(speaking, RESPONSES, asked) == "user:x;a:"
    tokens = speaking.post("/tokenize", {"messages": messages, "tools": [tool()]}).json()["tokens"]
    assert speaking.post("/detokenize", {"tokens": tokens}).json()["prompt"] == written


def test_effort_and_variables_reach_the_template(speaking: RunningServer) -> None:
    assert prompt_of(speaking, CHAT, ASK | {"reasoning_effort": "low"}).startswith("(low)")
    assert prompt_of(speaking, RESPONSES, {"input": "x", "reasoning": {"effort": "low"}}).startswith("(low)")
    for path, ask in ((CHAT, ASK), (RESPONSES, {"input": "x"})):
        off = ask | {"chat_template_kwargs": {"enable_thinking": False}}
        assert prompt_of(speaking, path, off).endswith("a:<think></think>")
        reserved = ask | {"chat_template_kwargs": {"tools": []}}
        assert refused(speaking, path, reserved)["param"] == "chat_template_kwargs"


def test_a_prompt_that_opens_or_ends_the_reasoning(speaking: RunningServer) -> None:
    """Then the marks in the answer are text."""
    for thinks, reasoning in ((True, "<think>\nHm, 2."), (False, None)):
        body = ASK | {"chat_template_kwargs": {"enable_thinking": thinks}}
        message = speaking.post(CHAT, body).json()["choices"][0]["message"]
        assert message.get("reasoning_content") == reasoning
        assert message["content"].endswith(SAID.removeprefix(THOUGHT))


def grammar_of(server: RunningServer, body: dict[str, Any], path: str = CHAT) -> str:
    num_before = len(server.messages_to_worker("Generate"))
    assert server.post(path, body).status_code == 200
    return server.messages_to_worker("Generate")[num_before].partition("grammar=")[2]


def test_grammars(speaking: RunningServer) -> None:
    assert grammar_of(speaking, ASK).startswith("None")
    assert grammar_of(speaking, ASK | {"tools": [tool()], "tool_choice": "none"}).startswith("None")
    two = ASK | {"tools": [tool("one"), tool("two")]}
    for choice, names in (
        ("auto", ["one", "two"]),
        ("required", ["one", "two"]),
        ({"type": "function", "function": {"name": "two"}}, ["two"]),
    ):
        grammar = grammar_of(speaking, two | {"tool_choice": choice})
        assert [name for name in ("one", "two") if f'"{name}' in grammar] == names
        assert ("TEXT" in grammar) is (choice == "auto")
    assert (
        grammar_of(speaking, two | {"parallel_tool_calls": False, "tool_choice": "required"}).count(" call ")
        == 1
    )
    formatted = two | {"response_format": {"type": "json_object"}}
    assert '("," s3j' in grammar_of(speaking, formatted).replace('", "', '","')


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
        ({"tools": [tool("a<b")]}, "tools.0.function.name", "invalid_value"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", "invalid_type"),
        ({"tools": [tool()] * 2}, "tools.1", "invalid_value"),
        ({"tools": [tool(f"t{i}") for i in range(1025)]}, "tools", "invalid_value"),
        ({"tools": [STRICT]}, "tools.0.function.parameters.contains", "invalid_grammar"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "invalid_value"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": [tool()], "structured_outputs": {"regex": "a"}}, "tools", "invalid_value"),
        ({"tools": [tool()], "min_tokens": 2}, "min_tokens", "unsupported_parameter"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "tool_calls": [{"id": "1", **tool(arguments="{}")}]}
                ]
            },
            "messages.0.tool_calls",
            "invalid_value",
        ),
    ],
)
def test_refusals(speaking: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(speaking, CHAT, ASK | fields)
    assert (error["param"], error["code"]) == (param, code)


# Excerpts of how templates write tools.
UNKNOWN = "{{ tools }}<|action_start|>f(){}<|action_end|>"
GEMMA_3 = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}"
KNOWN = {
    "gpt_oss": "functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>final"
    "<|message|>",
    "gemma4": "<|tool_call>call:f{}<tool_call|><|channel>thought\n<channel|>",
    "function_gemma": "<start_function_call>call:f{}<end_function_call>",
}


def tokenizer_of(template: str) -> Tokenizer:
    class Model:
        chat_template = template

    return Tokenizer(FastTokenizer(BPE()), ChatTemplates(Model()))


def test_a_known_family_that_does_not_write_earlier_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{{ tools }}" + KNOWN["gemma4"] + "{% for m in messages %}{{ m.content }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with saying(tmp_path_factory.mktemp, "x", template) as server:
        error = refused(server, CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert (error["param"], error["code"]) == ("messages.0.tool_calls", "unsupported_parameter")


@pytest.mark.parametrize(("name", "template"), KNOWN.items())
def test_families_are_known_by_their_templates(name: str, template: str) -> None:
    request = ChatRequest.model_validate(ASK | {"model": "m", "tools": [tool()]})
    use = tool_use(request, tokenizer_of("{{ tools }}" + template), Leniency(strict=False), 65536)
    assert use is not None
    assert use.calls.name == name


# gpt-oss writes conversations like this, in short.
WITH_HEADERS = """\
{% for m in messages %}<|start|>{{ m.role }}\
{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|channel|>commentary json\
<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}\
{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
<|message|>{{ m.content }}<|end|>{% endfor %}{{ '' if tools }}\
{% if add_generation_prompt %}<|start|>assistant{% else %}<|channel|>final<|message|>{% endif %}"""
MESSAGES = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    f"<|constrain|>json<|message|>{ARGUMENTS}"
)


def test_messages_with_headers(tmp_path_factory: pytest.TempPathFactory) -> None:
    with saying(tmp_path_factory.mktemp, MESSAGES, WITH_HEADERS) as server:
        body = ASK | {"tools": [tool()]}
        choice = server.post(CHAT, body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": ARGUMENTS}
        chunks = [each["choices"][0]["delta"] for each in answers(server, CHAT, body | {"stream": True})]
        pieces = [call["function"]["arguments"] for each in chunks for call in each.get("tool_calls", [])]
        assert "".join(pieces) == ARGUMENTS
        items = server.post(RESPONSES, {"input": "x", "tools": [flat()]}).json()["output"]
        assert [item["type"] for item in items] == ["reasoning", "function_call"]
        said = {"messages": [*ASK["messages"], message]}
        written = "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        prompt = prompt_of(server, CHAT, said | {"tools": [tool()]})
        assert written in prompt
        assert "<|channel|>analysis<|message|>Hm.<|end|>" in prompt
        error = refused(server, CHAT, body | {"continue_final_message": True})
        assert error["param"] == "continue_final_message"


@pytest.mark.parametrize(("stop", "reason"), [('"b"', "stop"), ("</tool_call>", "tool_calls")])
def test_a_stop_string_in_a_call(speaking: RunningServer, stop: str, reason: str) -> None:
    """One that cuts the call is why it ends."""
    choice = speaking.post(CHAT, ASK | {"tools": [tool()], "stop": stop}).json()["choices"][0]
    assert choice["finish_reason"] == reason


def test_an_output_without_its_call(speaking: RunningServer) -> None:
    item = {"type": "function_call_output", "call_id": "call_9", "output": "2"}
    assert "call_9" in refused(speaking, RESPONSES, {"input": [item]})["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_responses(speaking: RunningServer, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as sdk:
        asked: dict[str, Any] = {"model": MODEL, "input": "x", "tools": [flat()]}
        if not stream:
            answer = sdk.responses.create(**asked)
        else:
            with sdk.responses.stream(**asked) as events:
                seen = list(events)
                answer = events.get_final_response()
            for kind, index in (("response.reasoning_text.delta", 0), ("response.output_text.delta", 1)):
                deltas = [event for event in seen if event.type == kind]
                item: Any = answer.output[index]
                assert "".join(event.delta for event in deltas) == item.content[0].text  # type: ignore[union-attr]
                assert {event.item_id for event in deltas} == {item.id}  # type: ignore[union-attr]
            for index in (2, 3):
                pieces = [
                    event.delta
                    for event in seen
                    if event.type == "response.function_call_arguments.delta" and event.output_index == index
                ]
                assert "".join(pieces) == ARGUMENTS
    reasoning, message, *calls = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Hm, 2."]
    assert message.type == "message"
    assert answer.output_text == "I call."
    assert answer.status == "completed"
    for call in calls:
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("add", ARGUMENTS, "completed")
    assert answer.tools[0].type == "function"
