"""Chat templates are rendered as transformers does it, in a process that no template can take with it."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from tests.server.running import wait_for
from truedraft.engine.text.abandoned import AbandonedError, abandonable
from truedraft.server.errors import HelperLostError
from truedraft.server.stages import Stages, measuring
from truedraft.server.text import template_process
from truedraft.server.text.template_process import TemplateProcess, TemplateProcesses
from truedraft.server.text.tokenizer import ChatTemplateError, ChatTemplates

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Sei höflich. \n  "},
    {"role": "user", "content": "<b>1 & 2</b> \U0001f600 {{ no }}"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "f", "arguments": {"x": [1, 2.5, True, None], "ü": "\u2028"}},
            }
        ],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ORDINARY = [
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] | trim }}{{ m.tool_calls | default([]) | tojson }}\n{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | length }}{{ enable_thinking }}",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + m.content | length -%}"
    "{%- endfor -%}{{ ns.n }}",
    "{% macro one(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages if m.role != 'tool' %}{{ one(m) }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{% generation %}x{% endgeneration %}",
    "{{ messages[0].content.split(' ')[0] ~ 'a' * 3 ~ 2 ** 10 ~ range(3) | list }}",
    "{{ raise_exception('the roles must alternate') }}",
    "{{ nothing.at.all }}",
    "{% for %}",
]
# Each would freeze the front end, take all of its memory, or end in an exception that nobody expects.
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** 99999999 }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ 'a'.center(10 ** 11) }}",
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
    "{{ 1 / 0 }}",
    "{{ 10.0 ** 10000 }}",
    "{{ range(1000000) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for i in range(99) %}{{ 'a' * 1000000 }}{% endfor %}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if " + "not " * 100_000 + "x %}{% endif %}",
]


class Model:
    special_tokens_map = {"bos_token": "<s>"}

    def __init__(self, chat_template: Any) -> None:
        self.chat_template = chat_template


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """One of its own, that is less patient."""
    code = """
