"""Heads draft within captured rounds what they draft by phases, and their caches and what waits are the same.

Tapes stand in for CUDA graphs and ``torch_kernels`` for those in Triton, as in ``test_round_graphs``.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.graph_gates import LATE, PROMPTS, graphs_of
from tests.engine.planners import FixedPlanner, use_planner
from tests.engine.test_mtp import OTHERS, save_other
from tests.engine.test_round_graphs import PARAMS, PENALTIES, Watched, few_shapes, is_uncaptured, kernels_for
from tests.heads import Shape, fitted, random_head, save_head
from tests.models import make_engine, run_engine, save_random_llama, stepped
from tests.tape import TapeCapture
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import DraftChoice
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models import agreement
from truedraft.engine.models.base import Model
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.rounds import round as round_module
from truedraft.engine.rounds.capture import graphs as graphs_module
from truedraft.engine.rounds.capture import plan as plan_module
from truedraft.engine.rounds.capture.graphs import ScorePass
from truedraft.engine.rounds.capture.head_passes import HeadPasses

Patch = pytest.MonkeyPatch
SETTINGS: dict[str, Any] = {
    "method": "eagle",
    "native_kernels": False,
    "max_num_sequences": 3,
    "num_speculative_tokens": 3,
}
HIDDEN, VOCAB_SIZE = 32, 16
# Three of the target's tokens are never drafted, and layers are not read in order.
SHAPE = Shape(HIDDEN, VOCAB_SIZE, (*range(11), 13, 15), (3, 2, 4), has_parts=True, norm_output=True)
GREEDY = SamplingParams(max_tokens=12, temperature=0)
EVERY = [msgspec.structs.replace(each, max_tokens=10) for each in PARAMS["every rule"]]
MORE = [msgspec.structs.replace(each, max_tokens=6) for each in PENALTIES]
MORE[1] = msgspec.structs.replace(MORE[1], method="none")
MORE[2] = msgspec.structs.replace(MORE[2], method="ngram")
TRACED = msgspec.structs.replace(EVERY[1], trace=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Makes a target, and a head that has learned its greedy texts."""
    root = tmp_path_factory.mktemp("heads")
    target = save_random_llama(root / "target", 1, VOCAB_SIZE, layers=5, hidden=HIDDEN)
    texts = run_engine(make_engine(target, None), PROMPTS, GREEDY)
    whole = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    return target, save_head(root / "head", fitted(random_head(SHAPE, target), target, whole))


@pytest.fixture
def taped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(plan_module, "make_capture", TapeCapture)
    monkeypatch.setattr(agreement, "find_kernels", kernels_for)


def engines(folders: tuple[str, str], **config: Any) -> tuple[EngineCore, EngineCore]:
    settings = SETTINGS | config
    graphed, eager = (
        make_engine(*folders, cuda_graphs=is_captured, **settings) for is_captured in (True, False)
    )
    assert is_uncaptured(eager)
    return graphed, eager


@pytest.fixture(scope="module")
def pair(folders: tuple[str, str]) -> tuple[EngineCore, EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "make_capture", TapeCapture)
        patch.setattr(agreement, "find_kernels", kernels_for)
        return engines(folders)


def what_the_head_has(core: EngineCore) -> Iterator[torch.Tensor]:
    """Yields the states that wait, and what the cache has, of all sequences that run."""
    (proposer,) = core.scheduler.proposers
    assert isinstance(proposer, HeadProposer)
    cache = proposer.runner.cache
    for sequence in core.scheduler.running:
        if proposer.name not in sequence.sources:
            continue
        yield proposer.waiting(sequence, sequence.target_blocks.num_computed_tokens).known
        table = proposer.cache.table(sequence)
        starts = torch.tensor(table.block_ids, dtype=torch.int64)[:, None] * cache.block_size
        slots = (starts + torch.arange(cache.block_size)).flatten()[: table.num_computed_tokens]
        yield from (layer[slots] for layer in (*cache.keys, *cache.values))


