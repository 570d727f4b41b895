"""What commands print: a model's text cannot steer a terminal, and a pipe gets it as it is."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.engine.commands.generate import Printer
from truedraft.engine.messages import RoundOrigin, TokenOutput
from truedraft.engine.terminal import console, loading_bar, printable, stages
from truedraft.engine.text.text_stream import text_stream
from truedraft.engine.text.vocabulary import Vocabulary

HOSTILE = "<script>\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\x7f\u202eevil [bold]\n\tend 😀"
SHOWN = r"<script>\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\x7f\u202eevil [bold]" + "\n\tend 😀"


def test_printable() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("👩‍🚀 né\u200c x") == "👩‍🚀 né\u200c x"


def printer(folder: Path, out: Console) -> Printer:
    """Makes a printer for a tokenizer whose ids are bytes."""
    backend = Tokenizer.from_file(str(write_tokenizer(folder / "model") / "tokenizer.json"))
    return Printer(text_stream(backend, Vocabulary(backend), skip_special_tokens=True), out)


def output(text: str, num_accepted: int = 0) -> TokenOutput:
    token_ids = list(text.encode())
    origins = [RoundOrigin("ngram", num_accepted, num_accepted, len(token_ids))]
    return TokenOutput("r", 0, token_ids, None, num_accepted, num_accepted, origins=origins)


def test_a_terminal_gets_signs_and_colours_of_ours_only(tmp_path: Path) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system="standard", markup=False, soft_wrap=True)
    printer(tmp_path, terminal).write(output(HOSTILE, num_accepted=3))
    plain = out.getvalue().replace("\x1b[36m", "").replace("\x1b[0m", "")
    assert out.getvalue().count("\x1b[36m") == 3  # the accepted ones
    assert "\x1b" not in plain
    assert plain == SHOWN.replace("\t", "        ") or plain == SHOWN


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    out = io.StringIO()
    printer(tmp_path, Console(file=out)).write(output(HOSTILE, num_accepted=3))
    assert out.getvalue() == HOSTILE


def test_no_color(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    printer(tmp_path, Console(file=out, force_terminal=True)).write(output("abc", num_accepted=3))
    assert out.getvalue() == "abc"


def test_no_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with stages(2) as progress:
        progress.begin("one")
        progress.begin("two")
    console().print(json.dumps({"a": "[b]"}))
    captured = capsys.readouterr()
    assert captured.err.strip() == ""
    assert captured.out == '{"a": "[b]"}\n'


def test_a_bar_tells_what_loading_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with loading_bar() as begin:
            for stage in ("the target model", "the draft model", "caches and costs"):
                begin(stage)
        shown.append(stream.getvalue())
    assert "Loading caches and costs" in shown[0]
    assert shown[1].strip() == ""
