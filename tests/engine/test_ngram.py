"""Drafts from the text so far: the automaton against brute force, the proposer in the engine."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conftest import Models
from tests.engine.gates import PROMPTS
from tests.models import make_engine, run_engine, stepped
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.proposers.ngram import SuffixAutomaton
from truedraft.engine.speculation import lookups


def most_frequent(text: list[int], num_tokens: int) -> list[int]:
    """What followed the longest repeated end most often, the last one on ties; and so on from there."""
    drafted: list[int] = []
    end = text[len(text) - longest_match(text) :]
    while len(drafted) < num_tokens:
        followed = [text[i + len(end)] for i in range(len(text) - len(end)) if text[i : i + len(end)] == end]
        if not followed:
            end = end[1:]
            continue
        latest = {token: place for place, token in enumerate(followed)}
        drafted.append(max(latest, key=lambda token: (followed.count(token), latest[token])))
        end = [*end, drafted[-1]]
    return drafted


def longest_match(text: list[int]) -> int:
    """Length of the longest end of ``text`` that occurs earlier in it."""
    for length in range(len(text) - 1, 0, -1):
        end = text[-length:]
        if any(text[i : i + length] == end for i in range(len(text) - length)):
            return length
    return 0


@given(st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=30)))
def test_the_longest_earlier_occurrence_is_found(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, start=1):
        automaton.extend([token])
        length, end = automaton.match_length, automaton.match_end
        assert length == longest_match(text[:i])
        if length:
            assert end < i
            wanted = text[i - length : i]
            assert end == max(e for e in range(length, i) if text[e - length : e] == wanted)


@given(st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(0, size), max_size=24)))
def test_the_most_frequent_continuation_is_found(text: list[int]) -> None:
    automaton = SuffixAutomaton("most_frequent")
    automaton.extend(text)
    if automaton.match_length:
        assert automaton.continuation(1) == most_frequent(text, 1)


def test_recent_or_frequent() -> None:
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    for choice, expected in (("most_recent", 8), ("most_frequent", 7)):
        automaton = SuffixAutomaton(choice)  # type: ignore[arg-type]
        automaton.extend(text)
        assert automaton.continuation(1) == [expected]


def test_no_more_than_the_maximum_is_drafted(models: Models) -> None:
    params = SamplingParams(max_tokens=60, temperature=0)
    core = make_engine(
        models.target, None, method="ngram", num_speculative_tokens=8, ngram_min_match=1, ngram_max_tokens=3
    )
    run_engine(core, REPETITIVE, params)
    assert core.stats.draft_tokens_per_position[2] > 0 == core.stats.draft_tokens_per_position[3]


def test_a_long_prompt_is_taken_in_piece_by_piece(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it was computed: here all of it comes from the cache. Nothing is taken in twice, not even
    after a preemption."""
    monkeypatch.setattr(lookups, "MAX_READ", 16)
    taken: list[int] = []
    honest = SuffixAutomaton.extend

    def extend(self: SuffixAutomaton, token_ids: list[int]) -> None:
        taken.append(len(token_ids))
        honest(self, token_ids)

    monkeypatch.setattr(SuffixAutomaton, "extend", extend)
    core = make_engine(models.target, None, method="ngram", ngram_min_match=1, num_speculative_tokens=2)
    prompt = [i % 7 for i in range(120)]
    plain = SamplingParams(max_tokens=1, temperature=0, method="none")
    params = SamplingParams(max_tokens=40, temperature=0)
    run_engine(core, [prompt], plain)
    assert not taken
    core.add(Generate("r", prompt, params))
    outputs = 0
    while core.has_work:
        outputs += sum(len(output.token_ids) for output in stepped(core))
        if outputs == 20:
            core.scheduler._preempt(core.scheduler.running[0])
    assert max(taken) <= 16
    assert len(prompt) + 30 < sum(taken) < len(prompt) + 40
    assert core.stats.num_draft_tokens > 0


def test_a_continuation_that_meets_the_end_repeats_itself() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7, 1, 2, 1, 2])
    assert automaton.match_length == 2
    assert automaton.continuation(5) == [1, 2, 1, 2, 1]


def test_states_grow_linearly() -> None:
    """At most two states per token, whatever the text: the cost of a token cannot grow with its position."""
    for text in (
        [0] * 2000,
        list(range(2000)),
        [i % 7 for i in range(2000)],
        [int(i**0.5) for i in range(2000)],
    ):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert len(automaton._next) <= 2 * len(text)


REPETITIVE = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4], *PROMPTS]


def test_greedy_text_is_the_same_and_copies_are_accepted(models: Models) -> None:
    params = SamplingParams(max_tokens=60, temperature=0)
    plain = run_engine(make_engine(models.target, None), REPETITIVE, params)
    core = make_engine(models.target, None, method="ngram", num_speculative_tokens=8)
    assert run_engine(core, REPETITIVE, params) == plain
    assert core.stats.num_accepted_tokens > 0
    assert core.scheduler.draft_pools == []


def test_methods_side_by_side_in_one_batch(models: Models) -> None:
    """Deterministic and drawn drafts, and none, under the rules that use draft distributions."""
    methods = ["ngram", "draft_model", "none", "none", "ngram", "draft_model"]
    for verification in ("rejection", "block", "coupled"):
        base = SamplingParams(max_tokens=40, seed=4, verification=verification)
        params = [msgspec.structs.replace(base, method=method) for method in methods]
        core = make_engine(models.target, models.close_draft, ngram_min_match=1)
        together = run_engine(core, REPETITIVE, params)
        alone = [run_engine(core, [p], [q])[0] for p, q in zip(REPETITIVE, params, strict=True)]
        assert together == alone
