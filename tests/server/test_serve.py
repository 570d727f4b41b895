"""``foretoken serve`` as a process: start-up, friendly failures, and an orderly end."""

import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

import server.cli
import server.launch
from server.client.worker_client import WorkerClient
from tests.server.running import PATIENCE_SECONDS, wait_for
from tests.server.serve_process import body, serve_process

FAKE_WORKER = (sys.executable, "-m", "tests.fake_worker")


def test_serves_until_it_is_told_to_stop(model_folder: Path, tmp_path: Path) -> None:
    with serve_process(model_folder, tmp_path) as serve:
        assert (
            httpx.post(f"{serve.url}/v1/completions", json=body(), timeout=PATIENCE_SECONDS).status_code
            == 200
        )
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait() == 0
    assert "Traceback" not in serve.log.read_text()


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
    assert server.cli.main(["serve", "--target", str(model_folder), "--port", "0"]) == 1
    assert "error: The worker failed: not enough memory" in capsys.readouterr().err


def test_connections_do_not_wait_for_acknowledgements() -> None:
    """With a socket whose protocol asyncio cannot see, each request took 40 ms longer."""
    with server.launch.bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_sdk_waits_until_the_models_are_loaded(model_folder: Path, tmp_path: Path) -> None:
    """It comes back after the seconds that Retry-After says, and is served."""
    with serve_process(model_folder, tmp_path, wait=False) as serve, ThreadPoolExecutor() as threads:

        def were_refused(number: int) -> bool:
            metrics = httpx.get(f"{serve.url}/metrics", timeout=PATIENCE_SECONDS).text
            return (
                f'foretoken_request_errors_total{{code="not_ready",model_name="tiny-model"}} {number}.0'
                in metrics
            )

        sdk = partial(openai.OpenAI, base_url=f"{serve.url}/v1", api_key="none")
        with sdk(max_retries=0) as hasty, sdk(max_retries=30) as patient:
            with pytest.raises(openai.InternalServerError) as caught:
                hasty.completions.create(model="tiny-model", prompt="x")
            assert (caught.value.status_code, caught.value.code) == (503, "not_ready")
            assert caught.value.response.headers["retry-after"] == "2"
            answer = threads.submit(patient.completions.create, model="tiny-model", prompt="x")
            wait_for(lambda: were_refused(2), "a refusal")
            serve.worker.go_on()
            assert answer.result().choices
