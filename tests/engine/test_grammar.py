"""Constrained output: its distribution under every rule, with and without drafts, and its bookkeeping."""

import ctypes
import random
from collections.abc import Callable
from ctypes import memmove
from dataclasses import replace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from msgspec import structs

from tests.engine import grammars
from tests.engine.grammars import END, GRAMMAR, PROMPT, Constrained, Drafting
from tests.engine.planners import loops_in_c, use_planner
from tests.models import make_engine, outputs_by_choice, run_engine, stepped
from truedraft.engine.commands.replay import Replayer
from truedraft.engine.commands.replay_round import Outcome
from truedraft.engine.commands.trace_file import TracedChoice, TracedRound
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.step import StepPlan, StepResult
from truedraft.engine.machine.heap import heap_in_use
from truedraft.engine.messages import DraftCounts, Failed, Generate, SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.proposers import known
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling import grammar_compiler
from truedraft.engine.sampling.grammar import Grammars, Matcher
from truedraft.engine.sampling.grammar_tokenizer import load_tokenizer
from truedraft.engine.speculation import lookups, planner

Patch = pytest.MonkeyPatch


def bits(masks: torch.Tensor | None) -> list[list[int]]:
    """The token ids that each position's mask allows."""
    assert masks is not None
    return [
        [32 * word + bit for word, value in enumerate(row) for bit in range(32) if value >> bit & 1]
        for row in masks.tolist()
    ]


