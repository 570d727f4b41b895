"""Runs a benchmark's ``main`` as the command line would, in this process, and reads what it saved."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_file

Benchmark = Callable[..., dict[str, Any]]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Benchmark:
    """``benchmark("offline", "--repeats", 1)`` is ``python -m benchmarks.offline --repeats 1 --save ...``."""

    def run(module: str, *arguments: object) -> dict[str, Any]:
        saved = tmp_path / f"{module}.json"
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments), "--save", str(saved)])
        importlib.import_module(f"benchmarks.{module}").main()
        assert saved.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        document: dict[str, Any] = json.loads(saved.read_text())
        return document

    return run


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Puts an empty folder in place of benchmarks/results."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(result_file, "FOLDER", folder)
    return folder
