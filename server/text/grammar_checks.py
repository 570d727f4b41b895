"""The front end's side of ``server.text.grammar_checker``: starts it with the first grammar, and asks it."""

import asyncio
import json
import os
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from itertools import count

from truedraft.server.settings import RequestSettings
from truedraft.server.text.tokenizer import Tokenizer

COMMAND = (sys.executable, "-P", "-m", "truedraft.server.text.grammar_checker")
# Compiled at the same time; others wait.
MAX_PARALLEL = 2
# Grammars that are known to be fine, the least recently used leave first.
MAX_KNOWN = 1024


class GrammarChecks:
    def __init__(self, settings: RequestSettings) -> None:
        self.max_size = settings.max_grammar_size
        self._limits = {"seconds": settings.grammar_timeout, "memory": settings.grammar_memory}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_PARALLEL)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def error_of(self, grammar: str, tokenizer: Tokenizer) -> str:
        """Why the worker could not use it; empty if it can."""
        key = sha256(grammar.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return ""
        async with self._turns:
            error = await self._ask(grammar, tokenizer)
        if not error:
            self._known[key] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return error

    async def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what it compiles
            await self._process.wait()
            if self._reading is not None:
                await self._reading

    async def _ask(self, grammar: str, tokenizer: Tokenizer) -> str:
        async with self._starting:
            process = self._process or await self._start(tokenizer)
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(process, {"number": number, "grammar": grammar, **self._limits})
            return await answer
        finally:
            del self._waiting[number]

    async def _start(self, tokenizer: Tokenizer) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._send(process, await asyncio.to_thread(tokenizer.for_grammars))
        self._process = process
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Until the process ends. It should not before ``stop``; what waits fails then, and the next one
        starts it again."""
        assert process.stdout is not None
        async for line in process.stdout:
            answer = json.loads(line)
            if (waiting := self._waiting.get(answer["number"])) is not None and not waiting.done():
                waiting.set_result(answer["error"])
        self._process = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ChildProcessError("the process that checks grammars has ended"))

    def _send(self, process: asyncio.subprocess.Process, message: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")
