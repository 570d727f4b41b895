"""Rounds of a step as one call of C: what the same rounds emit and store phase by phase, bit for bit."""

import ctypes
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_params

from tests.engine.native_pair import LONG, make_twins, native_runner, save_pair
from tests.engine.native_rounds import RandomMasks, RowPlan, Side, compare, make_sequence
from tests.engine.planners import phases_of
from tests.engine.test_native import plant
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import EVERY_NEED, Need, Needs
from truedraft.engine.core.step import Round, StepPlan, StepResult
from truedraft.engine.layers.linear import DenseEmbeddings
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput
from truedraft.engine.native import compiler, library
from truedraft.engine.runtime.native.rows import NativeRow
from truedraft.engine.runtime.native.runner import NativeRunner
from truedraft.engine.sampling.adjust import History, adjust_logits

pytestmark = pytest.mark.usefixtures("needs_compiler")

GREEDY = SamplingParams(max_tokens=99, temperature=0)
COUPLED = SamplingParams(max_tokens=99, temperature=1.1, seed=5, verification="coupled")
REJECTION = SamplingParams(max_tokens=99, temperature=0.9, seed=6, verification="rejection")
CUT = SamplingParams(max_tokens=99, temperature=1.3, top_k=9, min_p=0.02, seed=8, verification="rejection")
NUCLEUS = SamplingParams(max_tokens=99, temperature=1.2, top_p=0.8, seed=9, verification="coupled")
BIAS = {1: 3.0, 2: -100.0, 7: 1.25, 39: 2.5}
STOPS = frozenset(range(0, 40, 3))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(40)), [2, 2]]
ALL = [GREEDY, COUPLED, REJECTION, CUT, NUCLEUS]


def rows_of(params: list[SamplingParams], **fields: Any) -> list[RowPlan]:
    return [RowPlan(own, prompt, **fields) for own, prompt in zip(params, PROMPTS, strict=False)]


def each_with(**changes: Any) -> list[RowPlan]:
    return rows_of([with_params(own, **changes) for own in ALL])


def given(seed: int, lengths: range) -> dict[int, list[int]]:
    """Drafts from outside at some lengths of the output."""
    generator = torch.Generator().manual_seed(seed)
    return {at: torch.randint(0, 40, (1 + at % 4,), generator=generator).tolist() for at in lengths}