def same_in_each_step(
    graphed: EngineCore,
    eager: EngineCore,
    params: Sequences[SamplingParams],
    arrivals: Sequences[int] = LATE,
    cache_prompt: bool = False,
) -> list[list[int]]:
    """Runs both step by step, and compares all that each step leaves. Returns their texts."""
    texts: list[list[int]] = [[] for _ in arrivals]
    for step in count():
        for number, arrival in enumerate(arrivals):
            if arrival == step:
                for core in (graphed, eager):
                    core.add(
                        Generate(str(number), PROMPTS[number], params[number], cache_prompt=cache_prompt)
                    )
        if not eager.has_work:
            break
        ours, theirs = (
            [(one.request_id, one.token_ids) for one in stepped(core)] for core in (graphed, eager)
        )
        assert ours == theirs
        for name, token_ids in theirs:
            texts[int(name)] += token_ids
        for one, other in zip(what_the_head_has(graphed), what_the_head_has(eager), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    return texts


def same(graphed: EngineCore, eager: EngineCore, *given: Any, **named: Any) -> list[list[int]]:
    """Compares all that each step leaves, and the verdicts that have been counted. Returns the texts."""
    before = graphs_of(graphed).num_replays
    texts = same_in_each_step(graphed, eager, *given, **named)
    assert graphs_of(graphed).num_replays > before
    assert vars(graphed.stats)["_verdicts"] == vars(eager.stats)["_verdicts"]
    assert 0 < eager.stats.num_accepted_tokens < eager.stats.num_draft_tokens
    return texts


def test_same_drafts_verdicts_and_states(pair: tuple[EngineCore, EngineCore], monkeypatch: Patch) -> None:
    """The target passes once a step, also where prompts arrive."""
    # What earlier passes have left where no row of this one is must not matter.
    tapped = graphs_of(pair[0]).tapped
    assert tapped is not None
    tapped.fill_(torch.nan)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        same(*pair, EVERY)
    assert set(pair[0].stats.num_rows) == {"cuda_graphs", "phases"}  # prompts go by phases
    assert set(watched.passes) == {1}
    assert graphs_of(pair[0]).num_misses == 0


def test_rows_that_ask_for_more_or_do_not_draft(pair: tuple[EngineCore, EngineCore]) -> None:
    assert run_engine(pair[0], PROMPTS, MORE, LATE) == run_engine(pair[1], PROMPTS, MORE, LATE)


def test_preemption_and_prefix_hits(folders: tuple[str, str], taped: None) -> None:
    core, eager = engines(folders, max_num_sequences=5)
    for each in (core, eager):
        for pool in (each.scheduler.target_pool, *each.scheduler.draft_pools):
            pool.__init__(18, 4, lookahead=pool.lookahead)  # type: ignore[misc]
    for params in (EVERY, [msgspec.structs.replace(each, max_tokens=5) for each in EVERY]):
        same(core, eager, params, [0] * 5, cache_prompt=True)
    assert core.scheduler.num_preemptions > 0
    assert core.scheduler.num_prefix_hits > 0


def test_steps_without_captured_passes_and_traced_rows_hand_over(
    folders: tuple[str, str], taped: None, monkeypatch: Patch
) -> None:
    """Batches go in parts, too, whose states lie in the same place one after the other."""
    few_shapes(monkeypatch, rows=2)
    core, eager = engines(folders, max_num_batched_tokens=13)
    graphs, step, steps = graphs_of(core), EngineCore.step, count()

    def in_turns(self: EngineCore) -> Any:
        if self is core:
            graphs.enabled = next(steps) % 3 != 2
        return step(self)

    monkeypatch.setattr(EngineCore, "step", in_turns)
    same(core, eager, [EVERY[0], TRACED, *EVERY[2:]])
    assert min(core.stats.num_rows.values()) > 5


class Seldom(FixedPlanner):
    """Plans drafts after every eighth token only, and plain rounds else."""

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        return super().choose_for_prompt(sequence) if len(sequence) % 8 == 7 else DraftChoice()


@pytest.mark.parametrize("is_captured", [True, False])
def test_states_wait_while_nothing_is_drafted(
    is_captured: bool, folders: tuple[str, str], taped: None, monkeypatch: Patch
) -> None:
    """More of them wait than a captured pass takes. A head that cannot be captured drafts by phases, and is
    told what captured passes compute of rows that do not draft."""
    can, answers = plan_module._can_be_captured, chain([True, is_captured], repeat(False))
    monkeypatch.setattr(plan_module, "_can_be_captured", lambda model: can(model) and next(answers))
    cores = engines(folders, max_num_sequences=2)
    for core in cores:
        use_planner(core, Seldom())
    same(*cores, [GREEDY, EVERY[2]], [0, 2])
    assert (graphs_of(cores[0]).head is not None) == is_captured
    assert cores[0].stats.num_rows["cuda_graphs"] > 8


def test_the_host_reads_once_a_round(pair: tuple[EngineCore, EngineCore], monkeypatch: Patch) -> None:
    """It launches no pass that is not captured, the head's neither."""
    core = pair[0]
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        honest = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, name: str = name, honest: Callable[..., Any] = honest) -> Any:
            reads.append(name)
            return honest(self)

        monkeypatch.setattr(torch.Tensor, name, read)
    for params in EVERY:
        core.add(Generate("0", [1, 2, 3], msgspec.structs.replace(params, max_tokens=6)))
        core.step()  # the prompt
        with monkeypatch.context() as patch:
            patch.setattr(Model, "forward", None)
            while core.has_work:
                reads.clear()
                core.step()
                assert reads == ["tolist"]


