"""The page docs/support-matrix.md says what the engine does; every cell is run."""

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
    params_of,
)
from truedraft.engine.sampling.sampler import Sampler

Cells = dict[tuple[str, str, str], str]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Products this small only wait for a second thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.build(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def cells() -> Cells:
    return {}


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_every_combination_works(pair: Pair, cells: Cells, parameter: str) -> None:
    for proposer in PROPOSERS:
        for rule in RULES:
            cells[parameter, proposer, rule] = cell(pair, parameter, proposer, rule)
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


@pytest.mark.parametrize("proposer", ["draft_model", "ngram"])
def test_there_is_something_to_verify(pair: Pair, proposer: str) -> None:
    """Drafts are accepted, and rejected too."""
    completions = pair.run(proposer, [params_of("rejection", seed=seed) for seed in range(50)])
    drafted = sum(completion.num_draft_tokens for completion in completions)
    assert 0.1 < sum(completion.num_accepted_tokens for completion in completions) / drafted < 0.95


def test_a_cell_can_fail(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "_adjust", lambda self, logits, drafted, offset: logits)
    assert cell(pair, "frequency_penalty", "draft_model", "rejection") == NO
    assert cell(pair, "logit_bias", "none", "coupled") == NO


def test_the_page_says_so(cells: Cells) -> None:
    """Written anew by ``python -m tests.support_matrix``."""
    if len(cells) < len(PARAMETERS) * len(PROPOSERS) * len(RULES):
        pytest.skip("needs the cells of the other tests")
    assert Path(PAGE).read_text() == page(cells)
