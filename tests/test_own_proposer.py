"""The proposer that docs/python-api.md shows runs as it is printed there, and changes no text."""

from pathlib import Path
from typing import Any

import pytest

from truedraft import LLM, ModelLoadError, Proposer, SamplingParams
from truedraft.engine.core.proposer import Observation

PAGE = Path(__file__).parents[1] / "docs" / "python-api.md"
GREEDY = SamplingParams(max_tokens=60, temperature=0)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Runs the page's example; returns its names."""
    section = PAGE.read_text(encoding="utf-8").split("## A proposer of your own")[1]
    names: dict[str, Any] = {}
    exec(section.split("```python\n")[1].split("```")[0], names)
    return names


def test_it_learns_and_changes_no_text(shown: dict[str, Any]) -> None:
    again, answer, llm = shown["llm"].generate("Once upon a time", GREEDY)[0], shown["answer"], shown["llm"]
    assert again.token_ids == answer.token_ids
    assert again.num_rounds < 30 < len(again.token_ids)
    assert again.acceptance_rate > 0.8
    plain = SamplingParams(max_tokens=60, temperature=0, method="none")
    assert llm.generate("Once upon a time", plain)[0].token_ids == again.token_ids
    named = SamplingParams(max_tokens=60, temperature=1.0, seed=1, method="memory")
    unnamed = SamplingParams(max_tokens=60, temperature=1.0, seed=1, method="none")
    assert llm.generate("A fox", named)[0].token_ids == llm.generate("A fox", unnamed)[0].token_ids


def test_the_page_names_every_member() -> None:
    page = PAGE.read_text(encoding="utf-8")
    members = [name for name in vars(Proposer) if not name.startswith("_")]
    left_out = {"need", "trace_source", "head_output", "draft_vocabulary"}
    assert [name for name in members if f"`{name}" not in page and name not in left_out] == []
    assert [name for name in Observation.__dataclass_fields__ if f"`{name}`" not in page] == []


class Nameless(Proposer):
    pass


class Namesake(Proposer):
    name = "ngram"


class Lagging(Proposer):
    name, taps = "lagging", (-1,)


class TooDeep(Proposer):
    name, taps, can_lag = "deep", (99,), False


@pytest.mark.parametrize(
    ("proposer", "words"),
    [
        ([1], "1 is no proposer"),
        (Nameless(), "have a name"),
        (Namesake(), "'ngram'"),
        (Lagging(), "set can_lag to False"),
        (TooDeep(), "the target has 16 layers"),
        ([Lagging(), Lagging()], "can_lag"),
    ],
)
def test_what_cannot_be_is_refused(proposer: Any, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        LLM(proposer=proposer, draft="none", num_speculative_tokens=2, cache_memory="16MiB")
