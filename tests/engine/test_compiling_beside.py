"""A grammar that takes long to compile holds up its own request only."""

from threading import Event

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.engine import grammars
from tests.engine.grammars import END, GRAMMAR, PROMPT, Constrained
from tests.engine.test_outbox import ScriptedConnection
from tests.models import make_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Abort, Failed, Generate, SamplingParams, StepOutput, ToWorker
from truedraft.engine.process.outbox import Outbox
from truedraft.engine.process.worker import Worker
from truedraft.engine.sampling.grammar_compiler import compile_grammar

FREE = Generate("free", PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Constrained.make(tmp_path_factory.mktemp("constrained")).target


def constrained(grammar: str = GRAMMAR, n: int = 1) -> Generate:
    return Generate("constrained", PROMPT, SamplingParams(max_tokens=12, grammar=grammar), n=n)


class Waiting(ScriptedConnection):
    """Ends the worker once it has nothing to do. ``compiled`` is set once the free request is over."""

    def __init__(self, messages: list[ToWorker | None], compiled: Event) -> None:
        super().__init__(messages)
        self.compiled = compiled
        self.worker: Worker | None = None

    def receive(self, milliseconds: int) -> list[bytes]:
        assert self.worker is not None
        if milliseconds and not self.messages:
            self.compiled.set()
            self.worker.running = bool(self.worker.preparing)
        return super().receive(0)


def run(
    target: str, monkeypatch: pytest.MonkeyPatch, *messages: ToWorker | None
) -> tuple[list[str], EngineCore]:
    """Requests by the order in which they end or fail."""
    compiled = Event()

    def compile_slowly(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        assert compiled.wait(60)
        return compile_grammar(tokenizer, grammar)

    monkeypatch.setattr("truedraft.engine.sampling.grammar.compile_grammar", compile_slowly)
    connection = Waiting([*messages], compiled)
    core = grammars.know_grammars(make_engine(target, None, num_speculative_tokens=0))
    connection.worker = Worker(core, connection, Outbox(0.0))  # type: ignore[arg-type]
    connection.worker.run()
    ends: list[str] = []
    for message in connection.sent:
        if isinstance(message, Failed):
            ends.append(f"{message.request_id} {message.code}")
        elif isinstance(message, StepOutput):
            ends += [f"{one.request_id} {one.index}" for one in message.outputs if one.finish_reason]
            texts = [one.token_ids for one in message.outputs if one.request_id == "constrained"]
            assert not any(END in text[:-1] for text in texts)
    return ends, core


def test_others_go_on(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, core = run(target, monkeypatch, FREE, None, constrained(n=2))
    assert ends[0] == "free 0"
    assert sorted(ends[1:]) == ["constrained 0", "constrained 1"]
    assert not core.has_work


def test_what_is_aborted_meanwhile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, _ = run(target, monkeypatch, FREE, None, constrained(n=2), Abort("constrained", 0))
    assert ends == ["free 0", "constrained 1"]
    ends, core = run(target, monkeypatch, FREE, None, constrained(n=2), Abort("constrained"))
    assert ends == ["free 0"]
    assert not core.has_work


def test_a_grammar_that_is_none(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, _ = run(target, monkeypatch, FREE, None, constrained("start: nothing"))
    assert ends == ["free 0", "constrained invalid_grammar"]
