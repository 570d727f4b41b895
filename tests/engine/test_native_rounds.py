"""Rounds that share a step, in C or in Python, emit and store what they would one by one, bit for bit."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_params

from tests.engine.native_pair import LONG, make_twins, save_pair
from tests.engine.native_rounds import RandomMasks, RowPlan, Side, compare, make_sequence
from tests.engine.test_native import plant
from tests.models import make_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.step import Round, StepResult
from truedraft.engine.layers.linear import DenseEmbeddings
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput
from truedraft.engine.native import compiler, library
from truedraft.engine.native.ops import NativeOps
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("needs_compiler")

GREEDY = SamplingParams(max_tokens=99, temperature=0)
COUPLED = SamplingParams(max_tokens=99, temperature=1.1, seed=5, verification="coupled")
REJECTION = SamplingParams(max_tokens=99, temperature=0.9, seed=6, verification="rejection")
CUT = SamplingParams(max_tokens=99, temperature=1.3, top_k=9, min_p=0.02, seed=8, verification="rejection")
NUCLEUS = SamplingParams(max_tokens=99, temperature=1.2, top_p=0.8, seed=9, verification="coupled")
BIAS = {1: 3.0, 2: -100.0, 7: 1.25, 39: 2.5}
STOPS = frozenset(range(0, 40, 3))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(40)), [2, 2]]
BLOCK = SamplingParams(max_tokens=99, temperature=0.9, seed=7, verification="block")
ALL = [GREEDY, COUPLED, REJECTION, CUT, NUCLEUS]
OTHER_DRAWS: tuple[Any, ...] = ("probabilistic", "greedy", "greedy", "probabilistic", "greedy")


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
    "the block rule": rows_of([BLOCK] * 4),
    "drafts that are drawn in another way": rows_of(
        [with_params(own, draft_sample_method=how) for own, how in zip(ALL, OTHER_DRAWS, strict=True)]
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
        for number, row in enumerate(each_with(logit_bias=BIAS, **PENALTIES))
    ],
    "everything at once": [
        RowPlan(with_params(GREEDY, **PENALTIES), PROMPTS[0], 5),
        RowPlan(with_params(COUPLED, min_tokens=9, logit_bias=BIAS), PROMPTS[1], 2, stop_token_ids=STOPS),
        RowPlan(
            with_params(REJECTION, frequency_penalty=1.5), PROMPTS[2], draft_ids=given(3, range(0, 30, 2))
        ),
        RowPlan(with_params(BLOCK, top_k=30), PROMPTS[3], 2),
        RowPlan(NUCLEUS, PROMPTS[4], 4),
        RowPlan(GREEDY, PROMPTS[3], 3, num_missing=32),
    ],
}


# Such rows have rounds in Python, whose passes and operations alone are C's.
IN_PYTHON = {kind for kind in KINDS if "masks" in kind or "log-prob" in kind}


def run_twins(
    folder: Path,
    kind: str,
    max_rounds: int,
    draft_vocab_size: int = 40,
    max_draft_len: int = 1000,
    phases_every: int = 0,
    in_c: bool = True,
) -> list[Round]:
    pair, rows = save_pair(folder, draft_vocab_size), KINDS[kind]
    ours, theirs = (Side(make_engine(*pair), rows, max_draft_len) for _ in range(2))
    return compare(ours, theirs, max_rounds, phases_every, in_c and kind not in IN_PYTHON)


@pytest.mark.parametrize("in_c", [True, False], ids=["in C", "in Python"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_emit_what_lone_rounds_emit(kind: str, in_c: bool, tmp_path: Path) -> None:
    rounds = run_twins(tmp_path, kind, 5, in_c=in_c)
    if kind != "without drafts":
        assert sum(map(sum, (one.num_drafted for one in rounds))) > 0


@pytest.mark.parametrize("draft_vocab_size", [33, 64])
@pytest.mark.parametrize("kind", ["of all rules", "all adjustments", "masks", "everything at once"])
def test_other_vocabularies(kind: str, draft_vocab_size: int, tmp_path: Path) -> None:
    """The draft knows fewer tokens than the target, or more."""
    run_twins(tmp_path, kind, 4, draft_vocab_size)


@pytest.mark.parametrize("kind", ["of all rules", "all adjustments", "everything at once"])
def test_rows_that_take_some_steps_by_phases(kind: str, tmp_path: Path) -> None:
    """Tokens that C has not emitted itself are counted, too."""
    run_twins(tmp_path, kind, 3, phases_every=2)


@pytest.mark.parametrize("kind", ["of all rules", "all penalties"])
def test_sequences_outgrow_the_draft_model(kind: str, tmp_path: Path) -> None:
    """Near its longest text it drafts less, then nothing, and the round goes on."""
    rounds = run_twins(tmp_path, kind, 5, max_draft_len=30)
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
    ours, theirs, vocab_size = NativeOps(loaded), TorchOps(), 1003
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
        plan = RowPlan(params, prompt, max_num_tokens=600, stop_token_ids=frozenset((5, prompt[0])))
        sequence = make_sequence(0, plan)
        sequence.token_ids += prompt[:trial]
        sequence.token_ids += torch.randint(0, vocab_size, (60,), generator=generator).tolist()
        if trial % 6 == 1:
            sequence.matcher = RandomMasks(trial, vocab_size)  # type: ignore[assignment]
        step = StepRows(RowTable().rows_of([sequence]), vocab_size, torch.device("cpu"))
        drafts = torch.randint(0, vocab_size, (1, 4), generator=generator)
        drafts[0, ::2] = torch.tensor([prompt[-1], sequence.token_ids[-1]])
        logits = 5 * torch.randn(5, vocab_size, generator=generator)
        expected = theirs.adjust(step, logits, drafts, 0, [5])
        # What was drafted is taken back, and everything counts as before.
        for _ in range(2):
            assert torch.equal(ours.adjust(step, logits, drafts, 0, [5]), expected)
        for offset in range(5):
            (one,) = ours.adjust(step, logits[offset:][:1], drafts, offset, [1])
            assert torch.equal(one, expected[offset])


def one_step(folder: Path, row: RowPlan, in_c: bool, seconds: float = LONG) -> tuple[Side, StepResult]:
    """Runs a lone row's step of up to four rounds."""
    side = Side(make_engine(*save_pair(folder)), [row])
    assert side.loop is not None
    side.runner.loop = side.loop if in_c else None
    side.runner.step_seconds = side.loop.seconds = seconds
    return side, side.runner.run(side.plan(4))


