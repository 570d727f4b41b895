"""Heads draft in rounds that share a step what they draft in lone rounds."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.engine.hybrid_models import KINDS, hybrid, hybrid_engine, hybrid_head
from tests.engine.native_pair import LONG, VOCAB_SIZE, make_twins
from tests.engine.planners import FixedPlanner, phases_of, use_planner
from tests.engine.test_eagle import HIDDEN
from tests.engine.test_eagle import SHAPES as OF_LAYOUTS
from tests.engine.test_native_rounds import run
from tests.heads import Shape, fitted, random_head, save_head
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.proposer import Observation, Proposer
from truedraft.engine.core.step import StepPlan
from truedraft.engine.layers.linear import DenseEmbeddings
from truedraft.engine.messages import SamplingParams
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("needs_compiler")

SHAPES = {
    "plain": Shape(HIDDEN, VOCAB_SIZE),
    "few tokens": OF_LAYOUTS["speculators"],
    "norms": replace(OF_LAYOUTS["norms"], has_embeddings=True),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(40)), [2, 2]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, seed=4)
COUPLED = SamplingParams(max_tokens=24, temperature=1.1, seed=5, verification="coupled")
REJECTION = SamplingParams(max_tokens=24, temperature=0.9, seed=6, verification="rejection")
CUT = structs.replace(REJECTION, top_k=9, min_p=0.02, temperature=1.3)
PENALTIES = {"frequency_penalty": 0.37, "presence_penalty": -0.21, "repetition_penalty": 1.13}
ADJUSTED = [
    structs.replace(GREEDY, logprobs=1, **PENALTIES),
    structs.replace(COUPLED, min_tokens=9, logit_bias={1: 3.0, 2: -100.0}, stop_token_ids=[7, 8, 9, 10]),
    structs.replace(REJECTION, frequency_penalty=1.5, logprobs=2),
    structs.replace(CUT, logprobs=0),
    structs.replace(GREEDY, method="none"),
]


@dataclass(frozen=True)
class Models:
    target: str
    heads: dict[str, str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Makes a target, and heads that have learned its greedy texts."""
    root = tmp_path_factory.mktemp("heads")
    target = save_random_llama(root / "target", 1, vocab_size=VOCAB_SIZE, layers=5, hidden=HIDDEN, std=0.2)
    outputs = run_engine(make_engine(target, None), PROMPTS, GREEDY)
    texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    heads = {
        name: save_head(root / name, fitted(random_head(shape, target), target, texts))
        for name, shape in SHAPES.items()
    }
    return Models(target, heads)


def proposer_of(core: EngineCore) -> HeadProposer:
    (proposer,) = core.scheduler.proposers
    assert isinstance(proposer, HeadProposer)
    return proposer


def twins(models: Models, shape: str, max_rounds: int = 5, **config: Any) -> tuple[EngineCore, EngineCore]:
    """Makes an engine with up to ``max_rounds`` a step, and one whose steps have one."""
    settings = {"method": "auto", "num_speculative_tokens": 4, **config}
    return make_twins(models.target, models.heads[shape], max_rounds, **settings)


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ("plain", [GREEDY, COUPLED, REJECTION]),
        ("few tokens", [GREEDY, COUPLED, REJECTION, CUT]),
        ("norms", [GREEDY, COUPLED, REJECTION, CUT]),
        ("few tokens", ADJUSTED),
    ],
)
def test_they_emit_what_lone_rounds_emit(models: Models, shape: str, params: list[SamplingParams]) -> None:
    ours, theirs = twins(models, shape)
    (told, num_steps), (expected, their_steps) = (run(core, params, PROMPTS) for core in (ours, theirs))
    assert told == expected
    assert ours.stats.drafts == theirs.stats.drafts
    assert num_steps < their_steps
    assert 0 < ours.stats.num_accepted_tokens < ours.stats.num_draft_tokens


class Watching(Proposer):
    """Keeps the states after the last layer, and what the last norm makes of them."""

    name = "watching"
    can_lag = False

    def __init__(self, taps: tuple[int, ...] = ()) -> None:
        self.taps = taps
        self.seen: list[torch.Tensor] = []

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        return Drafts.empty(len(plan.rows), sampler.device)

    def observe(self, observations: Sequences[Observation]) -> None:
        self.seen += [one.hidden for one in observations if one.hidden is not None]


def test_taps_count_layers_without_a_cache() -> None:
    target = hybrid(kinds=(*KINDS, "MLP"), vocab_size=VOCAB_SIZE)
    watching = Watching((-1, len(KINDS) + 1))
    core = hybrid_engine(target, proposers=[watching], method="auto")
    run_engine(core, PROMPTS, GREEDY)
    last, normed = torch.cat(watching.seen).unbind(1)
    torch.testing.assert_close(target.weights.norm(last), normed)


@pytest.mark.usefixtures("one_thread_afterwards")
def test_engines_report_the_same(models: Models) -> None:
    """Rounds share steps, sequences give way, and rows that C does not run come in between."""
    params = [GREEDY, COUPLED, structs.replace(REJECTION, verification="block"), CUT, GREEDY]
    ours, theirs = twins(models, "few tokens", max_rounds=5, num_threads=2)
    for core in (ours, theirs):
        for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
            pool.__init__(26, 4, lookahead=pool.lookahead)  # type: ignore[misc]
    (told, num_steps), (expected, their_steps) = (run(core, params, PROMPTS) for core in (ours, theirs))
    # Who gives way, and when, is not the same: a sequence that is computed anew drafts nothing at first.
    assert [(one.token_ids, one.ended) for one in told] == [(one.token_ids, one.ended) for one in expected]
    assert num_steps < their_steps
    assert max(core.scheduler.num_preemptions for core in (ours, theirs)) > 0


def test_a_row_without_a_verdict_keeps_what_rounds_before_have_emitted(models: Models) -> None:
    """The request ends, and others go on."""
    ours, theirs = twins(models, "norms", max_rounds=4)
    for core in (ours, theirs):
        embeddings = core.target.model.weights.embeddings
        assert isinstance(embeddings, DenseEmbeddings)
        with torch.inference_mode():
            embeddings.weight[11] = torch.nan  # what follows this token is nothing
    (told, _), (expected, _) = (run(core, [GREEDY, COUPLED], PROMPTS) for core in (ours, theirs))
    assert told == expected
    assert any("no distribution" in (one.ended or "") and one.num_rounds > 2 for one in told)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_target_with_states_of_its_own(kind: str) -> None:
    """Its layers take drafts back by their logs. The head reads what a recurrent layer makes of tokens, or
    the last norm of all."""
    targets = [hybrid(kinds=(*KINDS, "MLP"), in_c=True, vocab_size=VOCAB_SIZE) for _ in range(2)]
    ours, theirs = (
        hybrid_engine(target, hybrid_head(target, kind), method="auto", num_speculative_tokens=4)
        for target in targets
    )
    for core, rounds in ((ours, 4), (theirs, 1)):
        use_planner(core, FixedPlanner(max_rounds=rounds))
        phases_of(core).step_seconds = LONG
    params = [structs.replace(own, max_tokens=60) for own in (GREEDY, COUPLED)]
    (told, num_steps), (expected, their_steps) = (run(core, params, PROMPTS) for core in (ours, theirs))
    assert told == expected
    assert num_steps < their_steps
    assert ours.stats.num_draft_tokens > 100
