"""Whatever lies in the folder of compiled kernels, a start ends well, and with kernels."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from truedraft.engine.native import library

pytestmark = pytest.mark.usefixtures("needs_compiler")

LOAD = "from truedraft.engine.native.library import load_library; print(load_library() is not None)"


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No kernels are kept or loaded yet. To compile them is to copy those that there are."""
    compiled = library.load_library()
    assert compiled is not None
    monkeypatch.setattr(
        library, "compile_library", lambda *arguments: shutil.copy(compiled._name, arguments[-1])
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.fixture
def folder(no_folder: None) -> Path:
    """The folder has kernels, but none are loaded."""
    assert library.load_library() is not None
    library.load_library.cache_clear()
    return library.cache_folder()


def kernels(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def starts(folder: Path) -> bool:
    """Tells whether another process loads them; one that dies of it says nothing."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder.parent)}
    result = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True)
    return result.stdout == "True\n"


def zeros_behind(content: bytes) -> bytes:
    return content[:4096] + bytes(len(content) - 4096)


def one_bit_flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "garbage": lambda content: b"not a library\n" * 100,
    "cut in half": lambda content: content[: len(content) // 2],
    "cut off by a byte": lambda content: content[:-1],
    "zeros behind its header": zeros_behind,
    "a bit flipped": one_bit_flipped,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_kernels_are_made_anew(
    damage: Callable[[bytes], bytes], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = kernels(folder)
    content = made.read_bytes()
    # Replaced, not overwritten: this process has the old one mapped.
    made.unlink()
    made.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING):
        assert library.load_library() is not None
    assert "is damaged and compiled anew" in caplog.text
    made = kernels(folder)
    assert made.name == library._name(library._key(library.find_compiler()), made)


def test_without_the_checksum_a_start_would_die(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what the tests above are about, in a process of its own."""
    made = kernels(folder)
    content = made.read_bytes()
    made.unlink()
    for damage in (zeros_behind, DAMAGES["cut in half"]):
        made.write_bytes(damage(content))
        program = f"import ctypes; ctypes.CDLL({str(made)!r})"
        assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode != 0


def test_kernels_that_are_whole_are_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compile_library", lambda *_: pytest.fail("compiled again"))
    loaded = library.load_library()
    assert loaded is not None
    assert loaded._name == str(kernels(folder))
    assert starts(folder)


@pytest.mark.usefixtures("no_folder")
def test_the_content_is_on_the_disk_before_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(library, "_write_through", lambda path: order.append(path.name))
    monkeypatch.setattr(Path, "replace", lambda path, to: order.append("renamed") or replace(path, to))
    assert library.load_library() is not None
    assert order == ["kernels.so", "renamed", "truedraft"]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(
    mode: int, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernels(folder)
    folder.chmod(mode)
    loaded_from: list[str] = []
    load = ctypes.CDLL
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: loaded_from.append(name) or load(name))
    with caplog.at_level(logging.WARNING):
        assert library.load_library() is not None
    assert "others can write to it (chmod go-w)" in caplog.text
    assert str(folder) in caplog.text
    assert [Path(name).parent == folder for name in loaded_from] == [False]
    assert kernels(folder) == made


def test_a_folder_of_another_user_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me == 0:
        os.chown(folder, 12345, -1)
    with caplog.at_level(logging.WARNING):
        assert library.load_library() is not None
    owner = 12345 if me == 0 else me
    assert f"it belongs to the user with the number {owner}" in caplog.text


@pytest.mark.usefixtures("no_folder")
def test_a_new_folder_is_ours_alone() -> None:
    before = os.umask(0o002)
    try:
        assert library.load_library() is not None
    finally:
        os.umask(before)
    assert library.cache_folder().stat().st_mode & 0o777 == 0o700
