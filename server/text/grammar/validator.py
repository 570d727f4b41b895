"""The front end starts ``validator_process`` with the first grammar, and asks it from here.

The process, and those that it starts, may be killed or stopped at any moment. Every answer is waited for only
so long; then it is killed, another one is started, and who waited asks again.
"""

import asyncio
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from itertools import count
from typing import Any, TypeVar

from truedraft.server.errors import HelperLostError
from truedraft.server.settings import RequestSettings
from truedraft.server.text.helper_process import helper_command, helper_environment
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.turns import Turns

logger = logging.getLogger("truedraft.server")

# Compiled at the same time; others wait.
MAX_PARALLEL = 2
# Grammars that are known to be fine, the least recently used leave first.
MAX_KNOWN = 1024

# A grammar is asked about this often, with a pause before each further time.
MAX_ATTEMPTS = 3
PAUSE_SECONDS = 0.2
# The process may take this long to read the tokenizer, and to begin a check.
START_SECONDS = 60.0
BEGIN_SECONDS = 5.0
# A check may take this long, and several times its seconds of CPU: a machine may have much else to do.
CHECK_SECONDS = 10.0
SLOWDOWN = 10

T = TypeVar("T")


class CheckerLostError(Exception):
    """The process has ended or does not answer."""


class _Check:
    """A check is waited for twice: until it has begun, and for its outcome."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.error: asyncio.Future[str] = loop.create_future()

    def take(self, answer: dict[str, Any]) -> None:
        if not self.begun.done():
            self.begun.set_result(None)
        if self.error.done():
            return
        if "lost" in answer:
            self.error.set_exception(CheckerLostError(answer["lost"]))
        elif "error" in answer:
            self.error.set_result(answer["error"])


class _Checker:
    """Runs one process, from its start to its end."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._checks: dict[int, _Check] = {}
        self._is_killed = False
        self.reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._is_killed or self.reading.done()

    async def ask(self, number: int, question: dict[str, Any], seconds: float) -> str:
        check = self._checks[number] = _Check()
        try:
            self.send({"number": number} | question)
            await self._within(BEGIN_SECONDS, check.begun)
            return await self._within(seconds, check.error)
        except CheckerLostError:
            raise
        except BaseException:  # nobody waits for it any more
            self.send({"number": number})
            raise
        finally:
            del self._checks[number]
            for future in (check.begun, check.error):
                future.cancel()

    async def _within(self, seconds: float, answer: "asyncio.Future[T]") -> T:
        """The answer, which ends with the process; that is killed if none comes."""
        awaited: set[asyncio.Future[Any]] = {answer, self.reading}
        await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self.has_ended:
            raise CheckerLostError("it has ended")
        self.kill()
        raise CheckerLostError(f"it did not answer within {seconds:g} seconds")

    async def wait_until_ready(self) -> None:
        await self._within(START_SECONDS, self.ready)

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, RuntimeError):  # it has ended, which is noticed where it is read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        self._is_killed = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with what it compiles

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self.ready.set_result(None)
            elif (check := self._checks.get(answer["number"])) is not None:
                check.take(answer)
        await self.process.wait()


class GrammarValidator:
    def __init__(self, settings: RequestSettings) -> None:
        self.max_size = settings.max_grammar_size
        self._limits = {"seconds": settings.grammar_timeout, "memory": settings.grammar_memory}
        self._answer_timeout = CHECK_SECONDS + SLOWDOWN * settings.grammar_timeout
        self._checker: _Checker | None = None
        self._starting = asyncio.Lock()
        waiting = settings.max_queued_sequences
        self._turns = Turns("their grammar to be checked", 2 * MAX_PARALLEL, MAX_PARALLEL, waiting)
        self._numbers = count()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def error_of(self, grammar: str, tokenizer: Tokenizer, key: str = "") -> str:
        """Why the worker could not use it; empty if it can. ``key`` is the API key that waits for it."""
        digest = sha256(grammar.encode()).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return ""
        with await self._turns.begin(1, key):
            error = await self._ask(grammar, tokenizer)
        if not error:
            self._known[digest] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return error

    async def stop(self) -> None:
        if (checker := self._checker) is not None:
            checker.kill()
            await checker.reading

    async def _ask(self, grammar: str, tokenizer: Tokenizer) -> str:
        for attempt in range(MAX_ATTEMPTS):
            try:
                async with self._starting:
                    checker = await self._running(tokenizer)
                question = {"grammar": grammar, **self._limits}
                return await checker.ask(next(self._numbers), question, self._answer_timeout)
            except (CheckerLostError, OSError) as error:
                logger.warning("The process that checks grammars was lost (%s).", error)
            if attempt + 1 < MAX_ATTEMPTS:
                await asyncio.sleep(PAUSE_SECONDS)
        raise HelperLostError("The process that checks grammars was lost several times. Try again.")

    async def _running(self, tokenizer: Tokenizer) -> _Checker:
        """The one that runs, or a new one."""
        if self._checker is not None and not self._checker.has_ended:
            return self._checker
        process = await asyncio.create_subprocess_exec(
            *helper_command("grammar.validator_process"),
            stdin=PIPE,
            stdout=PIPE,
            env=helper_environment(),
            start_new_session=True,
        )
        checker = self._checker = _Checker(process)
        try:
            checker.send(await asyncio.to_thread(tokenizer.for_grammars))
            await checker.wait_until_ready()
        except BaseException:
            checker.kill()
            raise
        return checker