import sys
from truedraft.server.text import helper_process, template_renderer
helper_process.TEMPLATE_SECONDS = 0.2
sys.exit(template_renderer.main())
"""
    monkeypatch.setattr(template_process, "helper_command", lambda _: (sys.executable, "-c", code))
    made = TemplateProcess()
    monkeypatch.setattr("truedraft.server.text.tokenizer.template_process", lambda: made)
    yield made
    made.stop()


def render(template: Any, override: str | None = None, **options: Any) -> str:
    return ChatTemplates(Model(template), override).render(MESSAGES, options)


@pytest.mark.parametrize("template", [*ORDINARY, {"default": ORDINARY[0], "tool_use": ORDINARY[2]}])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "enable_thinking": False}])
def test_it_is_what_transformers_renders(template: Any, options: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast  # loads torch

    model = PreTrainedTokenizerFast(tokenizer_object=FastTokenizer(BPE()), bos_token="<s>", eos_token="</s>")
    model.chat_template = template
    try:
        expected = model.apply_chat_template(MESSAGES, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(ChatTemplateError, match=re.escape(str(error))):
            ChatTemplates(model).render(MESSAGES, options)
    else:
        assert ChatTemplates(model).render(MESSAGES, options) == expected
    assert ChatTemplates(model, ORDINARY[0]).render(MESSAGES, {}) == model.apply_chat_template(
        MESSAGES, tokenize=False, chat_template=ORDINARY[0]
    )


def test_variables() -> None:
    template = "{% set a = b %}{% for m in messages %}{{ m.c or d }}{% endfor %}"
    assert ChatTemplates(Model(template)).variables == {"b", "messages", "d"}
    assert ChatTemplates(Model("{% for %}")).variables == frozenset()
    assert ChatTemplates(Model(None)).variables == frozenset()


def test_no_template_takes_the_server_with_it(process: TemplateProcess) -> None:
    for template in HOSTILE:
        with pytest.raises(ChatTemplateError) as caught:
            render(template)
        assert len(str(caught.value)) > len("The model's chat template refused the messages: ")
    assert render(ORDINARY[0])


@pytest.mark.parametrize("template", ["{{ 9 ** 99999999 }}", "{{ 'a' * 10 ** 11 }}"])
def test_what_is_computed_while_a_template_is_read(process: TemplateProcess, template: str) -> None:
    """Its constants are, before anything is rendered."""
    assert ChatTemplates(Model(template)).variables == frozenset()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_replaced(
    process: TemplateProcess, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = render(ORDINARY[0])
    monkeypatch.setattr(template_process, "ANSWER_SECONDS", 1.0)
    first = process.pid
    assert first is not None
    os.kill(first, sent)
    assert render(ORDINARY[0]) == expected
    assert process.pid != first


def test_what_is_lost_over_and_over_is_an_error(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(template_process, "helper_command", lambda _: ("/bin/false",))
        with pytest.raises(HelperLostError):
            render(ORDINARY[0])
    assert render(ORDINARY[0])


def test_threads_get_their_own_answers(process: TemplateProcess) -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(20):
            wrong.extend([number] * (render("{{ n }}", n=number) != str(number)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_conversation_passes(process: TemplateProcess) -> None:
    """Longer than pipes are, both ways."""
    text = "ä" * 3_000_000
    assert ChatTemplates(Model("{{ messages[0].content }}")).render([{"content": text}], {}) == text


ENDLESS = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_costs_its_limit_once(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    ask = process.ask
    monkeypatch.setattr(process, "ask", lambda question: asked.append(question) or ask(question))
    templates = ChatTemplates(Model(ENDLESS))
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="more than"):
            templates.render(MESSAGES, {})
        assert not templates.has_system
        assert not templates.has_later_system
    assert len(asked) == 1


def test_messages_that_make_it_endless_cost_only_their_own_request(process: TemplateProcess) -> None:
    template = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    templates = ChatTemplates(Model(template))
    assert templates.render([{"role": "user", "content": "x"}], {}) == "x"
    with pytest.raises(ChatTemplateError, match="more than"):
        templates.render([{"role": "user", "content": "loop"}], {})
    assert templates.render([{"role": "user", "content": "x"}], {}) == "x"


class Held:
    """Stands for a process; it answers when a test lets it."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.pid = 1
        self.begun.set()
        if question.get("held"):
            self.go_on.wait()
        return question


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TemplateProcesses, list[Held]]]:
    monkeypatch.setattr(template_process, "HELD_UP_SECONDS", 0.0)
    made = TemplateProcesses()
    held = [Held() for _ in made._idle]
    made._idle = list(held)  # type: ignore[arg-type]
    yield made, held
    for each in held:
        each.go_on.set()


def ask_as(key: str, pool: TemplateProcesses, **question: Any) -> dict[str, Any]:
    stages = Stages()
    stages.key = key
    with measuring(stages):
        return pool.ask(question)


def test_one_key_leaves_a_process_to_others(pool: tuple[TemplateProcesses, list[Held]]) -> None:
    processes, held = pool
    with ThreadPoolExecutor() as threads:
        greedy = [threads.submit(ask_as, "a", processes, held=True) for _ in held]
        wait_for(lambda: sum(each.begun.is_set() for each in held) == len(held) - 1, "all but one")
        assert ask_as("b", processes, n=1) == {"n": 1}
        assert not any(future.done() for future in greedy)
        for each in held:
            each.go_on.set()
        assert all(future.result() for future in greedy)


def test_others_are_started_only_where_one_is_held_up(
    pool: tuple[TemplateProcesses, list[Held]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, held = pool
    monkeypatch.setattr(template_process, "HELD_UP_SECONDS", 1000.0)
    for number in range(5):
        assert ask_as("", processes, n=number) == {"n": number}
    assert [each.begun.is_set() for each in held] == [True, False, False]


def test_who_has_left_does_not_wait_for_a_process(pool: tuple[TemplateProcesses, list[Held]]) -> None:
    processes, held = pool
    with ThreadPoolExecutor() as threads:
        for _ in held:
            threads.submit(ask_as, "", processes, held=True)
        wait_for(lambda: all(each.begun.is_set() for each in held), "all of them")
        with abandonable(lambda: True), pytest.raises(AbandonedError):
            processes.ask({})
        for each in held:
            each.go_on.set()
