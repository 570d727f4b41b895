"""``num_speculative_tokens: auto`` in the whole engine: the text stays, hopeless drafts are given up."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.core.block_pool import BlockTable
from engine.core.engine import EngineCore
from engine.draft_length.confidence import PatientDraft
from engine.draft_length.plan import Plan, Search
from engine.draft_length.rounds import Candidate
from engine.draft_planner import DraftPlanner
from engine.messages import Failed, Generate, SamplingParams, TokenOutput
from tests.engine.conftest import Models
from tests.engine.fixed_length import FixedDraftLength
from tests.engine.gates import PROMPTS
from tests.models import make_engine, run_engine

GREEDY = SamplingParams(max_tokens=60, temperature=0)


def auto_engine(models: Models, draft: str | None, **config: object) -> EngineCore:
    path = getattr(models, draft) if draft else None
    return make_engine(models.target, path, num_speculative_tokens="auto", **config)


@pytest.mark.parametrize("draft", ["target", "close_draft", "random_draft", None])
@pytest.mark.parametrize("max_num_sequences", [1, 3, 8])
def test_greedy_and_seeded_text_is_that_of_plain_decoding(
    models: Models, draft: str | None, max_num_sequences: int
) -> None:
    params = [GREEDY, *(SamplingParams(max_tokens=50, seed=i) for i in range(len(PROMPTS) - 1))]
    expected = run_engine(make_engine(models.target, None), PROMPTS, params)
    core = auto_engine(models, draft, max_num_sequences=max_num_sequences, max_num_batched_tokens=24)
    assert run_engine(core, PROMPTS, params, arrivals=[0, 2, 4, 9, 9]) == expected


def test_calibration_leaves_the_caches_as_they_were(models: Models) -> None:
    core = auto_engine(models, "close_draft")
    assert core.scheduler.cache_usage() == {"target": 0, "draft": 0}
    assert core.speculation()["policy"] == "auto"


def test_a_length_that_a_request_asks_for_is_not_the_policys_to_change(models: Models) -> None:
    core = auto_engine(models, "random_draft")
    params = SamplingParams(max_tokens=60, temperature=0, num_speculative_tokens=3)
    run_engine(core, [[1, 2]], params)
    drafted = core.stats.draft_tokens_per_position
    assert drafted[2] > 0
    assert drafted[3] == 0
    assert drafted[0] >= drafted[2] >= drafted[0] - 2  # shorter only at the end


def test_the_state_tells_what_is_in_force(models: Models) -> None:
    core = auto_engine(models, "target")
    run_engine(core, PROMPTS, GREEDY)
    state = core.speculation()
    assert {"on", "why", "survival", "costs", "predicted_speedup"} <= state.keys()
    assert core.snapshot().num_speculative_tokens >= 0


def test_preemption_and_aborts_do_not_confuse_the_policy(models: Models) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    params = [SamplingParams(max_tokens=40, seed=i) for i in range(12)]
    expected = run_engine(make_engine(models.target, None), prompts, params)
    core = auto_engine(models, "close_draft")
    for pool in (core.scheduler.target_pool, core.scheduler.draft_pool):
        pool.__init__(30, 4)  # type: ignore[misc, union-attr]
    assert run_engine(core, prompts, params) == expected
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("is_cheap", [True, False])
def test_prompts_wait_for_a_dear_draft_that_does_not_pay(
    models: Models, is_cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the draft has not computed of a prompt it catches up with once it drafts."""
    core = auto_engine(models, "target", prefix_caching=False)
    policy = core.scheduler.planner.policy
    monkeypatch.setattr(policy.costs, "draft", lambda size: (0.01 if is_cheap else 1.0) * size)
    monkeypatch.setattr(policy.costs, "score", lambda size: 1.0 * size)
    monkeypatch.setattr(policy.costs, "observe_rounds", lambda **_: None)
    length = 0
    monkeypatch.setattr(policy, "choose", lambda rows, *_: [min(length, row.limit) for row in rows])
    monkeypatch.setattr(policy, "observe", lambda *_: None)
    plain = Plan([0], 1.0, 1.0)
    policy._in_force.search = Search(plain, plain, None)

    prompt = [1 + i % 13 for i in range(29)]
    core.add(Generate(request_id="a", prompt_token_ids=prompt, params=GREEDY))
    token_ids: list[int] = []
    sequence = None
    while core.has_work:
        for output in core.step():
            token_ids += output.token_ids
        sequence = core.scheduler.running[0] if core.scheduler.running else sequence
        assert sequence is not None
        if len(token_ids) < 10:
            assert sequence.draft_blocks.num_computed_tokens == (len(prompt) if is_cheap else 0)
        else:
            length = 4
    assert core.stats.draft_tokens_per_position[3] > 0
    # Its own draft: whatever it drafts is what comes, if nothing is missing in its cache.
    assert core.stats.accepted_tokens_per_position == core.stats.draft_tokens_per_position
    assert [token_ids] == [run_engine(make_engine(models.target, None), [prompt], GREEDY)[0]]


