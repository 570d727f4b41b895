"""Model folders that several engine tests share, made once per run."""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.families import save_family
from tests.models import save_perturbed, save_random_llama
from truedraft.engine.native import compiler, headers, library
from truedraft.engine.native.threads import set_num_threads
from truedraft.engine.rows import drafts
from truedraft.engine.sampling import processors
from truedraft.engine.sampling import random as random_numbers

# To compile takes a second, or minutes on a machine that is busy; the engine would go on without its kernels.
compiler.TIMEOUT_SECONDS = 3600


@dataclass(frozen=True)
class Models:
    target: str
    close_draft: str  # the target with noise on its weights: accepted often
    random_draft: str  # unrelated, smaller
    padded_draft: str  # unrelated, with a larger padded vocabulary
    lacking_draft: str  # unrelated, without the target's last tokens


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Vocabulary of 16 tokens, context 256, no end-of-sequence token."""
    root: Path = tmp_path_factory.mktemp("models")
    target = save_random_llama(root / "target", seed=1)
    return Models(
        target=target,
        close_draft=save_perturbed(root / "close", target, seed=2, noise=0.02),
        random_draft=save_random_llama(root / "random", seed=3, layers=1, hidden=16),
        lacking_draft=save_random_llama(root / "lacking", seed=5, layers=1, hidden=16, vocab_size=12),
        padded_draft=save_random_llama(root / "padded", seed=4, layers=1, hidden=16, vocab_size=24),
    )


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the folder of a family of ``tests.families``, made once."""
    root, folders = tmp_path_factory.mktemp("families"), {}

    def get(family: str) -> str:
        if family not in folders:
            folders[family] = save_family(root / str(len(folders)), family)
        return str(folders[family])

    return get


@pytest.fixture
def packs_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are packed, however small they are."""
    monkeypatch.setattr("truedraft.engine.families.linear.MIN_NATIVE_WEIGHTS", 0)
    monkeypatch.setattr("truedraft.engine.layers.linear.MIN_ONE_DNN_WEIGHTS", 0)


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps the objects of C files that tests have compiled."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture
def fresh_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, objects: Path
) -> Iterator[pytest.MonkeyPatch]:
    """No library is made or loaded yet. Of its files only those are compiled that no test has compiled so,
    and in a hurry: it is to be wrong, not fast."""
    compile_file = compiler.compile_file

    def compile_once(command: str, processor: Sequence[str], source: Path, to: Path) -> None:
        texts = [
            command,
            *processor,
            *compiler.FLAGS,
            *(path.read_text() for path in (*headers.HEADERS, source)),
        ]
        made = objects / f"{hashlib.sha256(repr(texts).encode()).hexdigest()}.o"
        if not made.exists():
            compile_file(command, processor, source, to)
            shutil.copy(to, made)
        shutil.copy(made, to)

    monkeypatch.setattr(compiler, "compile_file", compile_once)
    monkeypatch.setattr(compiler, "FLAGS", ["-O1" if flag == "-O3" else flag for flag in compiler.FLAGS])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    yield monkeypatch
    library.load_library.cache_clear()


@pytest.fixture(scope="session")
def needs_compiler() -> None:
    if library.load_library() is None:
        pytest.skip("no C compiler")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Products this small only wait for a second thread."""
    torch.set_num_threads(1)


@pytest.fixture
def one_thread_afterwards() -> Iterator[None]:
    """Restores one thread after tests that set another number, themselves or by ``num_threads``."""
    yield
    set_num_threads(1)


@pytest.fixture(autouse=True)
def no_kept_tensors() -> None:
    """No test finds tensors that an earlier one had made: where that was in inference mode, or they have been
    written to, it would be another test."""
    for kept in (processors._sampling_tensors, random_numbers._counters, drafts._no_ids):
        kept.cache_clear()


@pytest.fixture(autouse=True)
def same_numbers_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds torch for tests that draw numbers without a seed, and for requests that do."""
    torch.manual_seed(0)
    monkeypatch.setattr("secrets.randbits", random.Random(0).getrandbits)
