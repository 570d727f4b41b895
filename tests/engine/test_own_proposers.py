"""Proposers that a user writes: they change speed and nothing else, and are told what the target computes.

A small head on the target's states learns from what it observes; a copy of the target that cannot lag keeps a
cache of its own. Their acceptance, and what they are told, show every slip.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Models
from tests.engine.gates import PROMPTS
from tests.engine.native_pair import save_pair
from tests.engine.test_distribution import SIGNIFICANCE, Pair, p_values_of, pair
from tests.models import make_engine, run_engine
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.proposer import Observation, Proposer, ProposerCache
from truedraft.engine.core.sequence import Sequence as Text
from truedraft.engine.core.step import StepPlan
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.proposers.drawn import drawn_drafts, lengths_of
from truedraft.engine.rounds import round as one_round
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.sampling.verify import RowVerdict

__all__ = ["pair"]  # a fixture


def params_of(rule: str, name: str, seed: int) -> SamplingParams:
    if rule == "greedy":
        return SamplingParams(max_tokens=30, temperature=0, method=name)
    return SamplingParams(max_tokens=30, temperature=1.1, seed=seed, verification=rule, method=name)  # type: ignore[arg-type]


class Head(Proposer):
    """Guesses a token from the state of the last but one and the token itself, as trained heads do.

    It is fitted by least squares to what it has observed; until then its weights are random.
    """

    name = "head"
    taps = (-1,)
    can_lag = False

    def __init__(self) -> None:
        self.last: WeakKeyDictionary[Text, torch.Tensor] = WeakKeyDictionary()
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[int] = []

    def attach(self, target: ModelRunner) -> None:
        self.vocab_size = target.vocab_size
        generator = torch.Generator().manual_seed(1)
        size = target.model.config.hidden_size * self.vocab_size
        self.weight = torch.randn(size, self.vocab_size, generator=generator)

    def fit(self) -> None:
        wanted = torch.nn.functional.one_hot(torch.tensor(self.outputs), self.vocab_size).float()
        inputs = torch.stack(self.inputs)
        kernel = inputs @ inputs.T + 1e-2 * torch.eye(len(inputs))
        self.weight = inputs.T @ torch.linalg.solve(kernel, wanted)

    def _input(self, state: torch.Tensor, token_id: int) -> torch.Tensor:
        row = torch.zeros(self.vocab_size, len(state))
        row[token_id] = state / state.norm()
        return row.flatten()

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            assert seen.hidden is not None
            text = [*seen.token_ids, seen.next_token]
            states = [self.last.get(seen.sequence), *seen.hidden[:, 0]]  # each precedes a token of text
            for state, token_id, following in zip(states, text, text[1:], strict=False):
                if state is not None:
                    self.inputs.append(self._input(state, token_id))
                    self.outputs.append(following)
            self.last[seen.sequence] = seen.hidden[-1, 0]

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
            inputs = []
            for place, row in enumerate(rows):
                sequence = plan.rows[row].sequence
                state = self.last[sequence]
                known = sequence.token_ids[-1] if last_ids is None else int(last_ids[place])
                inputs.append(self._input(state, known))
            return 20 * torch.stack(inputs) @ self.weight

        lengths = [min(length, 1) for length in lengths_of(plan, self.name)]
        return drawn_drafts(lengths, sampler, next_logits)


class Follower(Proposer):
    """A copy of the target that cannot lag: its own cache takes in what the target's passes bring."""

    name = "follower"
    can_lag = False

    def __init__(self, num_blocks: int = 200) -> None:
        self.cache = ProposerCache(BlockPool(num_blocks, 4))

    def attach(self, target: ModelRunner) -> None:
        self.runner = ModelRunner.build(target.model, self.cache.pool.num_blocks, 4)

    @property
    def pools(self) -> Sequence[BlockPool]:
        return (self.cache.pool,)

    def tables(self, sequence: Text) -> Sequence[tuple[BlockPool, BlockTable]]:
        return ((self.cache.pool, self.cache.table(sequence)),)

    def reset(self) -> None:
        self.cache.reset()

    def observe(self, observations: Sequence[Observation]) -> None:
        spans = []
        for seen in observations:
            table = self.cache.table(seen.sequence)
            assert table.num_computed_tokens >= seen.first, "it has not been told of some tokens"
            # What it has drafted is stored already, as far as it stands; what follows is not.
            num_stored = min(table.num_computed_tokens - seen.first, len(seen.token_ids))
            table.num_computed_tokens = seen.first + num_stored
            if new := seen.token_ids[num_stored:]:
                spans.append(Span(table, new, 0))
        if spans:
            self.runner.forward(spans)

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
            sequences = [plan.rows[row].sequence for row in rows]
            ids = [[sequence.token_ids[-1]] for sequence in sequences]
            tables = [self.cache.table(sequence) for sequence in sequences]
            spans = [Span(table, each, 1) for table, each in zip(tables, ids, strict=True)]
            return self.runner.forward(spans, last_ids).logits

        return drawn_drafts(lengths_of(plan, self.name), sampler, next_logits)


