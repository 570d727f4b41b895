"""A pair's requests name who drafts, and its rows are told from those of others."""

import pytest

from benchmarks.defaults import figures
from benchmarks.pairs import Pair


@pytest.mark.parametrize(("draft", "method"), [(None, "ngram"), ("mtp", "mtp"), ("self:int8", "draft_model")])
def test_who_drafts(draft: str | None, method: str) -> None:
    assert Pair("named", "target", draft).method == method


def test_rows_of_several_pairs() -> None:
    speeds = {"default": 20, "none": 10, "k=3": 25}
    blocks = {name: [{"num_tokens": number, "seconds": 1.0}] for name, number in speeds.items()}
    found = {
        (figure.row, figure.column): figure.median
        for figure in figures([{"pair": pair, "clients": 4, "blocks": blocks} for pair in ("a", "b")])
    }
    for row in ("a, 4", "b, 4"):
        assert found[row, "default : no drafts"] == 2.0
        assert found[row, "default : best fixed length"] == 0.8