@pytest.fixture(scope="module")
def constrained(tmp_path_factory: pytest.TempPathFactory) -> Constrained:
    return Constrained.make(tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Constrained:
    """Makes a pair of a shape that the kernels in C run."""
    return Constrained.make(tmp_path_factory.mktemp("native"), hidden=64)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Constrained:
    """Its grammar starts after "ab", which n-grams of the prompt offer."""
    return Constrained.make(tmp_path_factory.mktemp("late"), hidden=64, grammar_after=[2], max_tokens=4)


@pytest.mark.parametrize(
    ("verification", "drafting", "in_flight", "num_samples"),
    [
        *[("rejection", "known", 1, 300), ("rejection", "known", 8, 600), ("rejection", "none", 8, 400)],
        *[("rejection", "draft_model and forced", 8, 600)],
        *[("block", "known", 8, 600), ("block", "draft_model", 8, 600)],
        *[("coupled", "draft_model", 1, 300), ("coupled", "draft_model and forced", 8, 600)],
    ],
)
def test_distribution_is_the_masked_targets(
    constrained: Constrained, verification: str, drafting: Drafting, in_flight: int, num_samples: int
) -> None:
    grammars.masked_distribution(constrained, verification, in_flight, num_samples, drafting)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("max_rounds", [1, 3])
@pytest.mark.parametrize("drafting", ["known", "draft_model and forced", "draft_model"])
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_distribution_of_native_rounds(
    native: Constrained, verification: str, drafting: Drafting, max_rounds: int
) -> None:
    """Within a step masks are renewed, as are drafts that the grammar forces; where it forces none, the draft
    model goes on."""
    # A longer draft of the draft model ends its row, and so the step, in the first round.
    how = {"num_speculative_tokens": 2} if drafting == "draft_model" and max_rounds > 1 else {}
    grammars.masked_distribution(
        native, verification, 8, 1000, drafting, max_rounds, step_seconds=1000.0, **how
    )


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("max_rounds", [1, 3])
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_distribution_of_native_rounds_of_one_row(
    native: Constrained, verification: str, max_rounds: int
) -> None:
    assert loops_in_c(native.engine())
    drafting: Drafting = "draft_model and forced"
    grammars.masked_distribution(native, verification, 1, 300, drafting, max_rounds, step_seconds=1000.0)


@pytest.mark.parametrize(
    ("verification", "in_flight"), [("rejection", 1), ("rejection", 8), ("block", 8), ("coupled", 8)]
)
def test_distribution_of_a_grammar_that_starts_late(
    late: Constrained, verification: str, in_flight: int
) -> None:
    grammars.masked_distribution(late, verification, in_flight, 100 * in_flight)


@pytest.mark.usefixtures("needs_compiler")
def test_a_grammar_starts_within_the_rounds_of_a_step(late: Constrained) -> None:
    grammars.masked_distribution(late, "rejection", 3, 1500, max_rounds=3, step_seconds=1000.0)


@pytest.mark.parametrize("after", [[2], [0, 2], [2, 2]])
def test_a_grammar_starts_exactly_behind_its_tokens(after: list[int]) -> None:
    """Wherever in a draft they end, however much of them was emitted before it."""
    tokenizer = grammars.make_tokenizer()
    params = SamplingParams(max_tokens=1, grammar=GRAMMAR, grammar_after=after)
    for before in range(4):
        text = (*[4, 0, 1, 2, 3][:before], *after, 3, 2, 3, 0, 1)
        naive = [grammars.allowed(tokenizer, params, text[:end]) for end in range(len(text))]
        for num_emitted in range(len(text)):
            for num_drafted in range(len(text) - num_emitted):
                matcher = Grammars(lambda: tokenizer).matcher(GRAMMAR, after)
                for token in text[:num_emitted]:
                    matcher.advance([token])
                draft = [*text[num_emitted : num_emitted + num_drafted]]
                assert matcher.allowed(draft) == draft
                masks = matcher.masks(draft)
                found = [[True] * grammars.VOCAB_SIZE] * (num_drafted + 1)
                if masks is not None:
                    found = [[bool(row >> token & 1) for token in range(6)] for [row] in masks.tolist()]
                assert found == naive[num_emitted : num_emitted + num_drafted + 1]


def change_masks(patch: Patch, change: Callable[[Matcher, torch.Tensor, list[int]], torch.Tensor]) -> None:
    """Changes what phases and C write alike: the masks after all drafts."""
    honest = Matcher.write_masks

    def write_masks(self: Matcher, address: int, draft_ids: list[int], first: int = 0) -> bool:
        masks = torch.empty(len(draft_ids) + 1, self.mask_words, dtype=torch.int32)
        if not honest(self, masks.data_ptr(), draft_ids):
            return False
        wanted = change(self, masks, draft_ids)[first:].contiguous()
        memmove(address, wanted.data_ptr(), wanted.nbytes)
        return True

    patch.setattr(Matcher, "write_masks", write_masks)


def mask_off_by_one_position(patch: Patch) -> None:
    change_masks(patch, lambda self, masks, draft_ids: masks.roll(-1, 0))


def matcher_not_rolled_back(patch: Patch) -> None:
    def change(self: Matcher, masks: torch.Tensor, draft_ids: list[int]) -> torch.Tensor:
        self._look_ahead(draft_ids)
        self._ahead.clear()
        return masks

    change_masks(patch, change)


def known_draft_counted_as_drawn(patch: Patch) -> None:
    honest = known.known_drafts

    def flat(draft_ids: list[list[int]], device: torch.device) -> Drafts:
        drafts = honest(draft_ids, device)
        share = 1 / grammars.VOCAB_SIZE
        return replace(drafts, probs=torch.full((*drafts.token_ids.shape, grammars.VOCAB_SIZE), share))

    patch.setattr("truedraft.engine.rounds.round.known_drafts", flat)


def mask_after_termination(patch: Patch) -> None:
    """The parser, which has nothing after an end, is asked for a mask there."""

    def change(self: Matcher, masks: torch.Tensor, draft_ids: list[int]) -> torch.Tensor:
        if END in draft_ids:
            masks[draft_ids.index(END) + 1 :] = 0
        return masks

    change_masks(patch, change)
    patch.setattr(Matcher, "_before_end", lambda self, token_ids: token_ids)


def grammar_starts_one_token_late(patch: Patch) -> None:
    honest = Matcher._start_in

    def start_in(self: Matcher, token_ids: list[int]) -> int | None:
        start = honest(self, token_ids)
        return start + 1 if start and start < len(token_ids) else start

    patch.setattr(Matcher, "_start_in", start_in)


def test_a_grammar_that_starts_one_token_late_is_caught(late: Constrained, monkeypatch: Patch) -> None:
    grammar_starts_one_token_late(monkeypatch)
    with pytest.raises(AssertionError):
        grammars.masked_distribution(late, "rejection", 8, 1200)


@pytest.mark.parametrize(
    "plant",
    [mask_off_by_one_position, matcher_not_rolled_back, known_draft_counted_as_drawn, mask_after_termination],
    ids=lambda plant: plant.__name__,
)
def test_planted_bug_is_caught(
    constrained: Constrained, monkeypatch: Patch, plant: Callable[[Patch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        grammars.masked_distribution(constrained, "rejection", 8, 1200)


OF_MASKS = [mask_off_by_one_position, matcher_not_rolled_back, mask_after_termination]


@pytest.mark.parametrize(
    ("plant", "verification"), list(zip(OF_MASKS, ["rejection", "block", "coupled"], strict=True))
)
def test_planted_bug_is_caught_behind_the_draft_model(
    constrained: Constrained, monkeypatch: Patch, plant: Callable[[Patch], None], verification: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        grammars.masked_distribution(constrained, verification, 8, 1200, "draft_model")


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("plant", OF_MASKS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_planted_bug_is_caught_in_native_rounds(
    native: Constrained, monkeypatch: Patch, plant: Callable[[Patch], None], verification: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        grammars.masked_distribution(
            native,
            verification,
            8,
            1200,
            "draft_model",
            max_rounds=3,
            step_seconds=1000.0,
            num_speculative_tokens=2,
        )


def test_the_engine_itself_passes(constrained: Constrained) -> None:
    grammars.masked_distribution(constrained, "rejection", 8, 1200)


def constrained_engine(target: str, **config: object) -> EngineCore:
    options = {"method": "auto", "num_speculative_tokens": "auto", **config}
    return grammars.know_grammars(make_engine(target, None, **options))


SEEDED = [
    SamplingParams(max_tokens=12, seed=seed, grammar=GRAMMAR if seed % 2 else None) for seed in range(8)
]
PROMPTS = [PROMPT[: 1 + number] for number in range(8)]


def is_whole(text: list[int]) -> bool:
    parser = LLMatcher(grammars.make_tokenizer(), GRAMMAR)
    return text[-1] == END and parser.consume_tokens(text[:-1]) and parser.is_accepting()


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("after", [[], [2]])
def test_seeded_texts_are_those_without_drafts(
    native: Constrained, after: list[int], temperature: float
) -> None:
    """Constrained and free rows in the same batch; the planner decides, and rounds share steps."""
    params = [
        structs.replace(own, temperature=temperature, grammar_after=after if own.grammar else [])
        for own in SEEDED
    ]
    plain = run_engine(make_engine_without_drafts(native.target), PROMPTS, params)
    drafting_engines: list[EngineCore] = [
        constrained_engine(native.target, step_seconds=0.02),
        native.engine("draft_model", step_seconds=0.02, num_speculative_tokens=4),
        native.engine("draft_model", native_kernels=False, num_speculative_tokens=4),
    ]
    for core in drafting_engines:
        assert run_engine(core, PROMPTS, params) == plain
    for core in drafting_engines[1:]:
        assert core.stats.drafts["draft_model"].num_accepted_tokens > 0
    for text in plain[1::2]:
        start = next((end + 1 for end, token in enumerate(text) if [token] == after), 0)
        assert len(text) == 12 or (after and 2 not in text) or is_whole(text[start:])


@pytest.mark.usefixtures("needs_compiler")
def test_free_rows_wait_for_few_forced_tokens(native: Constrained, monkeypatch: Patch) -> None:
    """Each of which takes half as long as a round here."""
    honest = planner.make_terms

    def make_terms(*given: Any, **named: Any) -> lookups.Terms:
        terms = honest(*given, **named)
        return terms._replace(usual=1.0, seconds=[0.5 * length for length in range(33)], rate=1e-3)

    monkeypatch.setattr(planner, "make_terms", make_terms)
    num_forced = []
    for params in ([SEEDED[1], SEEDED[0]], [SEEDED[1], SEEDED[3]]):
        core = constrained_engine(native.target, step_seconds=0.02)
        run_engine(core, PROMPTS[:2], params)
        num_forced.append(core.stats.drafts.get("grammar", DraftCounts()).num_draft_tokens)
    assert num_forced[0] < 3 < num_forced[1]


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_constrained_rows_take_part_in_all_rounds_of_a_step(native: Constrained, temperature: float) -> None:
    """Free rows do so, too: all emit what they emit one round at a time."""
    grammar = 'start: ("c" /[ab]/ "abcabc"){4,8}'
    free = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    kinds = [free, structs.replace(free, grammar=grammar, ignore_eos=False)]
    params = [structs.replace(kinds[seed % 4 == 1], seed=seed) for seed in range(8)]
    plain = run_engine(make_engine_without_drafts(native.target), PROMPTS, params)
    core = constrained_engine(native.target, step_seconds=1000.0)
    fixed = grammars.grammar_planner(max_rounds=5)
    use_planner(core, fixed)
    assert run_engine(core, PROMPTS, params) == plain
    steps = [
        (len(result.rounds), part.draft.first_source, [one.num_drafted[row] for one in result.rounds[1:]])
        for plan, result in fixed.observed
        for row, part in enumerate(plan.rows)
        if part.sequence.matcher is not None
    ]
    assert max(num_rounds for num_rounds, _, _ in steps) == 5
    later = {
        source: [number for _, own, drafted in steps if own == source for number in drafted]
        for source in ("grammar", "ngram")
    }
    assert max(later["grammar"]) > 0
    assert not any(later["ngram"])
    counted = core.stats.drafts["grammar"]
    assert counted.num_accepted_tokens == counted.num_draft_tokens
    assert counted.num_draft_tokens > sum(later["grammar"])


@pytest.mark.usefixtures("needs_compiler")
def test_the_draft_model_drafts_in_all_rounds_of_a_step(native: Constrained, monkeypatch: Patch) -> None:
    """This holds where it is the only source, too."""
    core = native.engine("draft_model", step_seconds=1000.0, num_speculative_tokens=2)
    later: list[int] = []
    honest = core.planner.observe

    def observe(plan: StepPlan, result: StepResult) -> None:
        later.extend(one.num_drafted[0] for one in result.rounds[1:])
        honest(plan, result)

    monkeypatch.setattr(core.planner, "observe", observe)
    params = SamplingParams(max_tokens=40, grammar="start: /[abc]{40}/", method="draft_model")
    run_engine(core, [PROMPT], params)
    assert later
    assert max(later) == 2
    assert sum(later) > len(later)


def make_engine_without_drafts(target: str) -> EngineCore:
    return grammars.know_grammars(make_engine(target, None, num_speculative_tokens=0))


def test_preempted_sequences_go_on_where_they_were(constrained: Constrained) -> None:
    grammar = 'start: /[abc]/ "abc" /[ab]{30}/'
    params = [SamplingParams(max_tokens=60, seed=seed, grammar=grammar) for seed in range(8)]
    plain = run_engine(make_engine_without_drafts(constrained.target), PROMPTS, params)
    core = constrained_engine(constrained.target, cache_memory="6KiB")
    use_planner(core, grammars.grammar_planner())
    assert run_engine(core, PROMPTS, params) == plain
    assert core.scheduler.num_preemptions > 0


def test_choices_and_aborted_ones(constrained: Constrained) -> None:
    core = constrained_engine(constrained.target)
    core.add(Generate("several", PROMPT, structs.replace(SEEDED[1], seed=7), n=6))
    core.step()
    core.step()
    core.abort("several", 0)
    texts = outputs_by_choice(core)
    assert {index for _, index in texts} == set(range(1, 6))
    assert not core.scheduler.running


def test_greedy_text_is_the_masked_argmax(constrained: Constrained) -> None:
    greedy = structs.replace(constrained.params, temperature=0.0)
    (plain,) = run_engine(make_engine_without_drafts(constrained.target), [PROMPT], greedy)
    assert run_engine(constrained_engine(constrained.target), [PROMPT], greedy) == [plain]
    assert constrained.texts[tuple(plain)] > 0


@pytest.mark.parametrize(
    ("params", "code", "message"),
    [
        ({"grammar": "start: nothing"}, "invalid_grammar", "nothing"),
        ({"grammar": LLMatcher.grammar_from_regex("(a|b")}, "invalid_grammar", "unclosed group"),
        ({"grammar": "start: /x/"}, "invalid_grammar", "no text"),
        ({"grammar": GRAMMAR, "min_tokens": 2}, "unsupported_parameter", "min_tokens"),
        ({"grammar": GRAMMAR, "ignore_eos": True}, "unsupported_parameter", "ignore_eos"),
        ({"method": "grammar"}, "grammar_missing", "grammar"),
        ({"grammar_after": [2]}, "grammar_missing", "grammar_after"),
        ({"grammar": GRAMMAR, "grammar_after": [6]}, "invalid_token_id", "grammar_after"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    constrained: Constrained, params: dict[str, object], code: str, message: str
) -> None:
    core = constrained_engine(constrained.target)
    core.admission = replace(core.admission, methods=(*core.admission.methods, "draft_model"))
    with pytest.raises(RequestError, match=message) as error:
        core.add(Generate("refused", PROMPT, SamplingParams(max_tokens=4, **params)))
    assert error.value.code == code


def test_a_model_without_a_tokenizer_takes_no_grammars(constrained: Constrained) -> None:
    core = make_engine(constrained.target, None)
    with pytest.raises(RequestError, match="tokenizer"):
        core.add(Generate("refused", PROMPT, SEEDED[1]))


def test_a_parser_that_gives_up_ends_its_request_alone(constrained: Constrained, monkeypatch: Patch) -> None:
    honest = Matcher.write_masks

    def write_masks(self: Matcher, place: int, draft_ids: list[int], first: int = 0) -> bool:
        found = honest(self, place, draft_ids, first)
        self.advance([3] * 9)  # an error that stays, as that of a parser without fuel
        return found

    monkeypatch.setattr(Matcher, "write_masks", write_masks)
    core = make_engine_without_drafts(constrained.target)
    core.add(Generate("constrained", PROMPT, SEEDED[1]))
    core.add(Generate("free", PROMPT, SEEDED[2]))
    failures, texts = [], []
    while core.has_work:
        for output in core.step():
            (failures if isinstance(output, Failed) else texts).append(output)
    assert [(failure.request_id, failure.code) for failure in failures] == [
        ("constrained", "invalid_grammar")
    ]
    assert texts[-1].request_id == "free"
    assert texts[-1].finish_reason is not None


def test_compiled_grammars_are_kept() -> None:
    compiled = Grammars(grammars.make_tokenizer)
    first = compiled.matcher(GRAMMAR)
    first.advance([0])
    assert compiled.matcher(GRAMMAR).masks([]).tolist() != first.masks([]).tolist()
    for number in range(100):
        compiled.matcher(f"start: /a{{{number + 1}}}/")
    assert len(compiled._compiled) == 64


def test_deep_grammars_are_compiled() -> None:
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(5000))
    matcher = Grammars(grammars.make_tokenizer).matcher(f'start: r0\n{rules}r5000: "a"')
    assert matcher.forced(32) == [0] * 32
    assert matcher.masks([0] * 32).tolist() == [[1]] * 33


def test_a_tokenizer_needs_an_end() -> None:
    with pytest.raises(ValueError, match="end-of-sequence"):
        load_tokenizer("nowhere", 6, [])


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|im_start|>", "<|endoftext|><|im_end|>"])
def test_the_name_of_a_special_token_is_forced_as_text(text: str) -> None:
    """A grammar that wants the token itself still gets it."""
    tokenizer = load_tokenizer(str(BUNDLED_PAIR / "target"), 2050, [0])
    compiled = Grammars(lambda: tokenizer)
    written: list[int] = []
    matcher = compiled.matcher(LLMatcher.grammar_from_lark(f'start: "{text}"'))
    while forced := matcher.forced(1):
        (allowed,) = bits(matcher.masks([]))
        assert forced == allowed
        matcher.advance(forced)
        written += forced
    assert tokenizer.decode_str(written) == text
    assert not any(map(tokenizer.is_special_token, written))
    special = compiled.matcher("start: <|im_end|>").forced(1)
    assert [tokenizer.is_special_token(token_id) for token_id in special] == [True]


@pytest.mark.parametrize(
    ("verification", "after"),
    [
        *[("rejection", []), ("block", []), ("coupled", []), ("exact_match", [])],
        *[("rejection", [2]), ("block", [2]), ("coupled", [2])],
    ],
)
def test_traces_verify(constrained: Constrained, verification: str, after: list[int]) -> None:
    """Every decision under masks is confirmed; without them the same trace is refuted."""
    how: dict[str, object] = {"verification": verification}
    if verification == "exact_match":
        how = {"temperature": 0.0}
    core = constrained_engine(constrained.target)
    use_planner(core, grammars.grammar_planner())
    params = structs.replace(
        constrained.params, trace=True, seed=3, max_tokens=12, grammar_after=after, **how
    )
    core.add(Generate("traced", PROMPT, params, n=1 if verification == "exact_match" else 8))
    rounds: dict[int, list[TracedRound]] = {}
    seeds: dict[int, int] = {}
    while core.has_work:
        for output in stepped(core):
            assert output.trace is not None
            rounds.setdefault(output.index, []).append(TracedRound.of(output.trace))
            seeds[output.index] = output.seed
    assert {round_.source for own in rounds.values() for round_ in own} >= {"grammar"}
    target = FreshModel(constrained.target, LoadOptions())

    def outcomes(params: SamplingParams) -> set[Outcome]:
        replayer = Replayer(target, {}, params, 1e-4, Grammars(grammars.make_tokenizer))
        choices = [TracedChoice(PROMPT, seeds[index], own) for index, own in rounds.items()]
        return {report.outcome for choice in choices for report in replayer.replay(choice)}

    assert Outcome.WRONG not in outcomes(params)
    assert Outcome.WRONG in outcomes(structs.replace(params, grammar=None, grammar_after=[]))


def exploding(number: int) -> str:
    """A grammar whose lexer has to know more and more states as its text goes on."""
    terms = range(60)
    rules = "".join(f"L{i}: /[ab]*a[ab]{{{i + number % 7 + 1}}}/\n" for i in terms)
    return f"start: {' | '.join(f'L{i}' for i in terms)}\n{rules}// {number}\n"


def give_up(matcher: Matcher) -> None:
    while not matcher.error:
        matcher.masks([])
        matcher.advance([random.choice([0, 1])])


def test_grammars_that_gave_up_are_not_kept(monkeypatch: Patch) -> None:
    """Their parsers are the largest that there are. The last one leaves with its sequence."""
    limits = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "LIMITS", limits)
    compiled = Grammars(grammars.make_tokenizer)
    fine = compiled.matcher(GRAMMAR)
    for number in range(3):
        matcher = compiled.matcher(exploding(number))
        give_up(matcher)
        assert "too many" in matcher.error or "limit" in matcher.error
        del matcher
        assert [*compiled._compiled] == [GRAMMAR]
    assert not fine.error


def test_kept_grammars_are_bounded_by_memory(monkeypatch: Patch) -> None:
    """The least recently used leave, and what else the process takes is not taken for theirs."""
    used = [10_000]
    monkeypatch.setattr("truedraft.engine.sampling.grammar.heap_in_use", lambda: used[0])
    monkeypatch.setattr("truedraft.engine.sampling.grammar.MAX_KEPT_BYTES", 100)
    compiled = Grammars(grammars.make_tokenizer)
    texts = [f"start: /a{{{number + 1}}}/" for number in range(3)]
    for text in texts:
        compiled.matcher(text)
    assert [*compiled._compiled] == texts
    used[0] += 101
    compiled.trim()
    assert not compiled._compiled  # nothing helped
    for text in texts:
        compiled.matcher(text)
    assert [*compiled._compiled] == texts


def test_memory_of_the_heap_is_measured() -> None:
    before = heap_in_use()
    if before is None:
        pytest.skip("this C library does not tell")
    held = ctypes.create_string_buffer(50_000_000)
    after = heap_in_use()
    assert after is not None
    # Other threads of the process may free something meanwhile.
    assert after - before >= 0.9 * len(held)
