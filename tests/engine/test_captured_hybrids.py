"""Captured rounds of models with running states say what phases say, and leave the same states.

Tapes stand in for CUDA graphs and ``torch_kernels`` for those in Triton, as in ``test_round_graphs``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine import torch_kernels
from tests.engine.graph_gates import graphs_of
from tests.engine.hybrid_models import KINDS, VOCAB_SIZE, hybrid, hybrid_engine
from tests.models import run_engine
from tests.tape import TapeCapture
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span, StateRows
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.rounds.capture import graphs as graphs_module
from truedraft.engine.rounds.capture import plan
from truedraft.engine.rounds.capture.graphs import ScorePass
from truedraft.engine.rounds.capture.rows import DeviceRows
from truedraft.engine.rounds.round import RoundRunner
from truedraft.engine.rows.columns import Field

Patch = pytest.MonkeyPatch
ATTENTION = ("attention", "attention")
PROMPTS = [
    [(5 * i * i + i + 7 * number) % VOCAB_SIZE for i in range(length)]
    for number, length in enumerate((1, 16, 40, 18))
]
PARAMS = [
    SamplingParams(max_tokens=18, temperature=0),
    SamplingParams(max_tokens=18, temperature=0.9, seed=1, verification="rejection"),
    SamplingParams(max_tokens=18, temperature=0.9, seed=2, verification="block"),
    SamplingParams(max_tokens=18, temperature=1.2, seed=3),
]
ARRIVALS = [0, 1, 3, 5]


@pytest.fixture(autouse=True)
def taped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(plan, "make_capture", TapeCapture)


def engine(
    of_target: tuple[str, ...] = KINDS, of_draft: tuple[str, ...] | None = KINDS, **config: Any
) -> EngineCore:
    target = hybrid(kinds=of_target, kernels=torch_kernels)
    draft = None if of_draft is None else hybrid(kinds=of_draft, noise=0.05, kernels=torch_kernels)
    # Prompts come in pieces, some of which are rows of captured passes, and others take the rows along.
    limits = {"max_num_sequences": 3, "num_speculative_tokens": 3, "max_num_batched_tokens": 19}
    config = limits | config
    return hybrid_engine(target, draft, native_kernels=False, **config)


def same(graphed: EngineCore, eager: EngineCore, num_texts: int = 4) -> None:
    """Runs texts that are folded, in rounds whose drafts are taken back, and compares what is left."""
    before = graphs_of(graphed).num_replays
    texts = PROMPTS[:num_texts], PARAMS[:num_texts], ARRIVALS[:num_texts]
    expected = run_engine(eager, *texts)
    assert run_engine(graphed, *texts) == expected
    assert graphs_of(graphed).num_replays > before
    assert vars(graphed.stats)["_verdicts"] == vars(eager.stats)["_verdicts"]
    assert 0 < eager.stats.num_accepted_tokens < eager.stats.num_draft_tokens
    same_states(graphed, eager)


def same_states(graphed: EngineCore, eager: EngineCore) -> None:
    for ours, theirs in zip(models_of(graphed), models_of(eager), strict=True):
        for layer, state in ours.cache.states.items():
            wanted = theirs.cache.states[layer].state
            is_used = wanted.flatten(1).any(1)  # the comparison at start has used more
            torch.testing.assert_close(state.state[is_used], wanted[is_used], rtol=1e-3, atol=1e-3)


def models_of(core: EngineCore) -> list[Any]:
    return [model for model in (core.target, core.draft) if model is not None]


def test_same_tokens_and_states() -> None:
    core, eager = engine(), engine(cuda_graphs=False)
    assert isinstance(eager.runner, RoundRunner)
    assert eager.runner.graphs is None
    assert graphs_of(core).draft is not None
    same(core, eager)
    same(core, eager, 3)  # with snapshots, from which texts go on
    assert core.scheduler.num_prefix_hits == eager.scheduler.num_prefix_hits > 0
    assert graphs_of(core).num_misses == 0


SMALL = ("Mamba 2", "attention")


@pytest.mark.parametrize(("of_target", "of_draft"), [(SMALL, ATTENTION), (ATTENTION, SMALL)])
def test_one_of_a_pair_has_states(of_target: tuple[str, ...], of_draft: tuple[str, ...]) -> None:
    same(engine(of_target, of_draft), engine(of_target, of_draft, cuda_graphs=False), 2)


def test_few_slots_leave_rows_that_are_compared() -> None:
    """The comparison at start has one text for each slot at most."""
    core = engine(of_draft=None, cache_memory="300KiB", num_speculative_tokens=0, max_num_sequences=3)
    pool = core.scheduler.target_pool
    assert pool.states is not None
    assert pool.states.num_slots < 3
    assert graphs_of(core).replays


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_piece_of_a_prompt_folds(is_forgotten: bool, monkeypatch: Patch) -> None:
    """The last two of 34 tokens go along with a row that decodes, in a captured pass. If the device does not
    hear what is to be folded then, it shows in the states."""
    run, set_states = ScorePass.run, DeviceRows.set_states
    scored: list[tuple[int, int]] = []

    def watched(self: ScorePass, shape: Any, spans: list[Span], *given: Any) -> Any:
        scored.extend((len(span.token_ids), span.certain) for span in spans)
        return run(self, shape, spans, *given)

    def told(self: DeviceRows, cache: int, row: int, table: BlockTable, num_certain: int) -> None:
        set_states(self, cache, row, table, 0 if is_forgotten else num_certain)

    monkeypatch.setattr(ScorePass, "run", watched)
    monkeypatch.setattr(DeviceRows, "set_states", told)
    texts = [PROMPTS[0], PROMPTS[2][:34]], [PARAMS[0]] * 2, [0, 2]
    limits = {"num_speculative_tokens": 1, "max_num_batched_tokens": 17}
    core, eager = (engine(SMALL, None, cuda_graphs=captured, **limits) for captured in (True, False))

    def compare() -> None:
        assert run_engine(core, *texts) == run_engine(eager, *texts)
        same_states(core, eager)

    if is_forgotten:
        with pytest.raises(AssertionError):
            compare()
    else:
        compare()
    assert (2, 34) in scored


# Bugs.


def changed_rows(patch: Patch, **fields: Callable[[StateRows], torch.Tensor]) -> None:
    states = DeviceRows.states

    def changed(self: DeviceRows, *given: Any) -> StateRows:
        made = states(self, *given)
        told = {name: getattr(made, name) for name in StateRows.__slots__}
        return StateRows(**told | {name: change(made) for name, change in fields.items()})

    patch.setattr(DeviceRows, "states", changed)


def every_pass_of_a_draft_folds(patch: Patch) -> None:
    def go_on(self: DeviceRows, num_rows: int) -> None:
        self.field(num_rows, Field.NUM_STORED).add_(1)
        self.field(num_rows, Field.NUM_SKIPPED).fill_(1)

    patch.setattr(DeviceRows, "go_on", go_on)


def nothing_is_folded(patch: Patch) -> None:
    changed_rows(patch, num_folded_after=lambda rows: rows.num_folded)


def slots_are_those_of_the_rows(patch: Patch) -> None:
    changed_rows(patch, slots=lambda rows: torch.arange(len(rows.slots)))


def states_are_said_to_be_folded_already(patch: Patch) -> None:
    changed_rows(patch, num_folded=lambda rows: rows.num_folded_after)


BUGS = [
    every_pass_of_a_draft_folds,
    nothing_is_folded,
    slots_are_those_of_the_rows,
    states_are_said_to_be_folded_already,
]


@pytest.fixture(scope="module")
def eager() -> EngineCore:
    return engine(SMALL, SMALL, cuda_graphs=False)


@pytest.mark.parametrize("plant", BUGS)
def test_tokens_or_states_show(plant: Callable[[Patch], None], eager: EngineCore, monkeypatch: Patch) -> None:
    monkeypatch.setattr(graphs_module, "_is_right", lambda *_: True)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        same(engine(SMALL, SMALL), eager)
