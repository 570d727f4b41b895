"""Log-probabilities are those of a fresh forward of the final text, however many tokens a round gave."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Models
from tests.models import make_engine
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams, TokenLogprob, TokenOutput

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def run(core: EngineCore, prompt: list[int], params: SamplingParams) -> list[TokenOutput]:
    core.add(Generate(request_id="r", prompt_token_ids=prompt, params=params))
    outputs = []
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            outputs.append(output)
    return outputs


def fresh_logprobs(models: Models, text: list[int]) -> torch.Tensor:
    """[len(text) - 1, vocab]: row i is of token i + 1."""
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)


def check(entries: list[TokenLogprob], rows: torch.Tensor, num_top: int) -> None:
    assert len(entries) == len(rows)
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        want = row.topk(num_top)
        assert [value for _, value in entry.top] == pytest.approx(want.values.tolist(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == want.indices.tolist()
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40, temperature=0, logprobs=0),
        SamplingParams(max_tokens=40, temperature=1, seed=1, logprobs=3),
        # The client's parameters change the draw, never the reported probability.
        SamplingParams(
            max_tokens=40,
            temperature=0.3,
            top_k=2,
            seed=2,
            logprobs=5,
            frequency_penalty=1,
            logit_bias={3: 5},
        ),
    ],
)
@pytest.mark.parametrize("verification", ["rejection", "coupled", "block"])
def test_output_logprobs(models: Models, params: SamplingParams, k: int, verification: str) -> None:
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=k, verification=verification)
    outputs = run(core, PROMPT, params)
    tokens = [token for output in outputs for token in output.token_ids]
    entries = [entry for output in outputs for entry in output.logprobs or []]
    assert [entry.token_id for entry in entries] == tokens
    assert all(len(output.logprobs or []) == len(output.token_ids) for output in outputs)
    rows = fresh_logprobs(models, PROMPT + tokens)[len(PROMPT) - 1 :]
    assert params.logprobs is not None
    check(entries, rows, params.logprobs)


@pytest.mark.parametrize("chunk", [4, 100])
def test_prompt_logprobs_in_chunks(models: Models, chunk: int) -> None:
    core = make_engine(models.target, models.close_draft, max_num_batched_tokens=chunk)
    outputs = run(core, PROMPT, SamplingParams(max_tokens=10, temperature=0, prompt_logprobs=2))
    first, *entries = outputs[0].prompt_logprobs or []
    assert first is None
    known = [entry for entry in entries if entry is not None]
    assert [entry.token_id for entry in known] == PROMPT[1:]
    check(known, fresh_logprobs(models, PROMPT), 2)
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert all(output.logprobs is None for output in outputs)


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_prompts_have_log_probabilities_too(models: Models, length: int, num_top: int) -> None:
    """The first token has none, which is said of a prompt of one token, too."""
    prompt = PROMPT[:length]
    core = make_engine(models.target, None, num_speculative_tokens=0)
    params = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
    first, *entries = run(core, prompt, params)[0].prompt_logprobs or []
    assert first is None
    known = [entry for entry in entries if entry is not None]
    assert [entry.token_id for entry in known] == prompt[1:]
    if known:
        check(known, fresh_logprobs(models, prompt), num_top)


@pytest.mark.parametrize(
    "limits", [{"max_model_len": 40, "step_seconds": 0.05}, {"cache_memory": "20KiB"}], ids=str
)
def test_prompts_that_are_scored_alone_fill_the_context(models: Models, limits: dict[str, Any]) -> None:
    """The token after such a prompt is drawn, but has no place in a cache."""
    core = make_engine(models.target, models.close_draft, method="auto", **limits)
    pool = core.scheduler.target_pool
    longest = min(core.admission.max_model_len, pool.num_blocks * pool.block_size)
    assert longest == 40
    prompt = (PROMPT * 4)[:longest]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0, num_speculative_tokens=0)
    (output,) = run(core, prompt, scored)
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    check(entries, fresh_logprobs(models, prompt), 0)
    assert pool.num_free == pool.num_blocks
    for length, params in (
        (longest + 1, scored),
        (longest, msgspec.structs.replace(scored, prompt_logprobs=None)),
        (longest, msgspec.structs.replace(scored, max_tokens=2)),
    ):
        with pytest.raises(RequestError):
            core.add(Generate("r", (PROMPT * 4)[:length], params))


def test_prompt_logprobs_beside_others_and_after_preemption(models: Models) -> None:
    core = make_engine(models.target, models.close_draft, max_num_batched_tokens=8)
    for i in range(4):
        wanted = 0 if i % 2 else None
        params = SamplingParams(max_tokens=30, temperature=0, prompt_logprobs=wanted)
        core.add(Generate(request_id=str(i), prompt_token_ids=PROMPT[i:], params=params))
    core.step()
    core.scheduler._put_back(core.scheduler.running[-1])
    got = {}
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            if output.prompt_logprobs is not None:
                got[int(output.request_id)] = output.prompt_logprobs
    assert sorted(got) == [1, 3]
    for i, entries in got.items():
        check([entry for entry in entries if entry], fresh_logprobs(models, PROMPT[i:]), 0)


GIVEN = [7, 0, 12]


@pytest.mark.parametrize("k", [0, 4])
def test_given_tokens_have_theirs_at_every_place(models: Models, k: int) -> None:
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=k)
    params = SamplingParams(max_tokens=12, temperature=1, seed=4, logprobs=1, logprob_token_ids=GIVEN)
    outputs = run(core, PROMPT, params)
    tokens = [token for output in outputs for token in output.token_ids]
    entries = [entry for output in outputs for entry in output.logprobs or []]
    rows = fresh_logprobs(models, PROMPT + tokens)[len(PROMPT) - 1 :]
    check(entries, rows, 1)
    for entry, row in zip(entries, rows, strict=True):
        assert [token_id for token_id, _ in entry.given] == GIVEN
        assert [value for _, value in entry.given] == pytest.approx(row[GIVEN].tolist(), abs=1e-4)


def scored(core: EngineCore, prompt: list[int], start: int) -> tuple[list[float | None], int]:
    """Returns the log-probabilities of a prompt's tokens from ``start`` on, and how many were cached."""
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start, num_speculative_tokens=0
    )
    (output,) = run(core, prompt, params)
    entries = output.prompt_logprobs or []
    assert [entry.token_id for entry in entries if entry] == prompt[max(1, start) :]
    return [None if entry is None else entry.logprob for entry in entries], output.num_cached_tokens


