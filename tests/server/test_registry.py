"""The registry keeps its promises under random requests in virtual time: which models are loaded, and when.

The served models are the real ones; their workers are replaced by what says when it is started and stopped.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, cast

import msgspec
import pytest

from tests.server.virtual_time import in_virtual_time
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import Ready
from truedraft.server.errors import ApiError, ModelBusyError, ModelLoadFailedError, NotReadyError
from truedraft.server.models import registry, served
from truedraft.server.models.registry import Hold, Limits, Models, Use
from truedraft.server.models.served import Parts, ServedModel
from truedraft.server.observability.metrics import Metrics
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers.worker_client import EngineState
from truedraft.server.workers.worker_pool import WorkerFailedError, WorkerPool

READY = Ready("t", None, "cpu", "float32", 10, 100, 4, 4, 16, [], "none")
FOR_EVER = 2e4  # virtual seconds


@dataclass
class Machine:
    """What is in memory, and what was wrong with that at any moment."""

    total: int
    most: int | None
    sizes: dict[str, int]
    live: Counter[str] = field(default_factory=Counter)
    holds: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False

    def start(self, name: str) -> None:
        self.live[name] += 1
        self.loads[name] += 1
        if self.live[name] > 1:
            self.wrong.append(f"{name} is loaded twice")
        taken = sum(self.sizes[each] for each in +self.live)
        if taken > self.total:
            self.wrong.append(f"{+self.live} take {taken} of {self.total}")
        if self.most is not None and len(+self.live) > self.most:
            self.wrong.append(f"{+self.live} are more than {self.most}")

    def stop(self, name: str) -> None:
        self.live[name] -= 1
        if self.holds[name] and not self.is_over:
            self.wrong.append(f"{name} was unloaded while {self.holds[name]} requests used it")


class FakePool:
    """Takes some time to load, and some to end."""

    stage, pid = "", None  # the pool is its own worker
    num_http_requests = 0

    def __init__(self, machine: Machine, name: str, seconds: float, fails: Callable[[], bool]) -> None:
        self.machine, self.name, self.seconds, self.fails = machine, name, seconds, fails
        self.when_weights_changed: Callable[[], None] = lambda: None
        self.when_changed: Callable[[], None] = lambda: None
        self.state = EngineState("loading", "The models are loading.")
        self._is_stopped = False

    @property
    def workers(self) -> list["FakePool"]:
        return [self]

    def start(self) -> None:
        self.machine.start(self.name)

    async def wait_until_ready(self) -> Ready:
        await asyncio.sleep(self.seconds)
        if self.fails():
            self.state = EngineState("failed", "It is broken.")
            raise WorkerFailedError("It is broken.")
        size = self.machine.sizes[self.name]
        self.state = EngineState("ready", "", msgspec.structs.replace(READY, worker_bytes=size))
        return READY

    async def wait_until_failed(self) -> NoReturn:
        await asyncio.sleep(10 * FOR_EVER)
        raise AssertionError

    async def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            await asyncio.sleep(0.1)
            self.machine.stop(self.name)

    def abandon(self) -> None: ...


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread would take real time, in which virtual time passes."""

    def at_once(load: Callable[[], Any]) -> "asyncio.Future[Any]":
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(load())
        except Exception as error:
            future.set_exception(error)
        return future

    monkeypatch.setattr(served, "in_daemon_thread", at_once)


def build(
    machine: Machine,
    limits: Limits,
    *,
    pinned: tuple[str, ...] = (),
    fails: Callable[[str], bool] = lambda name: False,
    seconds: float = 5.0,
) -> Models:
    names = [*machine.sizes]
    metrics = Metrics("t_", dict.fromkeys(names, 1))

    def assemble(name: str, _: EngineConfig) -> Parts:
        pool = FakePool(machine, name, seconds, partial(fails, name))
        return Parts(cast(WorkerPool, pool), lambda: cast(Tokenizer, object()))

    settings = Settings(device="cpu")
    models = []
    for name in names:
        own = settings.model_copy(update={"served_model_name": name})
        model = ServedModel(own, metrics.models[name], partial(assemble, name), is_pinned=name in pinned)
        model.memory = machine.sizes[name]
        models.append(model)
    limits = replace(limits, max_loaded_models=machine.most, memory=lambda: machine.total)
    return Models(models, limits, are_several=True)


async def use(models: Models, machine: Machine, name: str, seconds: float) -> str:
    """Uses a model for so long; returns how that ended."""
    model, hold = models.find(name), Hold(models)
    try:
        await hold.take(model)
        if model.condition.status != "ready":
            machine.wrong.append(f"{name} was taken while it was {model.condition.status}")
        machine.holds[name] += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            machine.holds[name] -= 1
    except ApiError as error:
        return str(error.code)
    except asyncio.CancelledError:
        return "left"
    finally:
        hold.release()
    return "answered"


