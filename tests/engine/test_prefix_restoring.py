"""Threads work while texts wait for their files: the engine asks the disk for nothing itself, and
prompts leave each other what has been read for them."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.engine.conftest import Models
from tests.engine.test_prefix_files import (
    ARRIVALS,
    HYBRID_OF,
    PARAMS,
    PROMPTS,
    Kind,
    Told,
    cached,
    clear,
    forgotten,
    held,
    text,
    written,
)
from tests.families import FAMILIES, SHAPE, save_random
from tests.hybrids import HYBRIDS
from tests.models import make_engine, outputs_by_choice, run_engine, stepped
from truedraft.engine.config import EngineConfig
from truedraft.engine.core import restoring
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.window_blocks import WindowedPool
from truedraft.engine.memory.cache_files import Background, CacheFiles
from truedraft.engine.memory.prefix_files import PrefixFolder
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models import kept_prefixes


def made(target: str) -> Kind:
    kind = Kind(target, None)
    kind.expected = run_engine(kind.engine(None), PROMPTS, PARAMS, ARRIVALS)
    return kind


def asks_nothing(kind: Kind, folder: Path) -> None:
    """Neither looks for files nor reads, writes, renames or removes any in the engine's thread."""
    asked: set[threading.Thread] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("has", "touch", "read", "write", "clear", "tidy"):
            honest = getattr(PrefixFolder, name)

            def noted(*given: Any, honest: Any = honest, **named: Any) -> Any:
                asked.add(threading.current_thread())
                return honest(*given, **named)

            patch.setattr(PrefixFolder, name, noted)
        core = kind.engine(folder)
        for _ in range(2):
            assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == kind.expected
            forgotten(core)
        assert clear(core) == ""
    assert threading.current_thread() not in asked
    assert len(asked) == 3


@pytest.mark.parametrize("has_states", [False, True])
def test_the_engine_asks_the_disk_for_nothing(models: Models, tmp_path: Path, has_states: bool) -> None:
    model_type, config = HYBRIDS[HYBRID_OF["Mamba 2"]]
    target = save_random(tmp_path / "target", model_type, SHAPE | config) if has_states else models.target
    asks_nothing(made(target), tmp_path / "kept")


