"""Rounds over captured passes: the same logits, caches, drafts and verdicts as over usual ones, whatever the
batch; a way back if not.

On a CPU a tape of torch's operations stands in for CUDA graphs (``tests.tape``): it freezes what a graph
freezes and refuses what a graph cannot hold. ``torch_kernels`` stand in for those in Triton. ``test_cuda``
runs the same gates on real graphs.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, PreTrainedConfig

import tests.models
from tests.engine import grammars, graph_gates, torch_kernels
from tests.engine.conftest import Models
from tests.engine.graph_gates import LATE, PROMPTS, graphs_of, same_as_eager
from tests.engine.test_llama import CONFIGS, ROPE, SHAPE, save
from tests.models import outputs_by_choice, run_engine, save_random_llama
from tests.tape import NotCapturableError, Tape, TapeCapture
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda import torch_sampling
from truedraft.engine.cuda.device_ops import DeviceOps, _Counts
from truedraft.engine.cuda.triton_run import _is_served
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.batch import ForwardBatch, PagedRows, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Failed, Generate, SamplingParams
from truedraft.engine.models import agreement
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.rounds import round as round_module
from truedraft.engine.rounds.capture import graphs as graphs_module
from truedraft.engine.rounds.capture import plan as plan_module
from truedraft.engine.rounds.capture.graphs import RoundGraphs, ScorePass
from truedraft.engine.rounds.capture.rows import DeviceRows
from truedraft.engine.rounds.capture.shapes import (
    MAX_PASSES,
    MAX_TOKENS,
    Shape,
    plan_shapes,
    smallest,
)
from truedraft.engine.rounds.round import RoundRunner
from truedraft.engine.rows.columns import Field
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.random import Stream

Patch = pytest.MonkeyPatch
# A tape holds torch's operations only.
make_engine = partial(tests.models.make_engine, native_kernels=False, max_num_sequences=6)


def is_uncaptured(core: EngineCore) -> bool:
    return isinstance(core.runner, RoundRunner) and core.runner.graphs is None


def kernels_for(shapes: list[AttentionShape], *_: object) -> Any:
    """Stands in for the kernels where they serve such layers."""
    return torch_kernels if all(map(_is_served, shapes)) else None


@pytest.fixture
def taped(monkeypatch: Patch) -> None:
    """Engines on the CPU capture their passes, on tapes."""
    monkeypatch.setattr(plan_module, "make_capture", TapeCapture)
    monkeypatch.setattr(agreement, "find_kernels", kernels_for)


@pytest.fixture
def unchecked(monkeypatch: Patch, taped: None) -> None:
    """The comparison at start finds everything right."""
    monkeypatch.setattr(graphs_module, "_is_right", lambda *_: True)


# A capture meets these differences between families; others are the same operations to it.
STATIC = {
    name: CONFIGS[name]
    for name in (
        "llama with biases and tied embeddings",
        "llama, rotary that follows the length",
        "qwen2 with windows above",
        "qwen3",
        "gemma3, tied embeddings",
        "phi3 that turns a part of each head",
    )
}
STATIC["llama, more positions than the table of angles"] = LlamaConfig(
    **(SHAPE | {"max_position_embeddings": 1 << 16}), rope_parameters=ROPE | {"rope_type": "default"}
)
# There are no kernels for this on a GPU; ``test_triton_attention`` has the reasons one by one.
EAGER = ["gemma2"]


@pytest.mark.parametrize("config", STATIC.values(), ids=STATIC.keys())
def test_same_logits_and_caches(config: PreTrainedConfig, tmp_path: Path, taped: None) -> None:
    same_as_eager(save(config, tmp_path), max_model_len=100)


def test_same_logits_of_drafts(models: Models, taped: None) -> None:
    same_as_eager(models.target, is_draft=True)


def test_same_logits_in_16_bits(models: Models, taped: None) -> None:
    same_as_eager(models.target, tolerance=0.1, dtype="bfloat16")


@pytest.mark.parametrize("name", EAGER)
def test_what_the_kernels_do_not_compute_is_not_captured(name: str, tmp_path: Path, taped: None) -> None:
    core = make_engine(save(CONFIGS[name], tmp_path), None)
    assert isinstance(core.target.model, FusedDecoder)
    assert is_uncaptured(core)
    assert core.target.fast_pass is None


# Whole engines.


def engines(models: Models, draft: str | None, **config: object) -> tuple[EngineCore, EngineCore]:
    graphed = make_engine(models.target, draft, **config)
    eager = make_engine(models.target, draft, cuda_graphs=False, **config)
    assert is_uncaptured(eager)
    assert eager.target.fast_pass is None
    return graphed, eager


def sampled(**fields: Any) -> list[SamplingParams]:
    usual = {"max_tokens": 16, "temperature": 0.9, "verification": "rejection"}
    return [SamplingParams(**(usual | {"seed": i} | fields)) for i in range(5)]


GREEDY = SamplingParams(max_tokens=16, temperature=0)
PARAMS = {
    "greedy": [GREEDY] * 5,
    "the default request": [SamplingParams(max_tokens=16)] * 5,
    "rejection": sampled(),
    "rejection with cuts": sampled(top_k=5, top_p=0.9, min_p=0.02),
    "coupled": sampled(verification=None),
    "coupled with top-p": sampled(verification=None, top_p=0.8),
    "block": sampled(verification="block"),
    "every rule": [
        GREEDY,
        *sampled()[1:2],
        *sampled(verification="block")[2:3],
        *sampled(verification=None)[3:],
    ],
}


@pytest.fixture(scope="module")
def pair(models: Models) -> tuple[EngineCore, EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "make_capture", TapeCapture)
        patch.setattr(agreement, "find_kernels", kernels_for)
        return engines(models, models.close_draft)


@pytest.mark.parametrize("params", [PARAMS[name] for name in PARAMS if name not in ("rejection", "coupled")])
def test_same_tokens(params: list[SamplingParams], pair: tuple[EngineCore, EngineCore]) -> None:
    """Drafts are the same, too, with the same verdicts."""
    replace = msgspec.structs.replace
    same_seeds = [replace(p, seed=p.seed or 7, verification=p.verification or "rejection") for p in params]
    is_default = params[0] == SamplingParams(max_tokens=16)
    graph_gates.same_tokens(*pair, same_seeds if is_default else params)
    assert graphs_of(pair[0]).num_misses == 0


def test_same_tokens_without_drafts(models: Models, taped: None) -> None:
    graph_gates.same_tokens(*engines(models, None), PARAMS["every rule"])


def test_same_tokens_with_preemption_and_prefix_hits(models: Models, taped: None) -> None:
    # 30 blocks of 4 tokens in each cache, for five sequences of up to 57.
    config = {"max_num_sequences": 5, "cache_memory": 30 * 4 * 2 * 256}
    graphed, eager = engines(models, models.close_draft, **config)
    params = [msgspec.structs.replace(p, max_tokens=25) for p in PARAMS["coupled"]]
    graph_gates.same_tokens(graphed, eager, params, arrivals=[0, 2, 4, 6, 8])
    graph_gates.same_tokens(graphed, eager, params)
    assert graphed.scheduler.num_preemptions > 0
    assert graphed.scheduler.num_prefix_hits > 0


def test_same_tokens_with_lengths_and_sources_by_measured_costs(models: Models, taped: None) -> None:
    """Costs are measured over the captured passes; the text does not depend on them."""
    core = make_engine(models.target, models.close_draft, num_speculative_tokens="auto", method="auto")
    params = PARAMS["coupled"]
    expected = run_engine(make_engine(models.target, None, cuda_graphs=False), PROMPTS, params)
    assert run_engine(core, PROMPTS, params) == expected
    assert graphs_of(core).num_replays > 0


def test_a_draft_that_pauses_catches_up(models: Models, taped: None, monkeypatch: Patch) -> None:
    """Where other sources have drafted the draft model's cache lacks more than the last tokens: these are
    computed before the captured pass."""
    caught: list[int] = []
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=3, method="auto")
    uncaptured = graphs_of(core).draft
    assert uncaptured is not None
    forward = uncaptured.forward

    def counted(spans: list[Span]) -> Any:
        caught.append(sum(len(span.token_ids) for span in spans if span.table.num_computed_tokens))
        return forward(spans)

    monkeypatch.setattr(uncaptured, "forward", counted)
    expected = run_engine(make_engine(models.target, None, cuda_graphs=False), PROMPTS, GREEDY)
    for number, (prompt, token_ids) in enumerate(zip(PROMPTS, expected, strict=True)):
        core.add(Generate(str(number), prompt, GREEDY, prediction_token_ids=token_ids[:12]))
    outputs = outputs_by_choice(core)
    assert [outputs[str(number), 0] for number in range(len(PROMPTS))] == expected
    assert sum(caught) > 0


@pytest.mark.parametrize("draft", ["lacking_draft", "padded_draft"])
def test_draft_with_another_vocabulary(draft: str, models: Models, taped: None) -> None:
    core, eager = engines(models, getattr(models, draft))
    graph_gates.same_tokens(core, eager, PARAMS["rejection"])


# Qwen 2.5 and Llama 3.1 ship such defaults, which every request has that names no others.
QWEN = SamplingParams(max_tokens=10, seed=3, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
PENALTIES = sampled(verification=None, frequency_penalty=1.5, presence_penalty=0.5)
OTHERS = {
    "logprobs": SamplingParams(max_tokens=10, temperature=0, logprobs=2),
    "penalties": SamplingParams(max_tokens=10, seed=1, frequency_penalty=0.5),
    "bias": SamplingParams(max_tokens=10, temperature=0, logit_bias={3: 5.0}),
    "min_tokens": SamplingParams(max_tokens=10, temperature=0, min_tokens=8),
    "a seed": SamplingParams(max_tokens=10, seed=4),
    "Qwen's defaults": QWEN,
    "Llama's defaults": SamplingParams(max_tokens=10, seed=5, temperature=0.6, top_p=0.9),
    "all at once": msgspec.structs.replace(QWEN, logprobs=1, logit_bias={2: 1.0}, min_tokens=5),
}


class Watched:
    """Counts passes of the target by step, captured or not."""

    def __init__(self, patch: Patch) -> None:
        self.passes: list[int] = []
        self.uncaptured: list[int] = []
        watched, step, replay = self, EngineCore.step, RoundGraphs.replay
        forward = Model.forward

        def counted_step(self: EngineCore) -> Any:
            watched.target = self.target.model
            watched.passes.append(0)
            watched.uncaptured.append(0)
            return step(self)

        def counted(self: RoundGraphs, shape: Shape) -> None:
            watched.passes[-1] += shape.queries is not None
            replay(self, shape)

        def counted_too(self: Model, *given: Any) -> Any:
            watched.passes[-1] += self is watched.target
            watched.uncaptured[-1] += self is watched.target
            return forward(self, *given)

        patch.setattr(EngineCore, "step", counted_step)
        patch.setattr(RoundGraphs, "replay", counted)
        patch.setattr(Model, "forward", counted_too)


@pytest.mark.parametrize("kinds", [list(OTHERS)[:4], list(OTHERS)[4:]])
def test_no_row_makes_the_others_pay_for_a_second_pass(
    kinds: list[str], pair: tuple[EngineCore, EngineCore], monkeypatch: Patch
) -> None:
    """The target passes once a step, whatever rows in a batch of greedy ones ask for."""
    params = [GREEDY, *[OTHERS[kind] for kind in kinds]]
    expected = outputs(pair[1], params)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        said = outputs(pair[0], params)
    for ours, theirs in zip(said, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert set(watched.passes) == {1}
    assert sum(watched.uncaptured) == 1  # the prompts


class Said(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]  # tokens, then the most likely ones, token by token


def outputs(
    core: EngineCore, params: list[SamplingParams], arrivals: Sequence[int] = (0, 0, 0, 0, 0)
) -> list[Said]:
    """Returns what follows each prompt, with log-probabilities where they are asked for. Prompts come before
    the steps of ``arrivals``."""
    found = [Said([], []) for _ in PROMPTS]
    for step in count():
        for number, arrival in enumerate(arrivals):
            if arrival == step:
                core.add(Generate(str(number), PROMPTS[number], params[number], cache_prompt=False))
        if not core.has_work:
            return found
        for output in core.step():
            assert not isinstance(output, Failed)
            said = found[int(output.request_id)]
            said.token_ids.extend(output.token_ids)
            for one in [*(output.prompt_logprobs or []), *(output.logprobs or [])]:
                said.logprobs.extend([] if one is None else [one.logprob, *(value for _, value in one.top)])
    raise AssertionError


def test_constrained_rows_are_captured(models: Models, taped: None, monkeypatch: Patch) -> None:
    """Forced tokens, n-grams and drafts of the model in texts that a grammar allows."""
    sizes = {"vocab_size": grammars.VOCAB_SIZE, "eos_token_id": grammars.END}
    target = save_random_llama(Path(models.target).parent / "constrained", seed=1, **sizes)
    core, eager = (
        grammars.know_grammars(make_engine(target, target, cuda_graphs=is_captured, method="auto"))
        for is_captured in (True, False)
    )
    free = SamplingParams(max_tokens=12, seed=2, temperature=0.8)
    params = [free, msgspec.structs.replace(free, grammar=grammars.GRAMMAR)] * 2 + [free]
    prompts = [grammars.PROMPT[: 1 + number] for number in range(5)]
    expected = run_engine(eager, prompts, params)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        assert run_engine(core, prompts, params) == expected
    assert set(watched.passes) == {1}


def test_traced_rows_share_the_pass(pair: tuple[EngineCore, EngineCore], monkeypatch: Patch) -> None:
    traced = SamplingParams(max_tokens=16, seed=2, verification="rejection", trace=True)
    params = [GREEDY, traced, GREEDY, GREEDY, GREEDY]
    expected = run_engine(pair[1], PROMPTS, params)
    before = dict(pair[0].stats.num_rows)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        assert run_engine(pair[0], PROMPTS, params) == expected
    assert set(watched.passes) == {1}
    assert sum(watched.uncaptured[1:]) == 0
    # Rows are counted by what scored them: only the prompts' ends may be in a pass as usual.
    assert pair[1].stats.num_rows.keys() == {"phases"}
    assert pair[0].stats.num_rows["phases"] <= before.get("phases", 0) + len(PROMPTS)
    assert pair[0].stats.num_rows["cuda_graphs"] > before.get("cuda_graphs", 0)


def test_a_round_draws_and_judges_in_few_launches(models: Models, taped: None, monkeypatch: Patch) -> None:
    """One call of the kernels draws a token of all rows, and one judges them."""
    counted: list[str] = []
    draw_drafts, judge = torch_sampling.draw_drafts, torch_sampling.judge

    def drawing(*given: torch.Tensor) -> None:
        counted.append("draw")
        draw_drafts(*given)

    def judging(*given: torch.Tensor) -> None:
        counted.append("judge")
        judge(*given)

    kernels = SimpleNamespace(draw_drafts=drawing, judge=judging)
    monkeypatch.setattr(plan_module, "find_sampling", lambda *_: kernels)
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=3)
    for number, params in enumerate(PARAMS["every rule"]):
        core.add(Generate(str(number), [1, 2, 3], params))
    core.step()
    while len(core.scheduler.running) == 5:
        counted.clear()
        core.step()
        assert counted.count("judge") == 1
        assert counted.count("draw") <= 3


def few_shapes(patch: Patch, **limits: int) -> None:
    """Plans no passes of more rows, or of more tokens a row, than ``limits`` say."""

    def few(*arguments: Any, **fields: Any) -> list[Shape]:
        return [
            shape
            for shape in plan_shapes(*arguments, **fields)
            if shape.rows <= limits.get("rows", 99) and (shape.queries or 0) <= limits.get("queries", 99)
        ]

    patch.setattr(plan_module, "plan_shapes", few)


def test_a_batch_that_no_graph_holds_goes_in_parts(models: Models, taped: None, monkeypatch: Patch) -> None:
    few_shapes(monkeypatch, rows=2)
    core, eager = engines(models, models.close_draft)
    arrivals = [0, 0, 0, 0, 2]
    expected = run_engine(eager, PROMPTS, PARAMS["every rule"], arrivals)
    watched = Watched(monkeypatch)
    assert run_engine(core, PROMPTS, PARAMS["every rule"], arrivals) == expected
    assert max(watched.passes) == 3
    # Rows go with a prompt in one pass as usual.
    assert watched.passes[2] == watched.uncaptured[2] == sum(watched.uncaptured[1:]) == 1


def test_drafts_that_no_graph_holds_are_scored_as_usual(
    models: Models, taped: None, monkeypatch: Patch
) -> None:
    few_shapes(monkeypatch, queries=3)
    core, eager = engines(models, models.close_draft, num_speculative_tokens="auto")
    params = [msgspec.structs.replace(p, num_speculative_tokens=4) for p in PARAMS["coupled"]]
    expected = run_engine(eager, PROMPTS, params)
    watched = Watched(monkeypatch)
    assert run_engine(core, PROMPTS, params) == expected
    assert set(watched.passes) == {1}
    assert graphs_of(core).num_misses > 0
    assert max(length for _, length, _ in vars(core.stats)["_verdicts"]) == 4


MIXED = {
    "every rule": PARAMS["every rule"],
    "rows that ask for more": [GREEDY, *[OTHERS[kind] for kind in list(OTHERS)[:4]]],
    "all at once": [GREEDY, *[OTHERS[kind] for kind in list(OTHERS)[4:]]],
}


@pytest.mark.parametrize("params", MIXED.values(), ids=MIXED.keys())
def test_prompts_and_rows_share_a_pass(
    params: list[SamplingParams], pair: tuple[EngineCore, EngineCore], monkeypatch: Patch
) -> None:
    """The target passes once in every step, also when prompts arrive."""
    expected = outputs(pair[1], params, LATE)
    # What earlier passes have left where no row of this one is must not matter.
    graphs_of(pair[0]).logits.fill_(torch.nan)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        said = outputs(pair[0], params, LATE)
    for ours, theirs in zip(said, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert set(watched.passes) == {1}
    # Captured passes hold the short ones.
    assert sum(watched.uncaptured) == 2


# A pass goes wrong by being given these as the tokens that the device has drawn: where each goes, and where
# it comes from.
JOINT_BUGS: dict[str, Callable[[list[tuple[int, int]]], list[tuple[int, int]]]] = {
    "drawn drafts are not looked up": lambda drawn: [(into, 0) for into, _ in drawn],
    "drafts go where others stand": lambda drawn: [(max(0, into - 1), taken) for into, taken in drawn],
    "rows have another's drafts": lambda drawn: [
        (into, taken) for (into, _), (_, taken) in zip(drawn, drawn[::-1], strict=True)
    ],
}


def test_a_wrong_pass_over_prompts_and_rows_shows(
    pair: tuple[EngineCore, EngineCore], monkeypatch: Patch
) -> None:
    packed_ids = round_module._packed_ids
    params = [msgspec.structs.replace(each, max_tokens=12) for each in PARAMS["every rule"]]
    expected = outputs(pair[1], params, LATE)
    for bug, change in JOINT_BUGS.items():

        def changed(spans: Any, drawn: Any, drafted: Any, change: Any = change) -> Any:
            return packed_ids(spans, change(drawn), drafted)

        with monkeypatch.context() as patch:
            patch.setattr(round_module, "_packed_ids", changed)
            assert outputs(pair[0], params, LATE) != expected, bug


def test_pieces_of_prompts_and_their_logprobs_share_a_pass(
    models: Models, taped: None, monkeypatch: Patch
) -> None:
    core, eager = engines(models, models.close_draft, max_num_batched_tokens=13)
    few = [msgspec.structs.replace(each, max_tokens=8) for each in (GREEDY, *sampled()[1:3])]
    params = [*few, msgspec.structs.replace(GREEDY, prompt_logprobs=1, max_tokens=4), few[0]]
    arrivals = [0, 1, 1, 3, 3]
    expected = outputs(eager, params, arrivals)
    watched = Watched(monkeypatch)
    said = outputs(core, params, arrivals)
    for ours, theirs in zip(said, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert set(watched.passes) == {1}
    assert sum(watched.uncaptured) >= 2


def test_the_host_reads_once_a_round(pair: tuple[EngineCore, EngineCore], monkeypatch: Patch) -> None:
    core = pair[0]
    reads: list[str] = []
    for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        honest = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, name: str = name, honest: Callable[..., Any] = honest) -> Any:
            reads.append(name)
            return honest(self)

        monkeypatch.setattr(torch.Tensor, name, read)
    for params in PARAMS["every rule"]:
        core.add(Generate("0", [1, 2, 3], msgspec.structs.replace(params, max_tokens=6)))
        core.step()  # the prompt
        while core.has_work:
            reads.clear()
            core.step()
            # The host's own buffer is filled through numpy.
            assert [name for name in reads if name != "numpy"] == ["tolist"]


def test_broken_logits_fail_their_sequence_alone(models: Models, taped: None, monkeypatch: Patch) -> None:
    core = make_engine(models.target, models.close_draft)
    graphs = graphs_of(core)
    for request_id in "01":
        core.add(Generate(request_id, [1, 2, 3], GREEDY))
    core.step()
    ids = core.scheduler.running[1].target_blocks.block_ids
    core.target.cache.values[0][ids[0] * 4 : ids[0] * 4 + 3] = torch.nan
    failed = [output for output in core.step() if isinstance(output, Failed)]
    assert [output.request_id for output in failed] == ["1"]
    assert graphs.num_misses == 0


# Bugs: how they are planted, by hand or in what is captured.


def patch_batch(patch: Patch, change: Callable[[DeviceRows, ForwardBatch, torch.Tensor], None]) -> None:
    batch = DeviceRows.batch

    def changed(self: DeviceRows, *arguments: Any) -> ForwardBatch:
        made = batch(self, *arguments)
        change(self, made, arguments[4])
        return made

    patch.setattr(DeviceRows, "batch", changed)


def padding_is_stored_in_slot_0(patch: Patch) -> None:
    def change(rows: DeviceRows, batch: ForwardBatch, counts: torch.Tensor) -> None:
        batch.slots = torch.where(batch.slots == rows.scratch_slot, 0, batch.slots)

    patch_batch(patch, change)


def padding_counts(patch: Patch) -> None:
    """Rows see a token too many, which is not there."""

    def change(rows: DeviceRows, batch: ForwardBatch, counts: torch.Tensor) -> None:
        batch.positions = batch.positions + 1

    patch_batch(patch, change)


def tables_are_frozen(patch: Patch) -> None:
    def change(rows: DeviceRows, batch: ForwardBatch, counts: torch.Tensor) -> None:
        paged = batch.short_rows
        assert paged is not None
        with _disable_current_modes():
            tables = paged.tables.clone()
        batch.short_rows = PagedRows(tables, paged.first_tokens, paged.counts, paged.queries)

    patch_batch(patch, change)


def tables_keep_their_end(patch: Patch) -> None:
    """Entries are sent once for ever."""
    set_table = DeviceRows.set_table

    def once(self: DeviceRows, cache: int, row: int, table: BlockTable) -> None:
        if (cache, row) in self._known:
            known = self._known[cache, row]
            known.table, known.num_cuts = table, table.num_cuts
        set_table(self, cache, row, table)

    patch.setattr(DeviceRows, "set_table", once)


def numbers_are_overwritten_before_they_are_sent(patch: Patch) -> None:
    send = TapeCapture.send

    def sent(self: TapeCapture, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        send(self, numbers, host)
        late = self._late
        host[1:].fill_(0)  # the next batch may do so, say, which has not waited
        self._late = late
        return lambda: None

    patch.setattr(TapeCapture, "send", sent)


BUGS = [
    padding_is_stored_in_slot_0,
    padding_counts,
    tables_are_frozen,
    tables_keep_their_end,
    numbers_are_overwritten_before_they_are_sent,
]
# The comparison at start sees these.
PLAIN_TO_SEE = [padding_counts, tables_are_frozen, numbers_are_overwritten_before_they_are_sent]


@pytest.mark.parametrize("plant", BUGS)
def test_gates_catch(
    plant: Callable[[Patch], None],
    models: Models,
    taped: None,
    unchecked: None,
    monkeypatch: Patch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        same_as_eager(models.target)


@pytest.mark.parametrize("plant", PLAIN_TO_SEE)
def test_the_comparison_at_start_catches(
    plant: Callable[[Patch], None],
    models: Models,
    taped: None,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, None)
    assert is_uncaptured(core)
    assert core.target.fast_pass is None
    assert "differ from the usual pass" in caplog.text
    graph_gates.still_says_the_same(models.target, core)


def every_draft_is_stored_anew(patch: Patch) -> None:
    """The draft's cache is said to lack nothing."""
    set_row = DeviceRows.set_row

    def lacking(self: DeviceRows, row: int, stored: int, ids: Any, num_skipped: int = 0) -> None:
        set_row(self, row, stored, ids, 1)

    patch.setattr(DeviceRows, "set_row", lacking)