PENALTIES = {"frequency_penalty": 0.37, "presence_penalty": -0.21, "repetition_penalty": 1.13}
KINDS: dict[str, list[RowPlan]] = {
    "greedy": rows_of([GREEDY] * 5),
    "coupled": rows_of([COUPLED] * 5),
    "rejection": rows_of([REJECTION] * 5),
    "cut": rows_of([CUT, NUCLEUS, CUT]),
    "of all rules": rows_of(ALL),
    "alone": rows_of([GREEDY]),
    "without drafts": rows_of(ALL, num_draft_tokens=0),
    "of several lengths": [
        replace(row, num_draft_tokens=number) for number, row in enumerate(rows_of([*ALL[:2], *ALL[1:4]]))
    ],
    "to several ends": [
        replace(row, max_num_tokens=len(row.prompt) + 1 + 3 * number)
        for number, row in enumerate(rows_of(ALL))
    ],
    "with stops": rows_of(ALL, stop_token_ids=STOPS),
    "behind with their drafts": [
        replace(row, num_missing=len(row.prompt) - 1 - (len(row.prompt) > 33) * 7) for row in rows_of(ALL)
    ],
    "bias": each_with(logit_bias=BIAS),
    "frequency": each_with(frequency_penalty=0.37),
    "presence": each_with(presence_penalty=0.9),
    "repetition": each_with(repetition_penalty=1.31),
    "rewarded repetition": each_with(repetition_penalty=0.77, frequency_penalty=-0.1),
    "all penalties": each_with(**PENALTIES),
    "a minimum": rows_of(
        [with_params(own, min_tokens=3 + 2 * number) for number, own in enumerate(ALL)], stop_token_ids=STOPS
    ),
    "all adjustments": rows_of(
        [with_params(own, min_tokens=7, logit_bias=BIAS, **PENALTIES) for own in ALL], stop_token_ids=STOPS
    ),
    "masks": [replace(row, mask_seed=number) for number, row in enumerate(rows_of(ALL))],
    "some masks": [
        replace(row, mask_seed=number if number % 2 else None)
        for number, row in enumerate(each_with(**PENALTIES))
    ],
    "log-probabilities": each_with(logprobs=3),
    "some log-probabilities": rows_of(
        [with_params(own, logprobs=top) for own, top in zip(ALL, (None, 0, 2, None, 5), strict=True)]
    ),
    "log-probabilities of adjusted rows": each_with(logprobs=2, logit_bias=BIAS, **PENALTIES),
    "drafts from outside": [
        replace(row, draft_ids=given(number, range(30))) for number, row in enumerate(rows_of(ALL))
    ],
    "some drafts from outside": [
        replace(row, draft_ids=given(number, range(number % 3, 30, 1 + number)))
        for number, row in enumerate(each_with(frequency_penalty=0.37))
    ],
    "prompts": [replace(row, num_uncomputed=len(row.prompt)) for row in rows_of(ALL)],
    "some prompts": [
        replace(row, num_uncomputed=max(1, len(row.prompt) * (number % 2)))
        for number, row in enumerate(each_with(logprobs=1, logit_bias=BIAS, **PENALTIES))
    ],
    "ends of prompts under masks": [
        replace(row, num_uncomputed=min(3, len(row.prompt)), mask_seed=number)
        for number, row in enumerate(rows_of(ALL))
    ],
    "everything at once": [
        RowPlan(with_params(GREEDY, logprobs=1, **PENALTIES), PROMPTS[0], 5),
        RowPlan(with_params(COUPLED, min_tokens=9, logit_bias=BIAS), PROMPTS[1], 2, stop_token_ids=STOPS),
        RowPlan(
            with_params(REJECTION, frequency_penalty=1.5), PROMPTS[2], draft_ids=given(3, range(0, 30, 2))
        ),
        RowPlan(with_params(CUT, logprobs=0), PROMPTS[3], 0),
        RowPlan(NUCLEUS, PROMPTS[4], 4),
        RowPlan(GREEDY, PROMPTS[3], 3, num_missing=32),
    ],
}


def run_twins(
    folder: Path,
    rows: list[RowPlan],
    max_rounds: int,
    draft_vocab_size: int = 40,
    max_draft_len: int = 1000,
    phases_every: int = 0,
) -> list[Round]:
    pair = save_pair(folder, draft_vocab_size)
    ours, theirs = (Side(make_engine(*pair), rows, max_draft_len) for _ in range(2))
    return compare(ours, theirs, max_rounds, phases_every)


# Sharing a step matters to what is kept from one to the next.
ALONE = (
    "of all rules",
    "all adjustments",
    "some masks",
    "drafts from outside",
    "prompts",
    "everything at once",
)


@pytest.mark.parametrize(
    ("kind", "max_rounds"), [*((kind, 5) for kind in KINDS), *((kind, 1) for kind in ALONE)]
)
def test_they_emit_what_phases_emit(kind: str, max_rounds: int, tmp_path: Path) -> None:
    rounds = run_twins(tmp_path, KINDS[kind], max_rounds)
    if kind != "without drafts":
        assert sum(map(sum, (one.num_drafted for one in rounds))) > 0


@pytest.mark.parametrize("draft_vocab_size", [33, 64])
@pytest.mark.parametrize("kind", ["of all rules", "all adjustments", "masks", "everything at once"])
def test_other_vocabularies(kind: str, draft_vocab_size: int, tmp_path: Path) -> None:
    """The draft knows fewer tokens than the target, or more."""
    run_twins(tmp_path, KINDS[kind], 4, draft_vocab_size)


@pytest.mark.parametrize("kind", ["of all rules", "all adjustments", "everything at once"])
def test_rows_that_take_some_steps_by_phases(kind: str, tmp_path: Path) -> None:
    """Tokens that C has not emitted itself are counted, too."""
    run_twins(tmp_path, KINDS[kind], 3, phases_every=2)


