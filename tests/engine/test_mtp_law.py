"""What is drafted by an MTP head has the target's law, under every rule and with every kind of parameter.

Texts of a few tokens are compared with their exact enumeration by chi-square. The head is random, so that
much is rejected and every residual is used.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec import structs

from tests.engine import test_mutants
from tests.engine.grammars import (
    END,
    GRAMMAR,
    PROMPT,
    SIGNIFICANCE,
    VOCAB_SIZE,
    Text,
    enumerated,
    know_grammars,
)
from tests.engine.head_runs import mtp_engine, save_small_hybrid
from tests.engine.simulation import chi_square
from tests.models import run_engine
from truedraft.engine.messages import Method, SamplingParams, Verification

COMMON = SamplingParams(max_tokens=3, temperature=2.5)
KINDS = {
    "temperature": structs.replace(COMMON, temperature=1.5),
    "top-k": structs.replace(COMMON, top_k=3),
    "top-p": structs.replace(COMMON, top_p=0.7),
    "min-p": structs.replace(COMMON, min_p=0.2),
    "penalties": structs.replace(
        COMMON, presence_penalty=0.5, frequency_penalty=0.8, repetition_penalty=1.3, min_tokens=2
    ),
    "grammar": structs.replace(COMMON, max_tokens=7, grammar=GRAMMAR),
}
# Texts of each kind; rounds of the block rule are not in C.
RULES: dict[Verification, int] = {"rejection": 500, "block": 120, "coupled": 500}


@dataclass(frozen=True)
class Enumerated:
    """Holds a hybrid with a head, and the law of its texts by kind of parameters."""

    path: str
    texts: dict[str, dict[Text, float]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    path = save_small_hybrid(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE, eos_token_id=END)
    return Enumerated(path, {kind: enumerated(path, params) for kind, params in KINDS.items()})


def law_is_the_targets(
    target: Enumerated,
    rule: Verification,
    kinds: list[str],
    num_samples: int,
    *,
    draft: str = "mtp",
    method: Method = "mtp",
    native_kernels: bool = True,
) -> None:
    """Requests of all kinds are side by side."""
    core = mtp_engine(
        target.path,
        draft,
        method=method,
        num_speculative_tokens=2,
        max_num_sequences=16,
        verification=rule,
        max_num_batched_tokens=512,
        native_kernels=native_kernels,
    )
    params = [
        structs.replace(KINDS[kind], seed=seed, method=method)
        for seed in range(num_samples)
        for kind in kinds
    ]
    outputs = run_engine(know_grammars(core), [PROMPT] * len(params), params)
    for number, kind in enumerate(kinds):
        counts, expected = Counter(map(tuple, outputs[number :: len(kinds)])), target.texts[kind]
        assert counts.keys() <= expected.keys(), kind
        observed = np.array([counts[text] for text in expected])
        assert chi_square(observed, np.array([*expected.values()])) > SIGNIFICANCE, kind
    drafts = core.stats.drafts[method]
    assert 0.1 < drafts.num_accepted_tokens / drafts.num_draft_tokens < 0.9


@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_law_of_the_target(target: Enumerated, rule: Verification) -> None:
    law_is_the_targets(target, rule, list(KINDS), RULES[rule])


def test_a_planted_bug_is_caught(target: Enumerated, monkeypatch: pytest.MonkeyPatch) -> None:
    test_mutants.argmax_draft_called_sampled(monkeypatch)
    with pytest.raises(AssertionError, match="top-k"):
        law_is_the_targets(target, "rejection", ["top-k"], 400, native_kernels=False)
