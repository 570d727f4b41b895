"""``truedraft chat``: the conversation that a person sees is the one that the model continues."""

import io
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from truedraft import LLM, SamplingParams
from truedraft.engine.commands import chat as command
from truedraft.engine.commands.chat import Chat, ChatSettings, main
from truedraft.engine.models import generation_defaults
from truedraft.server.cli.settings_sources import read_options, target_first

GREEDY = ["--temperature", "0", "--max-tokens", "16"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_speculative_tokens=3, cache_memory="64MiB", num_threads=1)


def settings(*flags: str) -> ChatSettings:
    return read_options(ChatSettings, target_first(flags))


def begun(llm: LLM, *flags: str) -> tuple[Chat, io.StringIO]:
    out = io.StringIO()
    return Chat(llm, settings(*flags), Console(file=out)), out


def expected(llm: LLM, *messages: tuple[str, str]) -> str:
    conversation = [{"role": role, "content": content} for role, content in messages]
    return llm.chat(conversation, SamplingParams(max_tokens=16, temperature=0))[0].text


def test_each_answer_continues_the_conversation(llm: LLM) -> None:
    chat, out = begun(llm, *GREEDY)
    chat.answer("Tell me a story.")
    first = expected(llm, ("user", "Tell me a story."))
    chat.answer("And then?")
    second = expected(llm, ("user", "Tell me a story."), ("assistant", first), ("user", "And then?"))
    assert out.getvalue() == f"{first}\n{second}\n"


def test_commands_change_the_conversation(llm: LLM) -> None:
    chat, out = begun(llm, *GREEDY)
    chat.answer("Tell me a story.")
    assert chat.command("/reset")
    assert chat.command("/system Be brief.")
    chat.answer("Who is there?")
    system = ("system", "Be brief.")
    assert out.getvalue().endswith(f"\n{expected(llm, system, ('user', 'Who is there?'))}\n")
    assert chat.command("/reset")
    assert chat.command("/system")
    chat.answer("Who is there?")
    assert out.getvalue().endswith(f"\n{expected(llm, ('user', 'Who is there?'))}\n")
    assert not chat.command("/exit")


def test_a_template_without_system_prompts_is_said(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm, "chat_template", SimpleNamespace(writes_system=False))
    chat, _ = begun(llm, *GREEDY, "--system", "Be brief.")
    assert "writes no system prompt" in capsys.readouterr().err
    assert chat.system is None


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, out = begun(llm, "--temperature", "0", "--max-tokens", "400")
    honest = Chat._print

    def interrupted(self: Chat, text: str) -> None:
        honest(self, text)
        if text.strip():
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Chat, "_print", interrupted)
        before = signal.getsignal(signal.SIGINT)
        chat.answer("Tell me a story.")
    assert signal.getsignal(signal.SIGINT) is before
    assert "Stopped." in capsys.readouterr().err
    assert 0 < len(out.getvalue()) < 700  # the whole answer has twice as many; a step may bring many tokens
    assert chat.messages[-1] == {"role": "assistant", "content": out.getvalue().removesuffix("\n")}
    assert not llm.core.has_work
    chat.answer("And then?")
    assert len(chat.messages) == 4


def test_a_message_that_does_not_fit_is_left_out(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat, out = begun(llm, *GREEDY)
    chat.answer("word " * 1500)
    assert "not part of the conversation" in capsys.readouterr().err
    chat.answer("Who is there?")
    assert out.getvalue() == f"{expected(llm, ('user', 'Who is there?'))}\n"


def test_an_answer_may_fill_the_context(llm: LLM) -> None:
    chat, _ = begun(llm, "--temperature", "0")
    chat.answer("word " * 400)
    room = llm.room(chat._conversation()[:1])
    assert 0 < len(llm.tokenizer.encode(chat.messages[-1]["content"])) <= room < 250


def test_what_the_makers_recommend_is_the_default(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recommended = {"temperature": 0.6, "top_k": 20.0, "max_new_tokens": 7.0}
    monkeypatch.setattr(generation_defaults, "default_sampling", lambda config: recommended)
    params = begun(llm)[0]._params
    monkeypatch.setattr(llm, "room", lambda messages: 500)
    assert params() == SamplingParams(max_tokens=7, temperature=0.6, top_k=20)
    other = begun(llm, "--temperature", "1", "--min-p", "0.1", "--max-tokens", "9")[0]._params
    assert other() == SamplingParams(max_tokens=9, temperature=1, top_k=20, min_p=0.1)
    assert begun(llm, "--generation-config", "none")[0]._params() == SamplingParams(max_tokens=500)


def test_lines_of_a_pipe_are_messages(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(**values: Any) -> LLM:
        return llm

    monkeypatch.setattr(command, "LLM", loaded)
    monkeypatch.setattr("sys.stdin", io.StringIO("\nTell me a story.\n/stats\n/nothing\n"))
    assert main(settings(*GREEDY)) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{expected(llm, ('user', 'Tell me a story.'))}\n"
    assert "drafted tokens accepted" in captured.err
    assert "There is no command /nothing" in captured.err


def test_a_model_without_a_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(
            chat_template=SimpleNamespace(exists=False), config=SimpleNamespace(target="base.gguf")
        )

    monkeypatch.setattr(command, "LLM", loaded)
    assert main(settings()) == 2
    assert "base.gguf has no chat template; continue a text with" in capsys.readouterr().err


def test_the_target_may_come_first() -> None:
    assert settings("some.gguf", "--top-k", "3").target == "some.gguf"
