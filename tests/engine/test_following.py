"""Heads follow the target, and let go of sequences while that does not pay: those get no drafts any more."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from tests.engine.conftest import Models
from tests.engine.head_runs import (
    TRAINED,
    compare_with_definition,
    mtp_engine,
    save_small_hybrid,
    story_prompts,
)
from tests.engine.planners import FixedPlanner, use_planner, without_loop
from tests.engine.test_own_proposers import PROMPTS, Follower
from tests.models import make_engine, save_random_llama, stepped
from tests.mtp import trained_head
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.planning import StepChoice
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import MAX_PROMPT_TOKENS, DraftChoice
from truedraft.engine.messages import Generate, SamplingParams

GREEDY = SamplingParams(max_tokens=30, temperature=0)
SEEDED = SamplingParams(max_tokens=30, temperature=1.1, seed=5, verification="coupled")
LENGTH = 4


class Pausing(FixedPlanner):
    """Drafts with whoever follows a sequence; in a ``share`` of the steps nobody drafts or has to follow."""

    def __init__(self, core: EngineCore, share: float) -> None:
        super().__init__(max_rounds=3)
        self.share, self.draws, self.is_paused = share, random.Random(1), False
        self.followed: dict[Sequence, list[bool]] = {}
        use_planner(core, self)

    def choose(self, decoding: list[Sequence]) -> StepChoice:
        self.is_paused = self.draws.random() < self.share
        for sequence in decoding:
            follows = any(map(sequence.is_followed_by, self.proposers))
            self.followed.setdefault(sequence, []).append(follows)
        return super().choose(decoding)

    def _choice(self, sequence: Sequence, source: str) -> DraftChoice | None:
        if self.is_paused or not sequence.is_followed_by(source):
            return None
        choice = super()._choice(sequence, source)
        return choice and replace(choice, num_tokens=min(choice.num_tokens, LENGTH))

    def lagging(self, sequence: Sequence) -> list[str]:
        return [name for name in self.proposers if self.is_paused and not sequence.insists_on(name)]


def run(core: EngineCore, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Runs all, up to four at a time. Sequences that nobody follows only hold blocks of the target."""
    waiting = [Generate(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    texts: list[list[int]] = [[] for _ in prompts]
    scheduler = core.scheduler
    while waiting or core.has_work:
        while waiting and len(scheduler.running) + len(scheduler.waiting) < 4:
            core.add(waiting.pop())
        for output in stepped(core):
            texts[int(output.request_id)] += output.token_ids
        for proposer in scheduler.proposers:
            for sequence in scheduler.running:
                is_held = any(table.block_ids for _, table in proposer.tables(sequence))
                assert is_held == sequence.is_followed_by(proposer.name)
    assert all(pool.usage == 0 for pool in (scheduler.target_pool, *scheduler.draft_pools))
    return texts


def own_engine(target: str, **config: object) -> EngineCore:
    """Makes one with a proposer that asserts that it has been told all, and drafts what the target says."""
    return make_engine(target, None, [Follower()], method="auto", num_speculative_tokens="auto", **config)


def followers_are_told_all_or_nothing(models: Models) -> None:
    """Few blocks: what is preempted begins anew, followed or not, whatever it was before."""
    core = own_engine(models.target, max_num_batched_tokens=12)
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        pool.__init__(36, 4)  # type: ignore[misc]
    planner = Pausing(core, 0.05)
    texts = run(core, 3 * PROMPTS, GREEDY)
    assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens > 100
    changes = {change for told in planner.followed.values() for change in zip(told, told[1:], strict=False)}
    assert changes >= {(True, True), (True, False), (False, False)}
    assert core.scheduler.num_preemptions > 0
    assert texts == run(make_engine(models.target, None), 3 * PROMPTS, GREEDY)


def test_followers_are_told_all_or_nothing(models: Models) -> None:
    followers_are_told_all_or_nothing(models)


def not_marked(self: Scheduler) -> None:
    """Blocks are freed, and the proposer still observes the sequence."""
    for proposer in self._followers:
        for sequence in self.running:
            if proposer.name in self.planner.lagging(sequence):
                for pool, table in proposer.tables(sequence):
                    pool.release(table)


def blocks_are_kept(self: Scheduler) -> None:
    for proposer in self._followers:
        for sequence in self.running:
            if proposer.name in self.planner.lagging(sequence):
                sequence.unfollowed |= {proposer.name}


@pytest.mark.parametrize("wrong", [not_marked, blocks_are_kept])
def test_letting_go_by_halves_is_caught(
    models: Models, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Scheduler], None]
) -> None:
    monkeypatch.setattr(Scheduler, "_let_go", wrong)
    with pytest.raises(AssertionError):
        followers_are_told_all_or_nothing(models)