@pytest.mark.parametrize("kind", ["of all rules", "all penalties"])
def test_sequences_outgrow_the_draft_model(kind: str, tmp_path: Path) -> None:
    """Near its longest text it drafts less, then nothing, and the round goes on."""
    rounds = run_twins(tmp_path, KINDS[kind], 5, max_draft_len=30)
    lengths = [length for one in rounds for length in one.num_drafted]
    assert lengths.count(0) > len(lengths) / 4


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("kind", ["of all rules", "all adjustments", "everything at once"])
def test_several_threads_and_a_wide_vocabulary(kind: str, tmp_path: Path) -> None:
    """So many rows and tokens make C draw them on all threads."""
    target = save_random_llama(tmp_path / "target", seed=1, vocab_size=3967, hidden=64, std=0.2)
    draft = save_perturbed(tmp_path / "draft", target, seed=2, noise=0.01)
    rows = [replace(row, max_num_tokens=len(row.prompt) + 12) for row in KINDS[kind]]
    ours, theirs = (Side(make_engine(target, draft, num_threads=2), rows) for _ in range(2))
    rounds = compare(ours, theirs, 3)
    assert sum(map(sum, (one.num_accepted for one in rounds))) > 0


def test_logits_are_adjusted_as_by_torch() -> None:
    """Bit for bit, at every position, and only for as many tokens as there are."""
    loaded = library.load_library()
    assert loaded is not None
    loaded.adjust_logits.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    loaded.count_token.argtypes = loaded.uncount_token.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    vocab_size = 1003
    generator = torch.Generator().manual_seed(7)
    for trial in range(60):
        frequency, presence, repetition, *biases = torch.randn(8, generator=generator).tolist()
        params = with_params(
            GREEDY,
            frequency_penalty=frequency * (trial % 2),
            presence_penalty=presence * (trial % 3 > 0),
            repetition_penalty=2.0**repetition if trial % 5 else 1.0,
            logit_bias={200 * i: 10 * bias for i, bias in enumerate(biases)} if trial % 4 else {},
            min_tokens=trial % 7,
        )
        prompt = torch.randint(0, vocab_size, (200,), generator=generator).tolist() * 2
        masks = RandomMasks(trial, vocab_size) if trial % 6 == 1 else None
        plan = RowPlan(params, prompt, max_num_tokens=600, stop_token_ids=frozenset((5, prompt[0])))
        text = prompt + prompt[:trial] + torch.randint(0, vocab_size, (60,), generator=generator).tolist()
        history = History(params, text, len(prompt), plan.stop_token_ids, matcher=masks)
        drafts = torch.randint(0, vocab_size, (1, 4), generator=generator)
        drafts[0, ::2] = torch.tensor([prompt[-1], text[-1]])
        logits = 5 * torch.randn(1, 5, vocab_size, generator=generator)
        expected = adjust_logits(logits, [history], drafts, 0)
        sequence = make_sequence(0, plan)
        sequence.token_ids += text[len(prompt) :]
        row = NativeRow(sequence, BlockTable())
        row.row.num_tokens = len(text)
        if masks is not None:
            kept = masks.masks(drafts[0].tolist())
            row.row.mask, (row.row.num_masked, row.row.mask_words) = kept.data_ptr(), kept.shape
        for position in range(5):
            loaded.adjust_logits(row.address, position, logits[0, position].data_ptr(), vocab_size)
            if position < 4:
                loaded.count_token(row.address, drafts[0, position])
        assert torch.equal(logits, expected)
        # What was drafted is taken back, and everything counts as before.
        for draft in reversed(drafts[0].tolist()):
            loaded.uncount_token(row.address, draft)
        first = torch.randn(1, 1, vocab_size, generator=generator)
        again = adjust_logits(first, [history], drafts[:, :0], 0)
        loaded.adjust_logits(row.address, 0, first.data_ptr(), vocab_size)
        assert torch.equal(first, again)


class CountingPhases:
    supports = EVERY_NEED

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult([])