def hanging_disk_is_left_alone(models: Models, folder: Path) -> None:
    """Nothing waits once the disk has not answered for too long, until it answers again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "TIMEOUT_SECONDS", 0.2)
        core = make_engine(models.target, None, prefix_cache_dir=folder)
        expected = run_engine(core, PROMPTS[:3], PARAMS[:3])
        forgotten(core)
        hold = threading.Event()
        honest = PrefixFolder.has
        try:
            patch.setattr(PrefixFolder, "has", lambda *given: hold.wait() and honest(*given))
            assert run_engine(core, PROMPTS[:1], PARAMS[:1]) == expected[:1]
            patch.setattr(restoring, "TIMEOUT_SECONDS", 1e9)
            core.add(Generate("0", PROMPTS[1], PARAMS[1]))
            said = [token for _ in range(40) for output in stepped(core) for token in output.token_ids]
            assert said == expected[1]
        finally:
            hold.set()
        looked = threading.Event()
        assert core.scheduler.restoring is not None
        core.scheduler.restoring._looker.submit(looked.set)
        assert looked.wait(60)
        forgotten(core)
        assert run_engine(core, PROMPTS[2:3], PARAMS[2:3]) == expected[2:]
        assert written(core).num_hits == 128


def test_a_disk_that_hangs_is_left_alone(models: Models, tmp_path: Path) -> None:
    hanging_disk_is_left_alone(models, tmp_path)


def refuse_to_rename(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def failure_to_clear_is_told(models: Models, folder: Path) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    run_engine(core, PROMPTS[:1], PARAMS[:1])
    written(core)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", refuse_to_rename)
        assert clear(core) == "Read-only file system"
    assert cached(core, PROMPTS[0]) == 0
    assert not written(core).is_writing


def test_a_failure_to_clear_is_told(models: Models, tmp_path: Path) -> None:
    failure_to_clear_is_told(models, tmp_path)


def nothing_is_read_while_it_is_cleared(models: Models, folder: Path) -> None:
    """What waits to be renamed is not found meanwhile, or memory would have it afterwards."""
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    run_engine(core, PROMPTS[:1], PARAMS[:1])
    written(core)
    hold, honest = threading.Event(), PrefixFolder.clear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixFolder, "clear", lambda *given: (hold.wait(), honest(*given))[1])
        cleared = core.forget_prefixes()
        assert cleared is not None
        files = core.scheduler.target_pool.files
        assert files is not None
        hashes = list(core.scheduler.target_pool.hash_chain(PROMPTS[0], ""))
        try:
            assert not files.has_block(hashes[0])
            assert files.read_block(hashes[0]) is None
        finally:
            hold.set()
        assert cleared.result(60) == ""


def test_nothing_is_read_while_it_is_cleared(models: Models, tmp_path: Path) -> None:
    nothing_is_read_while_it_is_cleared(models, tmp_path)


def prompts_leave_each_other_what_is_read(models: Models, folder: Path) -> None:
    """Files of many prompts that wait are read once each, and all that they have is found."""
    prompts = [text(number, 101) for number in range(5, 11)]
    params = SamplingParams(max_tokens=4, temperature=0)
    plain = make_engine(models.target, None, prefix_cache_dir=folder)
    expected = run_engine(plain, prompts, params)
    written(plain)
    size = plain.target.model.cache_bytes_per_token
    core = make_engine(models.target, None, prefix_cache_dir=folder, cache_memory=60 * 4 * size)
    reads: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        honest = CacheFiles.read_block

        def read(files: CacheFiles, block_hash: bytes) -> Any:
            reads.append(block_hash)
            return honest(files, block_hash)

        patch.setattr(CacheFiles, "read_block", read)
        assert run_engine(core, prompts, params) == expected
    assert len(reads) == len(set(reads)) == 25 * len(prompts)
    assert written(core).num_hits == 100 * len(prompts)


def test_prompts_leave_each_other_what_is_read(models: Models, tmp_path: Path) -> None:
    prompts_leave_each_other_what_is_read(models, tmp_path)


def test_a_prompt_that_never_has_room_is_computed(models: Models, tmp_path: Path) -> None:
    """It waits for a while, and then for blocks alone, as other prompts do."""
    core = make_engine(models.target, None, prefix_cache_dir=tmp_path)
    expected = run_engine(core, PROMPTS[:2], PARAMS[:2])
    forgotten(core)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "TIMEOUT_SECONDS", 0.2)
        patch.setattr(restoring.Restoring, "_begin", lambda *_, **__: False)
        assert run_engine(core, PROMPTS[:2], PARAMS[:2]) == expected
        assert not core.scheduler.restoring._hangs  # type: ignore[union-attr]
    forgotten(core)
    assert run_engine(core, PROMPTS[:2], PARAMS[:2]) == expected
    assert written(core).num_hits > 0


def test_a_window_that_no_file_has_is_not_waited_for(tmp_path: Path) -> None:
    """A text may share a beginning whose window has been let go: that alone is no reason to read files."""
    model_type, config = FAMILIES["Gemma 3 in C"]
    target = save_random(tmp_path / "target", model_type, SHAPE | config)
    core = make_engine(target, None, prefix_cache_dir=tmp_path / "kept", max_num_batched_tokens=40)
    assert isinstance(core.scheduler.target_pool, WindowedPool)
    params = SamplingParams(max_tokens=2, temperature=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheFiles, "has_block", lambda *_: False)
        patch.setattr(restoring.Restoring, "_begin", lambda *_, **__: pytest.fail("it reads"))
        first = [*text(1, 120), *text(5, 9)]
        run_engine(core, [first], params)
        for _ in range(3):  # other texts take the place of windows that were let go
            run_engine(core, [text(number, 130) for number in range(20, 24)], params)
        run_engine(core, [[*first[:41], *text(6, 30)]], params)


def beginnings_are_hashed_once(models: Models, folder: Path) -> None:
    """A block is hashed where its files are looked for, not again when it is admitted."""
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    hashed = 0
    with pytest.MonkeyPatch.context() as patch:
        honest = BlockPool.hash_chain

        def counted(*given: Any) -> Iterator[bytes]:
            nonlocal hashed
            for each in honest(*given):
                hashed += 1
                yield each

        patch.setattr(BlockPool, "hash_chain", counted)
        patch.setattr(BlockPool, "publish", lambda *_: None)
        for _ in range(2):
            run_engine(core, PROMPTS[2:3], SamplingParams(max_tokens=2, temperature=0))
    assert hashed == 2 * (129 // 4)


def test_beginnings_are_hashed_once(models: Models, tmp_path: Path) -> None:
    beginnings_are_hashed_once(models, tmp_path)


def reading_ahead_is_bounded(models: Models, folder: Path) -> None:
    """No more is read than three blocks have, until the engine has stored some."""
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    run_engine(core, PROMPTS[2:3], PARAMS[2:3])
    forgotten(core)
    found, done = core.scheduler.restoring, threading.Event()
    assert found is not None
    size = 4 * core.target.model.cache_bytes_per_token
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "READ_AHEAD_BYTES", 3 * size)
        patch.setattr(restoring, "GLANCE_SECONDS", 60)
        core.add(Generate("0", PROMPTS[2], PARAMS[2]))
        for _ in range(2):  # one step looks, and the next one begins to read
            stepped(core)
        found._reader.submit(done.set)
        assert not done.wait(0.5)
        assert found._num_ahead <= 3 * size
        outputs_by_choice(core)
        assert written(core).num_hits == 128
        assert found._num_ahead == 0


def test_reading_ahead_is_bounded(models: Models, tmp_path: Path) -> None:
    reading_ahead_is_bounded(models, tmp_path)


def gateways_hear_of_a_reset(models: Models, folder: Path) -> None:
    core = make_engine(models.target, None, prefix_cache_dir=folder)
    told = core.scheduler.target_pool.events = Told()  # type: ignore[assignment]
    run_engine(core, PROMPTS[1:2], PARAMS[1])
    before = dict(told.tokens)
    written(core)
    core.reset()
    assert not told.tokens
    run_engine(core, PROMPTS[1:2], PARAMS[1])
    assert written(core).num_hits == 96
    assert told.tokens == before


def test_gateways_hear_of_a_reset(models: Models, tmp_path: Path) -> None:
    gateways_hear_of_a_reset(models, tmp_path)


def closing_takes_no_longer(*_: object) -> None:
    """The end of an engine waits a second for what is to be written, and not for ever."""
    asked: list[float | None] = []
    hold, thread = threading.Event(), Background("test")
    other = Background("another")
    thread.submit(held(hold))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda _, timeout=None: asked.append(timeout))
        kept_prefixes._close(thread, other)
    hold.set()
    assert asked == [1.0, 0]


def test_closing_takes_no_longer_than_a_second() -> None:
    closing_takes_no_longer()


def test_what_waits_is_written_before_the_end() -> None:
    done, thread = [], Background("test")
    for number in range(100):
        thread.submit(partial(done.append, number))
    thread.close(60)
    assert done == [*range(100)]


@pytest.mark.parametrize("quota", [0, -1, "0GiB"])
def test_a_quota_of_nothing_is_refused(quota: Any) -> None:
    with pytest.raises(ValidationError, match="prefix_cache_disk"):
        EngineConfig(prefix_cache_disk=quota)


def at_once(patch: pytest.MonkeyPatch) -> None:
    """Work is done where it is submitted."""

    def submit(thread: Background, work: Callable[[], None]) -> bool:
        work()
        return True

    patch.setattr(Background, "submit", submit)


def said_to_be_cleared(patch: pytest.MonkeyPatch) -> None:
    honest = CacheFiles.clear
    patch.setattr(CacheFiles, "clear", lambda files: (honest(files), "")[1])


def no_timeout_is_heard_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restoring.Restoring, "_hangs", property(lambda _: False, lambda *_: None), raising=False)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]]] = {
    "the engine asks the disk": (at_once, lambda models, folder: asks_nothing(made(models.target), folder)),
    "a failure is not told": (said_to_be_cleared, failure_to_clear_is_told),
    "files are read while they are cleared": (
        lambda patch: patch.setattr(PrefixFolder, "begin_to_clear", lambda _: None),
        nothing_is_read_while_it_is_cleared,
    ),
    "all loads begin at once": (
        lambda patch: patch.setattr(BlockPool, "num_unused", lambda *_: 0),
        prompts_leave_each_other_what_is_read,
    ),
    "hashes are not remembered": (
        lambda patch: patch.setattr(
            BlockPool, "remembered", lambda pool, _, *given: [*pool.hash_chain(*given)]
        ),
        beginnings_are_hashed_once,
    ),
    "blocks are counted, not bytes": (
        lambda patch: patch.setattr(restoring.Arrived, "num_bytes", 1),
        reading_ahead_is_bounded,
    ),
    "there is no timeout": (no_timeout_is_heard_of, hanging_disk_is_left_alone),
    "a reset is not told": (
        lambda patch: patch.setattr(Told, "cleared", lambda _: None),
        gateways_hear_of_a_reset,
    ),
    "the end waits for ever": (
        lambda patch: patch.setattr(kept_prefixes, "CLOSING_SECONDS", None),
        closing_takes_no_longer,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_seen(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    plant_it, check = PLANTED[bug]
    plant_it(monkeypatch)
    with pytest.raises(AssertionError):
        check(models, tmp_path)
