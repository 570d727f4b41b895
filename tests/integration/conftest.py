"""Real servers; the one with the bundled pair is started once."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

# A busy machine may take a minute to load torch alone. Only a failure takes so long.
TIMEOUT_SECONDS = 600

# This is the command, but for the limit of its end, which a machine that stands still would reach.
SERVE = """
import sys
from truedraft.server.cli import draining, main
draining.END_SECONDS = 1000.0
sys.exit(main.main(sys.argv[1:]))
"""

# In a request: what would be left to costs, which are measured, happens on every machine.
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 4}


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=TIMEOUT_SECONDS)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=TIMEOUT_SECONDS)

    def stream(self, path: str, body: dict[str, Any]) -> AbstractContextManager[httpx.Response]:
        body = {**body, "stream": True}
        return httpx.stream("POST", f"{self.url}{path}", json=body, timeout=TIMEOUT_SECONDS)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over its labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@contextmanager
def serving(folder: Path, *arguments: str, program: str = SERVE) -> Iterator[Server]:
    """A server process started as a user would start it; its log goes to ``folder``."""
    log_path = folder / "log"
    # From another directory: the bundled pair must be found wherever the command is run.
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", program, "serve", "--port", "0", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=log,
            stderr=log,
        ) as process,
    ):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while "Ready" not in log_path.read_text():
                assert process.poll() is None, log_path.read_text()
                assert time.monotonic() < deadline, log_path.read_text()
                time.sleep(0.1)
            url = re.search(r"url +(http://\S+)/v1", log_path.read_text())
            assert url is not None
            yield Server(url[1], process.pid)
        finally:
            process.terminate()
            process.wait(TIMEOUT_SECONDS)
        assert process.returncode == 0, log_path.read_text()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--cache-memory", "256MiB") as running:
        yield running
