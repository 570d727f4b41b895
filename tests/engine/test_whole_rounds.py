"""Several rounds in one step: what the same rounds say and store one by one."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.core.engine import EngineCore
from engine.draft_length.confidence import Patience, PatientDraft
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds, lags_after
from engine.messages import Failed, Generate, SamplingParams, TokenOutput
from engine.native import library
from engine.native.decoder import NativeDecoder
from engine.whole_rounds import MAX_TIMED
from tests.engine.fixed_length import FixedDraftLength
from tests.engine.native_pair import draft_model, save_pair
from tests.engine.patience import known
from tests.engine.test_native import plant
from tests.engine.test_native_draft import BLOCK, COUPLED, CUT, GREEDY, NO_DRAFTS, REJECTION, TWO_DRAFTS
from tests.models import make_engine

pytestmark = pytest.mark.usefixtures("needs_compiler")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(40)) * 2, [2, 2]]
ROWS = {
    "greedy": [GREEDY],
    "coupled": [COUPLED],
    "rejection": [REJECTION],
    "cut": [CUT],
    "of all kinds": [GREEDY, COUPLED, REJECTION, CUT],
    "without drafts": [NO_DRAFTS],
    "without drafts, sampled": [
        SamplingParams(max_tokens=24, temperature=1.1, seed=5, num_speculative_tokens=0),
        SamplingParams(
            max_tokens=24, temperature=1.1, seed=6, verification="rejection", num_speculative_tokens=0
        ),
    ],
    "of several lengths": [TWO_DRAFTS, GREEDY],
    "some without drafts": [GREEDY, NO_DRAFTS, REJECTION, COUPLED],
    "some that ask for more": [
        GREEDY,
        SamplingParams(max_tokens=6, temperature=0, logprobs=2),
        SamplingParams(max_tokens=5, temperature=1.1, seed=2, frequency_penalty=0.5),
    ],
    "the block rule": [BLOCK],
    "with stops": [
        SamplingParams(max_tokens=24, temperature=0, stop_token_ids=list(range(0, 40, 3))),
        SamplingParams(max_tokens=24, temperature=1.5, seed=4, stop_token_ids=[7, 8, 9, 10]),
    ],
    "of other ends": [
        SamplingParams(max_tokens=n, temperature=1.2, seed=n, ignore_eos=True) for n in (1, 2, 7, 12, 17)
    ],
}
NEVER_SHARED = "the block rule"
# As much as any of these takes.
LONG = 1000.0


@dataclass
class Told:
    """What an engine has told of one prompt."""

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


def make_twins(target: str, draft: str, **config: Any) -> tuple[EngineCore, EngineCore]:
    """An engine whose rounds share steps, and one that takes them phase by phase."""
    whole, stepwise = (
        make_engine(target, draft, **config, step_seconds=LONG),
        make_engine(target, draft, **config),
    )
    stepwise.whole_rounds = None
    return whole, stepwise


def run(
    core: EngineCore, params: Sequence[SamplingParams], prompts: Sequence[list[int]]
) -> tuple[list[Told], int]:
    """What is told of each prompt, and in how many steps. The last two come later."""
    told = [Told() for _ in prompts]
    each = list(enumerate(zip(prompts, itertools.cycle(params), strict=False)))
    num_steps = 0
    while core.has_work or each:
        while each and (num_steps > 2 or len(each) > 2 or not core.has_work):
            i, (prompt, own) = each.pop(0)
            core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=own))
        for output in core.step():
            told[int(output.request_id)].add(output)
        num_steps += 1
        for sequence in core.scheduler.running:
            if sequence.num_uncomputed_tokens > 1:
                continue
            if sequence.uses_draft_model and len(params) == 1:
                assert len(sequence) - 2 <= sequence.draft_blocks.num_computed_tokens < len(sequence)
            for pool, table in core.scheduler._shares(sequence):
                assert len(table.block_ids) == pool.blocks_for(len(sequence) - 1)
    for pool in (core.scheduler.target_pool, core.scheduler.draft_pool):
        assert pool is None or pool.usage == 0
    return told, num_steps


def same_told(twins: Sequence[EngineCore], params: Sequence[SamplingParams]) -> tuple[int, int]:
    """Also what is counted. Returns the numbers of steps."""
    (ours, our_steps), (theirs, their_steps) = (run(core, params, PROMPTS) for core in twins)
    assert ours == theirs
    one, other = (core.stats for core in twins)
    assert one.drafts == other.drafts
    assert one.draft_tokens_per_position == other.draft_tokens_per_position
    assert one.accepted_tokens_per_position == other.accepted_tokens_per_position
    return our_steps, their_steps


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ROWS)
def test_they_say_what_they_say_one_by_one(kind: str, threads: int, tmp_path: Path) -> None:
    twins = make_twins(*save_pair(tmp_path), num_threads=threads, max_num_batched_tokens=64)
    ours, theirs = same_told(twins, ROWS[kind])
    torch.set_num_threads(1)
    if kind == NEVER_SHARED:
        assert ours == theirs
    else:
        assert ours < 0.7 * theirs


@pytest.mark.parametrize(("vocab_size", "shares"), [(33, True), (64, False)])
def test_other_vocabularies(vocab_size: int, shares: bool, tmp_path: Path) -> None:
    """The draft knows fewer tokens than the target, or more."""
    ours, theirs = same_told(make_twins(*save_pair(tmp_path, vocab_size)), [GREEDY])
    assert (ours < theirs) == shares


@pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_a_model_that_drafts_for_itself_is_always_right(params: SamplingParams, tmp_path: Path) -> None:
    """Any slip in the draft's cache or positions shows as an acceptance below 100 %."""
    target, _ = save_pair(tmp_path)
    core = make_engine(target, target, num_speculative_tokens=5, step_seconds=LONG)
    told, num_steps = run(core, [params], PROMPTS)
    assert sum(one.num_rounds for one in told) > 2 * num_steps
    assert core.stats.accepted_tokens_per_position == core.stats.draft_tokens_per_position


