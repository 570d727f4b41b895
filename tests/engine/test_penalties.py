"""Penalties by definition: repetition looks at prompt and output, frequency and presence at the output.

The oracle computes the target's logits of the whole text anew for every token and adjusts them by
``tests.naive``, which shares no code with the engine. What is prompt and what is output must not depend on
how a text was computed: in C or by torch, with drafts, after a preemption, after a prefix hit, as one of
several choices.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests import naive
from tests.engine.planners import loops_in_c
from tests.engine.test_mutants import all_penalties_count_the_prompt, repetition_forgets_the_prompt
from tests.engine.test_round_graphs import taped  # noqa: F401
from tests.models import make_engine, outputs_by_choice, run_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.device_ops import _Counts
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.rows.columns import Field
from truedraft.engine.rows.table import Row, RowTable

pytestmark = pytest.mark.usefixtures("needs_compiler")
Patch = pytest.MonkeyPatch
Pair = tuple[str, str]

NUM_TOKENS = 24
# Prompts name some tokens often and others never, so that it matters whether they count.
PROMPTS = [[1, 2, 3] * 6, [4], list(range(16)) * 2, [7, 7, 7, 7, 9]]
COMMON = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
ALL = replace(COMMON, frequency_penalty=0.4, presence_penalty=0.5, repetition_penalty=1.2)
PENALTIES = {
    "frequency": replace(COMMON, frequency_penalty=0.6),
    "presence": replace(COMMON, presence_penalty=1.1),
    "rewards": replace(COMMON, presence_penalty=-0.7, frequency_penalty=-0.1),
    "repetition": replace(COMMON, repetition_penalty=1.4),
    "all": ALL,
    "all, after a prompt by torch": replace(ALL, prompt_logprobs=0),
}
BY_TORCH = {"native_kernels": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": False},
    "plain by torch": {"draft": False, **BY_TORCH},
    "drafted": {},
    "several rounds a step": {"step_seconds": 1.0},
    "drafted by torch": BY_TORCH,
    "prompts in pieces": {"max_num_batched_tokens": 5},
    "n-grams": {"draft": False, "method": "ngram", "ngram_min_match": 1},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The kernels in C can run them."""
    folder = tmp_path_factory.mktemp("models")
    target = save_random_llama(folder / "target", seed=1, hidden=64)
    return target, save_perturbed(folder / "draft", target, seed=2, noise=0.02)


def engine(pair: Pair, draft: bool = True, **config: Any) -> EngineCore:
    core = make_engine(pair[0], pair[1] if draft else None, **config)
    assert loops_in_c(core) == config.get("native_kernels", True)
    return core


@cache
def fresh(target: str) -> FreshModel:
    return FreshModel(target, LoadOptions())


def expected(target: str, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        output: list[int] = []
        while len(output) < params.max_tokens:
            logits = fresh(target).logits([*prompt, *output], 16)[-1].double().numpy()
            output.append(int(np.argmax(naive.adjusted(logits, params, prompt, output, ()))))
        texts.append(output)
    return texts


def is_the_definitions(pair: Pair, way: dict[str, Any], params: SamplingParams) -> None:
    core = engine(pair, **way)
    assert run_engine(core, PROMPTS, params, arrivals=[0, 1, 3, 5]) == expected(pair[0], params)


def survives_a_preemption(pair: Pair, way: dict[str, Any]) -> None:
    """The cache holds about two of the texts; what was output before is output when it is read again."""
    per_token = engine(pair, draft=False).target.model.cache_bytes_per_token
    cache_memory = 2 * 18 * 4 * per_token  # 18 blocks for each model
    core = engine(pair, cache_memory=cache_memory, prefix_caching=False, **way)
    assert run_engine(core, PROMPTS, ALL) == expected(pair[0], ALL)
    assert core.scheduler.num_preemptions > 0


def survives_a_hit(pair: Pair, way: dict[str, Any]) -> None:
    """Prompts come again, and then with a part of the output appended, which is prompt now."""
    core = engine(pair, **way)
    once = run_engine(core, PROMPTS, ALL)
    assert once == run_engine(core, PROMPTS, ALL) == expected(pair[0], ALL)
    longer = [prompt + output[:9] for prompt, output in zip(PROMPTS, once, strict=True)]
    assert run_engine(core, longer, ALL) == expected(pair[0], ALL, longer)
    assert core.scheduler.num_prefix_hits > 0


def is_each_choices(pair: Pair, way: dict[str, Any]) -> None:
    core = engine(pair, **way)
    for number, prompt in enumerate(PROMPTS):
        core.add(Generate(str(number), prompt, ALL, n=2))
    said, alone = outputs_by_choice(core), expected(pair[0], ALL)
    assert said == {(str(number), index): alone[number] for number in range(len(PROMPTS)) for index in (0, 1)}


GATES = [survives_a_preemption, survives_a_hit, is_each_choices]


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("way", WAYS)
def test_text_is_the_definitions(pair: Pair, way: str, name: str) -> None:
    is_the_definitions(pair, WAYS[way], PENALTIES[name])


@pytest.mark.usefixtures("taped")
def test_text_of_captured_rounds_is_the_definitions(pair: Pair) -> None:
    is_the_definitions(pair, BY_TORCH, ALL)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("way", [{}, BY_TORCH], ids=["in C", "by torch"])
def test_what_is_output_stays_output(
    pair: Pair, gate: Callable[[Pair, dict[str, Any]], None], way: dict[str, Any]
) -> None:
    gate(pair, way)


def rows_count_the_prompt(patch: Patch) -> None:
    honest = RowTable._add

    def add(self: RowTable, text: Any) -> Row:
        row = honest(self, text)
        if row.is_penalised:
            row.arrays[Field.COUNTS][: self.numbers[row.number, Field.NUM_DISTINCT]] = 1
        return row

    patch.setattr(RowTable, "_add", add)


def rows_take_all_they_find_for_prompt(patch: Patch) -> None:
    """A row that begins after the first token was drawn elsewhere counts it as prompt."""
    honest = RowTable._add

    def add(self: RowTable, text: Any) -> Row:
        row = honest(self, text)
        self.numbers[row.number, Field.NUM_COUNTED] = len(row.token_ids)
        return row

    patch.setattr(RowTable, "_add", add)


def the_device_counts_the_prompt(patch: Patch) -> None:
    honest = _Counts.of

    def of(self: _Counts, history: Any) -> Any:
        in_prompt, in_output = honest(self, history)
        return in_output.new_tensor([[0] * len(in_prompt)] * 2) + in_prompt + in_output

    patch.setattr(_Counts, "of", of)


@pytest.mark.parametrize(
    ("plant", "way", "name"),
    [
        (all_penalties_count_the_prompt, BY_TORCH, "all"),
        (repetition_forgets_the_prompt, BY_TORCH, "all"),
        (rows_count_the_prompt, {}, "all"),
        (rows_take_all_they_find_for_prompt, {}, "all, after a prompt by torch"),
    ],
)
def test_a_planted_bug_shows(
    pair: Pair, monkeypatch: Patch, plant: Callable[[Patch], None], way: dict[str, Any], name: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        is_the_definitions(pair, way, PENALTIES[name])


@pytest.mark.usefixtures("taped")
def test_a_prompt_counted_on_the_device_shows(pair: Pair, monkeypatch: Patch) -> None:
    the_device_counts_the_prompt(monkeypatch)
    with pytest.raises(AssertionError):
        is_the_definitions(pair, BY_TORCH, ALL)
