"""Predicted outputs: the cursor against its definition, and drafts from it in the engine."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conftest import Models
from tests.models import make_engine, run_engine, stepped
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.prediction import TRUSTED_RUN, Prediction, PredictionCursor
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput

PROMPT = [1, 2, 3, 4, 5]
GREEDY = SamplingParams(max_tokens=60, temperature=0)
SEEDED = SamplingParams(max_tokens=60, temperature=1.0, seed=11)
TOKENS = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size), max_size=40))


def cursor_of(token_ids: list[int]) -> PredictionCursor:
    return PredictionCursor(Prediction(token_ids))


def answer(
    core: EngineCore, params: SamplingParams, prediction: list[int] | None, n: int = 1
) -> tuple[list[list[int]], list[TokenOutput]]:
    """Token ids by choice, and the steps' outputs."""
    core.add(Generate("r", PROMPT, params, n, prediction_token_ids=prediction))
    texts: list[list[int]] = [[] for _ in range(n)]
    outputs = []
    while core.has_work:
        for output in stepped(core):
            texts[output.index] += output.token_ids
            outputs.append(output)
    return texts, outputs


def plain_text(models: Models, params: SamplingParams) -> list[int]:
    return run_engine(make_engine(models.target, None), [PROMPT], params)[0]


@given(TOKENS, TOKENS)
def test_what_is_matched_is_there(prediction: list[int], output: list[int]) -> None:
    """Every index says where the token is, and what is drafted next follows the last of them."""
    cursor = cursor_of(prediction)
    for i, token in enumerate(output):
        (index,) = cursor.follow([token])
        run = cursor.run
        assert (index >= 0) == (run > 0)
        if index >= 0:
            assert prediction[index] == token
            assert cursor.place == index + 1
            known = min(run, index + 1, i + 1)
            assert prediction[index + 1 - known : index + 1] == output[i + 1 - known : i + 1]
        assert cursor.expected(3) == prediction[cursor.place : cursor.place + 3]


@given(TOKENS)
def test_a_prediction_that_comes_true_is_followed_to_its_end(prediction: list[int]) -> None:
    assert cursor_of(prediction).follow(prediction) == list(range(len(prediction)))


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ("a token replaced", [*range(10), 99, *range(11, 30)]),
        ("tokens inserted", [*range(10), 97, 98, 99, *range(10, 30)]),
        ("tokens left out", [*range(10), *range(15, 30)]),
        ("many left out", [*range(10), *range(60, 80)]),
        ("another beginning", [99, 98, *range(1, 30)]),
        ("back to the start", [*range(40), *range(10)]),
    ],
)
def test_it_is_found_again_after_a_divergence(change: str, output: list[int]) -> None:
    cursor = cursor_of(list(range(100)))
    matched = cursor.follow(output)
    assert matched[-1] == output[-1], change
    assert cursor.expected(3) == list(range(output[-1] + 1, output[-1] + 4))
    num_changed = sum(token >= 97 for token in output)
    assert sum(index < 0 for index in matched) <= num_changed + 2


def test_of_equal_matches_the_next_one_is_taken() -> None:
    line = [7, 8, 9]
    cursor = cursor_of([*line, 1, *line, 2, *line, 3, *line, 4])
    assert cursor.follow([*line, 1, *line, 99, 8, 9])[-1] == 10
    assert cursor.expected(1) == [3]


def test_a_long_prediction_is_indexed_piece_by_piece() -> None:
    prediction = Prediction(list(range(10_000)))
    assert prediction.ends_of(9_000, 9_001) == []
    prediction.ends_of(0, 0)
    assert prediction.ends_of(9_000, 9_001) == [9_002]


PREDICTIONS = ["right", "empty", "wrong", "longer", "edited", "shifted", "one token"]


def predict(kind: str, text: list[int]) -> list[int]:
    return {
        "right": text,
        "empty": [],
        "wrong": [(token + 1) % 16 for token in text],
        "longer": [*text, *text, *text],
        "edited": [*text[:10], 3, 3, *text[12:25], *text[30:]],
        "shifted": [9, 9, *text],
        "one token": [text[0]] * 100,
    }[kind]


@pytest.mark.parametrize("length", [1, 4, "auto"])
@pytest.mark.parametrize("kind", PREDICTIONS)
def test_the_text_is_the_same_with_any_prediction(models: Models, kind: str, length: int | str) -> None:
    for params in (GREEDY, SEEDED):
        text = plain_text(models, params)
        core = make_engine(models.target, None, num_speculative_tokens=length)
        assert answer(core, params, predict(kind, text))[0] == [text]


def test_a_right_prediction_is_accepted_whole(models: Models) -> None:
    text = plain_text(models, GREEDY)
    core = make_engine(models.target, None, num_speculative_tokens=8)
    _, outputs = answer(core, GREEDY, text)
    counts = core.stats.drafts["prediction"]
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 45
    matched = [index for output in outputs for index in output.prediction.matched]  # type: ignore[union-attr]
    assert matched == list(range(len(text)))


def test_the_server_that_drafts_nothing_still_uses_a_prediction(models: Models) -> None:
    text = plain_text(models, GREEDY)
    core = make_engine(models.target, models.close_draft, method="none")
    answer(core, GREEDY, text)
    assert set(core.stats.drafts) == {"prediction"}


@pytest.mark.parametrize("params", [{"method": "none"}, {"method": "ngram"}, {"num_speculative_tokens": 0}])
def test_a_client_may_leave_its_prediction_unused(models: Models, params: dict[str, object]) -> None:
    core = make_engine(models.target, None)
    _, outputs = answer(core, msgspec.structs.replace(GREEDY, **params), plain_text(models, GREEDY))
    assert "prediction" not in core.stats.drafts
    assert all(output.prediction is None for output in outputs)


def test_the_method_needs_a_prediction(models: Models) -> None:
    core = make_engine(models.target, None)
    with pytest.raises(RequestError, match="prediction"):
        answer(core, msgspec.structs.replace(GREEDY, method="prediction"), None)


def test_choices_follow_the_prediction_each_on_its_own(models: Models) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.2, seed=3)
    core = make_engine(models.target, None)
    plain, _ = answer(core, params, None, n=3)
    predicted, _ = answer(core, params, plain[1], n=3)
    assert predicted == plain


def test_the_start_is_trusted() -> None:
    assert cursor_of([1, 2]).run == TRUSTED_RUN
