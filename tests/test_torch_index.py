"""Where ``make`` takes torch from: the CPU build's index where it is wanted and answers, or as ever."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools import torch_index

ROOT = Path(__file__).parent.parent


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An index that answers, on a Linux machine without a driver."""
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/whl/cpu"
        monkeypatch.setattr(torch_index, "torch_index", lambda: address)
        monkeypatch.setattr(torch_index, "has_nvidia_driver", lambda: False)
        monkeypatch.setattr(sys, "platform", "linux")
        yield address
        server.shutdown()


def test_a_machine_without_a_driver_takes_the_cpu_build(index: str) -> None:
    assert torch_index.index_for_this_machine() == index


def test_a_machine_with_a_driver_takes_the_default(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_index, "has_nvidia_driver", lambda: True)
    assert torch_index.index_for_this_machine() == ""


def test_an_index_without_torch_is_not_taken(index: str) -> None:
    assert not torch_index.is_reachable(index.replace("cpu", "other"))


def test_an_index_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_index, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        assert not torch_index.is_reachable(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("there", [True, False])
def test_a_driver_is_known_by_its_files(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if there:
        (tmp_path / "nvidiactl").touch()
    assert torch_index.has_nvidia_driver([tmp_path / "version", tmp_path / "nvidiactl"]) == there


def test_the_command_says_nothing_where_nothing_answers() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        environment["https_proxy"] = f"http://127.0.0.1:{closed.getsockname()[1]}"
        command = [sys.executable, "-m", "tools.torch_index"]
        said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (0, "\n", "")
