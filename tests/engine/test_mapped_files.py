"""A file of weights that is written over while a worker reads it ends the worker; a renamed one does not."""

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.test_gguf import CONFIGS
from tests.engine.test_worker import spawned
from tests.gguf_models import save_gguf
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import WEIGHTS_CHANGED, Failed, Ready
from truedraft.engine.process import mapped_files
from truedraft.engine.process.heartbeat import CHANGED_EXIT_CODE
from truedraft.engine.process.mapped_files import MappedFiles

pytestmark = pytest.mark.skipif(not mapped_files.MAPS.exists(), reason="nothing tells what is mapped")


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def written_over(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.write(b"new")


def appended_to(path: Path) -> None:
    with path.open("ab") as opened:
        opened.write(b"more")


def copied_over(path: Path) -> None:
    """This is what ``cp`` does: the file is cut off and written again."""
    other = path.with_suffix(".other")
    other.write_bytes(b"y" * path.stat().st_size)
    shutil.copyfile(other, path)


def cut_off(path: Path) -> None:
    os.truncate(path, 10)


def renamed_over(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(b"y" * 10_000)
    other.replace(path)


def removed(path: Path) -> None:
    path.unlink()


def linked(path: Path) -> None:
    path.with_suffix(".link").hardlink_to(path)
    path.chmod(0o600)


@pytest.mark.parametrize("change", [written_over, appended_to, copied_over, cut_off])
@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "blobs/0123abcd"])
def test_what_is_written_is_noticed(tmp_path: Path, change: Callable[[Path], None], name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * 10_000)
    os.utime(path, (1, 1))
    with mapped(path):
        files = MappedFiles()
        files.watch()
        assert files.fault() == ""
        change(path)
        fault = files.fault()
    assert str(path) in fault
    assert ("cut off" if change is cut_off else "written over") in fault
    assert "renaming" in fault


@pytest.mark.parametrize("change", [renamed_over, removed, linked])
def test_what_keeps_the_mapped_file_is_no_fault(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x" * 10_000)
    with mapped(path) as data:
        files = MappedFiles()
        files.watch()
        change(path)
        assert files.fault() == ""
        assert data[:3] == b"xxx"


def test_only_weights_that_are_mapped_are_watched(tmp_path: Path) -> None:
    other, unmapped = tmp_path / "notes.txt", tmp_path / "m.gguf"
    for path in (other, unmapped):
        path.write_bytes(b"x" * 10_000)
    with mapped(other):
        files = MappedFiles()
        files.watch()
        written_over(other)
        written_over(unmapped)
        assert files.fault() == ""


def test_a_worker_ends_when_its_file_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, CONFIGS["llama"])
    with spawned(EngineConfig(target=str(path), num_threads=1)) as worker:
        ready = worker.receive()
        assert isinstance(ready, Ready)
        data = path.read_bytes()
        path.write_bytes(data[:-4000] + bytes(4000))
        failed = worker.receive()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code) == ("", WEIGHTS_CHANGED)
        assert f"{path} was written over while it was served" in failed.message
        assert worker.process.wait() == CHANGED_EXIT_CODE
    with spawned(EngineConfig(target=str(path), num_threads=1)) as worker:
        anew = worker.receive()
        assert isinstance(anew, Ready)
        assert anew.fingerprint != ready.fingerprint