def one_step(folder: Path, row: RowPlan, **runner: Any) -> tuple[NativeRunner, StepPlan, list[Round]]:
    """Runs a lone row's step of up to four rounds; ``runner`` is what is different about it."""
    side = Side(make_engine(*save_pair(folder)), [row])
    side.native.phases = CountingPhases()
    for name, value in runner.items():
        setattr(side.native, name, value)
    plan = side.plan(4)
    return side.native, plan, side.native.run(plan).rounds


def test_no_round_begins_that_would_end_too_late(tmp_path: Path) -> None:
    row = RowPlan(GREEDY, [1, 2, 3])
    assert len(one_step(tmp_path, row)[2]) == 4
    assert len(one_step(tmp_path, row, step_seconds=0.0)[2]) == 1


def test_prompts_are_rows_of_a_round(tmp_path: Path) -> None:
    runner, _, rounds = one_step(tmp_path, RowPlan(GREEDY, [1, 2, 3], num_uncomputed=3))
    assert [one.num_accepted for one in rounds] == [[0]]
    assert isinstance(runner.phases, CountingPhases)
    assert runner.phases.plans == []


def test_prompts_that_the_draft_model_does_not_follow_are_noticed(tmp_path: Path) -> None:
    """With the bug they are in the target's cache alone."""
    pair = save_pair(tmp_path)
    ours, theirs = (Side(make_engine(*pair), KINDS["prompts"]) for _ in range(2))
    ours.native.proposers = ()
    with pytest.raises(AssertionError):
        compare(ours, theirs, 1)


def test_what_it_does_not_support_goes_by_phases(tmp_path: Path) -> None:
    cases = [
        (RowPlan(with_params(GREEDY, trace=True), [1, 2, 3]), {}),
        (RowPlan(with_params(REJECTION, verification="block"), [1, 2, 3]), {}),
        (RowPlan(GREEDY, list(range(40)), num_missing=39), {}),
        (RowPlan(COUPLED, [1, 2, 3]), {"supports": {Need.DRAFT_MODEL}}),
    ]
    for row, changed in cases:
        runner, plan, rounds = one_step(tmp_path, row, **changed)
        assert rounds == []
        assert isinstance(runner.phases, CountingPhases)
        assert runner.phases.plans == [plan]


def test_it_supports_what_its_models_and_draws_do(tmp_path: Path) -> None:
    core = make_engine(*save_pair(tmp_path))
    whole = native_runner(core)
    lone = NativeRunner(whole.target, None, (), whole.phases, False, LONG)
    assert whole.supports - lone.supports == {Need.DRAFT_MODEL, Need.SAMPLING}
    assert not whole.supports & {Need.TRACE, Need.LONG_PROMPT, Need.CATCH_UP, Need.BLOCK_RULE}


def test_a_row_with_log_probabilities_bounds_the_rounds_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "truedraft.engine.runtime.native.runner.MAX_LOGITS_BYTES", 2 * 4 * 40 * 4
    )  # two rounds of four tokens
    assert len(one_step(tmp_path, RowPlan(with_params(GREEDY, logprobs=1), [1, 2, 3]))[2]) == 2


# Whole engines: what is emitted and counted, steps that share rounds, blocks, ends.


