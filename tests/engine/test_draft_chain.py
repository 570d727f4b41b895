"""Draft chains draft what the loop drafts, and store it where the loop does; a way back if they do not.

On a CPU a tape stands in for CUDA graphs (``tests.tape``). ``test_cuda`` runs the same gates on real graphs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import tests.models
from engine import graph_plan
from engine.core.block_pool import BlockTable
from engine.core.engine import EngineCore
from engine.messages import SamplingParams
from engine.models import draft_chain, step_buckets
from engine.models.chain_inputs import ChainBucket, ChainInputs, ChainPass, ChainShape, fitting, plan_chains
from engine.models.draft_chain import DraftChain
from engine.models.graph_capture import Capture
from engine.models.step_graphs import StepGraphs
from engine.proposers.draft_model import DraftModelProposer
from engine.sampling import captured_draw
from engine.sampling.adjust import History
from engine.sampling.captured_draw import DrawKind, DrawRow, DrawTensors
from engine.sampling.random import captured_noise, counters, exponential_noise
from engine.sampling.sampler import Row, Rule, Sampler
from tests.engine import gates
from tests.engine.chain_gates import (
    CUTS,
    GREEDY,
    PROMPTS,
    ROWS,
    WARM,
    chain_of,
    proposer_of,
    same_as_the_loop,
    same_drafts_and_tokens,
    stored,
)
from tests.engine.conftest import Models
from tests.models import run_engine
from tests.tape import TapeCapture

Patch = pytest.MonkeyPatch
Engines = tuple[EngineCore, EngineCore]
# A tape holds torch's operations only. All that is planned is captured, however slow the machine is.
SETTINGS: dict[str, Any] = {"native_kernels": False, "max_num_sequences": 5, "cuda_graph_seconds": 600}


def make_engine(target: str, draft: str, **config: Any) -> EngineCore:
    return tests.models.make_engine(target, draft, **{**SETTINGS, **config})


def make_engines(
    models: Models,
    make: Callable[..., EngineCore] = make_engine,
    capture: Callable[[torch.device], Capture | None] = TapeCapture,
    **config: Any,
) -> Engines:
    """One with chains, and one without that is the same otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_plan, "make_capture", capture)
        patch.setattr(graph_plan, "plan_rounds", lambda *_: [])
        patch.setattr(step_buckets, "QUERIES", (1, 2))
        chained = make(models.target, models.close_draft, **config)
        patch.setattr(graph_plan, "plan_chains", lambda *_: [])
        loop = make(models.target, models.close_draft, **config)
    for core in (chained, loop):
        for part in stored(core):
            part.zero_()  # the texts of the comparison at start
    return chained, loop


@pytest.fixture(scope="module")
def engines(models: Models) -> Engines:
    """Idle, and without anything of earlier tests in their caches that could be found."""
    return make_engines(models, num_speculative_tokens=5, prefix_caching=False)


@pytest.fixture
def taped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(graph_plan, "make_capture", TapeCapture)
    monkeypatch.setattr(graph_plan, "plan_rounds", lambda *_: [])
    monkeypatch.setattr(step_buckets, "QUERIES", (1, 2))  # the chains are what matters here


@pytest.fixture
def unchecked(monkeypatch: Patch, taped: None) -> None:
    """The comparison at start finds every chain right."""
    monkeypatch.setattr(draft_chain, "_is_right", lambda *_: True)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_same_drafts_and_caches(rows: list[SamplingParams], models: Models, taped: None) -> None:
    same_as_the_loop(models.target, models.close_draft, rows, cuda_graph_seconds=600)


@pytest.mark.parametrize("draft", ["lacking_draft", "padded_draft"])
def test_draft_with_another_vocabulary(draft: str, models: Models, taped: None) -> None:
    same_as_the_loop(models.target, getattr(models, draft), ROWS["of all kinds"], cuda_graph_seconds=600)


def test_the_longest_draft(models: Models) -> None:
    lengths = [36, 36, 1, 1, 1]
    params = [
        msgspec.structs.replace(p, max_tokens=length)
        for p, length in zip([GREEDY, WARM] * 3, lengths, strict=False)
    ]
    same_drafts_and_tokens(*make_engines(models, num_speculative_tokens=32, max_num_sequences=1), params)


# Bugs: how they are planted, by hand or in what is captured.


def patch_pass(patch: Patch, change: Callable[[ChainPass], ChainPass]) -> None:
    honest = ChainInputs.batch

    def batch(self: ChainInputs, *arguments: Any) -> ChainPass:
        return change(honest(self, *arguments))

    patch.setattr(ChainInputs, "batch", batch)


def positions_one_too_far(patch: Patch) -> None:
    def change(inputs: ChainPass) -> ChainPass:
        inputs.batch.positions = inputs.batch.positions + 1
        return inputs

    patch_pass(patch, change)


