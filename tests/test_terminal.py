"""What commands print fits the terminal: nothing is cut at 60, 80 and 120 columns."""

import io
import re
from contextlib import redirect_stdout

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from truedraft.engine.terminal import console, table
from truedraft.loadtest import report
from truedraft.server.cli.main import main

WIDTHS = (60, 80, 120)
COMMANDS = ("serve", "chat", "generate", "check", "verify-trace", "bench")


class Terminal(io.StringIO):
    """A stream that is one, for rich and for those who ask for its width."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=WIDTHS)
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    made.width = request.param  # type: ignore[attr-defined]
    return made


def lines_of(terminal: Terminal) -> list[str]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "…" not in text
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits(terminal: Terminal, command: str) -> None:
    with redirect_stdout(terminal):
        assert main([command, "--help"]) == 0
    lines = lines_of(terminal)
    assert len(lines) > 8
    assert "PydanticUndefined" not in terminal.getvalue()
    # Flags with all their choices stand on lines of their own, and may be longer.
    width = terminal.width  # type: ignore[attr-defined]
    assert [line for line in lines if len(line) > width and not line.startswith("  --")] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_breaks_and_no_cell_is_cut(width: int) -> None:
    out = Console(file=io.StringIO(), width=width, color_system=None, soft_wrap=True)
    names = [f"column {number}" for number in range(12)]
    shown = table(["load", *names])
    rows = [[f"clients {row}", *(f"{row * 1234.5 + number:.2f}" for number in range(12))] for row in range(3)]
    for cells in rows:
        shown.add_row(*cells)
    out.print(shown)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(cell_len, text.splitlines())) <= width
    for word in (*names, *(cell for row in rows for cell in row)):
        assert word in text


def test_a_long_text_folds(terminal: Terminal) -> None:
    facts = table(["", ""], num_left=2)
    facts.show_header = False
    facts.add_row("sampling", Text("word " * 60))
    with redirect_stdout(terminal):
        console().print(facts)
    lines = lines_of(terminal)
    assert max(map(len, lines)) <= terminal.width  # type: ignore[attr-defined]
    assert " ".join(lines).count("word") == 60


def test_a_load_test_fits(terminal: Terminal) -> None:
    row = {
        "load": "16 clients",
        "requests": 320,
        "errors": 0,
        "tokens/s": 12345.6,
        "requests/s": 47.18,
        **{f"first_p{percent}": 1234.56 for percent in (50, 99)},
        **{f"token_p{percent}": 17.25 for percent in (50, 99)},
        "accepted": 0.66,
        "tokens/round": 2.61,
    }
    with redirect_stdout(terminal):
        report.print_table([row, row], "Load")
    lines = lines_of(terminal)
    assert max(map(len, lines)) <= terminal.width  # type: ignore[attr-defined]
    for value in row.values():
        assert report.format_cell(value) in terminal.getvalue()


def test_the_widest_table_of_a_check_fits(terminal: Terminal) -> None:
    """It has the figures of a fast machine."""
    names = ["temperature", "drafted", "accepted", "tokens/round", "tokens/s", "plain", "speed-up", "ideal"]
    rows = table([*names, "costs: draft", "score", "rest"], num_left=0)
    figures = (
        "0.7",
        "16",
        "100%",
        "12.34",
        "123456.7",
        "23456.7",
        "11.80",
        "12.31",
        "10.08",
        "11.30",
        "1.02",
    )
    rows.add_row(*figures)
    with redirect_stdout(terminal):
        console().print(rows)
    lines = lines_of(terminal)
    assert max(map(len, lines)) <= terminal.width  # type: ignore[attr-defined]
    assert all(figure in terminal.getvalue() for figure in figures)
