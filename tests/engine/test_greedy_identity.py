"""Temperature 0: the very tokens of transformers' ``generate``, whoever drafts and whoever is near."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Models
from tests.models import greedily_generated, make_engine, run_engine
from truedraft.engine.messages import SamplingParams

NUM_PROMPTS, NUM_TOKENS = 10, 48
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 40, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(0, 16, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    return greedily_generated(model, prompts(), NUM_TOKENS)


@pytest.mark.parametrize("max_num_sequences", [1, 3, 8])
@pytest.mark.parametrize("num_speculative_tokens", range(9))
def test_equals_generate(
    models: Models, expected: list[list[int]], num_speculative_tokens: int, max_num_sequences: int
) -> None:
    """Requests arrive while others run; chunks of 16 tokens split the longer prompts."""
    core = make_engine(
        models.target,
        models.close_draft,
        num_speculative_tokens=num_speculative_tokens,
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=max(16, max_num_sequences * (num_speculative_tokens + 1)),
    )
    arrivals = [3 * i for i in range(NUM_PROMPTS)]
    assert run_engine(core, prompts(), PARAMS, arrivals) == expected
    if num_speculative_tokens:
        assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


@pytest.mark.parametrize("draft", ["random_draft", "padded_draft", "lacking_draft", None])
def test_equals_generate_whoever_drafts(models: Models, expected: list[list[int]], draft: str | None) -> None:
    core = make_engine(models.target, getattr(models, draft) if draft else None)
    assert run_engine(core, prompts(), PARAMS) == expected


def test_top_k_1_is_greedy(models: Models, expected: list[list[int]]) -> None:
    core = make_engine(models.target, models.close_draft)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, top_k=1)
    assert run_engine(core, prompts(), params) == expected


ADJUSTED = {
    "penalties": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.4,
    ),
    "bias and minimum": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        logit_bias={3: 2.5, 5: -100.0},
        min_tokens=9,
        stop_token_ids=[1, 2],
    ),
}


@pytest.mark.parametrize("adjustment", ADJUSTED)
@pytest.mark.parametrize("num_speculative_tokens", range(9))
def test_penalties_and_bias_equal_plain_decoding(
    models: Models, adjustment: str, num_speculative_tokens: int
) -> None:
    params = ADJUSTED[adjustment]
    plain = run_engine(make_engine(models.target, None), prompts(), params)
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=num_speculative_tokens)
    assert run_engine(core, prompts(), params) == plain


def test_repetition_penalty_is_that_of_transformers(models: Models) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    core = make_engine(models.target, models.close_draft)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, repetition_penalty=1.3)
    expected = greedily_generated(model, prompts(), NUM_TOKENS, repetition_penalty=1.3)
    assert run_engine(core, prompts(), params) == expected