def slots_one_too_far(patch: Patch) -> None:
    def change(inputs: ChainPass) -> ChainPass:
        inputs.batch.slots = inputs.batch.slots + 1
        return inputs

    patch_pass(patch, change)


def slots_without_the_table(patch: Patch) -> None:
    def change(inputs: ChainPass) -> ChainPass:
        inputs.batch.slots = inputs.batch.positions[0]
        return inputs

    patch_pass(patch, change)


def noise_of_the_position_before(patch: Patch) -> None:
    patch_pass(patch, lambda inputs: inputs._replace(drawn_positions=inputs.drawn_positions - 1))


def own_token_is_not_seen(patch: Patch) -> None:
    def change(inputs: ChainPass) -> ChainPass:
        (group,) = inputs.batch.groups
        group.query_positions = group.query_positions - 1
        return inputs

    patch_pass(patch, change)


def tables_and_numbers_are_frozen(patch: Patch) -> None:
    honest = ChainInputs.batch

    def captured(self: ChainInputs, *arguments: Any) -> ChainPass:
        with _disable_current_modes():
            return honest(self, *arguments)

    patch.setattr(ChainInputs, "batch", captured)


def short_rows_go_on(patch: Patch) -> None:
    honest = ChainInputs.send

    def send(
        self: ChainInputs,
        shape: ChainShape,
        tables: Sequence[BlockTable],
        num_passes: Sequence[int],
        rows: Sequence[DrawRow],
    ) -> None:
        honest(self, shape, tables, [max(num_passes)] * len(num_passes) if num_passes else [], rows)

    patch.setattr(ChainInputs, "send", send)


def padding_is_stored_in_slot_0(patch: Patch) -> None:
    honest = ChainInputs.batch

    def batch(self: ChainInputs, *arguments: Any) -> ChainPass:
        scratch, self.scratch_block = self.scratch_block, 0
        made = honest(self, *arguments)
        self.scratch_block = scratch
        return made

    patch.setattr(ChainInputs, "batch", batch)


def draws_are_not_read(patch: Patch) -> None:
    """Every pass of a chain has the first one's token."""
    honest = DraftChain._draw

    def draw(self: DraftChain, *arguments: Any) -> None:
        ids = self.ids
        self.ids = ids.clone()
        honest(self, *arguments)
        self.ids = ids

    patch.setattr(DraftChain, "_draw", draw)


def the_last_chain_goes_on(patch: Patch) -> None:
    """Nobody says that another one begins."""
    honest = DraftChain.replay

    def replay(self: DraftChain, *arguments: Any) -> torch.Tensor:
        num_done = self.num_done
        self.num_done = num_done.clone()
        drawn = honest(self, *arguments)
        self.num_done = num_done
        return drawn

    patch.setattr(DraftChain, "replay", replay)


def first_ids_of_the_last_chain(patch: Patch) -> None:
    honest = DraftChain.replay

    def replay(self: DraftChain, *arguments: Any) -> torch.Tensor:
        ids = self.ids
        self.ids = ids.clone()
        drawn = honest(self, *arguments)
        self.ids = ids
        return drawn

    patch.setattr(DraftChain, "replay", replay)


def replace_in_draw(patch: Patch, **columns: Callable[[DrawTensors], torch.Tensor]) -> None:
    honest = draft_chain.captured_draw

    def draw(kind: DrawKind, logits: torch.Tensor, rows: DrawTensors, *others: torch.Tensor) -> torch.Tensor:
        changed = {name: column(rows) for name, column in columns.items()}
        return honest(kind, logits, rows._replace(**changed), *others)

    patch.setattr(draft_chain, "captured_draw", draw)


def top_k_is_ignored(patch: Patch) -> None:
    replace_in_draw(patch, top_k=lambda rows: rows.top_k * 0)


def shares_are_mixed_up(patch: Patch) -> None:
    replace_in_draw(patch, top_p=lambda rows: rows.min_p, min_p=lambda rows: 1 - rows.top_p)


def greedy_rows_are_sampled(patch: Patch) -> None:
    replace_in_draw(patch, is_greedy=lambda rows: rows.is_greedy & False)


def one_seed_for_all(patch: Patch) -> None:
    replace_in_draw(patch, seeds=lambda rows: rows.seeds[:1].expand_as(rows.seeds))


BUGS = [
    positions_one_too_far,
    slots_one_too_far,
    slots_without_the_table,
    noise_of_the_position_before,
    own_token_is_not_seen,
    tables_and_numbers_are_frozen,
    short_rows_go_on,
    padding_is_stored_in_slot_0,
    draws_are_not_read,
    the_last_chain_goes_on,
    first_ids_of_the_last_chain,
    top_k_is_ignored,
    shares_are_mixed_up,
    greedy_rows_are_sampled,
    one_seed_for_all,
]
# Those that the comparison at start cannot see: it draws by the same function, and looks at new slots alone.
SUBTLE = [
    short_rows_go_on,
    padding_is_stored_in_slot_0,
    top_k_is_ignored,
    shares_are_mixed_up,
    greedy_rows_are_sampled,
    one_seed_for_all,
]


