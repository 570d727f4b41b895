"""Heads draft inside rounds in C what they draft by phases: caches and what waits have the same bits."""

from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.engine.hybrid_models import KINDS, hybrid, hybrid_engine, hybrid_head
from tests.engine.native_pair import VOCAB_SIZE, make_twins
from tests.engine.planners import FixedPlanner, phases_of, use_planner
from tests.engine.test_eagle import HIDDEN
from tests.engine.test_eagle import SHAPES as OF_LAYOUTS
from tests.engine.test_native import plant
from tests.engine.test_native_rounds import run
from tests.heads import Shape, fitted, random_head, save_head
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine.core.draft_choice import DraftChoice
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import EVERY_NEED
from truedraft.engine.core.proposer import Observation, Proposer
from truedraft.engine.core.runner import Runner
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import StepPlan, StepResult
from truedraft.engine.layers.linear import DenseEmbeddings
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput
from truedraft.engine.native import compiler
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.runtime.native.runner import NativeRunner
from truedraft.engine.runtime.phases import PhaseRunner
from truedraft.engine.sampling.sampler import Drafts, Sampler

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


def run_in_step(
    ours: EngineCore, theirs: EngineCore, params: list[SamplingParams]
) -> list[TokenOutput | Failed]:
    """Runs two engines whose steps have one round each, and compares all that each step leaves."""
    for number, (prompt, own) in enumerate(zip(PROMPTS, cycle(params), strict=False)):
        for core in (ours, theirs):
            core.add(Generate(str(number), prompt, own))
    reports: list[TokenOutput | Failed] = []
    while theirs.has_work:
        reported, expected = (
            [
                structs.replace(output, queue_seconds=None) if isinstance(output, TokenOutput) else output
                for output in core.step()
            ]
            for core in (ours, theirs)
        )
        assert reported == expected
        reports += reported
        for one, other in zip(state_of(ours), state_of(theirs), strict=True):
            assert torch.equal(one, other)
    assert not ours.has_work
    assert ours.stats.drafts == theirs.stats.drafts
    return reports


def twins(models: Models, shape: str, max_rounds: int = 1, **config: Any) -> tuple[EngineCore, EngineCore]:
    """Makes an engine whose rounds run in C, ``max_rounds`` a step, and one that takes them by phases."""
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
def test_each_round_is_that_of_phases(models: Models, shape: str, params: list[SamplingParams]) -> None:
    ours, theirs = twins(models, shape)
    run_in_step(ours, theirs, params)
    assert 0 < ours.stats.num_accepted_tokens < ours.stats.num_draft_tokens
    assert set(ours.stats.num_rows) == {"c"}


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


def test_others_that_follow_the_target_keep_steps_to_the_phases(models: Models) -> None:
    """C tells nobody but the head."""
    core = make_engine(models.target, models.heads["plain"], [Watching()], method="auto")
    assert isinstance(core.runner, PhaseRunner)


@dataclass
class InTurns:
    """Runs every third step by phases."""

    supports = EVERY_NEED

    native: NativeRunner
    phases: Runner
    num_steps: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        return (self.native if self.num_steps % 3 else self.phases).run(plan)


def test_steps_by_phases_may_come_between(models: Models) -> None:
    """Neither way loses what waits. The second time prompts are found in the caches, as far as they go."""
    ours, theirs = twins(models, "few tokens", max_num_batched_tokens=30)
    assert isinstance(ours.runner, NativeRunner)
    ours.runner = InTurns(ours.runner, ours.runner.phases)
    for _ in range(2):
        run_in_step(ours, theirs, [GREEDY, COUPLED, REJECTION])
    assert min(ours.stats.num_rows.values()) > 10
    assert ours.scheduler.num_prefix_hits > 30


class Seldom(FixedPlanner):
    """Plans drafts after every fiftieth token only, and plain rounds else."""

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        return super().choose_for_prompt(sequence) if len(sequence) % 50 == 49 else DraftChoice()


