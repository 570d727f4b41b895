"""The few questions that show that a freshly installed server works; for check_docker and check_wheel."""

import json
import subprocess
import time
import urllib.error
import urllib.request

READY_SECONDS = 180


def ask(url: str, body: dict[str, object] | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def try_server(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server is ready, then ask for its health and a completion; exits if it fails."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            ask(f"{url}/ready")
            break
        except OSError:
            time.sleep(0.5)
    else:
        raise SystemExit("FAILED: the server did not become ready")
    print("health:", ask(f"{url}/health"))
    body = {"model": "truedraft-demo", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    text = json.loads(ask(f"{url}/v1/completions", body))["choices"][0]["text"]
    print("completion:", text)
    if not text:
        raise SystemExit("FAILED: the completion is empty")
