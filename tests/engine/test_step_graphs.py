"""Captured passes: the same logits and caches as the usual pass, whatever the batch; a way back if not.

On a CPU a tape of torch's operations stands in for CUDA graphs (``tests.tape``): it freezes what a graph
freezes and refuses what a graph cannot hold. ``test_cuda`` runs the same gates on real graphs.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, PreTrainedConfig

import tests.models
from engine import graph_plan
from engine.batch import AttentionGroup, Span
from engine.core.engine import EngineCore
from engine.kv_cache import KVCache
from engine.messages import SamplingParams
from engine.models import step_graphs, step_inputs
from engine.models.step_buckets import MAX_TOKENS, Bucket, plan_buckets, shape_of, smallest
from engine.models.step_graphs import StepGraphs
from engine.models.step_inputs import StepInputs
from tests.engine import graph_gates
from tests.engine.conftest import Models
from tests.engine.graph_gates import same_as_eager
from tests.engine.test_llama import CONFIGS, ROPE, SHAPE, save
from tests.models import run_engine
from tests.tape import NotCapturableError, Tape, TapeCapture

Patch = pytest.MonkeyPatch
# A tape holds torch's operations only.
make_engine = partial(tests.models.make_engine, native_kernels=False)


@pytest.fixture
def taped(monkeypatch: Patch) -> None:
    """Engines on the CPU capture their passes, on tapes."""
    monkeypatch.setattr(graph_plan, "make_capture", TapeCapture)


@pytest.fixture
def unchecked(monkeypatch: Patch, taped: None) -> None:
    """The comparison at start finds everything right."""
    monkeypatch.setattr(step_graphs, "_is_right", lambda *_: True)


STATIC = {name: config for name, config in CONFIGS.items() if "follows the length" not in name}
STATIC["llama, more positions than the table of angles"] = LlamaConfig(
    **(SHAPE | {"max_position_embeddings": 1 << 16}), rope_parameters=ROPE | {"rope_type": "default"}
)


@pytest.mark.parametrize("config", STATIC.values(), ids=STATIC.keys())
def test_same_logits_and_caches(config: PreTrainedConfig, tmp_path: Path, taped: None) -> None:
    same_as_eager(save(config, tmp_path), max_model_len=100)


def no_single_tokens(patch: Patch) -> None:
    """Single tokens of rows are padded: no pass for them is captured."""

    def planned(*arguments: object) -> list[Bucket]:
        return [bucket for bucket in plan_buckets(*arguments) if bucket.queries > 1]  # type: ignore[arg-type]

    patch.setattr(graph_plan, "plan_buckets", planned)


def test_same_logits_with_single_tokens_padded(models: Models, taped: None, monkeypatch: Patch) -> None:
    no_single_tokens(monkeypatch)
    same_as_eager(models.target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_same_logits_in_16_bits(dtype: str, models: Models, taped: None) -> None:
    same_as_eager(models.target, tolerance=0.1, dtype=dtype)


def test_angles_that_follow_the_length_are_not_captured(tmp_path: Path, taped: None) -> None:
    folder = save(CONFIGS["llama, rotary that follows the length"], tmp_path)
    assert make_engine(folder, None).target.fast_pass is None


# Bugs: how they are planted, by hand or in what is captured.


def padding_is_stored_in_slot_0(patch: Patch) -> None:
    fill = StepInputs._fill

    def filled(self: StepInputs, bucket: Bucket, spans: list[Span]) -> int:
        scratch, self.scratch_block = self.scratch_block, 0
        num_logits = fill(self, bucket, spans)
        self.scratch_block = scratch
        return num_logits

    patch.setattr(StepInputs, "_fill", filled)


def mask_shows_one_token_too_many(patch: Patch) -> None:
    mask = AttentionGroup.mask

    def masked(self: AttentionGroup, sliding_window: int | None) -> torch.Tensor | None:
        visible = mask(self, sliding_window)
        if not self.keys_are_padded or visible is None:
            return visible
        return visible | F.pad(visible, (1, 0))[..., :-1]

    patch.setattr(AttentionGroup, "mask", masked)


def mask_forgets_the_padding_of_a_lone_row(patch: Patch) -> None:
    def visible(self: AttentionGroup) -> torch.Tensor | None:
        return None if self.rows == self.queries == 1 else self._visible

    patch.setattr(AttentionGroup, "_causal_mask", property(visible))


def ids_of_the_last_batch_are_sent(patch: Patch) -> None:
    fill = StepInputs._fill

    def filled(self: StepInputs, bucket: Bucket, spans: list[Span]) -> int:
        ids = self.host[: self.num_ids].clone()
        num_logits = fill(self, bucket, spans)
        if spans:
            self.host[: self.num_ids] = ids
        return num_logits

    patch.setattr(StepInputs, "_fill", filled)


def numbers_are_overwritten_before_they_are_sent(patch: Patch) -> None:
    send = TapeCapture.send

    def sent(self: TapeCapture, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        send(self, numbers, host)
        late = self._late
        host.fill_(0)  # by the next batch, say, which has not waited
        self._late = late
        return lambda: None

    patch.setattr(TapeCapture, "send", sent)


def block_tables_are_frozen(patch: Patch) -> None:
    """The slots of the keys are computed outside of what is captured, from what lay there then."""
    batch = StepInputs.batch

    def captured(self: StepInputs, bucket: Bucket) -> object:
        with _disable_current_modes():
            return batch(self, bucket)

    patch.setattr(StepInputs, "batch", captured)


def logits_are_not_copied(patch: Patch) -> None:
    def replay(
        self: StepGraphs, bucket: Bucket, spans: list[Span], ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_logits = self.inputs.send(bucket, spans, ids)
        self.replays[bucket]()
        return self.logits[:num_logits]

    patch.setattr(StepGraphs, "replay", replay)


def logits_of_first_tokens(patch: Patch) -> None:
    fill = StepInputs._fill

    def filled(self: StepInputs, bucket: Bucket, spans: list[Span]) -> int:
        num_logits = fill(self, bucket, spans)
        start = self.num_ids + 2 * bucket.num_tokens
        self.host[start : start + num_logits] = torch.arange(num_logits)
        return num_logits

    patch.setattr(StepInputs, "_fill", filled)


def ids_on_the_device_are_overwritten(patch: Patch) -> None:
    """All numbers are sent, placeholders of the ids among them."""

    def send(self: StepInputs, bucket: Bucket, spans: list[Span], ids: torch.Tensor | None = None) -> int:
        return honest(self, bucket, spans)

    honest = StepInputs.send
    patch.setattr(StepInputs, "send", send)


def ids_on_the_device_lie_behind_one_another(patch: Patch) -> None:
    """Whatever the bucket's padding."""
    no_single_tokens(patch)
    honest = StepInputs.send

    def send(self: StepInputs, bucket: Bucket, spans: list[Span], ids: torch.Tensor | None = None) -> int:
        num_logits = honest(self, bucket, spans, ids)
        if ids is not None:
            first = self.num_ids - bucket.num_tokens
            self.numbers[first : first + len(spans)] = ids
        return num_logits

    patch.setattr(StepInputs, "send", send)


