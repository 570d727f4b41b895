"""``truedraft serve`` as a process: start-up, friendly failures, and an orderly end."""

import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.running import TIMEOUT_SECONDS, wait_for
from tests.server.serve_process import ROOT, SERVE, body, serve_process
from truedraft.server.cli import launch
from truedraft.server.cli import main as cli
from truedraft.server.workers.worker_client import WorkerClient

FAKE_WORKER = (sys.executable, "-m", "tests.fake_worker")


def test_serves_until_a_signal_stops_it(model_folder: Path, tmp_path: Path) -> None:
    with serve_process(model_folder, tmp_path) as serve:
        assert (
            httpx.post(f"{serve.url}/v1/completions", json=body(), timeout=TIMEOUT_SECONDS).status_code == 200
        )
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait() == 0
    assert "Traceback" not in serve.log.read_text()


def test_port_that_is_taken(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--target", str(model_folder), "--port", port]) == 1
    assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err


def test_models_that_do_not_load_end_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (*FAKE_WORKER, "--fail-at-start", "not enough memory")
    monkeypatch.setattr(launch, "WorkerClient", partial(WorkerClient, worker_command=command))
    assert cli.main(["serve", "--target", str(model_folder), "--port", "0"]) == 1
    assert "error: not enough memory" in capsys.readouterr().err


def test_connections_do_not_wait_for_acknowledgements() -> None:
    """With a socket whose protocol asyncio cannot see, each request took 40 ms longer."""
    with launch.bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_sdk_waits_until_the_models_are_loaded(model_folder: Path, tmp_path: Path) -> None:
    """It comes back after the seconds that Retry-After says, and is served."""
    with serve_process(model_folder, tmp_path, wait=False) as serve, ThreadPoolExecutor() as threads:

        def were_refused(number: int) -> bool:
            metrics = httpx.get(f"{serve.url}/metrics", timeout=TIMEOUT_SECONDS).text
            return (
                f'truedraft_request_errors_total{{code="not_ready",model_name="tiny-model"}} {number}.0'
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


def test_a_unix_socket(model_folder: Path, tmp_path: Path) -> None:
    """It takes requests, and takes the place of a killed server's, but not of a running one's."""
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path may have 107 characters
        path = Path(folder) / "s"
        for _ in range(2):
            with (
                serve_process(model_folder, tmp_path, "--uds", str(path)) as serve,
                httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT_SECONDS) as client,
            ):
                assert serve.url == f"unix:{path}"
                answer = client.post("http://server/v1/completions", json=body(max_tokens=3))
                assert answer.json()["usage"]["completion_tokens"] == 3
                second = ["serve", "--target", str(model_folder), "--uds", str(path)]
                assert cli.main(second) == 1
            assert path.is_socket()  # left by the one that was killed


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with the openssl command")
def test_tls(model_folder: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        + ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with serve_process(model_folder, tmp_path, *files) as serve:
        assert serve.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=serve.url, verify=trusting, timeout=TIMEOUT_SECONDS) as client:
            assert client.post("/v1/completions", json=body(max_tokens=3)).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{serve.url}/health", timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_tls_files_that_do_not_work(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "cert.pem"
    if content is not None:
        file.write_text(content)
    files = ["--ssl-certfile", str(file), "--ssl-keyfile", str(file)]
    assert cli.main(["serve", "--target", str(model_folder), "--port", "0", *files]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "ssl_certfile" in line


def test_a_full_disk_for_its_output(model_folder: Path) -> None:
    """What it prints and logs is lost, and nothing else."""
    with tempfile.TemporaryDirectory() as folder, open("/dev/full", "w") as full:
        path = Path(folder) / "s"
        arguments = ["[]", "--target", str(model_folder), "--uds", str(path)]
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments], cwd=ROOT, stdout=full, stderr=full
        )
        transport = httpx.HTTPTransport(uds=str(path))
        try:
            wait_for(lambda: path.is_socket() or process.poll() is not None, "its socket")
            assert process.poll() is None
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=None) as client:
                wait_for(lambda: client.get("/ready").status_code == 200, "the worker")
                assert client.post("/v1/completions", json=body(max_tokens=3)).status_code == 200
            process.terminate()
            assert process.wait(TIMEOUT_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
