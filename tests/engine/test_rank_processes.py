"""Ranks in processes of their own, over gloo: the same texts, and an end with a reason when one is lost."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_worker import TIMEOUT_SECONDS, SpawnedWorker, spawned
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import Failed, Generate, Ready, SamplingParams, StepOutput
from truedraft.engine.models.ranks import Followers, LeadingDecoder
from truedraft.engine.parallel.group import RankLostError

ASKED = [SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, temperature=0.9, seed=5)]
PROMPTS = [[1, 2, 3, 4], [5] * 20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_random_llama(tmp_path_factory.mktemp("ranks") / "target", 1)


@contextmanager
def ranks(target: str, draft: str | None = None, **config: Any) -> Iterator[tuple[EngineCore, Followers]]:
    core = make_engine(target, draft, num_threads=1, **config)
    assert isinstance(core.target.model, LeadingDecoder)
    followers = core.target.model.followers
    try:
        yield core, followers
    finally:
        for process in followers.processes:
            process.kill()
        followers.close()


def test_four_processes_write_what_one_does(tmp_path: Path, target: str) -> None:
    """One of them is killed after that, and the next pass names it."""
    draft = save_perturbed(tmp_path, target, 2, 0.02)
    expected = run_engine(make_engine(target, None), PROMPTS, ASKED)
    with ranks(target, draft, tensor_parallel_size=4) as (core, followers):
        assert run_engine(core, PROMPTS, ASKED) == expected
        assert core.stats.num_accepted_tokens > 0
        followers.processes[2].kill()
        with pytest.raises(RankLostError, match="rank 3 of 4 was killed by signal 9"):
            run_engine(core, PROMPTS, ASKED)


def test_a_stopped_process_is_given_up(target: str) -> None:
    with ranks(target, tensor_parallel_size=2) as (core, followers):
        model = core.target.model
        assert isinstance(model, LeadingDecoder)
        model.group.seconds = 0.5
        os.kill(followers.processes[0].pid, signal.SIGSTOP)
        with pytest.raises(RankLostError, match=r"a rank has ended, or was silent for 0\.5 s"):
            run_engine(core, PROMPTS, ASKED)


def test_a_process_that_cannot_load_ends_the_others(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.engine.models.ranks.FOLLOWER", ("-c", "raise SystemExit(7)"))
    with pytest.raises((RankLostError, ModelLoadError), match="rank 1 of 2 exited with code 7"):
        make_engine(target, None, tensor_parallel_size=2)


def config_of(target: str) -> EngineConfig:
    return EngineConfig(
        target=target, draft="none", device="cpu", tensor_parallel_size=2, num_threads=1, cache_memory=1 << 24
    )


def follower_of(worker: SpawnedWorker) -> int:
    (child,) = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    return int(child)


def test_a_worker_says_which_process_it_has_lost(target: str) -> None:
    """While it is idle it looks every second; in a pass it notices at once."""
    with spawned(config_of(target)) as worker:
        assert isinstance(worker.receive(), Ready)
        os.kill(follower_of(worker), signal.SIGKILL)
        failed = worker.receive()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code) == ("", "rank_lost")
        assert "rank 1 of 2 was killed by signal 9" in failed.message
        assert worker.process.wait(TIMEOUT_SECONDS) == 4


def test_a_worker_ends_in_the_middle_of_a_request(target: str) -> None:
    params = SamplingParams(max_tokens=200, temperature=0)
    with spawned(config_of(target)) as worker:
        assert isinstance(worker.receive(), Ready)
        follower = follower_of(worker)
        worker.send(Generate(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
        assert isinstance(worker.receive(), StepOutput)
        os.kill(follower, signal.SIGKILL)
        while isinstance(message := worker.receive(), StepOutput):
            pass
        assert isinstance(message, Failed)
        assert "rank 1 of 2" in message.message
        assert worker.process.wait(TIMEOUT_SECONDS) == 4
