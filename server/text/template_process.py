"""The front end's threads ask one process, ``server.text.template_renderer``, for all templates.

It may end at any moment, by a template that takes too long or because somebody kills or stops it. Then
another one is started; a template that was not to blame is rendered again.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

from truedraft.server.errors import HelperLostError
from truedraft.server.text.helper_process import TEMPLATE_SECONDS, helper_command, helper_environment

# A template is tried this often where the process was lost.
MAX_ATTEMPTS = 3
START_SECONDS = 60.0
# A process that has not answered by then is killed; its limit of processor time comes earlier.
ANSWER_SECONDS = 30.0
# A process that a template has brought down itself ends so.
TOO_LONG = -signal.SIGPROF
CRASHED = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class ProcessLostError(Exception):
    """The process has ended or does not answer, and no template is known to be the reason."""


class TemplateProcess:
    """Safe to use from several threads, which wait for each other; they must not be the event loop's."""

    def __init__(self) -> None:
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
        raise HelperLostError("The process that renders chat templates was lost several times. Try again.")

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
                return {"error": f"it takes more than {TEMPLATE_SECONDS:g} seconds"}
            if process.returncode in CRASHED:
                return {"error": "it takes more memory than it may"}
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                helper_command("template_renderer"),
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


@cache
def template_process() -> TemplateProcess:
    """Returns the one of this process, which serves all of its tokenizers."""
    process = TemplateProcess()
    atexit.register(process.stop)
    return process
