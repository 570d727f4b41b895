"""Runs ``truedraft serve`` as a process of its own, around the fake worker."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.orders import WorkerOrders
from tests.server.running import MODEL, TIMEOUT_SECONDS, wait_for

ROOT = Path(__file__).parents[2]

# The command as installed, but for its worker, and for the limits of its end: a machine that stands still
# does not reach them, and a test that waits for what they would end fails.
SERVE = """
import json
import sys
from functools import partial
from truedraft.server.cli import main as cli
from truedraft.server.cli import draining, launch
from truedraft.server.workers import worker_process
from truedraft.server.workers.worker_client import WorkerClient
draining.END_SECONDS = worker_process.STOP_SECONDS = 1000.0
command = (sys.executable, "-m", "tests.fake_worker", *json.loads(sys.argv[1]))
launch.WorkerClient = partial(WorkerClient, worker_command=command)
sys.exit(cli.main(["serve", *sys.argv[2:]]))
"""


@dataclass
class ServeProcess:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    worker: WorkerOrders

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(TIMEOUT_SECONDS)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x"} | fields


def _hear_signals() -> None:
    """A shell's background jobs ignore Ctrl-C, those of ``nohup`` SIGHUP, and so would their children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def serve_process(
    model_folder: Path,
    log_folder: Path,
    *settings: str,
    wait: bool = True,
) -> Iterator[ServeProcess]:
    """``wait`` until the worker is ready, or order it not to be and wait until it is loading."""
    log, orders = log_folder / "serve.log", WorkerOrders(log_folder / "orders")
    if not wait:
        orders.die()
    until = "Ready on cpu in float32" if wait else "Loading the models"
    worker = ("--tokens-per-step", "1", "--orders", str(orders.path))
    arguments = ["--target", str(model_folder), "--port", "0", *settings]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(worker), *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_hear_signals,
        )
    try:
        wait_for(lambda: until in log.read_text() or process.poll() is not None, f"{until!r} in {log}")
        assert until in log.read_text(), log.read_text()
        url = re.search(r"url +(\S+)/v1", log.read_text())
        assert url is not None
        yield ServeProcess(url[1], process, log, orders)
    finally:
        process.kill()
        process.wait()
