"""A round of drafts in one call of C: the drafts, distributions and caches of the loop, bit for bit."""

import itertools
from collections.abc import Sequence as Sequences
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.engine import EngineCore
from engine.core.scheduler import Scheduled
from engine.draft_length.confidence import Patience, PatientDraft
from engine.messages import SamplingParams
from engine.native import draft, library
from engine.proposers import draft_model as proposer_module
from engine.sampling.sampler import Drafts, Sampler
from tests.engine.native_pair import draft_model, make_twins, save_pair
from tests.engine.patience import known
from tests.engine.test_native import plant
from tests.models import run_engine

pytestmark = pytest.mark.usefixtures("needs_compiler")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(40)) * 2, [2, 2]]
LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0)
COUPLED = SamplingParams(max_tokens=LENGTH, temperature=1.1, seed=5, verification="coupled")
REJECTION = SamplingParams(max_tokens=LENGTH, temperature=0.9, seed=6, verification="rejection")
BLOCK = SamplingParams(max_tokens=LENGTH, temperature=1.2, top_p=0.9, seed=7, verification="block")
CUT = SamplingParams(
    max_tokens=LENGTH, temperature=1.3, top_k=9, min_p=0.02, seed=8, verification="rejection"
)
NO_DRAFTS = SamplingParams(max_tokens=LENGTH, temperature=0, num_speculative_tokens=0)
TWO_DRAFTS = SamplingParams(max_tokens=LENGTH, temperature=1.1, seed=9, num_speculative_tokens=2)
ROWS = {
    "greedy": [GREEDY],
    "coupled": [COUPLED],
    "rejection": [REJECTION],
    "block": [BLOCK],
    "cut": [CUT],
    "of all kinds": [GREEDY, COUPLED, REJECTION, BLOCK, CUT],
    "some without drafts": [NO_DRAFTS, COUPLED, TWO_DRAFTS],
}


def record(core: EngineCore) -> list[Drafts]:
    """What the draft model proposes in each round."""
    proposer = core.proposer.proposers["draft_model"]
    rounds: list[Drafts] = []
    propose = proposer.propose

    def recorded(scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        rounds.append(propose(scheduled, sampler))
        return rounds[-1]

    proposer.propose = recorded  # type: ignore[method-assign]
    return rounds


def stored(core: EngineCore) -> list[torch.Tensor]:
    cache = draft_model(core).cache
    assert cache is not None
    return [*cache.keys, *cache.values]


def assert_same(ours: Drafts, theirs: Drafts) -> None:
    assert ours.lengths == theirs.lengths
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    if theirs.probs is None:
        assert ours.probs is None
    elif ours.probs is None:  # who asks for them drafts nothing in this round
        assert not theirs.probs.any()
    else:
        assert torch.equal(ours.probs, theirs.probs)


def same_rounds(ours: list[Drafts], theirs: list[Drafts]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each round that was asked for was drafted in C."""
    honest = draft.draft_round
    rounds: list[bool] = []

    def counted(*arguments: Any) -> Drafts | None:
        drafts = honest(*arguments)
        rounds.append(drafts is not None)
        return drafts

    monkeypatch.setattr(proposer_module, "draft_round", counted)
    return rounds


def run_twins(
    folder: Path, params: Sequences[SamplingParams], vocab_size: int = 40, **config: Any
) -> tuple[list[Drafts], list[Drafts]]:
    twins = make_twins(*save_pair(folder, vocab_size), **config)
    rounds = [record(core) for core in twins]
    each = list(itertools.islice(itertools.cycle(params), len(PROMPTS)))
    said = [run_engine(core, PROMPTS, each, arrivals=[0, 0, 1, 3, 9]) for core in twins]
    assert said[0] == said[1]
    for ours, theirs in zip(*map(stored, twins), strict=True):
        assert torch.equal(ours, theirs)
    return rounds[0], rounds[1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("params", ROWS.values(), ids=ROWS)
def test_rounds_are_the_loops(
    params: list[SamplingParams], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_c = count_rounds(monkeypatch)
    same_rounds(*run_twins(tmp_path, params, num_threads=threads, max_num_batched_tokens=32))
    assert len(in_c) > 10
    assert all(in_c)
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("vocab_size", "params", "in_c"), [(33, GREEDY, True), (33, COUPLED, False), (64, GREEDY, False)]
)
def test_other_vocabularies(
    vocab_size: int,
    params: SamplingParams,
    in_c: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft knows fewer tokens than the target, or more."""
    rounds = count_rounds(monkeypatch)
    same_rounds(*run_twins(tmp_path, [params], vocab_size, max_num_batched_tokens=32))
    assert set(rounds) == {in_c}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8, temperature=0, frequency_penalty=0.5),
        SamplingParams(max_tokens=8, temperature=0, logit_bias={3: 2.0}),
        SamplingParams(max_tokens=8, temperature=0, trace=True),
    ],
    ids=["penalty", "bias", "trace"],
)
def test_what_it_cannot_draw_takes_the_loop(
    params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = count_rounds(monkeypatch)
    run_twins(tmp_path, [params])
    assert set(rounds) == {False}


def propose_patiently(
    core: EngineCore, rates: Sequences[float], limits: tuple[float, float]
) -> tuple[Drafts, PatientDraft]:
    """One round of a lone row, after a prompt."""
    patient = PatientDraft(Patience(known(rates), *limits))
    proposer = core.proposer.proposers["draft_model"]
    propose = proposer.propose

    def impatient(scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        for part in scheduled:
            if part.num_draft_tokens:
                part.patient_draft = patient
        return propose(scheduled, sampler)

    proposer.propose = impatient  # type: ignore[method-assign]
    rounds = record(core)
    run_engine(core, [[3, 1, 4, 1, 5]], SamplingParams(max_tokens=2, temperature=0))
    return rounds[-1], patient


@pytest.mark.parametrize("limits", [(0.0, 0.0), (0.5, 0.6), (0.3, 0.9), (0.95, 0.95), (0.2, 0.25)])
@pytest.mark.parametrize("rates", [[0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99], [0.9] * 8, [0.0] * 8])
def test_patience_ends_where_the_loop_does(
    rates: list[float], limits: tuple[float, float], tmp_path: Path
) -> None:
    twins = make_twins(*save_pair(tmp_path), num_speculative_tokens=8)
    (ours, our_patient), (theirs, their_patient) = (propose_patiently(core, rates, limits) for core in twins)
    assert_same(ours, theirs)
    assert list(our_patient.confidences) == list(their_patient.confidences)
    for one, other in zip(*map(stored, twins), strict=True):
        assert torch.equal(one, other)


# Planted bugs: (what is right, what is wrong).
BUGS = {
    "stores a token behind": ("new->num_tokens[span] + position;", "new->num_tokens[span] + position - 1;"),
    "another row's block table": ("= new->first_block[span];", "= new->first_block[0];"),
    "draws every token at the same position": ("positions[row] + position;", "positions[row];"),
    "races with the first row's seed": ("rows->seeds + row, rows->positions", "rows->seeds, rows->positions"),
    "reads another row's logits": ("logits + i * vocab, probs", "logits, probs"),
}


@pytest.mark.parametrize(("right", "wrong"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(
    right: str, wrong: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(library, "SOURCES", plant(library.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        same_rounds(*run_twins(tmp_path, ROWS["of all kinds"]))
