"""Bugs of captured rounds are caught, by the gates and mostly at start already; verdicts and shapes alone.

On a CPU a tape stands in for CUDA graphs (``tests.tape``). ``test_cuda`` runs the same gates on real graphs.
"""

import logging

import pytest
import torch

from engine import graph_plan
from engine.core.engine import EngineCore
from engine.models import captured_round, step_buckets
from engine.models.round_inputs import MAX_DRAWN, RoundBucket, plan_rounds, smallest_round
from engine.models.step_buckets import Bucket
from engine.models.step_graphs import StepGraphs
from engine.sampling import captured_draw, captured_verify
from engine.sampling.captured_draw import DrawKind, DrawTensors
from tests.engine.conftest import Models
from tests.engine.round_bugs import BUGS, SUBTLE
from tests.engine.round_gates import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    same_rounds,
    taped_twins,
    verdicts_are_the_samplers,
)
from tests.models import make_engine, run_engine
from tests.tape import TapeCapture

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")


# A way back.


@pytest.fixture
def taped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(graph_plan, "make_capture", TapeCapture)
    monkeypatch.setattr(step_buckets, "QUERIES", (1, 2))
    monkeypatch.setattr(graph_plan, "plan_chains", lambda *_: [])


def goes_phase_by_phase(core: EngineCore, models: Models) -> None:
    assert core.target.captured_round is None
    assert isinstance(core.target.graphs, StepGraphs)
    assert core.target.graphs.enabled
    plain = make_engine(models.target, None, **SETTINGS)
    for name in ("greedy", "seeded"):
        assert run_engine(core, PROMPTS, PARAMS[name]) == run_engine(plain, PROMPTS, PARAMS[name])


def test_what_cannot_be_captured_goes_phase_by_phase(
    models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def looks(kind: DrawKind, logits: torch.Tensor, *others: object) -> torch.Tensor:
        return logits.new_tensor([int(row.argmax()) for row in logits], dtype=torch.int64)

    monkeypatch.setattr(captured_verify, "captured_draw", looks)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft, **SETTINGS)
    assert "Rounds cannot be captured and are not used: operation not permitted" in caplog.text
    goes_phase_by_phase(core, models)


def test_what_the_time_does_not_allow_goes_phase_by_phase(
    models: Models, taped: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(captured_round, "check_texts", lambda *_: [])  # nothing fits
    goes_phase_by_phase(make_engine(models.target, models.close_draft, **SETTINGS), models)


# Planted bugs.


def all_gates(models: Models) -> None:
    twins = taped_twins(models)
    for name in ("greedy", "of several temperatures", "cut", "of several lengths, 0 among them"):
        same_rounds(twins, PARAMS[name])
    verdicts_are_the_samplers(CPU, captured_round.captured_verify)


def test_gates_pass_without_a_bug(models: Models) -> None:
    all_gates(models)


@pytest.mark.parametrize("name", BUGS)
def test_gates_catch(name: str, models: Models, monkeypatch: Patch) -> None:
    monkeypatch.setattr(captured_round, "_is_right", lambda *_: True)
    BUGS[name](monkeypatch)
    with pytest.raises(AssertionError):
        all_gates(models)


@pytest.mark.parametrize("name", [name for name in BUGS if name not in SUBTLE])
def test_the_comparison_at_start_catches(
    name: str, models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    BUGS[name](monkeypatch)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft, **SETTINGS)
    assert "Captured rounds differ from the usual ones" in caplog.text
    goes_phase_by_phase(core, models)


# Verdicts and shapes.


@pytest.mark.parametrize("vocab_size", [20, 1500])
def test_verdicts_are_the_samplers(vocab_size: int) -> None:
    verdicts_are_the_samplers(CPU, vocab_size=vocab_size)


def test_a_failure_needs_to_be_reached() -> None:
    """Two drafts stand, the third does not: what lies behind it is never looked at."""
    logits = torch.zeros(1, 5, 4)
    for position, token_id in enumerate([1, 2, 3, 0, 0]):
        logits[0, position, token_id] = 5.0
    rows = DrawTensors(*(torch.tensor([column]) for column in captured_draw.PADDING))
    drafted, num_draft, first = torch.tensor([[1, 2, 0, 0]]), torch.tensor([4]), torch.tensor([9])

    def judge() -> list[int]:
        args = rows, first, drafted, num_draft, torch.zeros(4)
        verdict = captured_verify.captured_verify(DrawKind.GREEDY, logits, *args)
        return [int(column) for column in verdict]

    assert judge() == [2, 3, 0]
    logits[0, 3:] = torch.nan
    assert judge() == [2, 3, 0]
    logits[0, 2, 1] = torch.inf
    assert judge()[2] == 1


def test_the_first_rounds_are_the_most_useful() -> None:
    buckets = plan_rounds(48, 5000, 16, 4, 5, 1000)
    assert buckets[:3] == [RoundBucket(kind, Bucket(1, 1, 16)) for kind in DrawKind]
    assert len(set(buckets)) == len(buckets)
    assert {bucket.shape.queries for bucket in buckets} == {1, 5}
    assert {bucket.shape.queries for bucket in plan_rounds(48, 5000, 16, None, 5, 1000)} > {1, 2, 3, 5, 9}
    assert {bucket.shape.queries for bucket in plan_rounds(48, 5000, 16, 0, 1, 1000)} == {1}


def test_draws_over_a_large_vocabulary_have_few_positions() -> None:
    vocab_size = 1 << 17
    buckets = plan_rounds(64, 5000, 16, 4, 5, vocab_size)
    drawn = [bucket for bucket in buckets if bucket.kind is not DrawKind.GREEDY]
    assert max(bucket.shape.num_tokens for bucket in drawn) * vocab_size <= MAX_DRAWN
    assert max(bucket.shape.num_tokens for bucket in buckets) * vocab_size > MAX_DRAWN


def test_the_smallest_that_holds_the_round() -> None:
    buckets = plan_rounds(8, 1024, 16, 4, 5, 1000)
    found = smallest_round(buckets, DrawKind.CUT, 3, 2, 17)
    assert found == RoundBucket(DrawKind.CUT, Bucket(4, 5, 32))
    assert smallest_round(buckets, DrawKind.CUT, 9, 2, 17) is None
    assert smallest_round([b for b in buckets if b.kind], DrawKind.GREEDY, 1, 1, 1) is None
