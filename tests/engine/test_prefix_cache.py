"""Prefix reuse in the whole engine: fewer tokens computed, the same text, the same acceptance."""

import msgspec
import pytest

from tests.engine.conftest import Models
from tests.models import make_engine, run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput

SHARED = [(7 * i + i // 3) % 16 for i in range(100)]
PARAMS = SamplingParams(max_tokens=30, temperature=0.9, seed=3)


def scored_tokens(core: EngineCore) -> list[int]:
    """Grows by the number of tokens of each target forward."""
    counts: list[int] = []
    honest = core.target.forward

    def forward(spans, ids, taps):  # type: ignore[no-untyped-def]
        counts.append(sum(len(span.token_ids) for span in spans))
        return honest(spans, ids, taps)

    core.target.forward = forward  # type: ignore[method-assign]
    return counts


def first_output(core: EngineCore, request: Generate) -> TokenOutput:
    core.add(request)
    first = None
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            first = first or output
    assert first is not None
    return first


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_hit_changes_neither_text_nor_acceptance(models: Models, verification: str) -> None:
    params = msgspec.structs.replace(PARAMS, verification=verification)
    prompt = [*SHARED, 5, 6]
    cold = make_engine(models.target, models.close_draft)
    expected = run_engine(cold, [prompt], params)
    warm = make_engine(models.target, models.close_draft)
    run_engine(warm, [[*SHARED, 1]], msgspec.structs.replace(PARAMS, seed=99))
    before = (warm.stats.num_draft_tokens, warm.stats.num_accepted_tokens)
    counts = scored_tokens(warm)
    assert run_engine(warm, [prompt], params) == expected
    assert counts[0] == len(prompt) - 100
    assert warm.stats.num_draft_tokens - before[0] == cold.stats.num_draft_tokens
    assert warm.stats.num_accepted_tokens - before[1] == cold.stats.num_accepted_tokens


def test_self_draft_stays_perfect_after_hits(models: Models) -> None:
    """A draft cache that did not follow the hit would guess worse."""
    core = make_engine(models.target, models.target, method="draft_model")
    for i in range(5):
        run_engine(core, [[*SHARED, i]], PARAMS)
    assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens > 0
    assert core.scheduler.num_prefix_hits == 4 * 100


def test_cached_tokens_are_told_and_can_be_declined(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    prompt = [*SHARED, 1]

    def cached(**options: object) -> int:
        request = Generate(request_id="r", prompt_token_ids=prompt, params=PARAMS, **options)  # type: ignore[arg-type]
        return first_output(core, request).num_cached_tokens

    assert cached(cache_prompt=False) == 0
    assert cached() == 0  # what declines is not published either
    assert cached() == 100
    assert cached(cache_prompt=False) == 0
    assert cached(cache_salt="another tenant") == 0
    assert cached(cache_salt="another tenant") == 100


def test_generated_text_is_reused_in_the_next_turn(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    (answer,) = run_engine(core, [SHARED], PARAMS)
    following = [*SHARED, *answer, 1, 2, 3]
    request = Generate(request_id="r", prompt_token_ids=following, params=PARAMS)
    assert first_output(core, request).num_cached_tokens == 4 * ((100 + len(answer) - 1) // 4)


def test_prompt_logprobs_are_complete_after_a_hit(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    run_engine(core, [SHARED], PARAMS)
    params = msgspec.structs.replace(PARAMS, prompt_logprobs=0)
    output = first_output(core, Generate(request_id="r", prompt_token_ids=SHARED, params=params))
    assert len(output.prompt_logprobs or []) == 100


def test_choices_say_what_they_say_without_sharing(models: Models) -> None:
    def texts(**options: bool) -> dict[int, list[int]]:
        core = make_engine(models.target, models.close_draft, **options)
        core.add(Generate(request_id="r", prompt_token_ids=SHARED, params=PARAMS, n=4))
        collected: dict[int, list[int]] = {}
        while core.has_work:
            for output in core.step():
                assert isinstance(output, TokenOutput)
                collected.setdefault(output.index, []).extend(output.token_ids)
        return collected

    assert texts() == texts(prefix_caching=False)


def test_a_full_cache_forgets_and_goes_on(models: Models) -> None:
    prompts = [[i, *SHARED[:20]] for i in range(12)]
    params = [msgspec.structs.replace(PARAMS, seed=i) for i in range(12)]
    expected = run_engine(make_engine(models.target, models.close_draft), prompts, params)
    tight = make_engine(models.target, models.close_draft)
    for pool in (tight.scheduler.target_pool, *tight.scheduler.draft_pools):
        pool.__init__(30, 4)  # type: ignore[misc]
    for _ in range(2):
        assert run_engine(tight, prompts, params) == expected
    assert tight.scheduler.num_preemptions > 0