def test_rounds_share_steps_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """All that many rounds could say would not fit, but no text becomes longer than it may."""
    twins = make_twins(*save_pair(tmp_path), max_model_len=60, prefix_caching=False)
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    (ours, our_steps), (theirs, their_steps) = (run(core, [params], PROMPTS[:2]) for core in twins)
    assert ours == theirs
    assert all(len(told.token_ids) == 50 for told in ours)
    assert our_steps < 0.5 * their_steps


@pytest.mark.parametrize("num_blocks", [27, 33])
def test_few_blocks_are_no_reason_to_preempt_more(num_blocks: int, tmp_path: Path) -> None:
    """Rounds share a step where there is room for them all; where there is not, nobody gives way for that."""
    target, draft = save_pair(tmp_path)
    one = make_engine(target, draft)
    bytes_per_block = 4 * sum(model.cache_bytes_per_token for model in (one.target, draft_model(one)))
    twins = make_twins(target, draft, cache_memory=num_blocks * bytes_per_block, prefix_caching=False)
    assert twins[0].scheduler.target_pool.num_blocks == num_blocks
    (ours, our_steps), (theirs, their_steps) = (run(core, [GREEDY, COUPLED], PROMPTS) for core in twins)
    assert [told.token_ids for told in ours] == [told.token_ids for told in theirs]
    assert our_steps < their_steps
    assert 0 < twins[0].scheduler.num_preemptions <= twins[1].scheduler.num_preemptions + 1


@pytest.mark.parametrize(("params", "last"), [(GREEDY, 11), (COUPLED, 13)], ids=["greedy", "coupled"])
def test_logits_that_are_no_distribution_end_them(params: SamplingParams, last: int, tmp_path: Path) -> None:
    twins = make_twins(*save_pair(tmp_path))
    for core in twins:
        assert isinstance(core.target.whole_pass, NativeDecoder)
        embeddings = core.target.whole_pass._kept[3]
        assert isinstance(embeddings, torch.Tensor)
        embeddings[last] = torch.nan  # what follows this token is nothing
    (ours, our_steps), (theirs, their_steps) = (run(core, [params], PROMPTS[:2]) for core in twins)
    assert ours == theirs
    # After some rounds that were judged.
    assert any("no distribution" in (told.ended or "") and told.num_rounds > 2 for told in ours)
    assert our_steps < their_steps


def test_an_aborted_request_is_gone_after_its_step(tmp_path: Path) -> None:
    core = make_engine(*save_pair(tmp_path), step_seconds=LONG)
    for i in range(2):
        core.add(Generate(request_id=str(i), prompt_token_ids=[1, 2, 3 + i], params=GREEDY))
    for _ in range(3):
        core.step()
    core.abort("0")
    said: list[int] = []
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            assert output.request_id == "1"
            said += output.token_ids
    assert said
    assert core.scheduler.target_pool.usage == 0


