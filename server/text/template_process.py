"""The front end's threads ask processes, ``server.text.template_renderer``, to render templates, and others,
``server.text.picture_reader``, to read pictures.

One does nearly all of it. Where it is held up by a conversation that takes long, others are started, so that
only that request waits. A process may end at any moment, by a template that takes too long or because
somebody kills or stops it. Then another one is started; a template that was not to blame is rendered again.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

from truedraft.engine.text.abandoned import stop_if_abandoned
from truedraft.server.errors import HelperLostError
from truedraft.server.stages import current_stages
from truedraft.server.text.helper_process import (
    FETCH_SECONDS,
    TEMPLATE_SECONDS,
    helper_command,
    helper_environment,
)

# A template is tried this often where the process was lost.
MAX_ATTEMPTS = 3
START_SECONDS = 60.0
# A process that has not answered by then is killed; its limit of processor time comes earlier.
ANSWER_SECONDS = 30.0
# So many run at most. An API key that has one leaves the last one to others.
MAX_PROCESSES = 3
# Another one is started where all that run have been at work for so long.
HELD_UP_SECONDS = 0.5
LOOK_SECONDS = 0.05
# A process that a template has brought down itself ends so.
TOO_LONG = -signal.SIGPROF
# A process that waits too long for a host ends so.
NOT_FETCHED = -signal.SIGALRM
CRASHED = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class ProcessLostError(Exception):
    """The process has ended or does not answer, and no template is known to be the reason."""


class TemplateProcess:
    """Safe to use from several threads, which wait for each other; they must not be the event loop's. It runs
    ``module``, and ``task`` says what that does."""

    def __init__(self, module: str = "template_renderer", task: str = "renders chat templates") -> None:
        self._module, self._task = module, task
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            for _ in range(MAX_ATTEMPTS):
                with suppress(ProcessLostError, OSError):
                    return self._ask(json.dumps(question).encode() + b"\n")
        raise HelperLostError(f"The process that {self._task} was lost several times. Try again.")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, question: bytes) -> dict[str, Any]:
        process = self._running()
        try:
            return self._exchange(process, question, ANSWER_SECONDS)
        except ProcessLostError:
            self.stop()
            if process.returncode == TOO_LONG:
                return {"error": f"it takes more than {TEMPLATE_SECONDS:g} seconds", "is_slow": True}
            if process.returncode == NOT_FETCHED:
                return {"error": f"it was not fetched within {FETCH_SECONDS:g} seconds"}
            if process.returncode in CRASHED:
                return {"error": "it takes more memory than it may"}
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                helper_command(self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=helper_environment(),
                start_new_session=True,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            try:
                self._exchange(self._process, b"", START_SECONDS)
            except ProcessLostError:
                self.stop()
                raise
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes, seconds: float) -> dict[str, Any]:
        """Send ``question``, if it is not empty, and wait for a line."""
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin.fileno(), process.stdout.fileno()
        deadline, rest, answer = time.monotonic() + seconds, memoryview(question), bytearray()
        while not answer.endswith(b"\n"):
            awaited = select.poll()  # unlike ``select``, for any number of open files
            awaited.register(back, select.POLLIN)
            if rest:
                awaited.register(to, select.POLLOUT)
            ready = [file for file, _ in awaited.poll(1000 * max(0.0, deadline - time.monotonic()))]
            if not ready:
                raise ProcessLostError("it does not answer")
            if back in ready:
                data = os.read(back, 1 << 20)
                if not data:
                    process.wait()
                    raise ProcessLostError("it has ended")
                answer += data
            else:
                try:
                    rest = rest[os.write(to, rest) :]
                except BrokenPipeError:
                    rest = rest[:0]  # it has ended, which is noticed where it is read
        return dict(json.loads(answer))


class TemplateProcesses:
    """Safe to use from several threads, which must not be the event loop's. ``of_each`` are the arguments of
    each process."""

    def __init__(self, *of_each: str) -> None:
        self._idle = [TemplateProcess(*of_each) for _ in range(MAX_PROCESSES)]
        self._num_at_work: Counter[str] = Counter()  # keys are API keys
        self._changed = threading.Condition()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        key = current_stages().key
        process = self._take(key)
        try:
            return process.ask(question)
        finally:
            with self._changed:
                self._num_at_work[key] -= 1
                self._idle.insert(0, process)  # the next to be used: the others may never be started
                self._changed.notify_all()

    def stop(self) -> None:
        for process in self._idle:
            process.stop()

    def _take(self, key: str) -> TemplateProcess:
        """Waits for a process; those that do not run yet are for when the others are held up."""
        may_start_at = time.monotonic() + HELD_UP_SECONDS
        with self._changed:
            while True:
                is_served = key and self._num_at_work[key] > 0
                is_alone = not self._num_at_work.total()
                may_start = is_alone or time.monotonic() >= may_start_at
                if len(self._idle) > bool(is_served):
                    for process in sorted(self._idle, key=lambda one: one.pid is None):
                        if may_start or process.pid is not None:
                            self._idle.remove(process)
                            self._num_at_work[key] += 1
                            return process
                stop_if_abandoned()
                self._changed.wait(LOOK_SECONDS)


@cache
def template_process() -> TemplateProcesses:
    """Returns those of this process, which serve all of its tokenizers."""
    return helper()


def helper(*of_each: str) -> TemplateProcesses:
    """Makes processes that end with this one; ``of_each`` is as in ``TemplateProcesses``."""
    processes = TemplateProcesses(*of_each)
    atexit.register(processes.stop)
    return processes