async def ended(work: Awaitable[Any], machine: Machine, models: Models) -> None:
    try:
        async with asyncio.timeout(FOR_EVER):
            await work
    except TimeoutError:
        machine.wrong.append("somebody waits for ever")
    except Exception as error:
        machine.wrong.append(repr(error))
    machine.is_over = True
    try:
        async with asyncio.timeout(FOR_EVER):
            await models.stop()
    except TimeoutError:
        machine.wrong.append("the end takes for ever")


def random_run(seed: int) -> Machine:
    """Random models, limits and requests, some of which leave; with unloads in between."""
    drawn = random.Random(seed)
    sizes = {name: drawn.randint(1, 4) for name in "abcd"[: drawn.randint(2, 4)]}
    machine = Machine(drawn.randint(max(sizes.values()), 9), drawn.choice((None, 1, 2)), sizes)
    pinned = tuple(name for name in list(sizes)[:1] if drawn.random() < 0.2 and machine.most != 1)
    if pinned:
        machine.total = sizes[pinned[0]] + max(sizes.values())
    flaky = drawn.random() < 0.3
    idle = drawn.choice((None, 50.0))

    async def one(models: Models, outcomes: Counter[str]) -> None:
        await asyncio.sleep(drawn.uniform(0, 200))
        name = drawn.choice([*sizes])
        task = asyncio.create_task(use(models, machine, name, drawn.choice((0, 0.1, 3, 30))))
        if drawn.random() < 0.2:
            await asyncio.sleep(drawn.choice((0, 0.05, 4, 5, 20)))
            task.cancel()
        outcomes[await task] += 1

    async def unloads(models: Models) -> None:
        for _ in range(4):
            await asyncio.sleep(drawn.uniform(0, 80))
            model = models.find(drawn.choice([*sizes]))
            with suppress(ModelBusyError):
                await models.unload(model)

    async def work(models: Models) -> None:
        outcomes: Counter[str] = Counter()
        await models.wait_until_ready()
        await asyncio.gather(unloads(models), *(one(models, outcomes) for _ in range(40)))
        expected = {"answered", "left"} | ({"model_load_failed"} if flaky else set())
        if not set(outcomes) <= expected:
            machine.wrong.append(f"{outcomes}")
        if idle is not None:
            await asyncio.sleep(10 * idle)
            if {*(+machine.live)} - {*pinned}:
                machine.wrong.append(f"{+machine.live} stay loaded though nobody uses them")

    async def run() -> None:
        limits = Limits(idle_unload=idle, load_timeout=FOR_EVER / 2)
        fails = (lambda name: drawn.random() < 0.3) if flaky else (lambda name: False)
        models = build(machine, limits, pinned=pinned, fails=fails, seconds=drawn.choice((0.5, 5)))
        models.start()
        await ended(work(models), machine, models)

    in_virtual_time(run())
    return machine


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_runs(first: int) -> None:
    for seed in range(first, first + 50):
        assert random_run(seed).wrong == [], f"random_run({seed})"


def crowded_run() -> Machine:
    """Requests use one model all the time, and others ask for the second one; there is room for one."""
    machine = Machine(1, 1, {"a": 1, "b": 1})

    async def run() -> None:
        models = build(machine, Limits(load_timeout=FOR_EVER / 2))
        models.start()
        is_served = asyncio.Event()

        async def keep_busy() -> None:
            while not is_served.is_set() and await use(models, machine, "a", 3) == "answered":
                pass

        async def ask() -> None:
            await asyncio.sleep(20)
            assert await use(models, machine, "b", 1) == "answered"
            is_served.set()

        await ended(
            asyncio.wait([*map(asyncio.ensure_future, (keep_busy(), keep_busy(), ask()))]), machine, models
        )

    in_virtual_time(run())
    return machine


def test_a_model_that_is_always_used_makes_room() -> None:
    assert crowded_run().wrong == []


def forgets_to_begin_once(self: Models, model: ServedModel) -> "asyncio.Task[None]":
    task = asyncio.create_task(self._place_and_load(model))
    self._loads[model] = task
    task.add_done_callback(lambda _: self._loads.pop(model, None))
    return task


async def waits_for_idleness_only(self: Models) -> None:
    await self.news()


def gives_back_in_silence(self: Models, model: ServedModel) -> None:
    self._uses[model].num_requests -= 1


def forgets_the_new_one(self: Models, model: ServedModel) -> bool:
    present = [each for each in self._models if each.phase in ("loaded", "unloading")]
    most = self._limits.max_loaded_models
    if most is not None and len(present) >= most:
        return True
    return sum(map(registry.memory_of, present)) > self._limits.memory()


def forgets_those_that_leave(self: Models, model: ServedModel) -> bool:
    present = [each for each in self._models if each.phase == "loaded"]
    most = self._limits.max_loaded_models
    if most is not None and len(present) >= most:
        return True
    return sum(map(registry.memory_of, (*present, model))) > self._limits.memory()


