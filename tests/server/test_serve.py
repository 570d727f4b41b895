"""``foretoken serve`` as a process: start-up, friendly failures, and an orderly end."""

import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

import server.cli
import server.launch
from server.engine_client import WorkerClient
from tests.server.running import wait_for

ROOT = Path(__file__).parents[2]
FAKE_WORKER = (sys.executable, "-m", "tests.fake_worker")

# The command as installed, but for its worker.
SERVE = """
import sys
from functools import partial
import server.cli
import server.launch
from server.engine_client import WorkerClient
command = (sys.executable, "-m", "tests.fake_worker")
server.launch.WorkerClient = partial(WorkerClient, worker_command=command)
sys.exit(server.cli.main(["serve", *sys.argv[1:]]))
"""


def test_serves_until_it_is_told_to_stop(model_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    arguments = ["--target", str(model_folder), "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A shell's background job is born deaf to Ctrl-C, and so would be all its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        wait_for(lambda: "Ready on cpu in float32" in log.read_text(), "the start", seconds=30)
        url = re.search(r"url +(http://\S+)", log.read_text())
        assert url is not None
        answer = httpx.post(f"{url[1]}/completions", json={"model": "tiny-model", "prompt": "x"})
        assert answer.status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == server.cli.INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()


def test_port_that_is_taken(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert server.cli.main(["serve", "--target", str(model_folder), "--port", port]) == 1
    assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err


def test_models_that_do_not_load_end_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (*FAKE_WORKER, "--fail-at-start", "not enough memory")
    monkeypatch.setattr(server.launch, "WorkerClient", partial(WorkerClient, worker_command=command))
    monkeypatch.setattr(server.cli, "configure_logging", lambda level: None)
    assert server.cli.main(["serve", "--target", str(model_folder), "--port", "0"]) == 1
    assert "error: The worker failed: not enough memory" in capsys.readouterr().err


def test_connections_do_not_wait_for_acknowledgements() -> None:
    """With a socket whose protocol asyncio cannot see, each request took 40 ms longer."""
    with server.launch.bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
