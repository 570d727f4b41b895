"""Drafts end where the proposer is not sure of them: exactly under every rule, and in C where phases do."""

from pathlib import Path

import pytest
import torch

from tests.engine import gates, simulation
from tests.engine.conftest import Models
from tests.engine.native_pair import save_pair
from tests.engine.native_rounds import RowPlan, Side, compare
from tests.engine.planners import FixedPlanner, use_planner
from tests.engine.simulation import Lengths
from tests.models import make_engine, run_engine
from truedraft.engine.core.draft_choice import Stop, part_of
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import SamplingParams
from truedraft.engine.proposers import drawn
from truedraft.engine.sampling.sampler import DraftDraw, Rule, Sampler

Patch = pytest.MonkeyPatch
SURE = Stop((0.4, 0.5, 0.9, 0.95), 0.7)
PLAIN = SamplingParams(max_tokens=6)
STOPPING = Lengths(4, SURE)
# A draft model that is sure behind two tokens, one of which it mostly draws.
SURE_LOGITS, UNSURE_LOGITS = torch.tensor([1.5, 1, 0, -1, -1]), torch.tensor([1, 0.8, 0.2, -0.5, -0.5])
# Long drafts tell which tokens were drawn, and rounds after them draft nothing.
TELLING = Lengths(4, Stop((0.0,) * 4 + (1.0,) * 6, 0.5), heeding=4)


def sure_by_last_token(patch: Patch) -> None:
    patch.setattr(simulation, "DRAFT", lambda text: SURE_LOGITS if text[-1] in (0, 3) else UNSURE_LOGITS)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.COUPLED])
def test_samples_have_the_targets_distribution(rule: Rule) -> None:
    gates.joint_distribution(PLAIN, rule, 5000, lengths=STOPPING)


def test_what_lengths_tell_of_rejected_tokens_is_spent(monkeypatch: Patch) -> None:
    """A planner learns from lengths: they must say nothing of what a later round draws."""
    sure_by_last_token(monkeypatch)
    gates.joint_distribution(PLAIN, Rule.REJECTION, 5000, lengths=TELLING)
    monkeypatch.setattr(Sampler, "_seeds", lambda self, members: self.seeds[members])
    with pytest.raises(AssertionError):
        gates.joint_distribution(PLAIN, Rule.REJECTION, 16_000, lengths=TELLING)


def unsure_tokens_dropped(patch: Patch) -> None:
    """A draft ends before a token because of that token's own probability."""
    honest, follow = Sampler.draw_drafts, drawn._Stopping.follow

    def draw(self: Sampler, logits: torch.Tensor, drafted: torch.Tensor, *options: bool) -> DraftDraw:
        draw = honest(self, logits, drafted, *options)
        assert draw.probs is not None
        return draw._replace(confidences=draw.probs.gather(1, draw.ids[:, None])[:, 0])

    def drop(self: drawn._Stopping, rows: list[int], confidences: list[float]) -> None:
        before = self.lengths[:]
        follow(self, rows, confidences)
        self.lengths[:] = [new - (new < old) for new, old in zip(self.lengths, before, strict=True)]

    patch.setattr(Sampler, "draw_drafts", draw)
    patch.setattr(drawn._Stopping, "follow", drop)


def test_dropping_unsure_tokens_is_caught(monkeypatch: Patch) -> None:
    unsure_tokens_dropped(monkeypatch)
    with pytest.raises(AssertionError):
        gates.joint_distribution(PLAIN, Rule.REJECTION, 5000, lengths=STOPPING)


def stopping_engine(models: Models) -> EngineCore:
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=6)
    use_planner(core, FixedPlanner(stop=SURE))
    return core


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=30, temperature=0), SamplingParams(max_tokens=30, seed=3)]
)
def test_greedy_and_seeded_texts_are_those_of_plain_decoding(models: Models, params: SamplingParams) -> None:
    core = stopping_engine(models)
    assert run_engine(core, gates.PROMPTS, params) == run_engine(
        make_engine(models.target, None), gates.PROMPTS, params
    )
    assert isinstance(core.planner, FixedPlanner)
    lengths = [
        length for _, result in core.planner.observed for one in result.rounds for length in one.num_drafted
    ]
    assert {1, 2} <= set(lengths)
    assert 6 not in lengths


def test_c_stops_where_phases_do(tmp_path: Path) -> None:
    """Rules, cuts and penalties side by side, with a row that is only watched and one that is not."""
    params = [
        SamplingParams(max_tokens=40, temperature=0),
        SamplingParams(max_tokens=40, temperature=0, frequency_penalty=1.0),
        SamplingParams(max_tokens=40, verification="rejection", top_k=5),
        SamplingParams(max_tokens=40, verification="coupled", temperature=0.6),
    ]
    stop = Stop(SURE.rates, 0.45)
    rows = [RowPlan(each, [1, 2, 3], 5, stop) for each in params]
    rows += [RowPlan(params[0], [4, 5], 5, Stop(SURE.rates)), RowPlan(params[2], [6], 5)]
    pair = save_pair(tmp_path, 33)
    ours, theirs = (Side(make_engine(*pair), rows) for _ in range(2))
    rounds = compare(ours, theirs, 3)
    assert {1, 2, 5} <= {length for one in rounds for length in one.num_drafted}
    confidences = [one.confidences for one in rounds if one.confidences is not None]
    assert confidences
    assert not any(each[5] for each in confidences if len(each) > 5)


def test_parts_of_probabilities() -> None:
    found = [part_of(confidence, 4) for confidence in (0.0, 0.24, 0.25, 0.99, 1.0, float("nan"))]
    assert found == [0, 0, 1, 3, 3, 0]
