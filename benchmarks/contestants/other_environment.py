"""Runs a contestant in an environment of its own: another interpreter's process, which takes ids as JSON."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Run


class OtherProcess:
    """Runs ``script`` with ``options``; as a context, it ends with it. The script imports nothing of this
    project, answers with one line of JSON when it is ready, and then for each line that it is given."""

    def __init__(self, name: str, python: Path, script: Path, options: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [str(python), str(script), json.dumps(options, default=str)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._log.seek(0)
            log = self._log.read()
            self.close()
            raise RuntimeError(f"{self.name} ended:\n{log[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """Seconds are the process's own: what it takes to reach it is not among them."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return Run(sum(map(len, answer["token_ids"])), answer["seconds"], token_ids=answer["token_ids"])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)
        self._log.close()


def variants(
    processes: Sequence[OtherProcess], prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, Callable[[], Run]]:
    return {process.name: partial(process.run, prompts, max_tokens) for process in processes}