@dataclass
class Told:
    """What an engine has reported of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    ended: str | None = None

    def add(self, output: TokenOutput | Failed) -> None:
        if isinstance(output, Failed):
            self.ended = output.message
            return
        self.token_ids += output.token_ids
        self.num_rounds += output.num_rounds
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens
        self.ended = output.finish_reason


def run(
    core: EngineCore, params: Sequences[SamplingParams], prompts: Sequences[list[int]] = PROMPTS
) -> tuple[list[Told], int]:
    """What is reported of each prompt, and in how many steps. The last two come later."""
    told = [Told() for _ in prompts]
    left = list(enumerate(zip(prompts, cycle(params), strict=False)))
    num_steps = 0
    while core.has_work or left:
        while left and (num_steps > 2 or len(left) > 2 or not core.has_work):
            i, (prompt, own) = left.pop(0)
            core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=own))
        for output in core.step():
            told[int(output.request_id)].add(output)
        num_steps += 1
        for sequence in core.scheduler.running:
            for share, table in core.scheduler._shares(sequence):
                assert len(table.block_ids) <= share.blocks_for(len(sequence))
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        assert pool is None or pool.usage == 0
    return told, num_steps


def shortened(params: Sequences[SamplingParams]) -> list[SamplingParams]:
    return [with_params(own, max_tokens=min(own.max_tokens, 24)) for own in params]


ENGINES = {
    "greedy": [GREEDY],
    "of all rules": ALL,
    "some without drafts": [GREEDY, with_params(COUPLED, num_speculative_tokens=0), REJECTION],
    "some that ask for more": [
        GREEDY,
        with_params(GREEDY, logprobs=2),
        with_params(COUPLED, frequency_penalty=0.5),
        with_params(REJECTION, logit_bias=BIAS),
        with_params(CUT, trace=True, max_tokens=6),
    ],
    "the block rule": [with_params(REJECTION, verification="block"), GREEDY],
    "with stops": [
        with_params(GREEDY, stop_token_ids=list(range(0, 40, 3))),
        with_params(COUPLED, stop_token_ids=[7, 8, 9, 10], min_tokens=5),
    ],
}


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ENGINES)
def test_engines_report_the_same(kind: str, threads: int, tmp_path: Path) -> None:
    native, phased = make_twins(*save_pair(tmp_path), num_threads=threads, max_num_batched_tokens=64)
    params = shortened(ENGINES[kind])
    (ours, our_steps), (theirs, their_steps) = (run(core, params) for core in (native, phased))
    assert ours == theirs
    assert native.stats.drafts == phased.stats.drafts
    assert native.stats.draft_tokens_per_position == phased.stats.draft_tokens_per_position
    assert native.stats.accepted_tokens_per_position == phased.stats.accepted_tokens_per_position
    assert our_steps < their_steps


@pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_a_model_that_drafts_for_itself_is_always_right(params: SamplingParams, tmp_path: Path) -> None:
    """Any slip in the draft's cache or positions shows as an acceptance below 100 %."""
    target, _ = save_pair(tmp_path)
    core, _ = make_twins(target, target, num_speculative_tokens=5)
    told, num_steps = run(core, shortened([params]))
    assert sum(one.num_rounds for one in told) > 2 * num_steps
    assert core.stats.accepted_tokens_per_position == core.stats.draft_tokens_per_position


def test_rounds_share_steps_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """All that many rounds could emit would not fit, but no text becomes longer than it may."""
    twins = make_twins(*save_pair(tmp_path), max_model_len=120, prefix_caching=False, max_rounds=9)
    params = [with_params(GREEDY, max_tokens=40, ignore_eos=True)]
    (ours, our_steps), (theirs, their_steps) = (run(core, params) for core in twins)
    assert ours == theirs
    assert all(len(told.token_ids) == 40 for told in ours)
    assert our_steps < 0.5 * their_steps


@pytest.mark.parametrize("num_blocks", [25, 27])
def test_few_blocks_are_no_reason_to_preempt_more(num_blocks: int, tmp_path: Path) -> None:
    """Rounds share a step where there is room for them all, and no sequence gives way for that."""
    target, draft = save_pair(tmp_path)
    core = make_engine(target, draft)
    assert core.draft is not None
    bytes_per_block = 4 * sum(runner.model.cache_bytes_per_token for runner in (core.target, core.draft))
    twins = make_twins(target, draft, cache_memory=num_blocks * bytes_per_block, prefix_caching=False)
    assert twins[0].scheduler.target_pool.num_blocks == num_blocks
    (ours, our_steps), (theirs, their_steps) = (run(core, shortened([GREEDY, COUPLED])) for core in twins)
    assert [told.token_ids for told in ours] == [told.token_ids for told in theirs]
    assert our_steps < their_steps
    assert 0 < twins[0].scheduler.num_preemptions <= twins[1].scheduler.num_preemptions + 1


BROKEN = pytest.mark.parametrize(("params", "last"), [(GREEDY, 11), (COUPLED, 13)], ids=["greedy", "coupled"])


