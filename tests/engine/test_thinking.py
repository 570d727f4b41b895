"""A budget of reasoning forces the same tokens at the same places, with and without drafts."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.conftest import Models
from tests.engine.grammars import GRAMMAR, know_grammars, make_tokenizer
from tests.models import make_engine, run_engine
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput
from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.sampling.thinking import ThinkingBudget

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OPEN, CLOSE, ANSWER = [11], [12], [13, 14]
VOCAB_SIZE = 70


def forced_at(budget: ThinkingBudget, draft: Sequence[int]) -> list[int | None]:
    """Returns the one token that each position's mask allows; None where all are allowed."""
    masks = budget.masks([*draft])
    if masks is None:
        return [None] * (len(draft) + 1)
    found: list[int | None] = []
    for row in masks.tolist():
        bits = [32 * word + bit for word, value in enumerate(row) for bit in range(32) if value >> bit & 1]
        found.append(bits[0] if len(bits) == 1 else None)
        assert len(bits) == 1 or len(bits) == 96
    return found


def expected(budget: int, marks: Sequence[Sequence[int]], text: Sequence[int]) -> int | None:
    """Returns the token that must follow ``text``, by reading it from its beginning again."""
    opening, closing, answer, space = map(list, marks)
    is_open, num_tokens, begin = not opening, 0, 0
    for end in range(len(text) + 1):
        if is_open and num_tokens >= budget:
            # The mark goes on from what is there of it, and then the answer's beginning comes.
            there = next(
                n
                for n in range(len(closing) - 1, -1, -1)
                if [*text[max(begin, end - n) : end]] == closing[:n]
            )
            rest = (closing + answer)[there:]
            written = [*text[end:]]
            if len(written) >= len(rest):
                return None
            assert written == rest[: len(written)]
            return rest[len(written)]
        if end == len(text):
            return None
        if is_open:
            num_tokens += 1
            if [*text[max(begin, end + 1 - len(closing)) : end + 1]] == closing:
                if not answer:
                    return None
                num_tokens -= 1
                is_open, begin = False, end + 1
        elif [*text[max(begin, end + 1 - len(opening)) : end + 1]] == opening and (
            answer or {*text[: end + 1 - len(opening)]} <= {*space}
        ):
            is_open, begin = True, end + 1
    return None


MARKS: dict[str, list[list[int]]] = {
    "the prompt opens": [[], CLOSE, [], []],
    "opens itself": [OPEN, CLOSE, [], [0]],
    "marks of several tokens": [[1, 2], [2, 2, 3], [], [0]],
    "messages with headers": [[1, 2], [3, 0], [4], []],
}


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_masks_are_those_of_the_whole_text(name: str, size: int) -> None:
    """However a text is cut into what was read and drafts, the same token is forced at the same place."""
    marks, generator = MARKS[name], random.Random(f"{name} {size}")
    tokens = sorted({*itertools.chain(*marks), 0, 1})
    num_forced = 0
    for _ in range(60):
        text: list[int] = []
        while len(text) < 16:
            forced = expected(size, marks, text)
            num_forced += forced is not None
            text.append(generator.choice(tokens) if forced is None else forced)
        want = [expected(size, marks, text[:end]) for end in range(len(text) + 1)]
        read = generator.randrange(len(text))
        budget = ThinkingBudget(size, marks, VOCAB_SIZE, None)
        budget.advance(text[:read])
        assert budget.num_read == read
        assert forced_at(budget, text[read:]) == want[read:]
        first = generator.randrange(len(text) - read + 1)
        masks = budget.masks(text[read:], first)
        assert (masks is None) == (want[read + first :] == [None] * (len(text) + 1 - read - first))
        run = [*itertools.takewhile(lambda token: token is not None, want[read:])]
        assert budget.forced(8)[: len(run)] == run
        assert budget.allowed(text[read:]) == text[read:]
        other = next(token for token in tokens if token != want[read]) if want[read] is not None else None
        if other is not None:
            assert budget.allowed([other]) == []
        assert budget.budget_spent == any(token is not None for token in want[: read + 1])
    assert num_forced


def core_of(models: Models, k: int, **more: Any) -> EngineCore:
    return know_grammars(
        make_engine(models.target, models.close_draft if k else None, num_speculative_tokens=k, **more)
    )


@pytest.fixture(scope="module")
def cores(models: Models) -> list[EngineCore]:
    return [
        core_of(models, 0),
        core_of(models, 6),
        core_of(models, 6, method="auto", step_seconds=0.05),
        core_of(models, 4, method="ngram", ngram_min_match=1),
    ]


@pytest.mark.parametrize("how", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize(
    "marks", [[[], [12], [], []], [[7], [12, 3], [], [1]], [[], [12, 3], [1, 2], []]], ids=str
)
def test_the_text_is_the_same_whatever_drafts(
    cores: list[EngineCore], how: dict[str, Any], marks: list[list[int]]
) -> None:
    for size in (0, 1, 6):
        params = SamplingParams(max_tokens=16, thinking_budget=size, thinking_marks=marks, **how)
        texts = [run_engine(core, [PROMPT], params)[0] for core in cores]
        assert all(text == texts[0] for text in texts[1:])
        for end in range(len(texts[0])):
            forced = expected(size, marks, texts[0][:end])
            assert forced in (None, texts[0][end])
        if not marks[0]:
            closing = marks[1] + marks[2]
            begin = next(n for n in range(len(texts[0])) if texts[0][n : n + len(marks[1])] == marks[1])
            assert begin <= size
            if begin == size:
                assert texts[0][begin : begin + len(closing)] == closing


def test_a_budget_that_is_not_spent_changes_nothing(models: Models) -> None:
    for how in ({"temperature": 0.0}, {"seed": 5}):
        plain = SamplingParams(max_tokens=20, **how)
        budget = SamplingParams(max_tokens=20, thinking_budget=21, thinking_marks=[[], [15], [], []], **how)
        core = core_of(models, 4)
        assert run_engine(core, [PROMPT], plain) == run_engine(core, [PROMPT], budget)


def test_what_is_spent_is_reported(models: Models) -> None:
    for size, spent in ((3, True), (100, False)):
        core = core_of(models, 4)
        params = SamplingParams(
            max_tokens=20, seed=1, thinking_budget=size, thinking_marks=[[], [15], [], []]
        )
        core.add(Generate("r", PROMPT, params))
        outputs = []
        while core.has_work:
            outputs += core.step()
        assert isinstance(outputs[-1], TokenOutput)
        assert outputs[-1].budget_spent == spent


def test_a_grammar_after_the_reasoning_holds() -> None:
    """The closing mark is what the grammar waits for."""
    matcher = Grammars(make_tokenizer).matcher(GRAMMAR, [4])
    budget = ThinkingBudget(2, [[], [4], [], []], 6, matcher)
    assert budget.forced(5) == []
    budget.advance([1, 3])
    assert budget.forced(5) == [4]
    masks = budget.masks([4, 0])
    assert masks is not None
    assert masks[0].tolist() == [1 << 4]
    budget.advance([4])
    after = Grammars(make_tokenizer).matcher(GRAMMAR, [])
    assert budget.masks([]) is not None
    assert budget.masks([]).tolist() == after.masks([]).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("marks", [[], [[1], [2], []], [[1], [], [], []], [[], [999], [], []]], ids=str)
def test_marks_that_mean_nothing_are_refused(models: Models, marks: list[list[int]]) -> None:
    with pytest.raises(RequestError, match="thinking_marks"):
        core_of(models, 0).add(
            Generate("r", PROMPT, SamplingParams(max_tokens=4, thinking_budget=1, thinking_marks=marks))
        )