class Witness(Proposer):
    """Drafts nonsense, and compares what it is told with transformers' own forward of the text so far."""

    name = "witness"
    taps = (1, 2, 0)
    can_lag = False

    def __init__(self, target: str) -> None:
        self.fresh = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.texts: WeakKeyDictionary[Text, list[int]] = WeakKeyDictionary()
        self.num_seen = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            known, before = seen.sequence.token_ids, self.texts.get(seen.sequence, [])
            assert known[: len(before)] == before, "it was told of tokens that were not emitted"
            assert seen.first == max(0, len(before) - 1), "it was told twice of a token, or not at all"
            text = known[: seen.first] + seen.token_ids
            self.texts[seen.sequence] = [*text, seen.next_token]
            states = self.fresh(torch.tensor([text]), output_hidden_states=True).hidden_states
            assert seen.hidden is not None
            last, normed, first = seen.hidden.unbind(1)
            # transformers' last states are after the norm.
            both = (self.fresh.model.norm(last), states[2]), (normed, states[2]), (first, states[1])
            for ours, theirs in both:
                torch.testing.assert_close(ours, theirs[0, seen.first :], atol=1e-4, rtol=1e-4)
            self.num_seen += len(seen.token_ids)

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        generator = torch.Generator().manual_seed(len(plan.rows[0].sequence))
        return drawn_drafts(
            lengths_of(plan, self.name),
            sampler,
            lambda rows, _: torch.randn(len(rows), sampler.vocab_size, generator=generator),
        )


def engine(models: Models, proposer: Proposer, **config: Any) -> EngineCore:
    return make_engine(models.target, None, [proposer], method="auto", **config)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "block"])
@pytest.mark.parametrize("make", [Head, Follower])
def test_text_is_the_same_with_and_without(models: Models, make: type[Proposer], rule: str) -> None:
    """Short chunks of prompts, and few blocks, so that sequences are preempted and prefixes taken over."""
    core, plain = engine(models, make(), max_num_batched_tokens=12), make_engine(models.target, None)
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        pool.__init__(30, 4)  # type: ignore[misc]
    params = [params_of(rule, make.name, seed) for seed in range(2 * len(PROMPTS))]
    found = run_engine(core, 2 * PROMPTS, params)
    assert core.stats.num_draft_tokens > 100
    assert core.scheduler.num_preemptions > 0
    assert all(pool.usage == 0 for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools))
    if rule in ("greedy", "coupled"):  # the others draw from the same law, as the next test shows
        expected = [structs.replace(each, method="none", num_speculative_tokens=0) for each in params]
        assert found == run_engine(plain, 2 * PROMPTS, expected)


@pytest.mark.parametrize("make", [Head, Follower])
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_text_has_the_law_of_the_target(pair: Pair, make: type[Proposer], verification: str) -> None:
    core = make_engine(
        pair.target, None, [make()], method="auto", verification=verification, max_num_sequences=16
    )
    assert min(p_values_of(core, pair, 3000)) > SIGNIFICANCE


def follower_is_always_right(models: Models) -> None:
    """It drafts what the target says, unless it was not told what the target has computed."""
    core = engine(models, Follower(), num_speculative_tokens=3, max_num_batched_tokens=12)
    run_engine(core, PROMPTS, params_of("greedy", "follower", 0))
    assert core.stats.num_draft_tokens > 60
    assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens


def head_learns(models: Models) -> None:
    """A head that was fitted to what it has observed guesses most tokens of the same texts."""
    head = Head()
    params = params_of("greedy", "head", 0)
    run_engine(engine(models, head), PROMPTS, params)
    core = engine(models, head)
    head.fit()
    run_engine(core, PROMPTS, params)
    assert core.stats.num_accepted_tokens > 0.9 * core.stats.num_draft_tokens > 0


def witness_is_told_the_truth(models: Models) -> None:
    witness = Witness(models.target)
    core = engine(models, witness, max_num_batched_tokens=12, prefix_caching=False)
    params = [params_of(rule, "witness", seed) for seed, rule in enumerate(("greedy", "coupled", "block"))]
    run_engine(core, PROMPTS[1:4], params)
    assert witness.num_seen > 100
    assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


GATES = [follower_is_always_right, head_learns, witness_is_told_the_truth]


@pytest.mark.parametrize("gate", GATES)
def test_what_proposers_are_told_is_right(models: Models, gate: Callable[[Models], None]) -> None:
    gate(models)


@pytest.mark.usefixtures("needs_compiler")
def test_passes_in_c_tell_the_states_too(tmp_path: Path) -> None:
    """A target that C runs stays there with taps; only its rounds go by phases."""
    target = save_pair(tmp_path)[0]
    witness = Witness(target)
    core = make_engine(target, None, [witness], method="auto", prefix_caching=False)
    passes: list[Sequence[int]] = []
    fast_pass = core.target.fast_pass
    assert isinstance(fast_pass, NativeDecoder)

    def counted(spans: list[Span], ids: torch.Tensor | None, taps: Sequence[int] = ()) -> Any:
        found = fast_pass(spans, ids, taps)
        if found is not None:
            passes.append(taps)
        return found

    core.target.fast_pass = counted
    run_engine(core, PROMPTS[1:4], params_of("coupled", "witness", 1))
    assert witness.num_seen > 60
    assert len(passes) > 20
    assert {tuple(taps) for taps in passes} == {tuple(sorted(Witness.taps))}


def told(change: Callable[[Observation, Observation], Observation]) -> Callable[[pytest.MonkeyPatch], None]:
    """Returns a planted bug: ``change`` is given what was told, and what would be if all drafts stood."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = one_round._standing

        def standing(
            plan: StepPlan, scored: Any, drafts: Drafts, verdicts: list[RowVerdict]
        ) -> Iterator[Observation]:
            lengths = [len(span.token_ids) for span in scored.spans]
            drafted = (
                [
                    RowVerdict(length - part.num_tokens, verdict.next_token, False)
                    for part, length, verdict in zip(
                        plan.rows, lengths[-len(plan.rows) :], verdicts, strict=True
                    )
                ]
                if len(plan.rows) == len(plan.scheduled)
                else verdicts
            )
            everything = honest(plan, scored, drafts, drafted)
            return map(change, honest(plan, scored, drafts, verdicts), everything)

        patch.setattr(one_round, "_standing", standing)

    return plant


def one_token_short(seen: Observation, _: Observation) -> Observation:
    if len(seen.token_ids) == 1:
        return seen
    hidden = None if seen.hidden is None else seen.hidden[:-1]
    return replace(seen, token_ids=seen.token_ids[:-1], hidden=hidden, next_token=seen.token_ids[-1])


def state_before_the_last(seen: Observation, _: Observation) -> Observation:
    """The head lags: it is one state behind."""
    assert seen.hidden is None or len(seen.hidden) == len(seen.token_ids)
    return seen if seen.hidden is None else replace(seen, hidden=seen.hidden.roll(1, 0))


def with_rejected_drafts(_: Observation, everything: Observation) -> Observation:
    return everything


@pytest.mark.parametrize(
    ("gate", "change"),
    [
        (follower_is_always_right, one_token_short),
        (witness_is_told_the_truth, one_token_short),
        (head_learns, state_before_the_last),
        (witness_is_told_the_truth, state_before_the_last),
        (witness_is_told_the_truth, with_rejected_drafts),
        (head_learns, with_rejected_drafts),
    ],
)
def test_planted_bugs_are_caught(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    gate: Callable[[Models], None],
    change: Callable[[Observation, Observation], Observation],
) -> None:
    told(change)(monkeypatch)
    with pytest.raises(AssertionError):
        gate(models)
