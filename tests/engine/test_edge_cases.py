"""The edge cases of speculative sampling, a named test each; those of the rules alone: test_verify."""

from collections.abc import Sequence

import pytest
import torch

from tests.engine.conftest import Models
from tests.engine.planners import draft_cache
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput
from truedraft.engine.models.base import ForwardOutput

PROMPTS = [[1, 2, 3], [4, 4], [5, 6, 7, 8, 9]]
GREEDY = SamplingParams(max_tokens=20, temperature=0)


def break_logits(core: EngineCore, value: float, at_call: int, row: int) -> None:
    """The target's forward number ``at_call`` returns ``value`` in one row of logits."""
    honest, calls = core.target.forward, 0

    def forward(spans: list[Span], ids: torch.Tensor | None, taps: Sequence[int]) -> ForwardOutput:
        nonlocal calls
        calls += 1
        logits = honest(spans, ids, taps).logits.clone()
        if calls == at_call:
            logits[row, 3] = value
        return ForwardOutput(logits)

    core.target.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_fails_its_request_alone(
    models: Models, value: float, temperature: float
) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=5)
    expected = run_engine(make_engine(models.target, models.close_draft), PROMPTS, params)
    core = make_engine(models.target, models.close_draft)
    break_logits(core, value, at_call=3, row=0)  # the first request's pending token
    for i, prompt in enumerate(PROMPTS):
        core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=params))
    outputs: dict[str, list[int]] = {}
    failures = []
    while core.has_work:
        for result in core.step():
            if isinstance(result, Failed):
                failures.append(result)
            else:
                outputs.setdefault(result.request_id, []).extend(result.token_ids)
    assert [(failed.request_id, failed.code) for failed in failures] == [("0", "invalid_logits")]
    assert [outputs["1"], outputs["2"]] == expected[1:]
    assert core.scheduler.target_pool.usage == 0


def test_nothing_allowed_fails_the_request(models: Models) -> None:
    """Every token is a stop token and the minimum length forbids them all."""
    core = make_engine(models.target, models.close_draft)
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=list(range(16)))
    core.add(Generate(request_id="r", prompt_token_ids=[1], params=params, n=3))
    (failed,) = core.step()
    assert isinstance(failed, Failed)
    assert not core.has_work


def test_a_broken_draft_changes_nothing(models: Models) -> None:
    """NaN from the draft model is a poor guess, not an error."""
    params = SamplingParams(max_tokens=20, seed=3)
    expected = run_engine(make_engine(models.target, None), PROMPTS, params)
    core = make_engine(models.target, models.close_draft)
    draft = core.draft
    honest = draft.forward
    draft.forward = lambda *given: ForwardOutput(honest(*given).logits * torch.nan)
    assert run_engine(core, PROMPTS, params) == expected


