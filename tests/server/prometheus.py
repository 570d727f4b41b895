"""A real Prometheus that scrapes a server, and the queries of the dashboard."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import wait_for
from truedraft.server.cli.launch import bind

MONITORING = Path(__file__).parents[2] / "deploy/monitoring"
DASHBOARD = MONITORING / "grafana/dashboards/truedraft.json"


def executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: on Debian, install the package prometheus")
    return found


def dashboard_queries(interval: str) -> dict[str, str]:
    """Returns queries by panel and legend, filled in as Grafana does with scrapes every ``interval`` / 4."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$__rate_interval", interval)
        .replace("$instance", ".*")
        for panel in panels
        for target in panel.get("targets", ())
    }


@dataclass
class Prometheus:
    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.get("/api/v1/query", query=expression)["result"])

    def reload(self) -> None:
        """Reads the configuration again."""
        self.process.send_signal(signal.SIGHUP)

    def firing(self) -> set[str]:
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def run_prometheus(
    folder: Path, target: str, interval: str = "1s", window: str | None = None
) -> Iterator[Prometheus]:
    """Runs it by the shipped configuration, but for the target and the interval.

    With a ``window`` alerts look back that far, and wait a second.
    """
    prometheus = executable("prometheus")
    config = (MONITORING / "prometheus.yml").read_text()
    config = config.replace("truedraft:8000", target).replace("5s", interval)
    (folder / "prometheus.yml").write_text(config)
    alerts = (MONITORING / "alerts.yml").read_text()
    if window is not None:
        alerts = re.sub(r"for: \d+m", "for: 1s", re.sub(r"\[\d+m\]", f"[{window}]", alerts))
    (folder / "alerts.yml").write_text(alerts)
    with bind("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [
        prometheus,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        running = Prometheus(f"http://{address}", process)
        wait_for(lambda: _answers(running), "Prometheus")
        yield running
    finally:
        process.kill()
        process.wait()


def _answers(prometheus: Prometheus) -> bool:
    try:
        return bool(prometheus.query("up"))
    except OSError:
        time.sleep(0.1)
        return False
