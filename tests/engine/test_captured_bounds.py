"""Captured rounds keep within bounds: padding does not multiply passes, verdicts and mixed drafts take little
memory, and programs that serve were compiled and compared at load."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.conftest import Models
from tests.engine.graph_gates import PROMPTS, graphs_of
from tests.engine.test_captured_heads import EVERY, engines, folders, same
from tests.engine.test_round_graphs import PARAMS, Watched, make_engine, taped
from tests.models import run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda import torch_sampling
from truedraft.engine.cuda.device_ops import DeviceOps, slices
from truedraft.engine.cuda.triton_sampling import is_right
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.rounds.capture import plan as plan_module
from truedraft.engine.rounds.capture.shapes import Shape, with_head
from truedraft.engine.rounds.round import RoundRunner
from truedraft.engine.rows.drafts import Drafts, merge_drafts

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
__all__ = ["folders", "taped"]


@pytest.mark.parametrize(
    ("lengths", "num_replays"), [([1] * 5 + [5], 0), ([1] * 6, 1), ([5, 5], 2), ([1, 5], 2), ([5], 1)]
)
def test_one_long_draft_does_not_multiply_passes(
    lengths: list[int], num_replays: int, models: Models, taped: None, monkeypatch: Patch
) -> None:
    """A pass for each of six rows would read the weights six times; the usual pass reads them once."""
    monkeypatch.setattr(plan_module, "plan_shapes", lambda *_, **__: [Shape(6, 1), Shape(1, 5)])
    core = make_engine(models.target, None)
    graphs = graphs_of(core)
    graphs.num_replays = graphs.num_misses = 0
    spans = []
    for row, length in enumerate(lengths):
        table = BlockTable()
        table.block_ids = [2 * row, 2 * row + 1]
        spans.append(Span(table, [row] * length, length))
    logits = core.target.forward(spans).logits
    assert logits.shape[0] == sum(lengths)
    assert (graphs.num_replays, graphs.num_misses) == (num_replays, int(num_replays == 0))


def test_a_head_whose_later_passes_are_missing_drafts_the_same(
    folders: tuple[str, str], taped: None, monkeypatch: Patch
) -> None:
    """The pass that is fed several tokens would take them from the host, which does not know them."""

    def first_ones(planned: list[Shape], longest: int) -> list[Shape]:
        return [shape for shape in with_head(planned, longest) if shape.queries is not None or shape.fed > 1]

    monkeypatch.setattr(plan_module, "with_head", first_ones)
    cores = engines(folders)
    assert {shape.fed for shape in graphs_of(cores[0]).replays if shape.queries is None} == {4}
    same(*cores, EVERY)


def test_slices_of_rows() -> None:
    assert [*slices([2, 2, 2, 2], 6)] == [slice(0, 2), slice(2, 4)]
    assert [*slices([0, 0, 0, 9, 0, 0], 6)] == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert [*slices([0], 6)] == [slice(0, 1)]


@pytest.mark.parametrize("most", [3, 7])
def test_verdicts_in_slices(most: int, models: Models, taped: None, monkeypatch: Patch) -> None:
    """They are the same, and no call judges more positions, the padding included, unless one row has them."""
    sizes: list[tuple[int, int]] = []
    judge = torch_sampling.judge

    def judging(logits: torch.Tensor, *others: torch.Tensor) -> None:
        sizes.append((logits.shape[0], logits.shape[1]))
        judge(logits, *others)

    kernels = SimpleNamespace(draw_drafts=torch_sampling.draw_drafts, judge=judging)
    monkeypatch.setattr(plan_module, "find_sampling", lambda *_: kernels)
    core = make_engine(models.target, models.close_draft)
    expected = run_engine(core, PROMPTS, PARAMS["every rule"], [0, 0, 1, 2, 3])
    assert any(rows * positions > 7 and rows > 1 for rows, positions in sizes)
    sizes.clear()
    assert isinstance(core.runner, RoundRunner)
    assert isinstance(core.runner.ops, DeviceOps)
    core.runner.ops.max_judged = most
    watched = Watched(monkeypatch)
    assert run_engine(core, PROMPTS, PARAMS["every rule"], [0, 0, 1, 2, 3]) == expected
    assert all(rows * positions <= most or rows == 1 for rows, positions in sizes)
    assert len(sizes) > len(watched.passes)


class Largest(TorchDispatchMode):
    """Remembers the most bytes that one tensor has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.most = max(self.most, made.numel() * made.element_size())
        return made


def test_mixed_drafts_need_no_more_than_their_distributions() -> None:
    """Certain drafts are ones among zeros, which takes no tensor of all numbers in 64 bits."""
    num_rows, width, vocab_size = 6, 4, 1000
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (num_rows, width), generator=generator)
    drew = torch.tensor([True, False] * 3)
    probs = torch.rand(num_rows, width, vocab_size, generator=generator)
    drawn = Drafts(ids * drew[:, None], probs, [width, 0] * 3)
    known_ids = ids * ~drew[:, None]
    known = Drafts(known_ids, None, [0, width] * 3)
    with Largest() as largest:
        merged = merge_drafts([drawn, known], num_rows, vocab_size, CPU, with_probs=True)
    assert merged.probs is not None
    assert torch.equal(merged.probs[drew], probs[drew])
    for row in (1, 3, 5):
        for place in range(width):
            assert merged.probs[row, place].nonzero().tolist() == [[int(ids[row, place])]]
            assert merged.probs[row, place].max() == 1
    assert largest.most <= merged.probs.numel() * 4


@pytest.mark.parametrize("k", [0, 1, 3, "auto"])
def test_what_serves_was_compared_at_load(
    k: int | str, models: Models, taped: None, monkeypatch: Patch
) -> None:
    """Programs are compiled for the widths of rows and verdicts, and for the vocabularies."""
    used: set[tuple[str | int, ...]] = set()

    def drawing(
        logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, place: torch.Tensor
    ) -> None:
        used.add(("draw", logits.shape[1], probs.shape[1], numbers.shape[1]))
        torch_sampling.draw_drafts(logits, probs, numbers, place)

    def judging(
        logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, verdicts: torch.Tensor
    ) -> None:
        used.add(("judge", logits.shape[2], probs.shape[2], numbers.shape[1], verdicts.shape[1]))
        torch_sampling.judge(logits, probs, numbers, verdicts)

    kernels: Any = SimpleNamespace(draw_drafts=drawing, judge=judging)

    def found(*given: Any) -> Any:
        assert is_right(kernels, *given)
        return kernels

    monkeypatch.setattr(plan_module, "find_sampling", found)
    draft = models.close_draft if k else None
    core: EngineCore = make_engine(models.target, draft, num_speculative_tokens=k)
    compared = set(used)
    used.clear()
    run_engine(core, PROMPTS, PARAMS["every rule"])
    assert used
    assert used <= compared