def a_draft_goes_on_where_it_was(patch: Patch) -> None:
    """The pass after another one is at the same position."""
    go_on = DeviceRows.go_on

    def stays(self: DeviceRows, num_rows: int) -> None:
        go_on(self, num_rows)
        self.field(num_rows, Field.NUM_STORED).sub_(1)

    patch.setattr(DeviceRows, "go_on", stays)


def drafts_share_the_numbers_that_accept_them(patch: Patch) -> None:
    uniform = torch_sampling.uniform_on_device

    def shared(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        return uniform(seeds, positions, Stream.ACCEPT if stream is Stream.DRAFT else stream)

    patch.setattr(torch_sampling, "uniform_on_device", shared)


def rows_have_the_parameters_of_others(patch: Patch) -> None:
    send = DeviceOps._send

    def another(self: DeviceOps, *given: Any) -> torch.Tensor:
        found = send(self, *given)
        found[:, Field.SEED] = found[:, Field.SEED].roll(1)
        return found

    patch.setattr(DeviceOps, "_send", another)


def logits_are_anothers(patch: Patch) -> None:
    """A row's logits are those of the place where its part stands in the step."""
    places_of = DeviceRows.places_of

    def swapped(self: DeviceRows, *given: Any) -> list[int]:
        return places_of(self, *given)[::-1]

    run = ScorePass.run

    def misplaced(self: ScorePass, *given: Any) -> Any:
        output = run(self, *given)
        return output._replace(logits=output.logits.roll(1, 0))

    patch.setattr(DeviceRows, "places_of", swapped)
    patch.setattr(ScorePass, "run", misplaced)


def counts_lack_what_was_just_said(patch: Patch) -> None:
    of = _Counts.of

    def lacking(self: _Counts, row: Row) -> torch.Tensor:
        less = copy.copy(row)
        less.token_ids = row.token_ids[:-1]
        return of(self, less)

    patch.setattr(_Counts, "of", lacking)


def drafts_that_were_drawn_are_taken_for_certain(patch: Patch) -> None:
    judge = torch_sampling.judge

    def judged(logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, into: torch.Tensor) -> None:
        is_drawn = torch.arange(numbers.shape[1]) == Field.NUM_DRAWN
        judge(logits, probs, torch.where(is_drawn, 0, numbers), into)

    patch.setattr(torch_sampling, "judge", judged)


ROUND_BUGS = [
    every_draft_is_stored_anew,
    a_draft_goes_on_where_it_was,
    drafts_share_the_numbers_that_accept_them,
    rows_have_the_parameters_of_others,
    logits_are_anothers,
    counts_lack_what_was_just_said,
    drafts_that_were_drawn_are_taken_for_certain,
]


@pytest.fixture(scope="module")
def eager(models: Models) -> EngineCore:
    return make_engine(models.target, models.close_draft, cuda_graphs=False, num_speculative_tokens=3)


@pytest.mark.parametrize("plant", ROUND_BUGS)
def test_tokens_or_verdicts_show(
    plant: Callable[[Patch], None],
    models: Models,
    eager: EngineCore,
    unchecked: None,
    monkeypatch: Patch,
) -> None:
    plant(monkeypatch)
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=3)

    def compare() -> None:
        for name in ("every rule", "coupled"):
            graph_gates.same_tokens(core, eager, PARAMS[name], LATE)
        expected = run_engine(eager, PROMPTS, PENALTIES, LATE)
        assert run_engine(core, PROMPTS, PENALTIES, LATE) == expected

    with pytest.raises(AssertionError):
        compare()