@BROKEN
def test_logits_that_are_no_distribution_end_them(params: SamplingParams, last: int, tmp_path: Path) -> None:
    twins = make_twins(*save_pair(tmp_path))
    for core in twins:
        embeddings = core.target.model.weights.embeddings
        assert isinstance(embeddings, DenseEmbeddings)
        with torch.inference_mode():
            embeddings.weight[last] = torch.nan  # what follows this token is nothing
    (ours, our_steps), (theirs, their_steps) = (run(core, shortened([params]), PROMPTS[:2]) for core in twins)
    assert ours == theirs
    # After some rounds that were verified.
    assert any("no distribution" in (told.ended or "") and told.num_rounds > 2 for told in ours)
    assert our_steps < their_steps


def test_an_aborted_request_is_gone_after_its_step(tmp_path: Path) -> None:
    core, _ = make_twins(*save_pair(tmp_path))
    for i in range(2):
        params = with_params(GREEDY, max_tokens=60)
        core.add(Generate(request_id=str(i), prompt_token_ids=[1, 2, 3 + i], params=params))
    for _ in range(2):
        core.step()
    core.abort("0")
    emitted: list[int] = []
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            assert output.request_id == "1"
            emitted += output.token_ids
    assert emitted
    assert core.scheduler.target_pool.usage == 0


def spied_needs(monkeypatch: pytest.MonkeyPatch, runner: Any, name: str) -> list[Needs]:
    """Lists the needs of the steps that a method is called with, from now on."""
    honest, seen = getattr(runner, name), []

    def spy(plan: StepPlan) -> Any:
        seen.append(plan.needs)
        return honest(plan)

    monkeypatch.setattr(runner, name, spy)
    return seen


