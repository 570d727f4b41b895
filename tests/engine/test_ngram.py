"""Drafts from the text so far: the automaton against brute force, the proposer in the engine."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import SamplingParams
from engine.proposers.suffix_automaton import SuffixAutomaton
from tests.engine.conftest import Models
from tests.engine.gates import PROMPTS
from tests.models import make_engine, run_engine


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
            assert text[end - length : end] == text[i - length : i]


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
    assert core.scheduler.draft_pool is None


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
