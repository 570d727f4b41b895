"""With a seed the tokens are the same for any draft, draft length, batch, arrival order, preemption."""

import pytest

from tests.engine.conftest import Models
from tests.models import make_engine, outputs_by_choice, run_engine
from truedraft.engine.messages import Generate, SamplingParams

PROMPTS = [[i, (3 * i) % 16, 5] for i in range(8)]
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0.7 + 0.1 * i, top_p=0.95 if i % 2 else 1.0, seed=100 + i)
    for i in range(8)
]


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[int]]:
    """Plain decoding, one after the other."""
    return run_engine(make_engine(models.target, None, max_num_sequences=1), PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "draft", ["target", "close_draft", "random_draft", "padded_draft", "lacking_draft", None]
)
@pytest.mark.parametrize("max_num_sequences", [1, 8])
def test_same_tokens_whoever_drafts(
    models: Models, expected: list[list[int]], draft: str | None, max_num_sequences: int
) -> None:
    core = make_engine(
        models.target, getattr(models, draft) if draft else None, max_num_sequences=max_num_sequences
    )
    assert run_engine(core, PROMPTS, PARAMS) == expected


def test_same_tokens_with_drafts_from_ngrams(models: Models, expected: list[list[int]]) -> None:
    core = make_engine(models.target, None, method="ngram", ngram_min_match=1)
    assert run_engine(core, PROMPTS, PARAMS) == expected
    assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


@pytest.mark.parametrize("num_speculative_tokens", range(9))
def test_same_tokens_for_every_draft_length(
    models: Models, expected: list[list[int]], num_speculative_tokens: int
) -> None:
    core = make_engine(models.target, models.close_draft)
    params = [
        SamplingParams(
            max_tokens=30,
            temperature=p.temperature,
            top_p=p.top_p,
            seed=p.seed,
            num_speculative_tokens=num_speculative_tokens,
        )
        for p in PARAMS
    ]
    assert run_engine(core, PROMPTS, params) == expected


def test_same_tokens_in_another_order_of_arrival(models: Models, expected: list[list[int]]) -> None:
    core = make_engine(models.target, models.close_draft, max_num_sequences=3)
    arrivals = [14, 2, 9, 0, 5, 5, 1, 20]
    assert run_engine(core, PROMPTS, PARAMS, arrivals) == expected


def test_choices_differ_and_the_first_is_the_lone_one(models: Models, expected: list[list[int]]) -> None:
    core = make_engine(models.target, models.close_draft)
    core.add(Generate(request_id="r", prompt_token_ids=PROMPTS[0], params=PARAMS[0], n=3))
    outputs = outputs_by_choice(core)
    assert outputs["r", 0] == expected[0]
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3


def test_without_a_seed_runs_differ(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    params = SamplingParams(max_tokens=30)
    assert run_engine(core, PROMPTS[:1], params) != run_engine(core, PROMPTS[:1], params)
