"""Texts that are kept in files: found again after a restart, bit for bit, whatever becomes of the files."""

import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.engine.conftest import Models
from tests.engine.head_runs import save_small_hybrid
from tests.families import FAMILIES, SHAPE, save_random
from tests.hybrids import HYBRIDS
from tests.models import make_engine, run_engine, save_perturbed, stepped
from truedraft.engine.core import restoring
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory import cache_files, prefix_files
from truedraft.engine.memory.cache_files import Background, CacheFiles
from truedraft.engine.memory.prefix_files import PrefixFolder
from truedraft.engine.messages import Generate, PrefixFileStats, SamplingParams
from truedraft.engine.models import kept_prefixes

VOCAB_SIZE = 16


def text(number: int, length: int) -> list[int]:
    return [(5 * i * i + i + 7 * number) % VOCAB_SIZE for i in range(length)]


# Conversations begin alike, go on from one another, and are as long as whole blocks, or not.
PROMPTS = [
    *(text(1, length) for length in (64, 97, 130)),
    [*text(1, 64), *text(2, 33)],
    text(3, 81),
    text(4, 5),
]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 0.9, 1.2, 0.0, 0.8, 1.0))
]
ARRIVALS = [0, 3, 9, 14, 20, 22]


@dataclass
class Kind:
    """Is a pair of some kind of model, and what a server that is never stopped says."""

    target: str
    draft: str | None
    config: dict[str, Any] = field(default_factory=dict)
    expected: list[list[int]] = field(default_factory=list)

    def engine(self, folder: Path | None, **config: Any) -> EngineCore:
        made = {**self.config, "prefix_cache_dir": folder, **config}
        return make_engine(self.target, self.draft, **made)


FAMILY_OF = {"windows": "Gemma 3 in C", "latent": "DeepSeek-V3 in C"}
HYBRID_OF = {"Gated DeltaNet": "Qwen3.5, two value heads for each key head", "Mamba 2": "Granite 4 H"}
IN_INT8 = ", caches in int8"
KINDS = ("dense", *FAMILY_OF, *HYBRID_OF, "MTP head")
KINDS += tuple(f"{name}{IN_INT8}" for name in ("dense", "latent", "Gated DeltaNet", "MTP head"))


