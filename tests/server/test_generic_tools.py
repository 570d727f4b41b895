"""Models whose template writes no tools have them: what it gets instead, how calls are forced and read."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.server.refusals import CHAT, refused
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.test_tools import (
    ARGUMENTS,
    ASK,
    GEMMA_3,
    RESPONSES,
    UNKNOWN,
    flat,
    grammar_of,
    prompt_of,
    saying,
    tokenizer_of,
    tool,
)
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest, Message
from truedraft.server.text.families import GENERIC
from truedraft.server.text.prompt import render_chat, template_options
from truedraft.server.text.tokenizer import Tokenizer, load_tokenizer
from truedraft.server.text.tools import tool_use

# SmolLM2, Gemma 3 and Gemma 2 write conversations like this, in short.
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TAKES_TURNS = """\
{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set said = messages[1:] %}\
{% else %}{% set said = messages %}{% endif %}\
{% for m in said %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
<{{ m.role }}>{% if loop.first and system %}{{ system }}\n\n{% endif %}{{ m.content | trim }}</>\
{% endfor %}"""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHATML
)
FORGETS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "takes turns": TAKES_TURNS,
    "no system": NO_SYSTEM,
    "forgets system": FORGETS_SYSTEM,
}
Load = Callable[[str], Tokenizer]
each_template = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
ANSWERED = "<tool_response>\n%s\n</tool_response>"


def given_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}


CONVERSATION = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "I call.", "tool_calls": [given_call("1"), given_call("2")]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "tool", "tool_call_id": "2", "content": "4"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "tool_calls": [given_call("3")]},
    {"role": "tool", "tool_call_id": "3", "content": "5"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Returns what loads the tiny tokenizer with a template."""

    def load(template: str) -> Tokenizer:
        folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=template)
        return load_tokenizer(str(folder))

    return load