def test_taking_up_again_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: who has let go of a sequence drafts for it when drafting pays again."""
    monkeypatch.setattr(Sequence, "is_followed_by", lambda self, source: source in self.sources)
    with pytest.raises(AssertionError):
        followers_are_told_all_or_nothing(models)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_hybrid(tmp_path_factory.mktemp("hybrid") / "target")


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("by_phases", [False, True], ids=["rounds in C", "by phases"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_heads_let_go_and_the_text_stays(hybrid: str, params: SamplingParams, by_phases: bool) -> None:
    prompts = 2 * [[1, 2, 3], list(range(1, 30)), [4], [7] * 9, [1, 2, 3, 4], list(range(1, 30))]
    core = mtp_engine(hybrid, num_speculative_tokens="auto")
    if by_phases:
        core.runner = without_loop(core)
    Pausing(core, 0.1)
    texts = run(core, prompts, params)
    assert core.stats.num_draft_tokens > 100
    plain = make_engine(hybrid, None, max_num_batched_tokens=12, max_model_len=64)
    assert texts == run(plain, prompts, params)


@pytest.mark.usefixtures("needs_compiler")
def test_heads_draft_the_same_after_others_were_let_go_of() -> None:
    """Texts begin as those before, of which the head has stored nothing, or not all that the target has."""
    core = mtp_engine(num_speculative_tokens="auto")
    planner = Pausing(core, 0.05)
    params = structs.replace(GREEDY, max_tokens=24)
    assert compare_with_definition(trained_head(TRAINED), core, 3 * story_prompts(), params) > 60
    assert {told[-1] for told in planner.followed.values()} == {True, False}
    assert core.scheduler.num_prefix_hits > 0


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_random_llama(tmp_path_factory.mktemp("long"), 3, context=1024)


LONG = [number % 13 for number in range(2 * MAX_PROMPT_TOKENS)]


@pytest.mark.parametrize(
    ("num_tokens", "more", "is_followed"),
    [
        (len(LONG), {}, False),
        (len(LONG), {"method": "follower"}, True),
        (len(LONG), {"num_speculative_tokens": 3}, True),
        (MAX_PROMPT_TOKENS // 2, {}, True),
    ],
    ids=["long", "asked for", "fixed length", "short"],
)
def test_what_is_cached_for_the_target_alone(
    long_target: str, num_tokens: int, more: dict[str, object], is_followed: bool
) -> None:
    """It is computed again if that is little, or if a request asks for drafts of who must follow it."""
    core = own_engine(long_target, max_num_batched_tokens=64)
    planner, prompt = Pausing(core, 1.0), LONG[:num_tokens]
    run(core, [prompt], GREEDY)
    assert core.scheduler.num_prefix_hits == core.stats.num_draft_tokens == 0
    planner.share, planner.is_paused = 0.0, False
    run(core, [prompt], structs.replace(GREEDY, **more))
    *_, told = planner.followed.values()
    assert set(told) == {is_followed}
    assert core.scheduler.num_prefix_hits == (0 if is_followed else num_tokens - 4)
    assert (core.stats.num_draft_tokens > 0) == is_followed
