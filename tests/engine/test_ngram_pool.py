"""Texts of earlier requests: what is found in them, whose they are, and that they change no text."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conftest import Models
from tests.engine.gates import PROMPTS
from tests.models import make_engine, run_engine, stepped
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.proposers import ngram
from truedraft.engine.proposers.ngram import END, LONGEST, NgramPool, TextRing

# The same seed draws the same text again, which hardly repeats itself.
SAMPLED = SamplingParams(max_tokens=24, temperature=1.2, seed=7, ignore_eos=True)
PARAMS = {
    "greedy": msgspec.structs.replace(SAMPLED, temperature=0.0),
    "coupled": msgspec.structs.replace(SAMPLED, verification="coupled"),
    "rejection": msgspec.structs.replace(SAMPLED, verification="rejection"),
    "block": msgspec.structs.replace(SAMPLED, verification="block"),
}
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12)


def ends_of(texts: list[list[int]], end: list[int], limit: int) -> list[list[int]]:
    """What has followed ``end`` in the texts, anywhere."""
    return [
        text[i + len(end) : i + len(end) + limit]
        for text in texts
        for i in range(len(text) - len(end))
        if text[i : i + len(end)] == end
    ]


@given(TEXTS, st.integers(0, 80), st.lists(st.integers(0, 3), max_size=LONGEST), st.integers(1, 6))
def test_what_is_found_has_followed_in_a_text(
    texts: list[list[int]], size: int, end: list[int], limit: int
) -> None:
    """Whatever a small ring has overwritten: no draft crosses from one text into another."""
    ring = TextRing(max(size, 1))
    for text in texts:
        ring.add(text)
    run, following = ring.find(end, limit, 1)
    if run:
        assert any(following == found[: len(following)] for found in ends_of(texts, end[-run:], limit))
    assert (run == 0) == (following == [])
    assert END not in following


def test_the_longest_run_is_found_and_what_followed_it_last() -> None:
    ring = TextRing(256)
    for text in ([1, 2, 3, 4, 5, 6], [9, 3, 4, 7], [8, 3, 4, 6, 6]):
        ring.add(text)
    assert ring.find([0, 1, 2, 3, 4], 8, 1) == (4, [5, 6])
    assert ring.find([0, 0, 0, 3, 4], 8, 1) == (2, [6, 6])
    assert ring.find([0, 0, 0, 3, 4], 8, 3) == (0, [])
    assert ring.find([3, 4], 1, 2) == (2, [6])
    assert ring.find([6, 6], 4, 2) == (0, [])  # nothing follows a text's end
    ring.add(list(range(100, 400)))
    assert ring.find([0, 0, 0, 3, 4], 8, 1) == (0, [])
    assert ring.find(list(range(300, 316)), 3, 1) == (16, [316, 317, 318])


def accepted(core: EngineCore, **request: Any) -> int:
    """Returns how many drafts of a request stand, whose text is the same every time."""
    before = core.stats.num_accepted_tokens
    core.add(Generate("r", PROMPT, PARAMS["coupled"], **request))
    while core.has_work:
        stepped(core)
    return core.stats.num_accepted_tokens - before


def pooled(models: Models, **config: Any) -> EngineCore:
    return make_engine(models.target, None, method="ngram", num_speculative_tokens=4, **config)


PROMPT = [1, 13, 4, 9, 10, 7, 5, 3]
SHARING: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({"cache_salt": "one"}, {"cache_salt": "one"}, True),
    ({"cache_salt": "one"}, {"cache_salt": "other"}, False),
    ({"cache_salt": "one"}, {}, False),
    ({}, {"cache_salt": "one"}, False),
    ({"cache_prompt": False}, {}, False),
    ({}, {"cache_prompt": False}, False),
]


def shares(models: Models, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Tells whether a request drafts from the text of another one with the same prompt."""
    core = pooled(models, ngram_min_match=4)
    assert accepted(core, **first) == 0
    return accepted(core, **second) > 10


@pytest.mark.parametrize(("first", "second", "expected"), SHARING)
def test_texts_are_shared_as_beginnings_are(
    models: Models, first: dict[str, Any], second: dict[str, Any], expected: bool
) -> None:
    assert shares(models, first, second) == expected