@pytest.mark.parametrize("plant", BUGS)
def test_gates_catch(
    plant: Callable[[Patch], None], models: Models, unchecked: None, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        same_as_the_loop(models.target, models.close_draft, ROWS["of all kinds"], cuda_graph_seconds=600)


@pytest.mark.parametrize("plant", [plant for plant in BUGS if plant not in SUBTLE])
def test_the_comparison_at_start_catches(
    plant: Callable[[Patch], None],
    models: Models,
    taped: None,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft)
    model = proposer_of(core).model
    assert model.draft_chain is None
    assert isinstance(model.graphs, StepGraphs)
    assert model.graphs.enabled
    assert "differ from the usual passes" in caplog.text
    run_engine(core, PROMPTS, GREEDY)
    assert core.stats.num_accepted_tokens > 0


def test_what_cannot_be_captured_is_drafted_in_the_loop(
    models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def looks(kind: DrawKind, logits: torch.Tensor, *others: object) -> torch.Tensor:
        return logits.new_tensor([int(row.argmax()) for row in logits], dtype=torch.int64)

    monkeypatch.setattr(draft_chain, "captured_draw", looks)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft)
    model = proposer_of(core).model
    assert model.draft_chain is None
    assert isinstance(model.graphs, StepGraphs)
    assert "Draft chains cannot be captured and are not used: operation not permitted" in caplog.text
    run_engine(core, PROMPTS, GREEDY)


# Whole engines.


def each(number: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=15 + 7 * number, seed=number, **fields)


PARAMS = {
    "greedy": [SamplingParams(max_tokens=40, temperature=0)] * 5,
    "seeded": [SamplingParams(max_tokens=40, temperature=1.1, seed=i) for i in range(5)],
    "ragged": [each(i, temperature=0.4 * i, num_speculative_tokens=1 + i) for i in range(5)],
    "ending early": [each(i, temperature=0.5, stop_token_ids=[3 * i, 7]) for i in range(5)],
    "cut": [each(i, temperature=0.9, top_k=3 * (i % 3), top_p=0.7 + 0.1 * (i % 4)) for i in range(5)],
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_same_drafts_and_tokens(params: list[SamplingParams], engines: Engines) -> None:
    same_drafts_and_tokens(*engines, params)


def test_same_drafts_with_preemption_and_prefix_hits(models: Models) -> None:
    # 30 blocks of 4 tokens in each cache, for five sequences of up to 57.
    chained, loop = make_engines(models, cache_memory=30 * 4 * 2 * 256)
    params = [msgspec.structs.replace(p, max_tokens=25) for p in PARAMS["seeded"]]
    same_drafts_and_tokens(chained, loop, params, arrivals=[0, 2, 4, 6, 8])
    same_drafts_and_tokens(chained, loop, params)
    assert chained.scheduler.num_preemptions > 0
    assert chained.scheduler.num_prefix_hits > 0


def test_beside_rows_that_others_draft_for(models: Models) -> None:
    config = {"num_speculative_tokens": 5, **SETTINGS}
    chained, loop = make_engines(models, gates.rotating_engine, **config)
    same_drafts_and_tokens(chained, loop, PARAMS["seeded"])
    assert set(chained.stats.drafts) == {"draft_model", "ngram"}


LOOPED = {
    "rejection": {"verification": "rejection"},
    "block": {"verification": "block"},
    "trace": {"trace": True},
    "penalty": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {3: 2.0}},
    "least length": {"min_tokens": 30},
}


@pytest.mark.parametrize("fields", LOOPED.values(), ids=LOOPED.keys())
def test_rows_that_ask_for_more_are_drafted_in_the_loop(fields: dict[str, Any], engines: Engines) -> None:
    """And so are those beside them."""
    chained, loop = engines
    params = [*PARAMS["seeded"][:4], SamplingParams(max_tokens=30, seed=9, **fields)]
    assert run_engine(chained, PROMPTS, params) == run_engine(loop, PROMPTS, params)
    others = chain_of(chained).num_replays
    assert run_engine(chained, PROMPTS[:1], params[4:]) == run_engine(loop, PROMPTS[:1], params[4:])
    assert chain_of(chained).num_replays == others


def test_a_round_of_the_usual_length_is_one_replay(models: Models, taped: None) -> None:
    core = make_engine(models.target, models.target, num_speculative_tokens=5, max_num_sequences=1)
    run_engine(core, [[1, 2, 3]], SamplingParams(max_tokens=1 + 5 * 6, temperature=0))
    # The first token is the prompt's; then five rounds of six.
    assert core.stats.num_draft_tokens == 25
    assert (chain_of(core).num_replays, chain_of(core).num_misses) == (5, 0)


def test_the_host_reads_no_draft_before_all_are_drawn(engines: Engines, monkeypatch: Patch) -> None:
    tolist, looks = torch.Tensor.tolist, [0, 0]

    def watch(number: int, proposer: DraftModelProposer) -> None:
        propose = proposer.propose

        def look(self: torch.Tensor) -> Any:
            looks[number] += 1
            return tolist(self)

        def watched(*arguments: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", look)
                return propose(*arguments)

        monkeypatch.setattr(proposer, "propose", watched)

    for number, core in enumerate(engines):
        watch(number, proposer_of(core))
        run_engine(core, PROMPTS, SamplingParams(max_tokens=12, temperature=0))
    assert looks[0] == 0 < looks[1]


def test_disabled_with_the_passes(engines: Engines, monkeypatch: Patch) -> None:
    chained, _ = engines
    monkeypatch.setattr(proposer_of(chained).model.graphs, "enabled", False)
    before = chain_of(chained).num_replays
    for core in engines:
        run_engine(core, PROMPTS, SamplingParams(max_tokens=12, temperature=0))
    assert chain_of(chained).num_replays == before


# Draws.


def test_captured_noise_is_the_noise() -> None:
    seeds, positions = torch.tensor([0, -7, 1 << 60]), torch.tensor([5, 0, 1 << 40])
    expected = exponential_noise(seeds, positions, 500)
    noise = captured_noise(seeds, positions, counters(500, torch.device("cpu")))
    assert torch.allclose(noise, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("vocab_size", [20, 3000])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_captured_draws_are_the_samplers(vocab_size: int, spread: float) -> None:
    draws_are_the_samplers(vocab_size, spread, torch.device("cpu"))


def draws_are_the_samplers(vocab_size: int, spread: float, device: torch.device) -> None:
    """Flat logits too, whose top-p needs more tokens than the usual way looks at first."""
    params = [GREEDY, WARM, *CUTS, msgspec.structs.replace(WARM, top_p=0.99)] * 8
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    logits = logits.to(device)
    rows = [
        Row(
            Rule.COUPLED if p.temperature else Rule.EXACT_MATCH,
            seed=number,
            history=History(p, [1] * (1 + number), 1, frozenset()),
        )
        for number, p in enumerate(params)
    ]
    sampler = Sampler(rows, vocab_size, device)
    expected = sampler.draw_drafts(logits, torch.zeros(len(rows), 2, dtype=torch.int64, device=device)).ids
    numbers = captured_draw.draw_rows(sampler)
    assert numbers is not None
    tensors = DrawTensors(*(torch.tensor(column, device=device) for column in zip(*numbers, strict=True)))
    drawn = captured_draw.captured_draw(
        DrawKind.CUT, logits, tensors, sampler.positions + 2, counters(vocab_size, device)
    )
    assert drawn.tolist() == expected.tolist()
    assert {row.kind for row in numbers} == set(DrawKind)


# Shapes.


def test_the_first_chains_are_the_most_useful() -> None:
    buckets = plan_chains(48, 5000, 16, 4)
    assert buckets[:2] == [ChainBucket(ChainShape(DrawKind.GREEDY, 1, 16), passes) for passes in (1, 4)]
    assert len(set(buckets)) == len(buckets)
    assert {bucket.shape.kind for bucket in buckets} == set(DrawKind)
    assert max(bucket.shape.rows for bucket in buckets) == 48
    assert all(bucket.shape.rows * bucket.shape.blocks * 16 <= 1 << 16 for bucket in buckets)
    assert {bucket.passes for bucket in plan_chains(48, 5000, 16, 1)} == {1}
    assert plan_chains(48, 5000, 16, 0) == []


def test_chains_of_any_length_are_made_of_few_replays() -> None:
    buckets = plan_chains(8, 1024, 16, 3)
    for passes in range(1, 12):
        found = fitting(buckets, DrawKind.SAMPLED, 3, 17, passes)
        assert {bucket.shape for bucket in found} == {ChainShape(DrawKind.SAMPLED, 4, 32)}
        assert [bucket.passes for bucket in found] == [3] * (passes // 3) + [1] * (passes % 3)
    assert fitting(buckets, DrawKind.GREEDY, 9, 1, 1) == []
    assert fitting(buckets, DrawKind.GREEDY, 1, 65, 1) == []
    assert fitting([b for b in buckets if b.shape.kind], DrawKind.GREEDY, 1, 1, 1) == []
    assert fitting([b for b in buckets if b.passes == 3], DrawKind.GREEDY, 1, 1, 2) == []