def written(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> str:
    request = ChatRequest.model_validate({"model": MODEL, "messages": messages, **fields})
    options = template_options(request, tokenizer, Leniency(strict=False))
    return render_chat(request.messages, tokenizer, param="messages", options=options)


@each_template
def test_any_template_writes_a_conversation_with_tools(tiny: Load, template: str) -> None:
    text = written(tiny(template), CONVERSATION, tools=[tool(description="Adds 5 % of it.")])
    offered = '{"name": "add", "description": "Adds 5 % of it."}'
    assert text.count(offered) == 1
    assert text.index(offered) < text.index("Add.</>")
    assert text.endswith(
        f"Add.</><assistant>I call.\n{CALL}\n{CALL}</>"
        f"<user>{ANSWERED % 3}\n{ANSWERED % 4}\nAnd now?</><assistant>{CALL}</><user>{ANSWERED % 5}</>"
    )


@each_template
def test_nothing_is_added_without_tools(tiny: Load, template: str) -> None:
    """A conversation without tools stays as it is, and so does one where none may be called."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    assert written(tiny(template), said) == "<user>Hi.</><assistant>Ho.</>"
    assert (
        written(tiny(template), said, tools=[tool()], tool_choice="none") == "<user>Hi.</><assistant>Ho.</>"
    )


@pytest.mark.parametrize("template", [CHATML, TAKES_TURNS], ids=["chatml", "takes turns"])
def test_functions_follow_the_system_message(tiny: Load, template: str) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    text = written(tiny(template), said, tools=[tool()])
    assert text.count("Be brief.\n\nYou can call these functions:") == 1
    assert text.endswith("Hi.</>")


@pytest.mark.parametrize("template", [UNKNOWN, GEMMA_3, CHATML])
def test_templates_of_unknown_families_have_the_generic_form(template: str) -> None:
    """So has one that writes tools in a way that is not known here."""
    tokenizer = tokenizer_of(template)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
        request = ChatRequest.model_validate(ASK | {"model": "m", "tools": [tool()], "tool_choice": choice})
        use = tool_use(request, tokenizer, Leniency(strict=False), 65536)
        assert use is not None
        assert use.calls is GENERIC
    off = ChatRequest.model_validate(ASK | {"model": "m", "tools": [tool()], "tool_choice": "none"})
    assert tool_use(off, tokenizer, Leniency(strict=False), 65536) is None


def test_a_template_of_an_unknown_family_gets_no_tools(tiny: Load) -> None:
    text = written(tiny("{{ 'TOOLS' if tools }}" + CHATML), ASK["messages"], tools=[tool()])
    assert "TOOLS" not in text
    assert '{"name": "add"}' in text


def test_messages_stay_as_they_are(tiny: Load) -> None:
    """What is written out must not change the request, which may be written again."""
    messages = [Message.model_validate(each) for each in CONVERSATION]
    before = [message.model_dump() for message in messages]
    render_chat(messages, tiny(CHATML), param="messages", options={"tools": [tool()]})
    assert [message.model_dump() for message in messages] == before


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read(tmp_path_factory: pytest.TempPathFactory, stream: bool) -> None:
    with saying(tmp_path_factory.mktemp, f"I call.\n{CALL}\n{CALL}", CHATML) as server:
        response = server.post(CHAT, ASK | {"tools": [tool()], "stream": stream})
        assert response.headers["x-truedraft-tool-form"] == "generic"
        if not stream:
            choice = response.json()["choices"][0]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I call.")
            calls = [call["function"] for call in choice["message"]["tool_calls"]]
            assert calls == [{"name": "add", "arguments": ARGUMENTS}] * 2
        items = server.post(RESPONSES, {"input": "x", "tools": [flat()]}).json()["output"]
        assert [item["type"] for item in items] == ["message", "function_call", "function_call"]


def test_a_forced_call_is_all_that_may_come(server: RunningServer) -> None:
    """The grammar of a named function lets no other through, and ends with the call."""
    choice = {"type": "function", "function": {"name": "two"}}
    logged = grammar_of(server, ASK | {"tools": [tool("one"), tool("two")], "tool_choice": choice})
    text = ast.literal_eval(logged[: logged.index(", grammar_after")])
    tokens = server.model.loaded().tokenizer
    for said, is_allowed in (
        ('<tool_call>\n{"name": "two", "arguments": {}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "one"', False),
        ("I call", False),
    ):
        assert _allows(text, said, tokens) is is_allowed


def _allows(grammar: str, text: str, tokenizer: Tokenizer) -> bool:
    plain = tokenizer.for_grammars()
    matcher = LLMatcher(LLTokenizer(plain["tokenizer"], eos_token=plain["eos_token"]), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids)


def test_the_form_is_said(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert server.get("/v1/models").json()["data"][0]["tool_form"] == "generic"
    body = ASK | {"max_tokens": 1}
    assert "x-truedraft-tool-form" not in server.post(CHAT, body).headers
    off = body | {"tools": [tool()], "tool_choice": "none"}
    assert "x-truedraft-tool-form" not in server.post(CHAT, off).headers
    with saying(tmp_path_factory.mktemp, "x", '{{ tools }}{{ messages }}<tool_call>"arguments"') as hermes:
        assert hermes.get(f"/v1/models/{MODEL}").json()["tool_form"] == "hermes"
        answer = hermes.post(CHAT, ASK | {"tools": [tool()]})
        assert answer.headers["x-truedraft-tool-form"] == "hermes"


def test_no_template_has_no_form(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "plain" / MODEL, chat_template=None)
    with run_server(folder, load_tokenizer(str(folder)), tmp_path) as server:
        assert server.get("/v1/models").json()["data"][0]["tool_form"] is None
        assert "no chat template" in refused(server, CHAT, ASK | {"tools": [tool()]})["message"]


def test_the_prompt_over_http(server: RunningServer) -> None:
    """Every endpoint writes the same."""
    tools = [tool()]
    messages = CONVERSATION[4:]
    prompt = prompt_of(server, CHAT, {"messages": messages, "tools": tools, "max_tokens": 1})
    assert f"<|im_start|>user\n{ANSWERED % 5}<|im_end|>" in prompt
    tokens = server.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == prompt
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": json.dumps({"a": 1})},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ]
    prompt = prompt_of(server, RESPONSES, {"input": items, "tools": [flat()], "max_output_tokens": 1})
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt
    assert f"<|im_start|>user\n{ANSWERED % 2}<|im_end|>" in prompt
