"""A process that compiles grammars, to find out whether the worker may. Started by
``server.text.grammar.validator``.

A grammar of a few hundred characters can take minutes and all memory, in machine code which cannot be
interrupted. So each is compiled in a process of its own, a fork of this one, which has the tokenizer already.
Lines of JSON come in: the tokenizer first, then checks, and which of them nobody waits for any more. Lines
go out: one when the tokenizer is there, one when a check has begun, and one with its outcome. ``lost`` is
that of a check whose process could not be started or was killed by somebody else.
"""

import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from llguidance import LLTokenizer

from truedraft.engine.machine.deep_stack import STACK_BYTES
from truedraft.engine.sampling.grammar_compiler import GrammarError, compile_grammar
from truedraft.server.text.helper_process import limit_memory

# Characters of an error. Written as JSON it must fit into a pipe at once, as others write there too.
MAX_ERROR = 600
IN, OUT = 0, 1


def main() -> int:
    os.nice(5)
    # Wakes ``select`` whenever a process has ended, also if that was a moment before it began to wait.
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lines = Lines()
    try:
        tokenizer = LLTokenizer(**json.loads(lines.first()))
    except ValueError as error:
        say(ready=True)
        while arrived := lines.read():
            for line in arrived:
                reason = f"the model's tokenizer cannot be used for grammars: {error}"
                say(number=json.loads(line)["number"], error=reason[:MAX_ERROR])
        return 0
    checks = Checks(tokenizer)
    say(ready=True)
    while True:
        readable, _, _ = select.select([IN, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            checks.reap()
        if IN in readable:
            arrived = lines.read()
            if not arrived:
                return 0
            for line in arrived:
                checks.take(json.loads(line))


class Lines:
    """Reads standard input; ``read`` returns the lines that are complete, nothing at its end."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self) -> list[bytes]:
        while data := os.read(IN, 1 << 20):
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                return lines
        return []

    def first(self) -> bytes:
        """Nothing follows it before it is answered."""
        return (self.read() or [b""])[0]


def say(**message: Any) -> None:
    os.write(OUT, json.dumps(message).encode() + b"\n")


class Checks:
    """Holds the checks that are under way, by the process of each."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._running: dict[int, dict[str, Any]] = {}

    def take(self, check: dict[str, Any]) -> None:
        """Begin a check, or end one."""
        if "grammar" not in check:
            for process, other in self._running.items():
                if other["number"] == check["number"]:
                    os.kill(process, signal.SIGKILL)
            return
        try:
            process = os.fork()
        except OSError as error:
            say(number=check["number"], lost=str(error))
            return
        if process == 0:
            compile_and_exit(self._tokenizer, **check)
        self._running[process] = check
        say(number=check["number"], begun=True)

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if (check := self._running.pop(ended[0], None)) is not None:
                    report(ended[1], **check)


def report(status: int, number: int, grammar: str, seconds: float, memory: int) -> None:
    """Reports what came of a check's process, unless it has said so itself."""
    if status == 0:
        return
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        say(number=number, error=f"it takes more than {seconds:g} seconds (grammar_timeout)")
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        say(number=number, lost="its process was killed")
    else:  # such as a panic of the parser's
        say(number=number, error=f"it takes more than {memory >> 20} MiB of memory (grammar_memory)")


def compile_and_exit(tokenizer: LLTokenizer, number: int, grammar: str, seconds: float, memory: int) -> None:
    """Say what is wrong with it, in a process of its own, which ends where it takes more than it may."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limit_memory(STACK_BYTES + memory)  # the deep stack takes address space without using it
        signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-6))  # 0 would be no limit
        error = ""
        try:
            compile_grammar(tokenizer, grammar)
        except GrammarError as refusal:
            error = str(refusal)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(number=number, error=error[:MAX_ERROR])
    except BaseException:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
