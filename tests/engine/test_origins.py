"""Outputs say where each round's tokens came from, in the numbers that the engine counts by."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Models
from tests.engine.native_pair import LONG, save_pair
from tests.models import make_engine, stepped
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput
from truedraft.engine.models.hf.fresh import FreshModel, processed
from truedraft.engine.models.options import LoadOptions

PROMPTS = [[1, 2, 3], [5, 6, 5, 6, 5, 6, 5]]


def generate(core: EngineCore, **params: Any) -> list[TokenOutput]:
    """All outputs, once their sums have been compared with the engine's counters."""
    sampling = SamplingParams(max_tokens=40, origins=True, **params)
    for number, prompt in enumerate(PROMPTS):
        core.add(Generate(str(number), prompt, sampling))
    outputs = []
    while core.has_work:
        outputs += stepped(core)
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for output in outputs:
        rounds = output.origins
        assert rounds is not None
        assert sum(one.num_tokens for one in rounds) == len(output.token_ids)
        assert sum(one.num_accepted for one in rounds) == output.num_accepted_tokens
        assert all(one.num_accepted <= one.num_tokens <= one.num_accepted + 1 for one in rounds)
        for one in rounds:
            drafted[one.source] += one.num_drafted
            accepted[one.source] += one.num_accepted
    for source, counts in core.snapshot().drafts.items():
        assert (drafted[source], accepted[source]) == (counts.num_draft_tokens, counts.num_accepted_tokens)
    return outputs


@pytest.mark.parametrize("method", ["draft_model", "ngram", "auto", "none"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}, {"stop_token_ids": [4, 9]}], ids=str)
def test_sums_are_the_counters(models: Models, method: str, params: dict[str, Any]) -> None:
    core = make_engine(models.target, models.close_draft, method=method)
    outputs = generate(core, **params)
    assert sum(len(output.token_ids) for output in outputs) <= 2 * 40
    if method in ("draft_model", "ngram") and "stop_token_ids" not in params:
        assert any(output.num_accepted_tokens for output in outputs)


def test_a_step_of_several_rounds_says_it_of_each(tmp_path: Path, needs_compiler: None) -> None:
    outputs = generate(make_engine(*save_pair(tmp_path), step_seconds=LONG), temperature=0.0)
    longest = max(outputs, key=lambda output: output.num_rounds)
    assert longest.num_rounds > 1
    assert longest.origins is not None
    assert len(longest.origins) == longest.num_rounds


def test_none_without_being_asked_for(models: Models) -> None:
    core = make_engine(models.target, None)
    core.add(Generate("r", [1], SamplingParams(max_tokens=2)))
    assert stepped(core)[0].origins is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trace_has_the_probability_of_the_token_that_follows(models: Models, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, top_k=9, seed=1, trace=True)
    core = make_engine(models.target, models.random_draft)
    core.add(Generate("r", PROMPTS[0], params))
    traces = []
    token_ids = list(PROMPTS[0])
    while core.has_work:
        for output in stepped(core):
            token_ids += output.token_ids
            assert output.trace is not None
            traces.append(output.trace)
    fresh = FreshModel(models.target, LoadOptions())
    probs = processed(fresh.logits(token_ids, fresh.vocab_size), params)
    for trace in traces[:-1]:  # the last round's token may be beyond max_tokens
        place = trace.position + trace.num_accepted
        expected = probs[place - 1, trace.next_token].item() if temperature else 1.0
        assert trace.next_target_prob == pytest.approx(expected, abs=1e-5)
