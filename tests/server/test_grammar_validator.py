"""Grammars are compiled apart from everything else, and only as long as they may be."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from llguidance import LLMatcher

from tests.server.test_structured import intersection
from truedraft.server.errors import HelperLostError
from truedraft.server.settings import Settings
from truedraft.server.text.grammar.validator import GrammarValidator
from truedraft.server.text.tokenizer import Tokenizer

FINE = LLMatcher.grammar_from_lark('start: "a"')
WRONG = LLMatcher.grammar_from_lark("start: nothing")
ENDLESS = LLMatcher.grammar_from_lark(intersection(30))


def other(number: int) -> str:
    return LLMatcher.grammar_from_lark(f'start: "{number}"')


def checked(tokenizer: Tokenizer, *grammars: str, **limits: float) -> list[str]:
    async def run() -> list[str]:
        checks = GrammarValidator(Settings(**limits))
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


@asynccontextmanager
async def running(tokenizer: Tokenizer, **limits: float) -> AsyncIterator[GrammarValidator]:
    """With its process there."""
    checks = GrammarValidator(Settings(**limits))
    try:
        assert await checks.error_of(FINE, tokenizer) == ""
        while children(process_of(checks)):
            await asyncio.sleep(0.01)
        yield checks
    finally:
        await checks.stop()


def process_of(checks: GrammarValidator) -> int:
    assert checks._checker is not None
    return checks._checker.process.pid


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def compiling(checks: GrammarValidator) -> int:
    """The process of a check, once there is one."""
    while not (found := children(process_of(checks))):
        await asyncio.sleep(0.01)
    return found[0]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_replaced_and_its_requests_answered(
    tokenizer: Tokenizer, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.server.text.grammar.validator.BEGIN_SECONDS", 2.0)

    async def run() -> None:
        async with running(tokenizer) as checks:
            first = process_of(checks)
            os.kill(first, signal.SIGSTOP)  # so that what is asked now waits
            asked = [asyncio.create_task(checks.error_of(other(n), tokenizer)) for n in range(4)]
            await asyncio.sleep(0.2)
            os.kill(first, sent)
            assert await asyncio.gather(*asked) == [""] * 4
            assert process_of(checks) != first
            assert "nothing" in await checks.error_of(WRONG, tokenizer)

    asyncio.run(run())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_check_is_asked_again(
    tokenizer: Tokenizer, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.server.text.grammar.validator.CHECK_SECONDS", 1.0)

    async def run() -> None:
        async with running(tokenizer, grammar_timeout=0.5) as checks:
            waiting = asyncio.create_task(checks.error_of(ENDLESS, tokenizer))
            os.kill(await compiling(checks), sent)
            assert "0.5 seconds" in await waiting

    asyncio.run(run())


def patch_checker(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have the processes run ``code`` before the checker's ``main``."""
    lines = ["import sys", "from truedraft.server.text.grammar import validator_process", code]
    command = (sys.executable, "-c", "\n".join([*lines, "sys.exit(validator_process.main())"]))
    monkeypatch.setattr("truedraft.server.text.grammar.validator.helper_command", lambda _: command)


@pytest.fixture
def waits_for(monkeypatch: pytest.MonkeyPatch) -> str:
    """A grammar that takes no time of the processor and never ends."""
    code = """
import time
compile_grammar = validator_process.compile_grammar
def waiting(tokenizer, grammar):
    time.sleep(1000) if "never" in grammar else compile_grammar(tokenizer, grammar)
validator_process.compile_grammar = waiting
"""
    patch_checker(monkeypatch, code)
    return 'start: "never"'


def test_what_is_lost_over_and_over_is_an_error(tokenizer: Tokenizer, waits_for: str) -> None:
    async def run() -> None:
        async with running(tokenizer) as checks:
            waiting = asyncio.create_task(checks.error_of(waits_for, tokenizer))
            for _ in range(3):
                killed = await compiling(checks)
                os.kill(killed, signal.SIGKILL)
                while killed in children(process_of(checks)):
                    await asyncio.sleep(0.01)
            with pytest.raises(HelperLostError):
                await waiting
            assert await checks.error_of(other(1), tokenizer) == ""

    asyncio.run(run())


def test_a_check_that_cannot_be_forked_is_asked_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens with a limit of processes that others have used up."""
    code = """
import errno, os
fork, calls = os.fork, []
def failing():
    calls.append(1)
    if len(calls) == 2:
        raise OSError(errno.EAGAIN, "no more processes")
    return fork()
os.fork = failing
"""
    patch_checker(monkeypatch, code)

    async def run() -> None:
        async with running(tokenizer) as checks:
            first = process_of(checks)
            assert await checks.error_of(other(1), tokenizer) == ""
            assert process_of(checks) == first

    asyncio.run(run())


def test_a_check_that_nobody_waits_for_ends(tokenizer: Tokenizer, waits_for: str) -> None:
    async def run() -> None:
        async with running(tokenizer) as checks:
            waiting = [asyncio.create_task(checks.error_of(waits_for, tokenizer)) for _ in range(3)]
            await compiling(checks)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            while children(process_of(checks)):
                await asyncio.sleep(0.01)
            assert (checks._turns.num_at_work, checks._turns.num_waiting) == (0, 0)
            assert await checks.error_of(other(1), tokenizer) == ""

    asyncio.run(run())


def test_the_process_does_not_have_the_servers_keys(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEDRAFT_API_KEYS", "secret")

    async def run() -> None:
        async with running(tokenizer, grammar_timeout=5.0) as checks:
            assert b"secret" not in Path(f"/proc/{process_of(checks)}/environ").read_bytes()

    asyncio.run(run())
