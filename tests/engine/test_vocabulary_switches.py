"""A head's vocabulary is replaced within texts: drafts are verified with what they were drawn from."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.engine import simulation
from tests.engine.head_runs import TRAINED, mtp_engine, story_prompts
from tests.engine.simulation import VOCAB_SIZE, Lengths
from tests.models import make_engine, run_engine, stepped
from tests.mtp import NaiveMtp, trained_head
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.layers.linear import Linear
from truedraft.engine.memory.pointers import PointerError
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.drawn import drawn_drafts
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.rounds import vocabulary_changes
from truedraft.engine.rounds.vocabulary_changes import VocabularyChanges
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.speculation import vocabulary_choice
from truedraft.engine.speculation.vocabulary_choice import Layer

Patch = pytest.MonkeyPatch
# Two vocabularies of toy texts: a round that begins behind one token drafts by the other.
TOY = (torch.tensor([0, 2, 3]), torch.tensor([1, 2, 4]))
WARM = SamplingParams(max_tokens=3, temperature=1.2)
GREEDY = SamplingParams(max_tokens=16, temperature=0, method="mtp")
SEEDED = structs.replace(GREEDY, temperature=1.1, seed=3, verification="coupled")
PARAMS = [GREEDY, SEEDED, GREEDY, SEEDED, SEEDED]


def propose(mixes: bool) -> Callable[..., Drafts]:
    """Drafts with the vocabulary that a round has begun with. ``mixes``: ids that one has drawn are taken as
    those of the other."""

    def propose(sampler: Sampler, lengths: list[int]) -> Drafts:
        texts = [list(row.token_ids) for row in sampler.rows]
        drawn_by = [(len(text) - len(simulation.PROMPT)) % 2 for text in texts]

        def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
            if last_ids is not None:
                for row, token_id in zip(rows, last_ids.tolist(), strict=True):
                    texts[row].append(token_id)
            wide = []
            for row in rows:
                ids = TOY[drawn_by[row]]
                head = SimpleNamespace(token_ids=ids)
                logits = simulation.DRAFT(texts[row])[ids]
                wide.append(Head.in_width(head, logits[None], VOCAB_SIZE))  # type: ignore[arg-type]
            return torch.cat(wide)

        drafts = drawn_drafts(lengths, sampler, next_logits)
        if mixes:
            mixed = drafts.token_ids.clone()  # an empty one is shared by all callers
            for ids, number in zip(mixed, drawn_by, strict=True):
                places = [TOY[number].tolist().index(token) if token in TOY[number] else 0 for token in ids]
                ids[:] = TOY[1 - number][places]
            return replace(drafts, token_ids=mixed)
        return drafts

    return propose


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.COUPLED])
def test_texts_have_the_targets_law(monkeypatch: Patch, rule: Rule) -> None:
    """Compares with exact enumeration, by chi-square."""
    monkeypatch.setattr(simulation, "_propose", propose(mixes=False))
    assert simulation.p_value(WARM, rule, 2000, lengths=Lengths(2)) > 1e-4


def test_ids_of_the_old_vocabulary_that_the_new_one_maps_are_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(simulation, "_propose", propose(mixes=True))
    assert simulation.p_value(WARM, Rule.REJECTION, 2000, lengths=Lengths(2)) < 1e-9


# Tokens and bits that a head drafts with, one after the other; None: all.
SOME, OTHERS = np.arange(0, 600, 2), np.arange(1, 600, 2)
TURNS: tuple[tuple[np.ndarray[Any, np.dtype[np.int64]] | None, bool], ...] = (
    (SOME, False),
    (OTHERS, False),
    (None, True),
    (SOME, True),
    (None, False),
)


def switching(core: EngineCore, in_four_bits: bool = True) -> list[list[int]]:
    """Lets the head draft with another layer in each step. Returns which tokens it drafts in each."""
    (proposer,) = core.scheduler.proposers
    assert isinstance(proposer, HeadProposer)
    weights, step, number = proposer.head.model.weights, core.step, count()
    assert weights.make_output is not None
    layers: list[tuple[torch.Tensor | None, Linear, bool]] = []
    for ids, bits in TURNS:
        if ids is None and not bits:
            layers.append((None, weights.head, bits))
        elif in_four_bits or not bits:
            made = weights.make_output(ids, bits)
            assert made is not None
            layers.append((None if ids is None else torch.from_numpy(ids), made, bits))
    drafted: list[list[int]] = []

    def switched() -> Any:
        ids, layer, bits = layers[next(number) % len(layers)]
        proposer.draft_with(ids, layer, bits)
        drafted.append([*range(2048)] if ids is None else ids.tolist())
        return step()

    core.step = switched  # type: ignore[method-assign]
    return drafted


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return story_prompts()


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    params = [structs.replace(each, method="none") for each in PARAMS]
    return run_engine(make_engine(TRAINED, None, max_model_len=64, dtype="auto"), prompts, params)


def text_and_verdicts(core: EngineCore, prompts: list[list[int]]) -> tuple[Any, Any]:
    drafted = switching(core)
    texts = run_engine(core, prompts, PARAMS[: len(prompts)])
    assert len(drafted) > 6
    assert core.stats.drafts["mtp"].num_accepted_tokens > 5
    return texts, vars(core.stats)["_verdicts"]


def texts_are_those_without_a_head(prompts: list[list[int]], expected: list[list[int]]) -> None:
    core = mtp_engine(num_speculative_tokens=3, step_seconds=0.0, dtype="auto")
    texts, _ = text_and_verdicts(core, prompts)
    assert texts == expected


@pytest.mark.usefixtures("needs_compiler")
def test_text_is_the_same_over_switches(prompts: list[list[int]], expected: list[list[int]]) -> None:
    texts_are_those_without_a_head(prompts, expected)


@pytest.mark.usefixtures("needs_compiler")
def test_an_engine_takes_a_layer_that_was_made_beside(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: Patch
) -> None:
    """Whatever that gains at the draft length: a model so small has no use for it."""
    for module in (vocabulary_choice, vocabulary_changes):
        monkeypatch.setattr(module, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(vocabulary_choice, "REVIEW_OUTPUTS", 16)
    monkeypatch.setattr(vocabulary_changes, "STEPS", 1)
    core = mtp_engine(num_speculative_tokens=3, draft_vocab_size="auto", dtype="auto", step_seconds=0.0)
    assert core.speculation()["policy"] == "fixed"
    vocabulary, (proposer,) = core.vocabulary, core.scheduler.proposers
    assert isinstance(vocabulary, VocabularyChanges)
    assert isinstance(proposer, HeadProposer)
    vocabulary.choice.layers = [Layer(512, in_four_bits=True)]
    deadline = time.monotonic() + 300
    while not vocabulary.num_changes:
        assert run_engine(core, prompts, PARAMS) == expected
        assert time.monotonic() < deadline
    assert run_engine(core, prompts, PARAMS) == expected
    ids = proposer.head.token_ids
    assert ids is not None
    assert {*prompts[0], *core.target.model.eos_token_ids} < set(ids.tolist())
    state = core.speculation()["draft_vocabulary"]
    assert (state["tokens"], state["in_four_bits"], state["changes"] > 0) == (512, True, True)  # type: ignore[index]


def drafts_are_by_definition(head: NaiveMtp, prompt: list[int]) -> None:
    """Each draft is the most likely one of the tokens that its step draws from."""
    core = mtp_engine(step_seconds=0.0)
    drafted = switching(core, in_four_bits=False)
    core.add(Generate("0", prompt, structs.replace(GREEDY, trace=True)))
    text, rounds = list(prompt), []
    while core.has_work:
        for output in stepped(core):
            text += output.token_ids
            if output.trace and output.trace.draft_ids:
                rounds.append((output.trace, drafted[-1]))
    states = head.target[0].model(torch.tensor([text])).last_hidden_state[0]
    for one, allowed in rounds:
        known = text[: one.position], states[: one.position - 1]
        assert one.draft_ids == head.draft(*known, len(one.draft_ids), allowed)
    assert len({len(allowed) for _, allowed in rounds}) == 2


@pytest.fixture(scope="module")
def head() -> NaiveMtp:
    return trained_head(TRAINED)


@pytest.mark.usefixtures("needs_compiler")
@torch.no_grad()
def test_drafts_are_of_the_vocabulary_of_their_step(head: NaiveMtp, prompts: list[list[int]]) -> None:
    drafts_are_by_definition(head, prompts[0])


def ids_without_rows(patch: Patch) -> None:
    """The head's ids are others, but not its rows."""
    patch.setattr(ModelRunner, "change_model", lambda self, model: None)


@pytest.mark.usefixtures("needs_compiler")
@torch.no_grad()
def test_ids_of_other_rows_are_caught(head: NaiveMtp, prompts: list[list[int]], monkeypatch: Patch) -> None:
    ids_without_rows(monkeypatch)
    with pytest.raises((AssertionError, IndexError, PointerError)):
        drafts_are_by_definition(head, prompts[0])
