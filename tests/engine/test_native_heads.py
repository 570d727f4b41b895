"""Heads draft inside rounds in C: what phases draft and emit, and the same bits in caches and in what waits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from msgspec import structs

from tests.engine.native_pair import VOCAB_SIZE, make_twins, native_runner
from tests.engine.planners import FixedPlanner, phases_of, use_planner
from tests.engine.test_native import plant
from tests.heads import Shape, fitted, random_head, save_head
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine.core.draft_choice import DraftChoice
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import Needs
from truedraft.engine.core.runner import Runner
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import MAX_CATCH_UP_TOKENS, StepPlan, StepResult
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput
from truedraft.engine.native import compiler
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.runtime.native.runner import NativeRunner

pytestmark = pytest.mark.usefixtures("needs_compiler")

HIDDEN = 64
MOST = tuple(range(0, VOCAB_SIZE, 2)) + (1, 3, 5)
SHAPES = {
    "plain": Shape(HIDDEN, VOCAB_SIZE),
    "few tokens": Shape(HIDDEN, VOCAB_SIZE, MOST, (2, 3), has_parts=True, norm_before_residual=True),
    "norms": Shape(HIDDEN, VOCAB_SIZE, MOST, (3, 2, 4), fc_norm=True, norm_before_fc=True, norm_output=True),
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


def state_of(core: EngineCore) -> Iterator[torch.Tensor]:
    """Yields what the engine's caches and its head have of all sequences that run."""
    proposer = proposer_of(core)
    for sequence in core.scheduler.running:
        tables = [(core.target, sequence.target_blocks)]
        if proposer.name in sequence.sources:
            tables.append((proposer.runner, proposer.cache.table(sequence)))
            waiting = proposer.waiting(sequence, sequence.target_blocks.num_computed_tokens)
            yield waiting.known
        for runner, table in tables:
            starts = torch.tensor(table.block_ids, dtype=torch.int64)[:, None] * runner.cache.block_size
            slots = (starts + torch.arange(runner.cache.block_size)).flatten()[: table.num_computed_tokens]
            yield from (layer[slots] for layer in (*runner.cache.keys, *runner.cache.values))


def add(core: EngineCore, params: list[SamplingParams]) -> None:
    for number, (prompt, own) in enumerate(zip(PROMPTS, cycle(params), strict=False)):
        core.add(Generate(str(number), prompt, own))


def run_in_step(ours: EngineCore, theirs: EngineCore, params: list[SamplingParams]) -> None:
    """Runs two engines whose steps have one round each, and compares all that each step leaves."""
    for core in (ours, theirs):
        add(core, params)
    while theirs.has_work:
        reported, expected = (
            [structs.replace(output, queue_seconds=None) for output in core.step()] for core in (ours, theirs)
        )
        assert reported == expected
        for one, other in zip(state_of(ours), state_of(theirs), strict=True):
            assert torch.equal(one, other)
    assert not ours.has_work
    assert ours.stats.drafts == theirs.stats.drafts


def twins(models: Models, shape: str, max_rounds: int = 1) -> tuple[EngineCore, EngineCore]:
    return make_twins(models.target, models.heads[shape], max_rounds, method="auto", num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ("plain", [GREEDY, COUPLED, REJECTION]),
        ("few tokens", [GREEDY, COUPLED, REJECTION, CUT]),
        ("norms", [GREEDY, COUPLED, REJECTION, CUT]),
        ("few tokens", ADJUSTED),
    ],
)
def test_each_round_is_that_of_phases(models: Models, shape: str, params: list[SamplingParams]) -> None:
    ours, theirs = twins(models, shape)
    run_in_step(ours, theirs, params)
    assert 0 < ours.stats.num_accepted_tokens < ours.stats.num_draft_tokens