def test_states_wait_while_nothing_is_drafted(models: Models) -> None:
    """They are stored when there are many: those of a prompt, and of rounds without drafts."""
    ours, theirs = twins(models, "plain")
    for core in (ours, theirs):
        use_planner(core, Seldom())
    run_in_step(
        ours, theirs, [structs.replace(GREEDY, max_tokens=80), structs.replace(COUPLED, max_tokens=70)]
    )
    assert set(ours.stats.num_rows) == {"c"}
    assert 10 < ours.stats.num_draft_tokens < 60


@pytest.mark.usefixtures("one_thread_afterwards")
def test_engines_report_the_same(models: Models) -> None:
    """Rounds share steps, sequences give way, and rows that C does not run come in between."""
    params = [GREEDY, COUPLED, structs.replace(REJECTION, verification="block"), CUT, GREEDY]
    ours, theirs = twins(models, "few tokens", max_rounds=5, num_threads=2)
    for core in (ours, theirs):
        for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
            pool.__init__(26, 4, lookahead=pool.lookahead)  # type: ignore[misc]
    (told, num_steps), (expected, their_steps) = (run(core, params, PROMPTS) for core in (ours, theirs))
    assert told == expected
    assert num_steps < their_steps
    assert min(core.scheduler.num_preemptions for core in (ours, theirs)) > 0


def test_a_round_without_a_verdict_leaves_what_waits(models: Models) -> None:
    """Phases run it anew and draft the same; the request ends, and others go on."""
    ours, theirs = twins(models, "norms", max_rounds=4)
    for core in (ours, theirs):
        embeddings = core.target.model.weights.embeddings
        assert isinstance(embeddings, DenseEmbeddings)
        with torch.inference_mode():
            embeddings.weight[11] = torch.nan  # what follows this token is nothing
    (told, _), (expected, _) = (run(core, [GREEDY, COUPLED], PROMPTS) for core in (ours, theirs))
    assert told == expected
    assert any("no distribution" in (one.ended or "") and one.num_rounds > 2 for one in told)
    assert 0 < ours.stats.num_rows["phases"] < ours.stats.num_rows["c"]


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_target_with_states_of_its_own(kind: str) -> None:
    """Its layers take drafts back by their logs. The head reads what a recurrent layer makes of tokens, or
    the last norm of all."""
    targets = [hybrid(kinds=(*KINDS, "MLP"), in_c=True, vocab_size=VOCAB_SIZE) for _ in range(2)]
    ours, theirs = (
        hybrid_engine(target, hybrid_head(target, kind), method="auto", num_speculative_tokens=4)
        for target in targets
    )
    for core in (ours, theirs):
        assert isinstance(core.runner, NativeRunner)
        use_planner(core, FixedPlanner())
    theirs.runner = phases_of(theirs)
    run_in_step(ours, theirs, [structs.replace(own, max_tokens=60) for own in (GREEDY, COUPLED)])
    assert ours.stats.num_rows["phases"] <= 5  # a step with a prompt too long for logs of states
    assert ours.stats.num_draft_tokens > 100


# Planted bugs: what is right, and what is wrong.
KEEP = "memcpy(row->waiting + end * size, fused - num_kept * size, num_kept * size * sizeof(float));"
BUGS = {
    "keeps its own state after acceptance": (
        KEEP,
        f"{KEEP} if (num_accepted[i]) memcpy(row->waiting, scratch->next_states + i * size, 4 * size);",
    ),
    "a state comes with its own token": (
        "i = first; i < sequence->num_tokens; i++",
        "i = first - 1; i < sequence->num_tokens - 1; i++",
    ),
    "the first of several states is left out": (
        "scratch->tapped + first * width",
        "scratch->tapped + (first + (count > 1)) * width",
    ),
    "scatters by absolute ids": ("padded[ids[i]] = logits[i]", "padded[i] = logits[i]"),
    "feeds another row's state": ("scratch->next_states + row * size", "scratch->next_states"),
    "stores drafts a place behind": ("- is_head(drafter) + position;", "+ position;"),
    "stores states with their own tokens": (
        "i, told.first, count, scratch",
        "i, told.first - 1, count, scratch",
    ),
}


@pytest.mark.parametrize(("right", "wrong"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(
    models: Models, right: str, wrong: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        run_in_step(*twins(models, "few tokens"), [GREEDY, COUPLED])