def test_rounds_of_half_a_step_do_not_share_it(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    core = make_engine(target, draft, step_seconds=LONG)
    assert core.whole_rounds is not None
    core.add(Generate(request_id="0", prompt_token_ids=[1, 2, 3], params=GREEDY))
    core.step()
    core.whole_rounds.last_seconds = 0.6 * LONG
    (output,) = core.step()
    assert isinstance(output, TokenOutput)
    assert output.num_rounds == 1
    assert core.whole_rounds.last_seconds < LONG / 2  # that one was short
    (output,) = core.step()
    assert isinstance(output, TokenOutput)
    assert output.num_rounds > 1


class RecordingPolicy(FixedDraftLength):
    """Says the same for so many rounds, and notes what it is told of each."""

    def __init__(self, num_draft_tokens: int, limits: tuple[float, float] | None) -> None:
        super().__init__(num_draft_tokens)
        self.rule = Patience(known(), *limits) if limits else None
        self.told: list[tuple[list[int], list[tuple[int, int, bool]], object]] = []
        self.lags: list[int] = []
        self.current: dict[Hashable, PatientDraft] = {}
        self.num_timed = 0
        self.outcomes: list[Sequence[Outcome]] = []
        self.first: int | None = None  # place of what is told of a shared step's first round

    @property
    def num_rounds(self) -> int:
        return 5

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]:
        self.lags = [row.lag for row in rows]
        self.current = {row.key: PatientDraft(self.rule) for row in rows} if self.rule else {}
        return super().choose(rows, num_prompt_tokens)

    def patient_draft(self, key: Hashable) -> PatientDraft | None:
        return self.current.get(key)

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        if not outcomes:
            return
        if self.first is not None and len(self.told) > self.first:
            assert (seconds is not None) == (len(self.told) - self.first < MAX_TIMED)
            if seconds is not None:
                assert min(seconds.draft, seconds.score, seconds.host) > 0
        self.num_timed += seconds is not None
        self.outcomes.append(outcomes)
        judged = [(one.num_draft_tokens, one.num_accepted_tokens, one.ended) for one in outcomes]
        self.told.append((self.lags, judged, [list(draft.confidences) for draft in self.current.values()]))

    def go_on(self, patient: list[PatientDraft] | None) -> None:
        before = [Outcome("", drafted, accepted) for drafted, accepted, _ in self.told[-1][1]]
        self.lags = lags_after(before, list(self.current.values()) or None)
        if self.rule is not None:
            drafts = patient or [PatientDraft(self.rule) for _ in self.current]
            self.current = dict(zip(self.current, drafts, strict=True))


def mark_steps(core: EngineCore, policy: RecordingPolicy) -> None:
    """Tell the policy where steps of several rounds begin."""
    assert core.whole_rounds is not None
    tell = core.whole_rounds._observe

    def observe(*args: Any) -> None:
        policy.first = len(policy.told)
        tell(*args)
        policy.first = None

    core.whole_rounds._observe = observe  # type: ignore[method-assign]


def tell_all(core: EngineCore, params: Sequence[SamplingParams]) -> tuple[list[Told], int]:
    """What is told of prompts that come together, and in how many steps."""
    told = [Told() for _ in params]
    for i, own in enumerate(params):
        core.add(Generate(request_id=str(i), prompt_token_ids=PROMPTS[i], params=own))
    num_steps = 0
    while core.has_work:
        for output in core.step():
            told[int(output.request_id)].add(output)
        num_steps += 1
    return told, num_steps


