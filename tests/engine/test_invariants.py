"""What must hold after every step: caches in step with the tokens, scores equal to a fresh forward."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Models
from tests.engine.planners import draft_cache
from tests.models import make_engine, run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.step import StepPlan
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.rounds.round import RoundRunner
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(16)) * 3, [2, 2], [7, 1, 7]]


class CheckedCore:
    """Wraps an engine's score and step with comparisons against models that have no cache."""

    def __init__(self, core: EngineCore, target: str) -> None:
        self.core = core
        self.fresh = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.num_scored = 0
        runner = core.runner
        assert isinstance(runner, RoundRunner)
        self.inner_score = runner._score
        runner._score = self.score  # type: ignore[method-assign]

    def score(self, plan: StepPlan, sampler: Sampler, drafts: Drafts) -> Any:
        drafted = drafts.ids
        texts = [part.sequence.token_ids + ids for part, ids in zip(plan.rows, drafted, strict=True)]
        scored = self.inner_score(plan, sampler, drafts)
        logits = scored.logits
        start = 0
        for text, length in zip(texts, map(len, drafted), strict=True):
            with torch.no_grad():
                want = self.fresh(torch.tensor([text])).logits[0, -(length + 1) :]
            torch.testing.assert_close(logits[start : start + length + 1], want, atol=1e-4, rtol=1e-4)
            start += length + 1
            self.num_scored += length + 1
        assert start == len(logits)
        return scored

    def step(self) -> None:
        self.core.step()
        for sequence in self.core.scheduler.running:
            if sequence.num_uncomputed_tokens == 1:
                assert draft_cache(self.core).num_missing(sequence) in (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_num_sequences", [1, 3, 8])
def test_scores_equal_a_fresh_forward(models: Models, max_num_sequences: int, temperature: float) -> None:
    core = make_engine(
        models.target,
        models.close_draft,
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=20,
        num_speculative_tokens=4,
    )
    checked = CheckedCore(core, models.target)
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=20 + i, temperature=temperature, seed=i, verification="rejection")
        core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=params))
    while core.has_work:
        checked.step()
    assert checked.num_scored > sum(20 + i for i in range(len(PROMPTS)))
    assert core.scheduler.target_pool.usage == draft_cache(core).pool.usage == 0


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_model_that_drafts_for_itself_is_always_right(
    models: Models, verification: str, temperature: float
) -> None:
    """Any slip in the draft's cache or positions shows as an acceptance below 100 %."""
    core = make_engine(models.target, models.target, num_speculative_tokens=5, verification=verification)
    run_engine(core, PROMPTS, SamplingParams(max_tokens=60, temperature=temperature, seed=1))
    stats = core.stats
    assert stats.num_draft_tokens > 200
    assert stats.accepted_tokens_per_position == stats.draft_tokens_per_position


def test_few_blocks_preempt_and_change_nothing(models: Models) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    params = [SamplingParams(max_tokens=40, seed=i) for i in range(12)]
    roomy = make_engine(models.target, models.close_draft)
    tight = make_engine(models.target, models.close_draft)
    tight.scheduler.target_pool.__init__(30, 4)  # type: ignore[misc]
    draft_cache(tight).pool.__init__(30, 4)  # type: ignore[misc]
    assert run_engine(tight, prompts, params) == run_engine(roomy, prompts, params)
    assert tight.scheduler.num_preemptions > 0
    assert roomy.scheduler.num_preemptions == 0


def test_abort_frees_everything_at_once(models: Models) -> None:
    core = make_engine(models.target, models.close_draft, max_num_sequences=2)
    for name in "abc":
        core.add(
            Generate(request_id=name, prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=50), n=2)
        )
    core.step()
    core.abort("a", 1)
    assert [(s.request_id, s.index) for s in core.scheduler.running] == [("a", 0)]
    core.abort("a")
    core.abort("c")
    core.abort("unknown")
    assert not core.scheduler.running
    assert core.scheduler.target_pool.usage == 0
    assert {output.request_id for output in core.step()} == {"b"}
