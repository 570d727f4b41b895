"""Grammars are compiled apart from everything else, and only as long as they may be."""

import asyncio
import os
import signal

import pytest
from llguidance import LLMatcher

from tests.server.test_structured import intersection
from truedraft.server.settings import Settings
from truedraft.server.text.grammar_checks import GrammarChecks
from truedraft.server.text.tokenizer import Tokenizer

FINE = LLMatcher.grammar_from_lark('start: "a"')
WRONG = LLMatcher.grammar_from_lark("start: nothing")
ENDLESS = LLMatcher.grammar_from_lark(intersection(30))


def checked(tokenizer: Tokenizer, *grammars: str, **limits: float) -> list[str]:
    async def run() -> list[str]:
        checks = GrammarChecks(Settings(**limits))
        try:
            return await asyncio.gather(*(checks.error_of(grammar, tokenizer) for grammar in grammars))
        finally:
            await checks.stop()

    return asyncio.run(run())


def test_each_gets_its_own_answer(tokenizer: Tokenizer) -> None:
    errors = checked(tokenizer, *[FINE, WRONG, ENDLESS] * 3, grammar_timeout=0.2)
    assert [error[:24] for error in errors[:3]] == ["", errors[1][:24], "it takes more than 0.2 s"]
    assert "nothing" in errors[1]
    assert errors == errors[:3] * 3


def test_too_much_memory(tokenizer: Tokenizer) -> None:
    errors = checked(tokenizer, FINE, grammar_memory=1 << 20, grammar_timeout=60.0)
    assert errors == ["it takes more than 1 MiB of memory (grammar_memory)"]


def test_a_tokenizer_that_grammars_cannot_use(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "for_grammars", lambda self: {"tokenizer": "{}"})
    for error in checked(tokenizer, FINE, WRONG):
        assert "tokenizer cannot be used for grammars" in error


def test_a_process_that_dies_is_started_again(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        checks = GrammarChecks(Settings(grammar_timeout=60.0))
        assert await checks.error_of(FINE, tokenizer) == ""
        waiting = asyncio.create_task(checks.error_of(ENDLESS, tokenizer))
        while not checks._waiting:
            await asyncio.sleep(0.01)
        assert checks._process is not None
        os.killpg(checks._process.pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError):
            await waiting
        assert "nothing" in await checks.error_of(WRONG, tokenizer)
        await checks.stop()

    asyncio.run(run())