@pytest.mark.parametrize("in_c", [True, False], ids=["in C", "in Python"])
def test_no_round_begins_that_would_end_too_late(in_c: bool, tmp_path: Path) -> None:
    row = RowPlan(GREEDY, [1, 2, 3])
    assert len(one_step(tmp_path, row, in_c)[1].rounds) == 4
    assert len(one_step(tmp_path, row, in_c, seconds=0.0)[1].rounds) == 1


@pytest.mark.parametrize(
    "row",
    [
        RowPlan(with_params(GREEDY, trace=True), [1, 2, 3]),
        RowPlan(with_params(GREEDY, logprobs=1), [1, 2, 3]),
        RowPlan(GREEDY, [1, 2, 3], mask_seed=1),
        RowPlan(GREEDY, list(range(40)), num_missing=39),
    ],
    ids=["trace", "log-probabilities", "mask", "far behind"],
)
def test_what_the_loop_does_not_do_goes_by_phases(row: RowPlan, tmp_path: Path) -> None:
    _, result = one_step(tmp_path, row, in_c=True)
    assert set(result.num_rows) == {"phases"}


def test_a_texts_tokens_are_those_that_were_committed(tmp_path: Path) -> None:
    """Rounds in Python extend it until the step ends."""
    side, result = one_step(tmp_path, RowPlan(with_params(GREEDY, logprobs=1), [1, 2, 3]), in_c=False)
    assert len(result.rounds) == 4
    assert side.sequences[0].token_ids == [1, 2, 3]


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
                if sequence.is_decoding:  # a prompt that waits has reserved its first drafts, too
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


# Planted bugs: what is right, what is wrong, and rows that show it.
BUGS = {
    "scores a token behind": (
        "scratch->num_stored[i] = row->num_computed;",
        "scratch->num_stored[i] = row->num_computed - 1;",
        "greedy",
    ),
    "another row's table": ("->first_block[i] = size;", "->first_block[i] = 0;", "greedy"),
    "another row's draft table": ("first_draft_block[i] = size;", "first_draft_block[i] = 0;", "greedy"),
    "a neighbour's number of drafts": (
        "limit_of(draft, rounds, row);",
        "limit_of(draft, rounds, row_at(rounds, i ? i - 1 : i));",
        "of several lengths",
    ),
    "takes known drafts for drawn": (
        "row->num_drawn = limit && !row->num_known &&",
        "row->num_drawn = limit && scratch->draft_probs &&",
        "some drafts from outside",
    ),
    "takes rejected drafts for stored": ("= stored < valid ? stored : valid;", "= stored;", "greedy"),
    "goes on after a stop": ("if (emitted[j] == row->stop_ids[stop]) return 0;", "", "with stops"),
    "computes another part of a prompt": (
        "row->token_ids + row->num_computed, num_new",
        "row->token_ids, num_new",
        "prompts",
    ),
    "forgets what follows": ("= scratch->verdicts[i].next_token;", "= 0;", "greedy"),
    "judges before it adjusts": (
        "adjust_row(row, judged.drafts, 0, judged.logits, 1 + row->num_drafts, vocab);",
        "",
        "bias",
    ),
    "adjusts the first position only": (
        "adjust_row(row, judged.drafts, 0, judged.logits, 1 + row->num_drafts, vocab);",
        "adjust_row(row, judged.drafts, 0, judged.logits, 1, vocab);",
        "bias",
    ),
    "drafts by raw logits": (
        "adjust_row(row, drafts, task->offset, logits, 1, width);",
        "",
        "all penalties",
    ),
    "drafts with penalties that forget drafts": (
        "adjust_row(row, drafts, task->offset, logits, 1, width);",
        "adjust_row(row, drafts, 0, logits, 1, width);",
        "rewarded repetition",
    ),
    "drafts a token behind": ("length + offset - 1 :", "length + offset - 2 :", "greedy"),
    "drafts by another row's logits": (
        "scratch->draft_logits + i * known",
        "scratch->draft_logits",
        "greedy",
    ),
}


@pytest.mark.parametrize(("right", "wrong", "kind"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(
    right: str, wrong: str, kind: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        run_twins(tmp_path, kind, 4)


def test_a_verdict_on_broken_logits_is_caught(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the bug such a row emits the first token."""
    planted = plant(compiler.SOURCES, "if (num_failed) break;", "", tmp_path)
    fresh_library.setattr(compiler, "SOURCES", planted)
    with pytest.raises(AssertionError):
        test_logits_that_are_no_distribution_end_them(GREEDY, 11, tmp_path)
