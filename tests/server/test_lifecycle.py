"""Processes at odd moments: hung, stopped, killed or signalled ones leave nothing behind."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import COMPLETIONS
from tests.server.running import TIMEOUT_SECONDS, wait_for
from tests.server.serve_process import ROOT, ServeProcess, body, serve_process
from truedraft.engine.machine.lifeline import PARENT_VARIABLE
from truedraft.server.workers.worker_client import WORKER_COMMAND
from truedraft.server.workers.worker_process import worker_environment

FOR_EVER = ("--drain-timeout", "1000")


def children(serve: ServeProcess) -> list[str]:
    """Returns the server's children without those that help it with text or have just been forked."""
    process = serve.process.pid
    own = Path(f"/proc/{process}/cmdline").read_bytes()
    found = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with suppress(FileNotFoundError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if command != own and b"truedraft.server.text" not in command:
                found.append(child)
    return found


def worker_pid(serve: ServeProcess) -> int:
    """Returns the only child."""
    (pid,) = children(serve)
    return int(pid)


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent has yet to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ignores(pid: int, number: int) -> bool:
    """A worker does, just after it has tied its life to the server's."""
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_stopped_worker_is_replaced(start_server: StartServer) -> None:
    with start_server(heartbeat_timeout=20) as server:
        stopped = server.engine.workers[0].pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)

        def is_given_up() -> bool:
            server.pass_time(1)  # one more of those that its silence is given
            return server.engine.state.status == "restarting"

        wait_for(is_given_up, "its replacement")
        assert "no sign of life for 20 s" in server.engine.state.reason
        assert not is_alive(stopped)
        server.wait_until_ready()
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_hung_worker_is_replaced(start_server: StartServer) -> None:
    """Its process lives, its heartbeats come, and its loop never leaves one step."""
    with start_server(step_timeout=1) as server:
        server.worker.hang()
        wait_for(lambda: server.engine.state.status == "restarting", "its replacement")
        assert "in one step" in server.engine.state.reason
        server.worker.go_on()
        # On a machine that stands still for a second the next one may be replaced, too.
        wait_for(lambda: server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).is_success, "an answer")


def test_a_worker_that_keeps_dying_ends_the_server(model_folder: Path, tmp_path: Path) -> None:
    with serve_process(model_folder, tmp_path, "--max-worker-restarts", "1") as serve:
        first = worker_pid(serve)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: serve.log.read_text().count("Restarting in") == 1, "a restart")

        def next_worker() -> bool:
            return children(serve) not in ([], [str(first)])

        wait_for(next_worker, "the next worker")
        os.kill(worker_pid(serve), signal.SIGKILL)
        assert serve.wait() == 1
        assert "killed by signal 9" in serve.log.read_text()
        assert "restarted 1 times (max_worker_restarts)" in serve.log.read_text()
        assert "Traceback" not in serve.log.read_text()


@pytest.mark.parametrize("is_loading", [True, False])
def test_no_worker_outlives_a_killed_server(model_folder: Path, tmp_path: Path, is_loading: bool) -> None:
    with serve_process(model_folder, tmp_path, wait=not is_loading) as serve:
        wait_for(lambda: bool(children(serve)), "the worker")
        worker = worker_pid(serve)
        wait_for(lambda: ignores(worker, signal.SIGTERM), "its ties and what follows them")
        serve.process.kill()
        wait_for(lambda: not is_alive(worker), "the worker's end")


