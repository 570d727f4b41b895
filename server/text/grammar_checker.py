"""A process that compiles grammars, to find out whether the worker may. Started by
``server.text.grammar_checks``.

A grammar of a few hundred characters can take minutes and all memory, in machine code which cannot be
interrupted. So each is compiled in a process of its own, a fork of this one, which has the tokenizer already.
Lines of JSON come in: the tokenizer first, then checks; a line with the outcome of each goes out.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from llguidance import LLTokenizer

from truedraft.engine.deep_stack import STACK_BYTES
from truedraft.engine.grammar_compiler import GrammarError, compile_grammar

# Bytes of an error. Written as JSON it must fit into a pipe at once, as others write there too.
MAX_ERROR = 600
OUT = 1


def main() -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing to wait for
    os.nice(5)
    try:
        tokenizer = LLTokenizer(**json.loads(sys.stdin.buffer.readline()))
    except ValueError as error:
        for line in sys.stdin.buffer:
            reason = f"the model's tokenizer cannot be used for grammars: {error}"
            answer(json.loads(line)["number"], reason[:MAX_ERROR])
        return 0
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            watch(tokenizer, **json.loads(line))
            os._exit(0)
    return 0


def answer(number: int, error: str) -> None:
    os.write(OUT, json.dumps({"number": number, "error": error}).encode() + b"\n")


def watch(tokenizer: LLTokenizer, number: int, grammar: str, seconds: float, memory: int) -> None:
    """Have the grammar compiled, and say what came of it, even if that is the end of a process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, attempt(tokenizer, grammar, seconds, memory).encode()[:MAX_ERROR])
        except BaseException:  # such as a panic of the parser's
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        error = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        error = f"it takes more than {seconds:g} seconds (grammar_timeout)"
    elif status != 0:
        error = f"it takes more than {memory >> 20} MiB of memory (grammar_memory)"
    answer(number, error)


def attempt(tokenizer: LLTokenizer, grammar: str, seconds: float, memory: int) -> str:
    """What is wrong with it, if anything. The process ends where it takes more than it may."""
    with suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
        # Of address space, beside what is there; the deep stack takes it without using it.
        before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (before + STACK_BYTES + memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-6))  # 0 would be no limit
    try:
        compile_grammar(tokenizer, grammar)
    except GrammarError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