def forget_ends(planner: DraftPlanner, *args: Any) -> bool:
    """Planted bug: a text may be drafted for beyond its end."""
    planner._longest = [1000 for _ in planner._longest]
    return DraftPlanner._stands(planner, *args)


def forget_lags(planner: DraftPlanner, *args: Any) -> bool:
    """Planted bug: a draft's cache misses what it missed when the choice was made."""
    lags = [choice.lag for choice in planner._choices.values()]
    stood = DraftPlanner._stands(planner, *args)
    for choice, lag in zip(planner._choices.values(), lags, strict=True):
        choice.lag = lag
    return stood


def same_steps(models: Models, length: int | str, ask: Callable[..., bool] = DraftPlanner._stands) -> int:
    """Asserts that choices that stand are those of asking anew; returns how many stood."""
    params = SamplingParams(max_tokens=43, temperature=0, seed=1, ignore_eos=True)
    cores = [make_engine(models.target, models.target, num_speculative_tokens=length) for _ in range(2)]
    num_stood = 0
    for core, may_stand in zip(cores, (True, False), strict=True):
        planner = core.scheduler.planner
        core.whole_rounds = None  # which would share steps

        def stands(*args: Any, planner: DraftPlanner = planner, may_stand: bool = may_stand) -> bool:
            nonlocal num_stood
            stood = may_stand and ask(planner, *args)
            num_stood += stood
            return stood

        planner._stands = stands  # type: ignore[method-assign]
        if planner.policy is not None:  # a policy that is told nothing of time says the same to both
            planner.policy = StandingLengths()
        for i, prompt in enumerate(PROMPTS):
            core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=params))
    while any(core.has_work for core in cores):
        ours, theirs = ([said(output) for output in core.step()] for core in cores)
        assert ours == theirs
        assert [table.num_computed_tokens for table in draft_tables(cores[0])] == [
            table.num_computed_tokens for table in draft_tables(cores[1])
        ]
    return num_stood


def said(output: TokenOutput | Failed) -> tuple[object, ...]:
    assert isinstance(output, TokenOutput)
    return output.request_id, output.token_ids, output.num_draft_tokens, output.num_accepted_tokens


def draft_tables(core: EngineCore) -> list[BlockTable]:
    return [sequence.draft_blocks for sequence in core.scheduler.running]


class StandingLengths(FixedDraftLength):
    """None, two and four tokens in turns, each for five rounds."""

    def __init__(self) -> None:
        super().__init__(0)
        self.round = 0

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]:
        self.num_draft_tokens = 2 * (self.round // 5 % 3)
        self.round += bool(rows)
        return super().choose(rows, num_prompt_tokens)

    def go_on(self, patient: list[PatientDraft] | None) -> None:
        self.round += 1

    @property
    def num_rounds(self) -> int:
        return 5 - (self.round - 1) % 5


@pytest.mark.parametrize("length", [4, "auto"])
def test_a_choice_that_stands_is_what_asking_anew_would_say(models: Models, length: int | str) -> None:
    assert same_steps(models, length) > 5


@pytest.mark.parametrize("bug", [forget_ends, forget_lags])
def test_choices_that_wrongly_stand_are_caught(models: Models, bug: Callable[..., bool]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        same_steps(models, 4, bug)
