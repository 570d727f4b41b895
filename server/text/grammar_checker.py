"""A process that compiles grammars, to find out whether the worker may. Started by
``server.text.grammar_checks``.

A grammar of a few hundred characters can take minutes and all memory, in machine code which cannot be
interrupted. So each is compiled in a process of its own, a fork of this one, which has the tokenizer already.
Lines of JSON come in: the tokenizer first, then checks, and which of them nobody waits for any more. Lines
go out: one when the tokenizer is there, one when a check has begun, and one with its outcome. ``lost`` is
that of a check whose process could not be started or was killed by somebody else.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llguidance import LLTokenizer

from truedraft.engine.deep_stack import STACK_BYTES
from truedraft.engine.grammar_compiler import GrammarError, compile_grammar
from truedraft.server.text.helper_process import limit_memory

# Characters of an error. Written as JSON it must fit into a pipe at once, as others write there too.
MAX_ERROR = 600
OUT = 1


def main() -> int:
    os.nice(5)
    try:
        tokenizer = LLTokenizer(**json.loads(sys.stdin.buffer.readline()))
    except ValueError as error:
        say(ready=True)
        for line in sys.stdin.buffer:
            reason = f"the model's tokenizer cannot be used for grammars: {error}"
            say(number=json.loads(line)["number"], error=reason[:MAX_ERROR])
        return 0
    checks: dict[int, dict[str, Any]] = {}  # by the process of each

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if (check := checks.pop(ended[0], None)) is not None:
                    report(ended[1], **check)

    signal.signal(signal.SIGCHLD, reap)
    say(ready=True)
    for line in sys.stdin.buffer:
        check = json.loads(line)
        with without_reaping():
            if "grammar" not in check:
                for process, other in checks.items():
                    if other["number"] == check["number"]:
                        os.kill(process, signal.SIGKILL)
                continue
            try:
                process = os.fork()
            except OSError as error:
                say(number=check["number"], lost=str(error))
                continue
            if process == 0:
                compile_and_exit(tokenizer, **check)
            checks[process] = check
            say(number=check["number"], begun=True)
    return 0


def say(**message: Any) -> None:
    os.write(OUT, json.dumps(message).encode() + b"\n")


@contextmanager
def without_reaping() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def report(status: int, number: int, grammar: str, seconds: float, memory: int) -> None:
    """What came of a check's process, unless it has said so itself."""
    if status == 0:
        return
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        say(number=number, error=f"it takes more than {seconds:g} seconds (grammar_timeout)")
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        say(number=number, lost="its process was killed")
    else:  # such as a panic of the parser's
        say(number=number, error=f"it takes more than {memory >> 20} MiB of memory (grammar_memory)")


def compile_and_exit(tokenizer: LLTokenizer, number: int, grammar: str, seconds: float, memory: int) -> None:
    """In a process of its own, which ends where it takes more than it may."""
    try:
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
