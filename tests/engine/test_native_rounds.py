"""Rounds of a step as one call of C: what the same rounds emit and store phase by phase, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_params

from engine.core.step import EarlyExit, Round
from engine.messages import SamplingParams
from engine.native import library
from tests.engine.native_pair import save_pair
from tests.engine.native_rounds import RowPlan, Side, compare
from tests.engine.test_native import plant
from tests.models import make_engine

pytestmark = pytest.mark.usefixtures("needs_compiler")

GREEDY = SamplingParams(max_tokens=99, temperature=0)
COUPLED = SamplingParams(max_tokens=99, temperature=1.1, seed=5, verification="coupled")
REJECTION = SamplingParams(max_tokens=99, temperature=0.9, seed=6, verification="rejection")
CUT = SamplingParams(max_tokens=99, temperature=1.3, top_k=9, min_p=0.02, seed=8, verification="rejection")
NUCLEUS = SamplingParams(max_tokens=99, temperature=1.2, top_p=0.8, seed=9, verification="coupled")
BIAS = {1: 3.0, 2: -100.0, 7: 1.25, 39: 2.5}
STOPS = frozenset(range(0, 40, 3))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(40)), [2, 2]]
ALL = [GREEDY, COUPLED, REJECTION, CUT, NUCLEUS]
EXITS = [
    EarlyExit((0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99), 0.5),
    EarlyExit((0.9,) * 8, 0.7),
    EarlyExit((0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99), 0.3),
    EarlyExit((0.0,) * 8, 0.5),
    EarlyExit((0.0,) * 8, 0.0),
]


def rows_of(params: list[SamplingParams], **fields: Any) -> list[RowPlan]:
    return [RowPlan(own, prompt, **fields) for own, prompt in zip(params, PROMPTS, strict=False)]


def each_with(**changes: Any) -> list[RowPlan]:
    return rows_of([with_params(own, **changes) for own in ALL])


def given(seed: int, lengths: range) -> dict[int, list[int]]:
    """Drafts from outside at some lengths of the output."""
    generator = torch.Generator().manual_seed(seed)
    return {at: torch.randint(0, 40, (1 + at % 4,), generator=generator).tolist() for at in lengths}


PENALTIES = {"frequency_penalty": 0.37, "presence_penalty": -0.21, "repetition_penalty": 1.13}
KINDS: dict[str, list[RowPlan]] = {
    "greedy": rows_of([GREEDY] * 5),
    "coupled": rows_of([COUPLED] * 5),
    "rejection": rows_of([REJECTION] * 5),
    "cut": rows_of([CUT, NUCLEUS, CUT]),
    "of all rules": rows_of(ALL),
    "alone": rows_of([GREEDY]),
    "without drafts": rows_of(ALL, num_draft_tokens=0),
    "of several lengths": [
        replace(row, num_draft_tokens=number) for number, row in enumerate(rows_of([*ALL[:2], *ALL[1:4]]))
    ],
    "to several ends": [
        replace(row, max_num_tokens=len(row.prompt) + 1 + 3 * number)
        for number, row in enumerate(rows_of(ALL))
    ],
    "with stops": rows_of(ALL, stop_token_ids=STOPS),
    "behind with their drafts": [
        replace(row, num_missing=len(row.prompt) - 1 - (len(row.prompt) > 33) * 7) for row in rows_of(ALL)
    ],
    "bias": each_with(logit_bias=BIAS),
    "frequency": each_with(frequency_penalty=0.37),
    "presence": each_with(presence_penalty=0.9),
    "repetition": each_with(repetition_penalty=1.31),
    "rewarded repetition": each_with(repetition_penalty=0.77, frequency_penalty=-0.1),
    "all penalties": each_with(**PENALTIES),
    "a minimum": rows_of(
        [with_params(own, min_tokens=3 + 2 * number) for number, own in enumerate(ALL)], stop_token_ids=STOPS
    ),
    "all adjustments": rows_of(
        [with_params(own, min_tokens=7, logit_bias=BIAS, **PENALTIES) for own in ALL], stop_token_ids=STOPS
    ),
    "masks": [replace(row, mask_seed=number) for number, row in enumerate(rows_of(ALL))],
    "some masks": [
        replace(row, mask_seed=number if number % 2 else None)
        for number, row in enumerate(each_with(**PENALTIES))
    ],
    "log-probabilities": each_with(logprobs=3),
    "some log-probabilities": rows_of(
        [with_params(own, logprobs=top) for own, top in zip(ALL, (None, 0, 2, None, 5), strict=True)]
    ),
    "log-probabilities of adjusted rows": each_with(logprobs=2, logit_bias=BIAS, **PENALTIES),
    "drafts from outside": [
        replace(row, draft_ids=given(number, range(30))) for number, row in enumerate(rows_of(ALL))
    ],
    "some drafts from outside": [
        replace(row, draft_ids=given(number, range(number % 3, 30, 1 + number)))
        for number, row in enumerate(each_with(frequency_penalty=0.37))
    ],
    "early exits": [
        replace(row, num_draft_tokens=6, early_exit=rule)
        for row, rule in zip(rows_of(ALL), EXITS, strict=True)
    ],
    "some early exits": [
        replace(row, num_draft_tokens=5, early_exit=EXITS[number] if number % 2 else None)
        for number, row in enumerate(each_with(repetition_penalty=1.31))
    ],
    "everything at once": [
        RowPlan(with_params(GREEDY, logprobs=1, **PENALTIES), PROMPTS[0], 5, early_exit=EXITS[0]),
        RowPlan(with_params(COUPLED, min_tokens=9, logit_bias=BIAS), PROMPTS[1], 2, stop_token_ids=STOPS),
        RowPlan(
            with_params(REJECTION, frequency_penalty=1.5), PROMPTS[2], draft_ids=given(3, range(0, 30, 2))
        ),
        RowPlan(with_params(CUT, logprobs=0), PROMPTS[3], 0),
        RowPlan(NUCLEUS, PROMPTS[4], 4, early_exit=EXITS[2]),
        RowPlan(GREEDY, PROMPTS[3], 3, num_missing=32),
    ],
}


def run_twins(
    folder: Path,
    rows: list[RowPlan],
    max_rounds: int,
    draft_vocab_size: int = 40,
    max_draft_len: int = 1000,
    phases_every: int = 0,
) -> list[Round]:
    pair = save_pair(folder, draft_vocab_size)
    ours, theirs = (Side(make_engine(*pair), rows, max_draft_len) for _ in range(2))
    return compare(ours, theirs, max_rounds, phases_every)


@pytest.mark.parametrize("max_rounds", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_they_emit_what_phases_emit(kind: str, max_rounds: int, tmp_path: Path) -> None:
    rounds = run_twins(tmp_path, KINDS[kind], max_rounds)
    if kind != "without drafts":
        assert sum(map(sum, (one.num_drafted for one in rounds))) > 0


@pytest.mark.parametrize("draft_vocab_size", [33, 64])
@pytest.mark.parametrize(
    "kind", ["of all rules", "all adjustments", "masks", "everything at once", "early exits"]
)
def test_other_vocabularies(kind: str, draft_vocab_size: int, tmp_path: Path) -> None:
    """The draft knows fewer tokens than the target, or more."""
    run_twins(tmp_path, KINDS[kind], 4, draft_vocab_size)


# Planted bugs: what is right, what is wrong, and rows that show it.
BUGS = {
    "bias at the wrong token": (
        "logits[row->bias_ids[i]] += row->biases[i];",
        "logits[row->bias_ids[i]] += row->biases[0];",
        "bias",
    ),
    "penalties that forget drafts, when they verify": (
        "    for (int64_t i = position - 1; i >= 0; i--) uncount_token(of, drafts[i]);",
        "",
        "frequency",
    ),
}


@pytest.mark.parametrize(("right", "wrong", "kind"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(
    right: str, wrong: str, kind: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(library, "SOURCES", plant(library.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        run_twins(tmp_path, KINDS[kind], 4)
