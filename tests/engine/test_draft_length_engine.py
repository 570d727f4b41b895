"""``num_speculative_tokens: auto`` in the whole engine: the text stays, hopeless drafts are given up."""

import pytest

from engine.core import EngineCore
from engine.messages import SamplingParams
from tests.engine.conftest import Models
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
