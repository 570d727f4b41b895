"""Whether a draft accepted to its end would have been right about the token that followed, as rounds in C
tell when the draft model catches up with it."""

from collections.abc import Hashable
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.draft_length.learning import Round, learn_acceptance, replayed_of
from engine.draft_length.rounds import Candidate, Outcome
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance
from engine.native import library
from tests.engine.native_pair import save_pair
from tests.engine.test_native import plant
from tests.engine.test_native_draft import COUPLED, GREEDY
from tests.engine.test_whole_rounds import RecordingPolicy, make_twins, tell_all

# Two rows that look back, around one whose draws cannot tell.
PARAMS = [replace(own, max_tokens=60, ignore_eos=True) for own in (GREEDY, COUPLED, GREEDY)]
Rights = dict[tuple[int, int], bool]


def rights(models: tuple[str, str], num_draft_tokens: int) -> tuple[list[list[int]], Rights, Rights]:
    """The texts; by row and place whether the draft was right, as its verdicts say; and as is told of the
    tokens that followed drafts accepted to their ends."""
    core, _ = make_twins(*models, num_speculative_tokens="auto")
    policy = RecordingPolicy(num_draft_tokens, None)
    core.scheduler.planner.policy = policy
    told, _ = tell_all(core, PARAMS)
    judged: Rights = {}
    afterwards: Rights = {}
    rows: dict[Hashable, int] = {}
    places: dict[int, int] = {}
    for outcomes in policy.outcomes:
        for one in outcomes:
            row = rows.setdefault(one.key, len(rows))
            place = places.get(row, 1)
            judged |= {(row, place + i): True for i in range(one.num_accepted_tokens)}
            place += one.num_accepted_tokens
            if one.num_accepted_tokens < one.num_draft_tokens:
                assert one.next_right is None
                judged[row, place] = False
            elif one.next_right is not None:
                afterwards[row, place] = one.next_right
            places[row] = place + 1
    return [one.token_ids for one in told], judged, afterwards


def check(models: tuple[str, str], num_draft_tokens: int) -> None:
    """Greedy texts tell whatever the draft's length is, so longer drafts know what shorter ones are told."""
    texts, judged, afterwards = rights(models, num_draft_tokens)
    for longer in (4, 5, 6):
        same_texts, known, _ = rights(models, longer)
        assert same_texts == texts
        judged |= known
    assert {row for row, _ in afterwards} == {0, 2}
    common = [key for key in afterwards if key in judged]
    assert len(common) > 5
    assert [afterwards[key] for key in common] == [judged[key] for key in common]
    assert {afterwards[key] for key in common} == {False, True}


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_it_is_what_longer_drafts_of_the_same_text_know(num_draft_tokens: int, tmp_path: Path) -> None:
    check(save_pair(tmp_path), num_draft_tokens)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("== *last_tokens(rounds, row, 1);", "== *last_tokens(rounds, row, 2);"),
        ("likeliest(&rows->hindsight[row],", "likeliest(&rows->hindsight[0],"),
        ("next += vocab;\n        }", "}"),
    ],
    ids=["another token", "another row", "logits of the next token"],
)
def test_wrong_looks_back_are_caught(
    right: str, wrong: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(library, "SOURCES", plant(library.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        check(save_pair(tmp_path), 2)


def test_it_is_learned_from() -> None:
    """As a verdict on one more token; and a text in step is seen in it, where every fourth token is wrong."""
    outcomes = [Outcome(0, 1, 1, next_right=True), Outcome(0, 1, 1, next_right=False)]
    sequence = SequenceAcceptance(GroupAcceptance(), 0)
    rounds = [
        Round([Candidate(0, "draft_model", 0.0, 8)], [1], [0], [outcome], None, 0)
        for outcome in outcomes * 50
    ]
    learn_acceptance(rounds, {0: {"draft_model": sequence}}, 0, 99)
    assert sequence.rate(0) > 0.9
    assert sequence.rate(1) == pytest.approx(0.5, abs=0.05)
    text = [one for one in [replayed_of(one, 0, sequence) for one in rounds] if one is not None]
    assert [one.next_right for one in text] == [1.0, 0.0] * 50
    sequence.group.replay([text] * 5)
    # Drafts of three would always be right.
    assert sequence.group.factors[2] > 1.1