@pytest.mark.parametrize("rows", ["greedy", "coupled", "of all kinds"])
@pytest.mark.parametrize("limits", [None, (0.3, 0.4), (0.55, 0.7), (0.0, 0.9)])
def test_the_policy_is_told_of_every_round(
    limits: tuple[float, float] | None, rows: str, tmp_path: Path
) -> None:
    """What drafts ended by, and what the draft's cache missed before them, as one by one."""
    twins = make_twins(*save_pair(tmp_path), num_speculative_tokens="auto")
    policies = []
    for core in twins:
        policies.append(RecordingPolicy(6, limits))
        core.scheduler.planner.policy = policies[-1]
    mark_steps(twins[0], policies[0])
    (ours, our_steps), (theirs, their_steps) = (tell_all(core, ROWS[rows]) for core in twins)
    assert ours == theirs
    assert policies[0].told == policies[1].told
    assert our_steps < their_steps
    # Of every step at least one round, but for those with prompts; not the first of several.
    assert our_steps - 2 <= policies[0].num_timed < len(policies[0].told)
    if limits is not None:
        first_rounds = policies[0].told[: our_steps // 2 + 1]
        assert min(drafted for _, judged, _ in first_rounds for drafted, _, _ in judged) < 6  # ended early


class LengthsByTurns(FixedDraftLength):
    """Rows draft for some rounds, and then others do, whose draft caches have to catch up."""

    def __init__(self) -> None:
        super().__init__(2)
        self.told: list[list[tuple[int, int]]] = []
        self.round = -1

    @property
    def num_rounds(self) -> int:
        return 8 - self.round % 8

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]:
        self.round += 1
        return [min(row.limit, (self.round // 8 + i) % 3) for i, row in enumerate(rows)]

    def go_on(self, patient: list[PatientDraft] | None) -> None:
        self.round += 1

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        self.told.append([(one.num_draft_tokens, one.num_accepted_tokens) for one in outcomes])


def tell_by_turns(core: EngineCore) -> tuple[list[Told], LengthsByTurns, int]:
    """What is told of prompts whose rows draft by turns, and in how many steps."""
    policy = core.scheduler.planner.policy = LengthsByTurns()
    params = [replace(own, max_tokens=40) for own in (GREEDY, COUPLED, REJECTION, CUT, GREEDY)]
    told, num_steps = tell_all(core, params)
    return told, policy, num_steps


def test_rows_that_draft_share_them_with_rows_that_do_not(tmp_path: Path) -> None:
    """Whatever the others' draft caches miss."""
    whole, stepwise = make_twins(*save_pair(tmp_path), num_speculative_tokens="auto")
    ours, policy, num_steps = tell_by_turns(whole)
    theirs, policy_of_theirs, num_rounds = tell_by_turns(stepwise)
    assert ours == theirs
    assert policy.told == policy_of_theirs.told
    mixed = [told for told in policy.told if 0 < sum(drafted > 0 for drafted, _ in told) < len(told)]
    assert len(mixed) > 0.7 * num_rounds
    assert sum(accepted for told in mixed for _, accepted in told) > 0
    assert num_steps < 0.7 * num_rounds


# Planted bugs: what is right, what is wrong, and rows that show it.
BUGS = {
    "stores a token behind": (
        "= rounds->rows[row].num_tokens - 1;",
        "= rounds->rows[row].num_tokens - 2;",
        "greedy",
    ),
    "another row's table": ("= rounds->rows[row].first_block;", "= rounds->rows[0].first_block;", "greedy"),
    "another row's draft table": (
        "= of->draft_first_block;",
        "= rounds->rows[0].draft_first_block;",
        "greedy",
    ),
    "accepts too much": (
        "number * guessed[draft] < probs",
        "number * guessed[draft] < 2.0f * probs",
        "rejection",
    ),
    "accepts by the draft's number": ("&place, ACCEPT_STREAM", "&place, DRAFT_STREAM", "rejection"),
    "recovers from the target": ("follow(probs, guessed, 1.0", "follow(probs, NULL, 1.0", "rejection"),
    "races at the first position": ("rows[row].num_tokens + position;", "rows[row].num_tokens;", "coupled"),
    "takes rejected drafts for stored": ("= stored < known ? stored : known;", "= stored;", "greedy"),
    "drafts where the first row is": ("= of->num_tokens;\n", "= rounds->rows[0].num_tokens;\n", "coupled"),
    "drafts after another row": ("= num_spans++;", "= num_spans++ * 0;", "some without drafts"),
    "goes on after a stop": ("if (said[i] == stops[stop]) return 0;", "", "with stops"),
    "looks at another row's stops": ("rounds->stops + of->first_stop", "rounds->stops", "with stops"),
    "forgets what followed": ("said[num_accepted] = space->next[row];", "said[num_accepted] = 0;", "greedy"),
}


@pytest.mark.parametrize(("right", "wrong", "kind"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(
    right: str, wrong: str, kind: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(library, "SOURCES", plant(library.SOURCES, right, wrong, tmp_path))
    twins = make_twins(*save_pair(tmp_path))
    with pytest.raises(AssertionError):
        same_told(twins, ROWS[kind])


def test_a_verdict_on_broken_logits_is_caught(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = plant(library.SOURCES, "if (num_broken) break;", "", tmp_path)
    fresh_library.setattr(library, "SOURCES", planted)
    with pytest.raises(AssertionError):
        test_logits_that_are_no_distribution_end_them(GREEDY, 11, tmp_path)