# Failures.


def test_what_cannot_be_captured_runs_as_before(
    models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    norm = torch_kernels.rms_norm

    def looks(x: torch.Tensor, *others: Any) -> torch.Tensor:
        return norm(x, *others) if x.amax().item() >= 0 else x

    monkeypatch.setattr(torch_kernels, "rms_norm", looks)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft)
    assert is_uncaptured(core)
    assert core.target.fast_pass is None
    assert core.draft.fast_pass is None
    assert caplog.text.count("cannot be captured and are not used: operation not permitted") == 1
    assert "NotCapturableError" in caplog.text  # the whole exception
    graph_gates.still_says_the_same(models.target, core)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.max().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1, 2]),
        lambda x: bool((x > 1).all()),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_the_tape_refuses_what_a_graph_cannot_hold(
    look: Callable[[torch.Tensor], object], inference: bool
) -> None:
    with pytest.raises(NotCapturableError), torch.inference_mode(inference), Tape():
        look(torch.arange(2))


def test_the_tape_does_not_ask_python_again() -> None:
    x, y, steps = torch.zeros(2), torch.zeros(2), []

    def step() -> None:
        steps.append(1)
        y.copy_(x.view(2) * len(steps))

    replay = TapeCapture(torch.device("cpu")).record(step)
    x.fill_(3)
    replay()
    assert (y.tolist(), len(steps)) == ([3, 3], 1)