@pytest.fixture(scope="module")
def kinds(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """Returns a kind by its name, made once."""
    made: dict[str, Kind] = {}

    def get(whole_name: str) -> Kind:
        if whole_name not in made:
            name = whole_name.removesuffix(IN_INT8)
            folder = tmp_path_factory.mktemp("kind")
            if name == "dense":
                kind = Kind(models.target, models.close_draft)
            elif name == "MTP head":
                kind = Kind(save_small_hybrid(folder / "target"), "mtp", {"method": "mtp"})
            else:
                model_type, config = (
                    FAMILIES[FAMILY_OF[name]] if name in FAMILY_OF else HYBRIDS[HYBRID_OF[name]]
                )
                target = save_random(folder / "target", model_type, SHAPE | config)
                kind = Kind(target, save_perturbed(folder / "draft", target, 2, 0.02))
            kind.config.setdefault("max_num_batched_tokens", 40)
            if whole_name != name:
                kind.config["cache_dtype"] = "int8"
            kind.expected = run_engine(kind.engine(None), PROMPTS, PARAMS, ARRIVALS)
            made[whole_name] = kind
        return made[whole_name]

    return get


def written(core: EngineCore) -> PrefixFileStats:
    """Waits until what waits for the writer is written."""
    files, done = core.scheduler.target_pool.files, threading.Event()
    assert files is not None
    assert files._writer.submit(done.set)
    assert done.wait(60)
    found = core.snapshot().prefix_files
    assert found is not None
    return found


def forgotten(core: EngineCore) -> None:
    """Takes what is published from the caches, and leaves it in files."""
    written(core)
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        pool.forget_all()


def killed(core: EngineCore, num_steps: int) -> None:
    """Runs ``num_steps`` steps, and writes nothing any more."""
    pending = list(range(len(PROMPTS)))
    for step in range(num_steps):
        while pending and ARRIVALS[pending[0]] <= step:
            number = pending.pop(0)
            core.add(Generate(str(number), PROMPTS[number], PARAMS[number]))
        stepped(core)
    files = core.scheduler.target_pool.files
    assert files is not None
    files.folder.is_writing = False


@pytest.mark.parametrize("name", KINDS)
def test_a_restart_at_any_moment_changes_no_text(
    kinds: Callable[[str], Kind], tmp_path: Path, name: str
) -> None:
    kind, numbers = kinds(name), random.Random(name)
    num_hits = 0
    for number in range(3):
        folder = tmp_path / str(number)
        killed(kind.engine(folder), numbers.randrange(10, 60))
        core = kind.engine(folder)
        assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected
        num_hits += written(core).num_hits
    core = kind.engine(folder)
    assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected
    assert written(core).num_hits > 200 < num_hits
    assert written(core).num_damaged == 0


def test_a_draft_that_is_the_target_agrees_after_a_restart(models: Models, tmp_path: Path) -> None:
    """Its cache comes from files, too, or is computed; if it held something else, it would guess worse."""
    for _ in range(2):
        core = make_engine(models.target, models.target, method="draft_model", prefix_cache_dir=tmp_path)
        run_engine(core, PROMPTS, PARAMS, ARRIVALS)
        assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens > 0
        restored = written(core)
    assert restored.num_hits > 200


@pytest.mark.parametrize("name", ["dense", "MTP head", "Mamba 2"])
def test_what_the_cache_has_no_room_for_is_in_files(
    kinds: Callable[[str], Kind], tmp_path: Path, name: str
) -> None:
    kind = kinds(name)
    core = kind.engine(tmp_path)
    for _ in range(2):
        assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected
        forgotten(core)
    assert written(core).num_hits > 200


# What may become of files.


def cut(path: Path, numbers: random.Random) -> None:
    os.truncate(path, numbers.randrange(max(1, path.stat().st_size)))


def flip(path: Path, numbers: random.Random) -> None:
    data = bytearray(path.read_bytes() or b" ")
    place = numbers.randrange(len(data))
    data[place] ^= numbers.choice((1 << numbers.randrange(8), 255))
    path.write_bytes(data)


def replace(path: Path, numbers: random.Random) -> None:
    """Puts another file in its place, whole and with a right checksum."""
    size = path.stat().st_size
    others = [other for other in path.parent.iterdir() if other != path and other.stat().st_size == size]
    if others:
        shutil.copy(numbers.choice(others), path)


def lengthen(path: Path, numbers: random.Random) -> None:
    path.write_bytes(path.read_bytes() + numbers.randbytes(16))


def empty(path: Path, numbers: random.Random) -> None:
    path.write_bytes(b"")


DAMAGES = [cut, flip, cut, flip, cut, flip, replace, lengthen, empty]


def damage(
    core: EngineCore,
    kind: Kind,
    numbers: random.Random,
    times: int,
    damages: Sequence[Callable[[Path, random.Random], None]] = DAMAGES,
    most: int = 3,
) -> None:
    """Damages files again and again; every answer must be right."""
    run_engine(core, PROMPTS, PARAMS, ARRIVALS)
    files = core.scheduler.target_pool.files
    assert files is not None
    for number in range(times):
        forgotten(core)
        found = sorted(files.folder.folder.iterdir())
        for path in numbers.sample(found, min(len(found), numbers.choice((1, 1, most)))):
            damages[number % len(damages)](path, numbers)
        assert run_engine(core, PROMPTS[:4], PARAMS[:4]) == kind.expected[:4]


@pytest.mark.parametrize(("name", "times"), [("dense", 100), ("MTP head", 60), ("Mamba 2", 40)])
def test_damaged_files_are_never_served(
    kinds: Callable[[str], Kind], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, times: int
) -> None:
    kind = kinds(name)
    core = kind.engine(tmp_path)
    damage(core, kind, random.Random(1), times)
    stats = written(core)
    assert stats.num_damaged > times // 4
    assert stats.num_hits > 50 * times
    assert sum("damaged" in line for line in caplog.text.splitlines()) == stats.num_damaged
    assert stats.is_writing


def test_what_cannot_be_read_is_computed(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    expected = run_engine(core, PROMPTS[:1], PARAMS[0])
    files = core.scheduler.target_pool.files
    assert files is not None
    written(core)
    for path in files.folder.folder.iterdir():
        path.unlink()
        path.mkdir()
    for _ in range(3):
        forgotten(core)
        assert run_engine(core, PROMPTS[:1], PARAMS[0]) == expected
    assert written(core).num_failures == 3
    assert caplog.text.count("cannot be read") == 1


def test_quota_is_kept_by_age(models: Models, tmp_path: Path) -> None:
    """The oldest texts give way, the ends of a text before its beginning; what is used again is young."""
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path, prefix_cache_disk=64 * 4096)
    params = SamplingParams(max_tokens=1, temperature=0)
    hot = text(1, 41)  # ten blocks
    for number in range(2, 12):
        run_engine(core, [hot], params)
        run_engine(core, [text(number, 61)], params)  # fifteen
        assert written(core).num_bytes <= 64 * 4096
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 64 * 4096
    forgotten(core)
    before = written(core).num_hits
    run_engine(core, [hot], params)
    assert written(core).num_hits - before == 40
    forgotten(core)
    run_engine(core, [text(2, 61)], params)
    assert written(core).num_hits - before == 40


def test_what_is_not_ours_stays(models: Models, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path, prefix_cache_disk=40 * 4096)
    files = core.scheduler.target_pool.files
    assert files is not None
    theirs = [tmp_path / "notes.txt", files.folder.folder / "notes.txt", tmp_path / "truedraft-x" / "a.txt"]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    for number in range(6):
        run_engine(core, [text(number, 61)], params)
    written(core)
    core.forget_prefixes()
    written(core)
    assert [path.exists() for path in theirs] == [True, False, True]
    assert len([*tmp_path.rglob("notes.txt")]) == 2  # a folder that was cleared keeps it


def test_rights(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    run_engine(core, [PROMPTS[0]], PARAMS[0])
    written(core)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (own,) = folder.iterdir()
    own.chmod(0o777)
    with pytest.raises(ModelLoadError, match="may be written to by others"):
        make_engine(models.target, None, prefix_cache_dir=folder)


def test_a_folder_that_cannot_be(models: Models, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="prefix_cache_dir .* cannot be used"):
        make_engine(models.target, None, prefix_cache_dir=tmp_path / "file")
    with pytest.raises(ValueError, match="prefix_cache_dir keeps what prefix_caching reuses"):
        make_engine(models.target, None, prefix_cache_dir=tmp_path, prefix_caching=False)


def test_a_full_disk_ends_writing(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    expected = run_engine(core, [PROMPTS[0]], PARAMS[0])
    written(core)
    honest = os.open

    def full(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(28, "No space left on device")
        return honest(path, flags, *more)

    monkeypatch.setattr(os, "open", full)
    run_engine(core, PROMPTS[3:], PARAMS[3:])
    stats = written(core)
    assert (stats.is_writing, stats.num_failures) == (False, 1)
    assert caplog.text.count("No space left") == 1
    forgotten(core)
    assert run_engine(core, [PROMPTS[0]], PARAMS[0]) == expected
    assert written(core).num_hits == 60
    assert not [*tmp_path.rglob("*.new")]


def test_two_servers_share_a_folder(kinds: Callable[[str], Kind], tmp_path: Path) -> None:
    """They write, remove and clear at the same time; neither says anything else than alone."""
    kind = kinds("dense")
    cores = [kind.engine(tmp_path, prefix_cache_disk=100 * 4096) for _ in range(2)]
    for number in range(12):
        for core in cores:
            forgotten(core)
            assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected
        if number % 5 == 4:
            cores[number % 2].forget_prefixes()
    assert all(written(core).num_hits for core in cores)
    assert all(written(core).is_writing for core in cores)


def held(hold: threading.Event) -> Callable[[], None]:
    """Makes work that lasts until ``hold`` is set."""

    def wait() -> None:
        hold.wait(60)

    return wait


def cached(core: EngineCore, prompt: list[int], **options: Any) -> int:
    core.add(Generate("r", prompt, SamplingParams(max_tokens=1, temperature=0), **options))
    return int(next(output.num_cached_tokens for output in list(iter_outputs(core))))


def iter_outputs(core: EngineCore) -> Iterator[Any]:
    while core.has_work:
        yield from stepped(core)


def salts_stay_apart(core: EngineCore) -> None:
    prompt = text(9, 50)
    assert cached(core, prompt, cache_salt="one") == 0
    forgotten(core)
    assert cached(core, prompt, cache_salt="another") == 0
    forgotten(core)
    assert cached(core, prompt, cache_salt="one") == 48
    assert cached(core, prompt) == 0
    forgotten(core)
    assert cached(core, prompt, cache_prompt=False) == 0
    assert cached(core, prompt) == 48


def test_keys_have_their_texts_apart(models: Models, tmp_path: Path) -> None:
    salts_stay_apart(make_engine(models.target, None, prefix_cache_dir=tmp_path))


def test_to_clear_forgets_memory_and_files(kinds: Callable[[str], Kind], tmp_path: Path) -> None:
    for name in ("dense", "MTP head"):
        kind = kinds(name)
        core = kind.engine(tmp_path / name)
        assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected
        core.forget_prefixes()
        written(core)
        assert not [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert cached(core, PROMPTS[2]) == 0
        core.add(Generate("0", PROMPTS[0], PARAMS[0]))
        said = [token for _ in range(4) for output in stepped(core) for token in output.token_ids]
        core.forget_prefixes()  # in the midst of a text
        said += [token for output in iter_outputs(core) for token in output.token_ids]
        assert said == kind.expected[0]
        assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected


class Told:
    """Hears what gateways would hear of a pool."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, list[int]] = {}

    def stored(self, chain: Sequence[bytes], token_ids: Sequence[int]) -> None:
        assert len(chain) == 1 or chain[0] in self.tokens
        self.tokens[chain[-1]] = [*token_ids]

    def removed(self, block_hash: bytes) -> None:
        self.tokens.pop(block_hash, None)


def test_gateways_hear_of_restored_blocks(models: Models, tmp_path: Path) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    told = core.scheduler.target_pool.events = Told()  # type: ignore[assignment]
    run_engine(core, PROMPTS[1:2], PARAMS[1])
    before = dict(told.tokens)
    forgotten(core)
    assert not told.tokens
    run_engine(core, PROMPTS[1:2], PARAMS[1])
    assert written(core).num_hits == 96
    assert told.tokens == before


def test_running_texts_go_on_while_another_waits_for_files(models: Models, tmp_path: Path) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path, num_speculative_tokens=0)
    waiting = [text(5, 201)]
    expected = run_engine(core, waiting, PARAMS[1])
    forgotten(core)
    files, hold = core.scheduler.target_pool.files, threading.Event()
    reader = core.scheduler.restoring
    assert files is not None
    assert reader is not None
    reader._reader.submit(held(hold))
    core.add(Generate("runs", text(6, 9), structs.replace(PARAMS[0], max_tokens=12)))
    core.add(Generate("waits", waiting[0], PARAMS[1]))
    seen = [output.request_id for _ in range(12) for output in stepped(core)]
    assert seen == ["runs"] * 12
    hold.set()
    assert [token for output in iter_outputs(core) for token in output.token_ids] == expected[0]
    assert written(core).num_hits == 200


def test_a_disk_that_hangs_is_not_waited_for(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "TIMEOUT_SECONDS", 0.2)
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    expected = run_engine(core, [PROMPTS[1]], PARAMS[1])
    forgotten(core)
    hold = threading.Event()
    assert core.scheduler.restoring is not None
    core.scheduler.restoring._reader.submit(held(hold))
    assert run_engine(core, [PROMPTS[1]], PARAMS[1]) == expected
    assert written(core).num_hits == 0
    hold.set()


def test_a_request_may_leave_while_it_waits(models: Models, tmp_path: Path) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    expected = run_engine(core, [PROMPTS[1]], PARAMS[1])
    for _ in range(3):
        forgotten(core)
        core.add(Generate("leaves", PROMPTS[1], PARAMS[1], n=3))
        stepped(core)
        core.abort("leaves", 0)
        stepped(core)
        core.abort("leaves")
        assert not core.has_work
        assert run_engine(core, [PROMPTS[1]], PARAMS[1]) == expected
    core.add(Generate("is lost", PROMPTS[1], PARAMS[1]))
    core.reset()
    assert run_engine(core, [PROMPTS[1]], PARAMS[1]) == expected


# Planted bugs, each of which some check above must see.


def reused_while_written(models: Models, folder: Path) -> None:
    """The cache is used for other texts before the writer comes to it; no file may have what it holds by
    then."""
    expected = run_engine(make_engine(models.target, None), PROMPTS, PARAMS)
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    files, hold = core.scheduler.target_pool.files, threading.Event()
    assert files is not None
    core.scheduler.target_pool.__init__(60, 4)  # type: ignore[misc]
    core.scheduler.target_pool.keep_in(files)
    files._writer.submit(held(hold))
    for number in (0, 4, 3, 2, 4, 2):
        run_engine(core, [PROMPTS[number]], PARAMS[number])
    hold.set()
    written(core)
    assert run_engine(make_engine(models.target, None, prefix_cache_dir=folder), PROMPTS, PARAMS) == expected


def test_what_is_used_again_is_not_written(models: Models, tmp_path: Path) -> None:
    reused_while_written(models, tmp_path)


def other_weights(models: Models, folder: Path) -> None:
    """The draft is the target with a little noise; each must go on with its own texts."""
    for model in (models.target, models.close_draft, models.target):
        expected = run_engine(make_engine(model, None), PROMPTS, PARAMS)
        core = make_engine(model, None, prefix_cache_dir=folder)
        assert run_engine(core, PROMPTS, PARAMS) == expected
        written(core)


def test_models_have_their_texts_apart(models: Models, tmp_path: Path) -> None:
    other_weights(models, tmp_path)


def plant(patch: pytest.MonkeyPatch, bug: str) -> None:
    honest_end, honest_chain = restoring.Restoring._end, BlockPool.hash_chain
    if bug == "another model's":
        patch.setattr(kept_prefixes, "_identity", lambda config, cached: "all alike")
    elif bug == "another chain's":
        patch.setattr(CacheFiles, "_named", lambda self, kind, block_hash: ("0" * 32, bytes(48)))
    elif bug == "a block too long":

        def end(self: restoring.Restoring, load: restoring.Load) -> None:
            for part in load.parts:
                length = sum(map(part.pool.has, part.hashes))
                if 0 < length < len(part.hashes):
                    data = part.files.read_block(part.hashes[length - 1])
                    assert data is not None
                    part.pool.restore(part.hashes[length - 1 : length + 1], [], "", data)
            honest_end(self, load)

        patch.setattr(restoring.Restoring, "_end", end)
    elif bug == "another key's":
        patch.setattr(
            BlockPool, "hash_chain", lambda self, ids, salt, known=(): honest_chain(self, ids, "", known)
        )
    elif bug == "no checksum":
        patch.setattr(prefix_files, "_checksum", lambda head, parts: bytes(16))
    elif bug == "used again":
        patch.setattr(CacheFiles, "_is_unchanged", staticmethod(lambda uses, place, use: True))
    elif bug == "no key in files":
        honest_header = prefix_files._header
        patch.setattr(
            prefix_files, "_header", lambda number, size, key: honest_header(number, size, bytes(48))
        )
    else:
        raise ValueError(bug)


@pytest.mark.parametrize(
    "bug",
    ["another model's", "another chain's", "a block too long", "another key's", "no checksum", "used again"]
    + ["no key in files"],
)
def test_planted_bugs_are_seen(
    models: Models, kinds: Callable[[str], Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    dense = kinds("dense")

    def longer_and_longer() -> None:
        core = dense.engine(tmp_path)
        for number in range(3):
            assert run_engine(core, [PROMPTS[number]], PARAMS[number]) == [dense.expected[number]]
            forgotten(core)

    checks: dict[str, Callable[[], None]] = {
        "another model's": lambda: other_weights(models, tmp_path),
        "another key's": lambda: salts_stay_apart(dense.engine(tmp_path)),
        "used again": lambda: reused_while_written(models, tmp_path),
        "another chain's": longer_and_longer,
        "no key in files": lambda: damage(
            dense.engine(tmp_path), dense, random.Random(1), 20, [replace], 999
        ),
        "a block too long": longer_and_longer,
        "no checksum": lambda: damage(dense.engine(tmp_path), dense, random.Random(1), 20, [flip], 999),
    }
    plant(monkeypatch, bug)
    with pytest.raises(AssertionError):
        checks[bug]()


def test_identity_has_what_bytes_depend_on(models: Models, tmp_path: Path) -> None:
    """Each change alone finds no file of another."""
    base: dict[str, Any] = {"prefix_cache_dir": tmp_path}
    changed: list[dict[str, Any]] = [{"block_size": 8}, {"dtype": "bfloat16"}, {"cache_dtype": "float16"}]
    changed += [{"native_kernels": False}, {"quantize": "int8"}, {"cache_dtype": "int8"}]
    for config in (*changed, {}):
        try:
            core = make_engine(models.target, None, **base, **config)
        except ModelLoadError:
            continue
        run_engine(core, [PROMPTS[0]], PARAMS[0])
        assert written(core).num_hits == 0, config
    core = make_engine(models.target, None, **base)
    run_engine(core, [PROMPTS[0]], PARAMS[0])
    assert written(core).num_hits > 0


def test_folder_names_an_older_layout_apart(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_engine(core := make_engine(models.target, None, prefix_cache_dir=tmp_path), [PROMPTS[0]], PARAMS[0])
    written(core)
    for module in (prefix_files, kept_prefixes):
        monkeypatch.setattr(module, "VERSION", prefix_files.VERSION + 1)
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    run_engine(core, [PROMPTS[0]], PARAMS[0])
    assert (written(core).num_hits, len([*tmp_path.iterdir()])) == (0, 2)


def test_files_read_back_what_was_written(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, bytes(32), 1 << 20)
    folder.write("a" * 32, bytes(48), 7, [memoryview(b"one"), memoryview(b"two")], lambda: True)
    found = folder.read("a" * 32, bytes(48), 6)
    assert found is not None
    assert (found[0], bytes(found[1])) == (7, b"onetwo")
    assert folder.read("b" * 32, bytes(48), 6) is None
    assert folder.counts["damaged"] == 0
    assert folder.read("a" * 32, b"x" * 48, 6) is None
    assert folder.counts["damaged"] == 1
    assert not folder.has("a" * 32)


WRITING = """
import sys
from pathlib import Path
from truedraft.engine.memory.prefix_files import PrefixFolder
folder = PrefixFolder(Path(sys.argv[1]), bytes(32), 1 << 30)
for number in range(10000):
    data = number.to_bytes(4, "little") * 30000
    folder.write(f"{number % 50:032x}", bytes(48), number, [memoryview(data)], lambda: True)
    print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    numbers, num_read = random.Random(5), 0
    for _ in range(8):
        command = [sys.executable, "-c", WRITING, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(numbers.randrange(1, 120)):
                process.stdout.readline()
            process.kill()
        folder = PrefixFolder(tmp_path, bytes(32), 1 << 30)
        for name in {path.name for path in folder.folder.iterdir() if path.suffix != ".new"}:
            found = folder.read(name, bytes(48), 120_000)
            assert found is not None
            assert bytes(found[1]) == found[0].to_bytes(4, "little") * 30000
            num_read += 1
        assert folder.counts["damaged"] == 0
    assert num_read > 100


def test_the_scheduler_shares_no_more_than_it_computes(models: Models, tmp_path: Path) -> None:
    """Log-probabilities of a prompt need passes over it, whatever files have."""
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    run_engine(core, [PROMPTS[1]], PARAMS[1])
    forgotten(core)
    core.add(Generate("r", PROMPTS[1], structs.replace(PARAMS[1], prompt_logprobs=0)))
    assert max(len(output.prompt_logprobs or []) for output in iter_outputs(core)) == len(PROMPTS[1])


def test_a_piece_that_no_quota_holds_removes_nothing(tmp_path: Path) -> None:
    def write(folder: PrefixFolder, name: str, size: int) -> None:
        folder.write(name, bytes(48), 1, [memoryview(bytes(size))], lambda: True)

    folder = PrefixFolder(tmp_path, bytes(32), 1 << 20)
    write(folder, "0" * 32, 1000)
    write(folder, "1" * 32, 2 << 20)
    assert (folder.has("0" * 32), folder.has("1" * 32)) == (True, False)
    assert folder.counts["dropped"] == 1


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Others may put links into a folder that is shared."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ("f" * 32)).write_bytes(b"mine")
    root = tmp_path / "root"
    folder = PrefixFolder(root, bytes(32), 1 << 20)
    (root / "truedraft-x.gone-y").symlink_to(elsewhere)
    folder.tidy()
    assert (elsewhere / ("f" * 32)).exists()


def test_a_folder_that_may_not_be_looked_into_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PrefixFolder(tmp_path, bytes(32), 1 << 20)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    assert not folder.has("0" * 32)


def test_what_cannot_be_cleared_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrefixFolder(tmp_path, bytes(32), 1 << 20)
    folder.write("a" * 32, bytes(48), 7, [memoryview(b"one")], lambda: True)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    folder.clear()
    assert not folder.has("a" * 32)
    assert folder.read("a" * 32, bytes(48), 3) is None


def test_a_thread_keeps_nothing_of_what_it_has_done() -> None:
    class Work:
        def __call__(self) -> None:
            done.set()

    done, thread = threading.Event(), Background("test")
    work = Work()
    seen = weakref.ref(work)
    thread.submit(work)
    del work
    assert done.wait(60)
    until = time.monotonic() + 60
    while seen() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert seen() is None
    failed = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_files.logger, "exception", lambda *_: failed.set())
        thread.submit(lambda: thread.close(60))
        thread._thread.join(60)
    assert not thread._thread.is_alive()
    assert not failed.is_set()