def others_slots_are_read(patch: Patch) -> None:
    """Masked keys are whatever lies in the row's blocks."""

    def where(own: torch.Tensor, slots: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return slots

    patch.setattr(step_inputs, "torch", SimpleNamespace(**(vars(torch) | {"where": where})))


BUGS = [
    padding_is_stored_in_slot_0,
    mask_shows_one_token_too_many,
    mask_forgets_the_padding_of_a_lone_row,
    ids_of_the_last_batch_are_sent,
    numbers_are_overwritten_before_they_are_sent,
    block_tables_are_frozen,
    logits_are_not_copied,
    logits_of_first_tokens,
    ids_on_the_device_are_overwritten,
    ids_on_the_device_lie_behind_one_another,
    others_slots_are_read,
]
# Those that the comparison at start, with its texts in order, ids in them and logits everywhere, cannot see.
SUBTLE = [
    padding_is_stored_in_slot_0,
    logits_are_not_copied,
    logits_of_first_tokens,
    ids_on_the_device_are_overwritten,
    ids_on_the_device_lie_behind_one_another,
    others_slots_are_read,
]


@pytest.mark.parametrize("plant", BUGS)
def test_gates_catch(
    plant: Callable[[Patch], None], models: Models, unchecked: None, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        same_as_eager(models.target)


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
        core = make_engine(models.target, None)
    assert core.target.fast_pass is None
    assert "differ from the usual pass" in caplog.text
    graph_gates.still_says_the_same(models.target, core)


def test_what_cannot_be_captured_runs_as_before(
    models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    write = KVCache.write

    def looks(self: KVCache, layer: int, slots: torch.Tensor, *stored: torch.Tensor) -> None:
        if int(slots[0]) >= 0:
            write(self, layer, slots, *stored)

    monkeypatch.setattr(KVCache, "write", looks)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, None)
    assert core.target.fast_pass is None
    assert "cannot be captured and are not used: operation not permitted" in caplog.text
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


# Whole engines.


def engines(models: Models, draft: str | None, **config: object) -> tuple[EngineCore, EngineCore]:
    graphed = make_engine(models.target, draft, **config)
    eager = make_engine(models.target, draft, cuda_graphs=False, **config)
    assert eager.target.fast_pass is None
    return graphed, eager


PARAMS = {
    "greedy": [SamplingParams(max_tokens=40, temperature=0)] * 5,
    "seeded": [SamplingParams(max_tokens=40, temperature=1.1, seed=i) for i in range(5)],
    "rejection": [
        SamplingParams(max_tokens=40, temperature=0.8, top_k=5, seed=i, verification="rejection")
        for i in range(5)
    ],
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_same_tokens(params: list[SamplingParams], speculative: bool, models: Models, taped: None) -> None:
    draft = models.close_draft if speculative else None
    graph_gates.same_tokens(*engines(models, draft), params)


def test_same_tokens_with_preemption_and_prefix_hits(models: Models, taped: None) -> None:
    # 30 blocks of 4 tokens in each cache, for five sequences of up to 57.
    config = {"max_num_sequences": 5, "cache_memory": 30 * 4 * 2 * 256}
    graphed, eager = engines(models, models.close_draft, **config)
    params = [msgspec.structs.replace(p, max_tokens=25) for p in PARAMS["seeded"]]
    graph_gates.same_tokens(graphed, eager, params, arrivals=[0, 2, 4, 6, 8])
    graph_gates.same_tokens(graphed, eager, params)
    assert graphed.scheduler.num_preemptions > 0
    assert graphed.scheduler.num_prefix_hits > 0


def test_same_tokens_with_a_draft_length_by_measured_costs(models: Models, taped: None) -> None:
    """Costs are measured over the captured passes; the text does not depend on them."""
    core = make_engine(models.target, models.close_draft, num_speculative_tokens="auto", method="auto")
    params = PARAMS["seeded"]
    expected = run_engine(make_engine(models.target, None, cuda_graphs=False), graph_gates.PROMPTS, params)
    assert run_engine(core, graph_gates.PROMPTS, params) == expected


def test_draft_with_another_vocabulary(models: Models, taped: None) -> None:
    for draft in (models.lacking_draft, models.padded_draft):
        graph_gates.same_tokens(*engines(models, draft), PARAMS["greedy"])


# Shapes.


def test_on_a_cpu_nothing_is_captured(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    assert core.target.fast_pass is None
    assert len(core.target.cache.keys[0]) == core.scheduler.target_pool.num_blocks * 4


def test_the_scratch_block_is_no_sequences(models: Models, taped: None) -> None:
    core = make_engine(models.target, models.close_draft, cache_memory="64KiB")
    pool = core.scheduler.target_pool
    assert isinstance(core.target.fast_pass, StepGraphs)
    assert core.target.fast_pass.inputs.scratch_block == pool.num_blocks
    num_slots = len(core.target.cache.keys[0])
    assert num_slots == (pool.num_blocks + 1) * 4
    # It counts: both caches hold 2 layers of 2 x 2 heads of 8 float32 numbers a token.
    assert num_slots * 2 * 2 * 2 * 2 * 8 * 4 <= 64 << 10


def test_what_the_time_does_not_allow_runs_as_before(models: Models, taped: None) -> None:
    core = make_engine(models.target, None, cuda_graph_seconds=0)
    assert core.target.fast_pass is None
    graph_gates.still_says_the_same(models.target, core)


def test_time_and_memory_end_the_capturing(models: Models, taped: None, monkeypatch: Patch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(TapeCapture, "free_memory", lambda self: -self.num_recorded << 20)
    monkeypatch.setattr(graph_plan, "_memory", lambda *_: 3 << 20)
    monkeypatch.setattr(graph_plan, "FIXED_BYTES", 0)
    core = make_engine(models.target, models.close_draft)
    draft = core.draft
    for model in (draft, core.target):
        assert isinstance(model.fast_pass, StepGraphs)
        recorded.append(len(model.fast_pass.replays))
    assert recorded == [4, 3]  # the first that is one too many ends it
    graph_gates.still_says_the_same(models.target, core)


@pytest.mark.parametrize("queries", [1, 2, 5, 9, 6, 40])
def test_every_bucket_is_within_the_limits(queries: int) -> None:
    buckets = plan_buckets(48, 5000, 16, queries)
    assert len(set(buckets)) == len(buckets)
    assert buckets[0] == Bucket(1, 1, 16)
    assert max(b.rows for b in buckets) == 48
    assert max(b.blocks for b in buckets) == -(-5000 // 16)
    assert all(b.num_tokens <= MAX_TOKENS and b.rows * b.blocks * 16 <= 1 << 16 for b in buckets)
    assert (Bucket(8, queries, 32) in buckets) == (queries <= 33)
    # None is reached before those that it could be reached from.
    assert buckets.index(Bucket(2, 1, 16)) < buckets.index(Bucket(4, 2, 32))


def test_the_smallest_that_holds_the_batch() -> None:
    buckets = plan_buckets(8, 1024, 16, 5)
    for rows in range(1, 11):
        for queries in range(1, 40):
            for blocks in (1, 16, 17, 64, 65):
                found = smallest((rows, queries, blocks), buckets)
                holding = [b for b in buckets if b.holds(rows, queries, blocks)]
                assert (found is None) == (not holding)
                assert found is None or found.num_tokens == min(b.num_tokens for b in holding)


def test_shapes_of_batches() -> None:
    def span(stored: int, length: int, num_logits: int) -> Span:
        table = graph_gates.table([], stored)
        return Span(table, [1] * length, num_logits)

    assert shape_of([span(3, 1, 1), span(10, 3, 2)], 4) == (2, 3, 4)
    assert shape_of([span(12, 1, 1)], 4) == (1, 1, 4)
    assert shape_of([span(0, 34, 1)], 4) is None
    assert shape_of([span(0, 5, 0), span(3, 1, 1)], 4) is None