# Shapes.


def test_on_a_cpu_nothing_is_captured(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    assert is_uncaptured(core)
    assert len(core.target.cache.keys[0]) == core.scheduler.target_pool.num_blocks * 4


def test_the_scratch_block_is_no_sequences(models: Models, taped: None) -> None:
    core = make_engine(models.target, models.close_draft, cache_memory="64KiB")
    pool = core.scheduler.target_pool
    assert graphs_of(core).rows.scratch_slot == pool.num_blocks * 4
    num_slots = len(core.target.cache.keys[0])
    assert num_slots == (pool.num_blocks + 1) * 4
    # It counts: both caches hold 2 layers of 2 x 2 heads of 8 float32 numbers a token.
    assert num_slots * 2 * 2 * 2 * 2 * 8 * 4 <= 64 << 10


def test_what_the_time_does_not_allow_runs_as_before(models: Models, taped: None) -> None:
    core = make_engine(models.target, None, cuda_graph_seconds=0)
    assert is_uncaptured(core)
    graph_gates.still_says_the_same(models.target, core)


def test_time_and_memory_end_the_capturing(models: Models, taped: None, monkeypatch: Patch) -> None:
    """What no captured pass holds is computed as usual."""
    monkeypatch.setattr(TapeCapture, "free_memory", lambda self: -self.num_recorded << 20)
    monkeypatch.setattr(plan_module, "_memory", lambda *_: 1 << 20)
    core, eager = engines(models, models.close_draft)
    assert 1 < len(graphs_of(core).replays) < 5
    assert run_engine(core, PROMPTS, PARAMS["every rule"]) == run_engine(eager, PROMPTS, PARAMS["every rule"])
    assert graphs_of(core).num_misses > 0


def test_warm_ups_stay_within_the_tensors(models: Models, taped: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(TapeCapture, "num_warm_ups", 3)
    config = {"num_speculative_tokens": 2, "max_num_sequences": 2}
    graph_gates.same_tokens(*engines(models, models.close_draft, **config), PARAMS["rejection"])


def test_a_small_device_captures_less(models: Models, taped: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(plan_module, "FIXED_BYTES", 0)
    monkeypatch.setattr(plan_module, "GRAPH_BYTES", 0)
    monkeypatch.setattr(plan_module, "free_memory", lambda device: 4 * 40_000)
    core = make_engine(models.target, models.close_draft)
    tokens = {shape.num_tokens for shape in graphs_of(core).replays}
    assert max(tokens) < 6 * 5
    assert run_engine(core, PROMPTS, GREEDY) == run_engine(
        make_engine(models.target, None, cuda_graphs=False), PROMPTS, GREEDY
    )
    monkeypatch.setattr(plan_module, "free_memory", lambda device: 0)
    assert is_uncaptured(make_engine(models.target, models.close_draft))


@pytest.mark.parametrize("max_rows", [32, 48, 64, 128, 256])
def test_passes_hold_any_batch(max_rows: int) -> None:
    """Any batch of 128 rows is judged by graphs in one piece, and with four drafts where weights are what a
    pass reads."""
    planned = plan_shapes(max_rows, "auto", has_draft=True)
    assert len(set(planned)) == len(planned)
    assert len(planned) <= MAX_PASSES
    for rows in range(1, min(max_rows, 128) + 1):
        assert smallest(rows, None, 1, planned)
        assert smallest(rows, 1, 1, planned)
        assert smallest(rows, 5, 1, planned) or rows > 64
    # Every round of up to 8 drafts that a default request may have.
    assert all(smallest(rows, 9, 1, planned) for rows in range(1, 33))


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4, 8, 32, "auto"])
@pytest.mark.parametrize("max_rows", [1, 5, 32, 48, 300])
@pytest.mark.parametrize("has_draft", [False, True])
def test_every_shape_is_within_the_limits(
    num_speculative_tokens: Any, max_rows: int, has_draft: bool
) -> None:
    planned = plan_shapes(max_rows, num_speculative_tokens, has_draft)
    assert 0 < len(set(planned)) == len(planned) <= MAX_PASSES
    assert all(shape.rows <= max_rows and shape.num_tokens <= MAX_TOKENS for shape in planned)
    drafting = {shape.queries is None for shape in planned}
    assert (True in drafting) == (has_draft and num_speculative_tokens != 0)


def test_the_smallest_that_holds_the_batch() -> None:
    planned = plan_shapes(8, "auto", has_draft=True)
    for rows in range(1, 11):
        for queries in (None, *range(1, 20)):
            found = smallest(rows, queries, 1, planned)
            assert (found is None) == (rows > 8 or (queries or 0) > 17)
            if found is not None:
                assert rows <= found.rows < 2 * rows
                assert (found.queries is None) == (queries is None)


@pytest.mark.parametrize(
    ("num_rows", "length", "is_held"), [(3, 9, True), (8, 5, False), (16, 1, True), (16, 5, False)]
)
def test_what_goes_along_does_not_fill_a_pass_with_padding(num_rows: int, length: int, is_held: bool) -> None:
    planned = plan_shapes(32, "auto", has_draft=False)
    graphs: Any = SimpleNamespace(find=lambda rows, queries: smallest(rows, queries, 1, planned))
    rows = [Span(BlockTable(), [1], 1) for _ in range(num_rows)]
    # It is the beginning of a prompt, or its end.
    guests = [Span(BlockTable(), [1] * length, num_logits) for num_logits in range(2) if length > num_logits]
    assert {ScorePass(graphs)._is_mostly_padding([*rows, guest]) for guest in guests} <= {not is_held, False}
    assert ScorePass(graphs)._is_mostly_padding([*rows, guests[0]]) is not is_held
    assert not ScorePass(graphs)._is_mostly_padding(rows)


def test_tables_are_sent_as_far_as_they_are_new() -> None:
    capture = TapeCapture(torch.device("cpu"))
    rows = DeviceRows(2, 2, 4, 4, 99, torch.device("cpu"), capture)
    table = BlockTable()
    for block_ids, sent in (
        ([5, 6], 2),
        ([5, 6], 0),
        ([5, 6, 7], 1),
        ([5, 6], 0),
        ([5, 6, 8], 1),
        ([9, 6, 8, 2, 3], 4),  # more than is ever used
    ):
        rows.begin()
        table.num_cuts += table.block_ids != block_ids[: len(table.block_ids)]
        table.block_ids = block_ids
        rows.set_table(1, 1, table)
        assert len(rows._places) == sent
        rows.send(2)
        rows.sent.wait()
        assert rows.tables[1, 1, : len(block_ids)].tolist() == block_ids[:4]
    assert not rows.tables[0].any()
    assert not rows.tables[1, 0].any()


def test_rows_keep_their_places() -> None:
    rows = DeviceRows(4, 2, 3, 4, 99, torch.device("cpu"), TapeCapture(torch.device("cpu")))
    a, b, c, d = (BlockTable() for _ in range(4))
    assert rows.places_of(0, [a, b, c], 4) == [0, 1, 2]
    assert rows.places_of(0, [c, d], 4) == [2, 0]
    assert rows.places_of(1, [d], 4) == [0]  # the other cache has its own
    assert rows.places_of(0, [c, d], 2) == [1, 0]  # a smaller graph


def test_a_draft_that_cannot_be_captured_goes_by_phases(
    models: Models, taped: None, monkeypatch: Patch
) -> None:
    """Rows that do not draft are captured all the same."""
    can = plan_module._can_be_captured
    answers = chain([True, False], repeat(False))
    monkeypatch.setattr(plan_module, "_can_be_captured", lambda model: can(model) and next(answers))
    core = make_engine(models.target, models.close_draft)
    assert graphs_of(core).draft is None
    expected = run_engine(make_engine(models.target, None, cuda_graphs=False), PROMPTS, GREEDY)
    assert run_engine(core, PROMPTS, GREEDY) == expected
    assert core.stats.num_accepted_tokens > 0
    replays = graphs_of(core).num_replays
    plain = msgspec.structs.replace(GREEDY, num_speculative_tokens=0)
    assert run_engine(core, PROMPTS, plain) == expected
    assert graphs_of(core).num_replays > replays
