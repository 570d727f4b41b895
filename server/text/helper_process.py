"""Starts the processes that help the front end: they check grammars and render chat templates.

They run what comes from clients and checkpoints, within limits, and may end at any moment.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from truedraft.server.settings import ENV_PREFIX

# A chat template may take this much of the processor's time for one conversation.
TEMPLATE_SECONDS = 5.0
# A picture that is fetched must be there by then.
FETCH_SECONDS = 15.0
OUT = 1


def helper_command(module: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", f"truedraft.server.text.{module}")


def helper_environment() -> dict[str, str]:
    """Returns the environment without the server's settings, keys among them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def limit_memory(num_bytes: int) -> None:
    """Limits this process to that much address space in addition to what it has."""
    with suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
        before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (before + num_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_lines(outcome_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Says that this process is ready, and then what ``outcome_of`` makes of each line of JSON that comes in,
    for which it has ``TEMPLATE_SECONDS`` of the processor's time."""
    say(ready=True)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
        outcome = outcome_of(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(**outcome)


def say(**message: Any) -> None:
    """Writes one line of JSON, as whoever started this process expects it."""
    rest = memoryview(json.dumps(message).encode() + b"\n")
    while rest:
        rest = rest[os.write(OUT, rest) :]