def test_the_worker_ties_its_life_before_it_imports_the_engine() -> None:
    """With another parent than the one that started it, it leaves at once, without importing torch."""
    environment = os.environ | {PARENT_VARIABLE: "1", "PYTHONPATH": str(ROOT)}
    process = "truedraft.engine.process"
    program = f"import sys, truedraft.engine.machine.lifeline, {process}.spawned; print(sorted(sys.modules))"
    listed = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert "'torch'" not in listed
    assert "'msgspec'" not in listed
    result = subprocess.run(WORKER_COMMAND, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_worker_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("engine", "msgspec", "argparse", "signal"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} was executed')")
    environment = os.environ | {"PYTHONPATH": str(ROOT), PARENT_VARIABLE: str(os.getpid())}
    result = subprocess.run(
        [*WORKER_COMMAND, "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "executed" not in result.stdout
    assert "--socket" in result.stdout


def test_signals_for_the_whole_group_drain(model_folder: Path, tmp_path: Path) -> None:
    """systemd sends SIGTERM to every process of a service; the worker leaves it to the front end."""
    with serve_process(model_folder, tmp_path, *FOR_EVER) as serve:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(worker_pid(serve), number)
        answer = httpx.post(f"{serve.url}{COMPLETIONS}", json=body(max_tokens=1), timeout=TIMEOUT_SECONDS)
        assert answer.status_code == 200
        assert "Restarting" not in serve.log.read_text()
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_orderly_end_is_no_failure(model_folder: Path, tmp_path: Path, number: int) -> None:
    with serve_process(model_folder, tmp_path, *FOR_EVER) as serve:
        serve.process.send_signal(number)
        assert serve.wait() == 0
        assert "Traceback" not in serve.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_end_while_loading_takes_no_time(model_folder: Path, tmp_path: Path, number: int) -> None:
    """A worker that loads does not hear that it should leave, and is killed; nor does a tokenizer."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")  # which nobody writes to
    with serve_process(folder, tmp_path, *FOR_EVER, wait=False) as serve:
        wait_for(lambda: bool(children(serve)), "the worker")
        worker = worker_pid(serve)
        serve.process.send_signal(number)
        assert serve.wait() == 0
        assert not is_alive(worker)
        assert "Traceback" not in serve.log.read_text()


def test_loading_says_what_it_is_at(model_folder: Path, tmp_path: Path) -> None:
    with serve_process(model_folder, tmp_path, wait=False) as serve:
        wait_for(lambda: " s: loading the fake model\n" in serve.log.read_text(), "a line of progress")
        serve.worker.go_on()
        wait_for(lambda: "Ready on cpu" in serve.log.read_text(), "the end of loading")


def test_descriptors_for_many_connections(model_folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with serve_process(model_folder, tmp_path) as serve:
            (allowed, _) = resource.prlimit(serve.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == min(hard, 65536)


def test_the_workers_environment_has_no_settings() -> None:
    environ = {
        "TRUEDRAFT_API_KEYS": "secret",
        "truedraft_api_key_file": "/keys",
        "PATH": "/bin",
        "HF_HOME": "x",
        "OMP_WAIT_POLICY": "passive",
    }
    kept = worker_environment(environ)
    assert kept == {
        "PATH": "/bin",
        "HF_HOME": "x",
        "OMP_WAIT_POLICY": "passive",
        PARENT_VARIABLE: str(os.getpid()),
    }


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_torchs_threads_do_not_wait_long_unless_the_environment_says_so(name: str, value: str) -> None:
    assert worker_environment({})["GOMP_SPINCOUNT"] == "1000"
    assert worker_environment({name: value}) == {name: value, PARENT_VARIABLE: str(os.getpid())}


def test_keys_are_not_in_the_workers_environment(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEDRAFT_API_KEYS", "a-secret-key")
    with serve_process(model_folder, tmp_path) as serve:
        process = Path(f"/proc/{worker_pid(serve)}")
        assert b"a-secret-key" in Path(f"/proc/{serve.process.pid}/environ").read_bytes()
        assert b"a-secret-key" not in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        answer = httpx.get(f"{serve.url}/v1/models", timeout=TIMEOUT_SECONDS)
        assert answer.status_code == 401


def test_half_a_body_is_not_waited_for(start_server: StartServer) -> None:
    with start_server(body_timeout=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS) as connection:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"model"'.encode())
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "body_timeout"


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT")
def test_a_client_that_reads_nothing_is_cut_off(model_folder: Path, tmp_path: Path) -> None:
    """The answer is larger than all buffers on the way."""
    limits = ("--send-timeout", "1", "--max-prompt-characters", "3000000")
    with serve_process(model_folder, tmp_path, *limits) as serve:
        address = urlsplit(serve.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((address.hostname, address.port))
            content = json.dumps(body(prompt="x" * 2_000_000, return_token_strs=True)).encode()
            head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            ports = f":{address.port:04X} 0100007F:{connection.getsockname()[1]:04X} 01"

            def is_open() -> bool:
                return ports in Path("/proc/net/tcp").read_text()

            assert is_open()
            wait_for(lambda: not is_open(), "the connection's end")
            answer = httpx.get(f"{serve.url}/health", timeout=TIMEOUT_SECONDS)
            assert answer.status_code == 200
