"""The page docs/support-matrix.md says what the engine does; every cell is run."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support_matrix import (
    DECIDING,
    NO,
    PAGE,
    PARAMETERS,
    PROPOSERS,
    REFUSED,
    RULES,
    Pair,
    cell,
    law_of,
    page,
    pairs_of,
    params_of,
)
from truedraft.engine.native.ops import NativeOps
from truedraft.engine.rounds.native_loop import NativeLoop

Cells = dict[tuple[str, str, str], str]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Products this small only wait for a second thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return pairs_of(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def pair(pairs: dict[str, Pair]) -> Pair:
    return pairs["none"]


@pytest.fixture(scope="module")
def cells() -> Cells:
    return {}


def combinations(number: int) -> list[tuple[str, str]]:
    """Returns proposers with rules for one parameter: all pairs of two things come up over all parameters,
    and with ALL_TESTS, nightly, every combination of the three."""
    if os.environ.get("ALL_TESTS"):
        return [(proposer, rule) for proposer in PROPOSERS for rule in RULES]
    return [(PROPOSERS[(number + i) % len(PROPOSERS)], rule) for i, rule in enumerate(RULES)]


def test_all_pairs_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALL_TESTS", raising=False)
    found = {(parameter, *both) for i, parameter in enumerate(PARAMETERS) for both in combinations(i)}
    for first, second, names in ((0, 1, PROPOSERS), (0, 2, RULES)):
        pairs = {(each[first], each[second]) for each in found}
        assert pairs == {(parameter, name) for parameter in PARAMETERS for name in names}
    assert {each[1:] for each in found} == {(proposer, rule) for proposer in PROPOSERS for rule in RULES}


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_combinations_work(pairs: dict[str, Pair], cells: Cells, parameter: str) -> None:
    for proposer, rule in combinations([*PARAMETERS].index(parameter)):
        cells[parameter, proposer, rule] = cell(pairs[proposer], parameter, proposer, rule)
        assert cells[parameter, proposer, rule] != NO, (parameter, proposer, rule)
        is_refused = proposer == "ngram" and parameter == "draft_sample_method: probabilistic"
        assert (cells[parameter, proposer, rule] == REFUSED) is is_refused


@pytest.mark.parametrize("parameter", DECIDING)
def test_the_values_matter(pair: Pair, parameter: str) -> None:
    """A row would prove little if dropping the parameter changed nothing."""
    given = params_of("rejection", **DECIDING[parameter])
    dropped = msgspec.structs.replace(
        given, **{name: getattr(params_of("rejection"), name) for name in DECIDING[parameter]}
    )
    law, law_without = law_of(pair, given), law_of(pair, dropped)
    texts = law.keys() | law_without.keys()
    assert sum(abs(law.get(text, 0) - law_without.get(text, 0)) for text in texts) > 0.1


@pytest.mark.parametrize("proposer", ["draft_model", "assistant", "ngram"])
def test_there_is_something_to_verify(pairs: dict[str, Pair], proposer: str) -> None:
    """Drafts are accepted, and rejected too."""
    completions = pairs[proposer].run(proposer, [params_of("rejection", seed=seed) for seed in range(50)])
    drafted = sum(completion.num_draft_tokens for completion in completions)
    assert 0.1 < sum(completion.num_accepted_tokens for completion in completions) / drafted < 0.95


def test_a_cell_can_fail(pair: Pair, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeOps, "adjust", lambda self, step, logits, *_: logits)
    monkeypatch.setattr(NativeLoop, "run", lambda self, plan, rows: [])
    assert cell(pair, "frequency_penalty", "draft_model", "rejection") == NO
    assert cell(pair, "logit_bias", "none", "coupled") == NO
    assert cell(pairs["assistant"], "repetition_penalty", "assistant", "rejection") == NO


def test_the_page_says_so(cells: Cells) -> None:
    """Written anew by ``python -m tests.support_matrix``."""
    text = Path(PAGE).read_text()
    said = cells_of(text)
    assert page(said) == text  # it has all cells, and says nothing else
    assert {place: said[place] for place in cells} == cells


def cells_of(text: str) -> Cells:
    """Reads the page."""
    found: Cells = {}
    proposer = ""
    for line in text.splitlines():
        first, *words = [word.strip() for word in line.strip("|").split("|")]
        if words == [*RULES]:
            proposer = first
        elif first in PARAMETERS and proposer:
            found |= {(first, proposer, rule): word for rule, word in zip(RULES, words, strict=True)}
    return found