@pytest.fixture(scope="module")
def eos_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target that ends its texts (token 0), and a draft that often agrees."""
    root = tmp_path_factory.mktemp("eos")
    target = save_random_llama(root / "target", seed=21, eos_token_id=0)
    return target, save_perturbed(root / "draft", target, seed=22, noise=0.02)


def test_end_of_sequence_inside_an_accepted_run(eos_pair: tuple[str, str]) -> None:
    """The target drafts for itself, so that all drafts are accepted: the text still ends at the first."""
    prompts = [[i, j] for i in range(1, 8) for j in range(1, 6)]
    params = SamplingParams(max_tokens=30, seed=1)
    target, _ = eos_pair
    plain = run_engine(make_engine(target, None), prompts, params)
    drafted = run_engine(make_engine(target, target, num_speculative_tokens=8), prompts, params)
    assert drafted == plain
    ended = [tokens for tokens in plain if tokens[-1] == 0]
    assert len(ended) > 5
    assert all(0 not in tokens[:-1] for tokens in plain)


def test_ignore_eos_and_minimum_length(eos_pair: tuple[str, str]) -> None:
    prompts = [[i, 3] for i in range(1, 12)]
    core = make_engine(*eos_pair)
    ignoring = run_engine(core, prompts, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    assert {len(tokens) for tokens in ignoring} == {30}
    assert any(0 in tokens for tokens in ignoring)
    longer = run_engine(core, prompts, SamplingParams(max_tokens=30, seed=1, min_tokens=12))
    assert all(0 not in tokens[:12] for tokens in longer)
    assert any(len(tokens) < 30 for tokens in longer)


def test_a_stop_within_the_budget_wins_over_the_length(eos_pair: tuple[str, str]) -> None:
    core = make_engine(*eos_pair)
    (tokens,) = run_engine(core, [[2, 5]], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    last = tokens[9]
    stop_at = tokens.index(last) + 1
    params = SamplingParams(max_tokens=stop_at, temperature=0, ignore_eos=True, stop_token_ids=[last])
    core.add(Generate(request_id="r", prompt_token_ids=[2, 5], params=params))
    reasons = []
    while core.has_work:
        reasons += [output.finish_reason for output in core.step() if isinstance(output, TokenOutput)]
    assert reasons[-1] == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_inside_a_run(models: Models, max_tokens: int) -> None:
    core = make_engine(models.target, models.target, num_speculative_tokens=8)
    outputs = run_engine(core, PROMPTS, SamplingParams(max_tokens=max_tokens, temperature=0))
    assert [len(tokens) for tokens in outputs] == [max_tokens] * 3
    long = run_engine(make_engine(models.target, None), PROMPTS, GREEDY)
    assert outputs == [tokens[:max_tokens] for tokens in long]


def test_the_context_ends_inside_a_run(models: Models) -> None:
    core = make_engine(models.target, models.target, num_speculative_tokens=8, max_model_len=16)
    plain = make_engine(models.target, None, max_model_len=16)
    params = SamplingParams(max_tokens=100, temperature=0)
    outputs = run_engine(core, PROMPTS, params)
    assert [len(p) + len(o) for p, o in zip(PROMPTS, outputs, strict=True)] == [16] * 3
    assert outputs == run_engine(plain, PROMPTS, params)


@pytest.mark.parametrize("draft", ["padded_draft", "lacking_draft"])
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_vocabularies_of_different_width(models: Models, draft: str, verification: str) -> None:
    """Every token occurs in the prompt, also those that the draft lacks; none beyond the target's comes."""
    core = make_engine(models.target, getattr(models, draft), verification=verification)
    params = [SamplingParams(max_tokens=60, temperature=1.5, seed=seed) for seed in range(4)]
    outputs = run_engine(core, [list(range(16))] * 4, params)
    assert {token for tokens in outputs for token in tokens} <= set(range(16))
    assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


def test_a_draft_with_a_shorter_context_stops_drafting_there(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = save_random_llama(tmp_path_factory.mktemp("short"), seed=31, layers=1, hidden=16, context=24)
    params = SamplingParams(max_tokens=60, temperature=0)
    prompts = [*PROMPTS, list(range(16)) * 2]
    core = make_engine(models.target, short)
    assert run_engine(core, prompts, params) == run_engine(make_engine(models.target, None), prompts, params)
    assert core.stats.num_draft_tokens > 0


def test_the_draft_catches_up_after_full_acceptance(models: Models) -> None:
    """It lacks the last drafted token then; the next round's first pass computes two."""
    core = make_engine(models.target, models.target, num_speculative_tokens=3)
    core.add(Generate(request_id="r", prompt_token_ids=[1], params=GREEDY))
    core.step()
    (sequence,) = core.scheduler.running
    assert draft_cache(core).table(sequence).num_computed_tokens == len(sequence) - 2
    core.step()
    assert core.stats.num_accepted_tokens == 6


def test_a_temperature_next_to_zero_is_no_overflow(models: Models) -> None:
    core = make_engine(models.target, models.close_draft)
    params = SamplingParams(max_tokens=20, temperature=1e-38, seed=1)
    greedy = run_engine(core, PROMPTS, GREEDY)
    assert run_engine(core, PROMPTS, params) == greedy


def test_greedy_and_sampled_rows_in_one_batch(models: Models) -> None:
    params = [GREEDY, SamplingParams(max_tokens=20, seed=1), SamplingParams(max_tokens=20, temperature=0)]
    core = make_engine(models.target, models.close_draft)
    together = run_engine(core, PROMPTS, params)
    alone = [run_engine(core, [p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert together == alone