@pytest.mark.parametrize("chunk", [3, 16, 200])
@pytest.mark.parametrize("start", [0, 1, 2, 8, 9, 17, 31, 32, 33, 43])
def test_a_continuation_is_scored_after_what_the_cache_has(models: Models, start: int, chunk: int) -> None:
    """The numbers are those of a prompt that was computed whole, whatever the cache has of it. torch's
    products of other shapes may differ in their last bits."""
    prompt = PROMPT * 4
    core = make_engine(models.target, models.close_draft, block_size=8, max_num_batched_tokens=chunk)
    whole, _ = scored(core, prompt, 0)
    values, num_cached = scored(core, prompt, start)
    assert num_cached == max(0, start - 1) // 8 * 8
    assert values[: max(1, start)] == [None] * max(1, start)
    assert values[max(1, start) :] == pytest.approx(whole[max(1, start) :], abs=1e-5)
    rows = fresh_logprobs(models, prompt)
    want = [float(rows[place - 1, prompt[place]]) for place in range(max(1, start), len(prompt))]
    assert values[max(1, start) :] == pytest.approx(want, abs=1e-4)


def test_a_scored_continuation_is_not_computed_twice_after_it_gave_way(models: Models) -> None:
    core = make_engine(models.target, models.close_draft, block_size=8, max_num_batched_tokens=8)
    prompt = PROMPT * 4
    want, _ = scored(core, prompt, 20)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=20)
    core.add(Generate("r", prompt, params, cache_salt="another"))
    for _ in range(4):
        core.step()
    (sequence,) = core.scheduler.running
    assert 20 < len(sequence.prompt_logprobs or []) < len(prompt)
    core.scheduler._put_back(sequence)
    outputs = [output for _ in range(20) for output in core.step()]
    assert isinstance(outputs[0], TokenOutput)
    entries = outputs[0].prompt_logprobs or []
    assert [entry is None for entry in entries] == [value is None for value in want]
    told = [entry.logprob for entry in entries if entry is not None]
    assert told == pytest.approx([value for value in want if value is not None], abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {"prompt_logprobs": 0, "prompt_logprobs_start": len(PROMPT)},
        {"logprobs": 0, "logprob_token_ids": [1000]},
    ],
    ids=str,
)
def test_what_is_not_there_cannot_be_scored(models: Models, params: dict[str, Any]) -> None:
    core = make_engine(models.target, None, num_speculative_tokens=0)
    with pytest.raises(RequestError, match=list(params)[-1]):
        core.add(Generate("r", PROMPT, SamplingParams(max_tokens=1, **params)))