def states_are_rolled(patch: Patch, by: int) -> None:
    run = ScorePass.run

    def rolled(self: ScorePass, *given: Any) -> Any:
        output = run(self, *given)
        return output._replace(hidden=output.hidden.roll(by, 0))

    patch.setattr(ScorePass, "run", rolled)


def states_are_those_of_tokens_before(patch: Patch) -> None:
    states_are_rolled(patch, 1)


def states_are_those_of_tokens_after(patch: Patch) -> None:
    states_are_rolled(patch, -1)


def states_of_rejected_drafts_stand(patch: Patch) -> None:
    standing = round_module._standing

    def all_of_them(plan: Any, scored: Any, drafts: Any, verdicts: Any) -> Any:
        verdicts = [
            each._replace(num_accepted=length) for each, length in zip(verdicts, drafts.lengths, strict=True)
        ]
        return standing(plan, scored, drafts, verdicts)

    patch.setattr(round_module, "_standing", all_of_them)


def states_come_with_their_own_tokens(patch: Patch) -> None:
    feed = HeadPasses.feed

    def fed(self: HeadPasses, rows: Any, spans: Any) -> None:
        for span in spans:
            span.token_ids = [0, *span.token_ids[:-1]]
        feed(self, rows, spans)

    patch.setattr(HeadPasses, "feed", fed)


def its_own_state_is_lost(patch: Patch) -> None:
    run = HeadPasses.run

    def lost(self: HeadPasses, *given: Any) -> None:
        run(self, *given)
        self.own.zero_()

    patch.setattr(HeadPasses, "run", lost)


def drawn_tokens_are_not_looked_up(patch: Patch) -> None:
    packed_ids = round_module._packed_ids
    patch.setattr(round_module, "_packed_ids", lambda *given: packed_ids(*given).clamp(max=0))


BUGS = [
    states_are_those_of_tokens_before,
    states_are_those_of_tokens_after,
    states_of_rejected_drafts_stand,
    states_come_with_their_own_tokens,
    its_own_state_is_lost,
    drawn_tokens_are_not_looked_up,
]


@pytest.mark.parametrize("plant", BUGS)
def test_planted_bugs_show(
    plant: Callable[[Patch], None],
    pair: tuple[EngineCore, EngineCore],
    folders: tuple[str, str],
    taped: None,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(graphs_module, "_is_right", lambda *_: True)
    plant(monkeypatch)
    core = make_engine(*folders, **SETTINGS)
    assert graphs_of(core).head is not None
    with pytest.raises(AssertionError):
        same_in_each_step(core, pair[1], EVERY)
    pair[1].reset()


def test_the_comparison_at_start_looks_at_the_head(
    folders: tuple[str, str], taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    its_own_state_is_lost(monkeypatch)
    core = make_engine(*folders, native_kernels=False, method="eagle", max_num_sequences=1)
    assert is_uncaptured(core)
    assert "differ from the usual pass" in caplog.text


@pytest.mark.parametrize("name", ["Qwen3-Next", "GLM-4.7-Flash"])
def test_the_heads_of_models_with_experts(name: str, tmp_path: Path, taped: None) -> None:
    """Targets keep states of their own, or latent vectors, as the head does then; the head was not trained,
    and little is accepted."""
    target, _ = save_other(tmp_path / "target", OTHERS[name])
    graphed, eager = engines((target, "mtp"), method="mtp", max_num_sequences=2)
    assert graphs_of(graphed).head is not None
    texts = PROMPTS[:3], [msgspec.structs.replace(each, max_tokens=6) for each in EVERY[:3]], LATE[:3]
    assert run_engine(graphed, *texts) == run_engine(eager, *texts)
    assert graphed.stats.num_draft_tokens == eager.stats.num_draft_tokens > 10