def another_keys_texts(patch: pytest.MonkeyPatch) -> None:
    """The pool looks in whatever texts it has."""

    def find(self: NgramPool, sequence: Sequence, limit: int, min_match: int) -> tuple[int, list[int]]:
        for ring in self._rings.values():
            if (found := ring.find(sequence.token_ids[-LONGEST:], limit, min_match))[0]:
                return found
        return 0, []

    patch.setattr(NgramPool, "find", find)


def everybodys_texts_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Texts of requests that share nothing are kept like others."""
    honest = NgramPool.keep

    def keep(self: NgramPool, sequence: Sequence) -> None:
        sequence.cache_prompt = True
        honest(self, sequence)

    patch.setattr(NgramPool, "keep", keep)


@pytest.mark.parametrize("plant", [another_keys_texts, everybodys_texts_are_kept])
def test_a_leak_between_salts_is_seen(
    models: Models, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert any(shares(models, first, second) for first, second, expected in SHARING if not expected)


def test_adapters_have_texts_of_their_own(models: Models) -> None:
    core = pooled(models)
    (sequence,) = core.admission.sequences(Generate("r", PROMPT, SAMPLED))
    pool = NgramPool(64)
    sequence.token_ids = [*PROMPT, 1, 2, 3, 4]
    pool.keep(sequence)
    sequence.token_ids = [*PROMPT]
    assert pool.find(sequence, 4, 2)[1] == [1, 2, 3, 4]
    sequence.adapter = "digest"
    assert pool.find(sequence, 4, 2) == (0, [])


def test_only_the_salts_used_last_are_kept(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_SALTS", 2)
    core = pooled(models, ngram_min_match=4)
    for salt in ("a", "b", "a", "c"):
        accepted(core, cache_salt=salt)
    assert [accepted(core, cache_salt=salt) > 10 for salt in ("a", "c", "b")] == [True, True, False]


def test_forgetting_prefixes_forgets_texts(models: Models) -> None:
    core = pooled(models, ngram_min_match=4)
    assert accepted(core) == 0
    assert accepted(core) > 10
    core.forget_prefixes()
    assert accepted(core) == 0


def test_texts_of_requests_that_were_given_up_are_not_kept(models: Models) -> None:
    core = pooled(models, ngram_min_match=4)
    core.add(Generate("r", PROMPT, PARAMS["coupled"]))
    for _ in range(20):
        stepped(core)
    core.abort("r")
    assert accepted(core) == 0


@pytest.mark.parametrize(("config", "size"), [({}, 32_768), ({"prefix_caching": False}, 0)])
def test_the_default_follows_prefix_caching(config: dict[str, Any], size: int) -> None:
    assert EngineConfig(**config).num_pool_tokens == size
    assert EngineConfig(**config, ngram_pool_tokens=0).num_pool_tokens == 0


def test_a_pool_without_prefix_caching_is_refused() -> None:
    with pytest.raises(ValueError, match="ngram_pool_tokens"):
        EngineConfig(ngram_pool_tokens=100, prefix_caching=False)


def texts_in_turn(core: EngineCore, params: SamplingParams) -> list[list[list[int]]]:
    """Returns the texts of the same requests, asked three times with seeds of their own."""
    each = [msgspec.structs.replace(params, seed=number) for number in range(len(PROMPTS))]
    return [run_engine(core, PROMPTS, each) for _ in range(3)]


@pytest.mark.parametrize("rule", PARAMS)
def test_texts_are_the_same_with_and_without_the_pool(models: Models, rule: str) -> None:
    core = pooled(models, ngram_min_match=2)
    with_pool = texts_in_turn(core, PARAMS[rule])
    assert with_pool == texts_in_turn(pooled(models, ngram_pool_tokens=0), PARAMS[rule])
    assert all(before == after for before, after in pairwise(with_pool))
    if rule in ("greedy", "coupled"):
        assert core.stats.num_accepted_tokens > 3 * len(PROMPTS)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_its_own_numbers_have_drawn_is_seen(
    models: Models, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Planted: rules that judge drafts by numbers of the seed get texts that these numbers have drawn."""
    monkeypatch.setattr(ngram, "_may_have_drawn", lambda sequence: False)
    first, second, _ = texts_in_turn(pooled(models), PARAMS[rule])
    assert first != second