def keeps_what_it_holds(self: Hold) -> None:
    self.model = None


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "evicts a busy model": lambda patch: patch.setattr(Use, "is_idle", True),
    "evicts what others wait for": lambda patch: patch.setattr(
        Use, "is_idle", property(lambda self: not self.num_requests)
    ),
    "loads twice": lambda patch: patch.setattr(Models, "_begin", forgets_to_begin_once),
    "a busy model never makes room": lambda patch: patch.setattr(
        Models, "_ask_for_room", waits_for_idleness_only
    ),
    "a wait that never ends": lambda patch: patch.setattr(Models, "give_back", gives_back_in_silence),
    "accounting forgets the new one": lambda patch: patch.setattr(Models, "_lacks_room", forgets_the_new_one),
    "accounting forgets those that leave": lambda patch: patch.setattr(
        Models, "_lacks_room", forgets_those_that_leave
    ),
    "a hold that is never released": lambda patch: patch.setattr(Hold, "release", keeps_what_it_holds),
    "unloads at once": lambda patch: patch.setattr(
        Models, "unload", lambda self, model, to="unloaded": self._unload(model, to)
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    assert any(random_run(seed).wrong for seed in range(30)) or crowded_run().wrong


def test_one_load_for_all_that_ask() -> None:
    machine = Machine(1, None, {"a": 1})

    async def run() -> None:
        models = build(machine, Limits())
        models.start()
        outcomes = await asyncio.gather(*(use(models, machine, "a", 1) for _ in range(5)))
        assert outcomes == ["answered"] * 5
        await models.stop()

    in_virtual_time(run())
    assert machine.loads["a"] == 1


def test_the_least_recently_used_makes_room() -> None:
    machine = Machine(9, 2, {"a": 1, "b": 1, "c": 1})

    async def run() -> None:
        models = build(machine, Limits())
        models.start()
        for name in "abac":
            await use(models, machine, name, 1)
        await models.stop()

    in_virtual_time(run())
    assert machine.loads == {"a": 1, "b": 1, "c": 1}
    assert machine.wrong == []


def test_nobody_waits_beyond_the_timeout() -> None:
    machine = Machine(1, 1, {"a": 1, "b": 1})

    async def run() -> tuple[str, float]:
        models = build(machine, Limits(load_timeout=60))
        models.start()
        loop = asyncio.get_running_loop()
        longest = asyncio.ensure_future(use(models, machine, "a", 1000))
        await asyncio.sleep(10)
        began = loop.time()
        with pytest.raises(NotReadyError, match=r"load_timeout.*It is unloaded"):
            await Hold(models).take(models.find("b"))
        passed = loop.time() - began
        # Nobody waits for its place any more, so the model takes requests again.
        assert await use(models, machine, "a", 1) == "answered"
        assert await longest == "answered"
        await models.stop()
        return models.find("b").condition.status, passed

    assert in_virtual_time(run()) == ("stopped", 60)


def test_what_does_not_fit_is_refused_before_anything_makes_room() -> None:
    machine = Machine(10, None, {"small": 4, "large": 7, "huge": 11})

    async def run() -> None:
        models = build(machine, Limits(), pinned=("small",))
        models.start()
        await models.wait_until_ready()
        for name in ("large", "huge"):
            with pytest.raises(ModelLoadFailedError, match="may take"):
                await Hold(models).take(models.find(name))
        assert await use(models, machine, "small", 1) == "answered"
        await models.stop()

    in_virtual_time(run())
    assert machine.loads == {"small": 1}


def test_a_failed_load_is_not_tried_again_at_once() -> None:
    machine = Machine(1, None, {"a": 1})
    is_broken = True

    async def run() -> None:
        nonlocal is_broken
        models = build(machine, Limits(), fails=lambda name: is_broken)
        models.start()
        model = models.find("a")
        assert [await use(models, machine, "a", 1) for _ in range(3)] == ["model_load_failed"] * 3
        assert (machine.loads["a"], model.condition.status) == (1, "failed")
        await asyncio.sleep(registry.RETRY_SECONDS)
        assert await use(models, machine, "a", 1) == "model_load_failed"
        assert machine.loads["a"] == 2
        is_broken = False
        await models.load(model)  # an operator need not wait
        assert (machine.loads["a"], model.condition.status) == (3, "ready")
        await models.stop()

    in_virtual_time(run())


def test_who_waits_hears_of_the_end() -> None:
    machine = Machine(1, None, {"a": 1})

    async def run() -> list[str]:
        models = build(machine, Limits())
        models.start()
        waiting = asyncio.ensure_future(use(models, machine, "a", 1))
        await asyncio.sleep(1)
        models.abandon()
        outcomes = [await waiting, await use(models, machine, "a", 1)]
        await models.stop()
        return outcomes

    assert in_virtual_time(run()) == ["shutting_down", "shutting_down"]
