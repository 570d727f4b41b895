"""A headless Chromium, driven by the DevTools protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.server.running import wait_for

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


class Browser:
    """Drives one tab. ``problems`` are exceptions and refusals (such as the content security policy's)."""

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._ids = count()
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Anew, without what the page remembered in memory."""
        self.leave()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def leave(self) -> None:
        self.call("Page.navigate", url="about:blank")

    def wait(self, condition: str) -> None:
        wait_for(lambda: bool(self.run(condition)), condition)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, value: str | bool) -> None:
        """Sets a field as a person would, so that the page hears of it."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{field}.{'checked' if isinstance(value, bool) else 'value'} = {json.dumps(value)}")
        for event in ("input", "change"):
            self.run(f"{field}.dispatchEvent(new Event('{event}', {{bubbles: true}}))")

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Enter also writes, as on a real keyboard, unless the page prevents it."""
        known: dict[str, dict[str, Any]] = {
            "Enter": {"text": "\r", "windowsVirtualKeyCode": 13},
            "Escape": {"windowsVirtualKeyCode": 27},
        }
        modifiers = 8 if shift else 0
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **known.get(key, {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)

    def connect(self, *, is_there: bool) -> None:
        """Breaks the network, for requests that begin then, or mends it."""
        self.call("Network.enable")
        speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.call("Network.emulateNetworkConditions", offline=not is_there, **speed)

    def look(self, *, width: int = 1280, height: int = 860, theme: str = "light") -> None:
        """The size of the window, and the colours that its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Skips the test where there is no Chromium."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("no Chromium: on Debian, install the package chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [executable, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(folder) / "DevToolsActivePort"
            wait_for(lambda: port_file.exists() and "\n" in port_file.read_text(), "the browser")
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(target for target in json.load(answer) if target["type"] == "page")
            with connect(
                tab["webSocketDebuggerUrl"], max_size=None, proxy=None, ping_interval=None
            ) as socket:
                yield Browser(socket)
        finally:
            process.kill()
            process.wait()