def test_long_prompts_and_parts_of_them_go_by_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose log-probabilities are asked for do, too; all others are rows of a round."""
    monkeypatch.setattr("truedraft.engine.core.scheduler.MAX_PROMPT_TOKENS", 20)
    native, phased = make_twins(*save_pair(tmp_path), max_num_batched_tokens=30)
    by_phases = spied_needs(monkeypatch, phases_of(native), "run")
    in_c = spied_needs(monkeypatch, native.runner, "run_rounds")
    prompts = [[number, *range(length)] for number, length in enumerate((5, 8, 3, 2, 35))]
    params = [
        GREEDY,
        COUPLED,
        with_params(GREEDY, prompt_logprobs=1),
        with_params(GREEDY, max_tokens=3),
        GREEDY,
    ]
    texts = [
        run_engine(core, prompts, shortened(params), arrivals=[0, 0, 0, 4, 0]) for core in (native, phased)
    ]
    assert texts[0] == texts[1]
    # These are three prompts, one with log-probabilities, and a part of the last one; then its other parts.
    assert len(by_phases) >= 2
    assert all(Need.LONG_PROMPT in needs for needs in by_phases)
    assert any(Need.PROMPT in needs for needs in in_c)
    assert not any(Need.LONG_PROMPT in needs for needs in in_c)


# Planted bugs: what is right, what is wrong, and rows that show it.
BUGS = {
    "scores a token behind": (
        "num_computed[i] = row->num_computed;",
        "num_computed[i] = row->num_computed - 1;",
        "greedy",
    ),
    "computes another part of a prompt": (
        "row->token_ids + row->num_computed, num_new",
        "row->token_ids, num_new",
        "ends of prompts under masks",
    ),
    "another row's table": ("->first_block[i] = size;", "->first_block[i] = 0;", "greedy"),
    "another row's draft table": ("first_draft_block[i] = size;", "first_draft_block[i] = 0;", "greedy"),
    "accepts too much": (": 1.0f) < probs[draft]", ": 1.0f) < 2.0f * probs[draft]", "rejection"),
    "accepts by the draft's number": ("&place, ACCEPT_STREAM", "&place, DRAFT_STREAM", "rejection"),
    "recovers from the target": ("(probs, draft_probs, 1.0,", "(probs, NULL, 1.0,", "rejection"),
    "takes drafts from outside for drawn": (
        "draft_probs[draft] : 1.0f",
        "draft_probs[draft] : 0.5f",
        "drafts from outside",
    ),
    "recovers drafts from outside": (
        "draft_probs[draft] = 1.0f;",
        "draft_probs[draft] = 0.0f;",
        "drafts from outside",
    ),
    "coupled draws at the first position": (
        "gumbel_argmax(emitted, probs, &sequence->seed, &place,",
        "gumbel_argmax(emitted, probs, &sequence->seed, &sequence->num_tokens,",
        "coupled",
    ),
    "takes rejected drafts for stored": ("= stored < valid ? stored : valid;", "= stored;", "greedy"),
    "goes on after a stop": ("if (emitted[j] == row->stop_ids[stop]) return 0;", "", "with stops"),
    "forgets what follows": ("= scratch->next_id[i];", "= 0;", "greedy"),
    "keeps logits of one position": (
        "(rounds->max_drafts + 1) + position) * vocab",
        "(rounds->max_drafts + 1)) * vocab",
        "log-probabilities",
    ),
    "biases another token": ("+= row->biases[i];", "+= row->biases[0];", "bias"),
    "biases the first position only": (
        "if (is_token(row->bias_ids[i], vocab))",
        "if (position == 0 && is_token(row->bias_ids[i], vocab))",
        "bias",
    ),
    "verifies with penalties that forget drafts": (
        "        count_token(sequence, draft);\n    }\n"
        "    for (int64_t i = position - 1; i >= 0; i--) uncount_token(sequence, drafts[i]);",
        "    }",
        "frequency",
    ),
    "drafts with penalties that forget drafts": (
        "count_token(task->rounds->rows[row], id);",
        "",
        "repetition",
    ),
    "counts accepted drafts twice": (
        "    for (int64_t i = position - 1; i >= 0; i--) uncount_token(sequence, drafts[i]);",
        "",
        "frequency",
    ),
    "counts the prompt's tokens": (
        "rounded(row->frequency * (float)row->counts[i])",
        "rounded(row->frequency * (float)(row->counts[i] + (i < row->num_distinct_in_prompt)))",
        "frequency",
    ),
    "takes the prompt's tokens for said": (
        "row->counts[i] ? logit - row->presence : logit",
        "logit - row->presence",
        "presence",
    ),
    "forgets the prompt with rejected drafts": (
        "if (i >= row->num_distinct_in_prompt && !row->counts[i])",
        "if (!row->counts[i])",
        "repetition",
    ),
    "drafts by raw logits": (
        "adjust_logits(sequence, position, logits, known);",
        "",
        "all penalties",
    ),
    "forbids stops by the round's start": (
        "row->num_tokens + position < row->min",
        "row->num_tokens < row->min",
        "a minimum",
    ),
    "masks all positions alike": ("row->mask + position * row->mask_words", "row->mask", "masks"),
    "drafts a token behind": (
        "- is_head(drafter) + position;",
        "- is_head(drafter) + position - 1;",
        "greedy",
    ),
    "drafts by another row's logits": ("draft_logits + i * task->known", "draft_logits", "greedy"),
    "drafts all tokens at one position": (
        "place = sequence->num_tokens + position;\n    int64_t id;",
        "place = sequence->num_tokens;\n    int64_t id;",
        "coupled",
    ),
}


@pytest.mark.parametrize(("right", "wrong", "kind"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(
    right: str, wrong: str, kind: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        run_twins(tmp_path, KINDS[kind], 4)


def test_a_verdict_on_broken_logits_is_caught(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the bug such a row emits the first token."""
    emits = (
        "for (int64_t i = 0; num_broken && i < num_rows; i++) "
        "if (scratch.is_broken[i]) scratch.next_id[i] = 0;"
    )
    planted = plant(compiler.SOURCES, "if (num_broken) break;", emits, tmp_path)
    fresh_library.setattr(compiler, "SOURCES", planted)
    with pytest.raises(AssertionError):
        test_logits_that_are_no_distribution_end_them(GREEDY, 11, tmp_path)
