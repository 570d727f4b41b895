"""Fixtures of the server's tests: a tiny tokenizer, and a real server around the fake worker."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.server.browser import Browser, open_browser
from tests.server.running import RunningServer, run_server
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.text.tokenizer import Tokenizer, load_tokenizer

StartServer = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TRUEDRAFT_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_logging_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``truedraft serve`` sets up writes to the stderr of now. A test's is closed at its end, while the
    set-up would stay, and every later line would be an error."""
    monkeypatch.setattr("truedraft.server.cli.main.configure_logging", lambda level, style: None)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / "tiny-model")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()  # the fake worker reads neither
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    loaded = load_tokenizer(str(model_folder))
    loaded.fill_ids = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3}  # control characters
    return loaded


@pytest.fixture
def start_server(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> StartServer:
    """Start a server of one's own: ``with start_server("--once", port=...) as server``."""
    return partial(run_server, model_folder, tokenizer, tmp_path)


@pytest.fixture(scope="session")
def vector_server(
    model_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server whose model makes vectors, which all tests share."""
    log = tmp_path_factory.mktemp("vectors")
    with run_server(model_folder, tokenizer, log, "--task", "embed") as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_server(
    model_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with run_server(model_folder, tokenizer, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """A server that all tests share which only ask for completions, done with earlier ones."""
    shared_server.wait_until_idle()
    return shared_server
