"""Real servers; the one with the bundled pair is started once."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 120


@dataclass(frozen=True)
class Server:
    url: str

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over its labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    """A server process started as a user would start it; its log goes to ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_path = folder / "log"
    # From another directory: the bundled pair must be found wherever the command is run.
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "server", "serve", "--port", str(port), *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=log,
            stderr=log,
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        try:
            while not _is_ready(url):
                assert process.poll() is None, log_path.read_text()
                assert time.monotonic() < deadline, log_path.read_text()
                time.sleep(0.1)
            yield Server(url)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
