"""``truedraft top`` against the real application: the figures of ``/metrics`` and ``/speculation``."""

import io
import os
import pty
import re
import signal
import termios

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.server.conftest import StartServer
from tests.server.running import RunningServer
from truedraft.server.cli import top
from truedraft.server.cli.main import main
from truedraft.server.cli.top import Client, History, sparkline, view


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["top", "--interval", "0", *flags]) == 0
    return capsys.readouterr().out


def test_one_view_where_there_is_no_terminal(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 8})
    out = printed(capsys, "--base-url", f"{server.url}/v1")
    assert "\x1b" not in out
    assert "tiny-model: tiny-model" in out
    lines = [line for line in server.get("/metrics").text.splitlines() if "_request_errors_total{" in line]
    errors = sum(float(line.rpartition(" ")[2]) for line in lines)
    assert re.search(rf"errors +{errors:.0f} ", out)
    for state in server.get("/speculation").json()["acceptance_by_position"]:
        # The first token of a draft is number 1 for people, and position 0 in the API.
        assert re.search(rf" {state['position'] + 1} .* of {state['drafted']:,} ", out)


def test_rates_are_those_between_two_readings(server: RunningServer) -> None:
    client, history = Client(server.url, ""), History()
    history.add(client.read())
    assert history.rate("generation_tokens_total") == 0
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 40})
    history.add(client.read())
    assert history.last is not None
    assert history.before is not None
    seconds = history.last.time - history.before.time
    assert history.rate("generation_tokens_total") == pytest.approx(40 / seconds)
    assert list(history.rates) == [history.rate("generation_tokens_total")]


def test_another_prefix_and_a_key(start_server: StartServer, capsys: pytest.CaptureFixture[str]) -> None:
    with start_server(api_keys=["one"], metrics_prefix="vllm:") as server:
        body = {"prompt": "x", "max_tokens": 8}
        server.post("/v1/completions", body, headers={"authorization": "Bearer one"})
        assert "●" in printed(capsys, "--base-url", server.url, "--api-key", "one")
        assert main(["top", "--base-url", server.url, "--api-key", ""]) == 1
        assert "--api-key" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "No server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(start_server: StartServer) -> None:
    with start_server(served_model_name="a\x1b[2Jb\u202e") as server:
        history = History()
        history.add(Client(server.url, "").read())
        out = io.StringIO()
        Console(file=out, force_terminal=True, width=200).print(view(history))
        assert "\x1b[2J" not in out.getvalue()
        assert r"a\x1b[2Jb\u202e" in out.getvalue()


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "  "
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_view_fits(server: RunningServer, width: int) -> None:
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 40})
    client, history = Client(server.url, ""), History()
    for _ in range(3):
        history.add(client.read())
    history.rates.extend([1.0] * 60)
    out = Console(file=io.StringIO(), width=width, color_system=None)
    out.print(view(history, width))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    for unit in (" ms", " of "):
        assert unit in text


def test_q_ends_the_live_view_and_leaves_the_last_one(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = 0
    honest = Client.read

    def read(client: Client) -> top.Reading:
        nonlocal reads
        reads += 1
        if reads == 3:
            os.write(ours, b"xq")
        assert reads < 20
        return honest(client)

    monkeypatch.setattr(Client, "read", read)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with os.fdopen(theirs) as keys, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", keys)
        assert top._watch(Client(server.url, ""), 0.1) == 0
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
    assert reads == 3
    assert "acceptance by position" in capsys.readouterr().out


def test_ctrl_c_leaves_the_last_view_too(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = top.view

    def view_and_interrupt(history: History, width: int) -> object:
        signal.raise_signal(signal.SIGINT) if history.before else None
        return honest(history, width)

    monkeypatch.setattr(top, "view", view_and_interrupt)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert top._watch(Client(server.url, ""), 0.1) == 130
    assert "acceptance by position" in capsys.readouterr().out
