"""Recurrences compute what they are by definition, to the same bits however a text is cut into passes."""

import random

import pytest
import torch

from tests.engine.recurrences import MAKERS, by_definition, state_cache, table_in
from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.layers.torch_recurrent import TorchStates
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.recurrent_state import ROLLBACK

NUM_TOKENS = 90
SOME = ["short convolution of 7", "delta rule, 2 heads a key", "Mamba 2 in groups"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(
    rule: Recurrence, cache: KVCache, parts: list[tuple[BlockTable, torch.Tensor, int]]
) -> list[torch.Tensor]:
    """Computes tokens after those of each table, the last ones of which may be taken back."""
    spans = [
        Span(table, [0] * len(x), 0, table.num_computed_tokens + len(x) - num_uncertain)
        for table, x, num_uncertain in parts
    ]
    output = TorchStates(spans, cache.states).recur(rule, torch.cat([x for _, x, _ in parts]))
    for span in spans:
        span.table.num_folded_tokens, span.table.num_computed_tokens = span.num_folded_after, span.end
    return list(torch.split(output, [len(x) for _, x, _ in parts]))


def one_by_one(rule: Recurrence, x: torch.Tensor) -> torch.Tensor:
    cache, table = state_cache(rule, 1), table_in(0)
    return torch.cat([run(rule, cache, [(table, token[None], 0)])[0] for token in x])


@pytest.mark.parametrize("name", MAKERS)
def test_a_recurrence_is_what_it_is_by_definition(name: str) -> None:
    rule = MAKERS[name]()
    x = torch.randn(50, rule.input_size)
    torch.testing.assert_close(one_by_one(rule, x).double(), by_definition(rule, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_passes_and_rejected_drafts_change_no_bit(name: str) -> None:
    """Two texts are computed side by side in random rounds, prompts first, with tokens that are rejected."""
    rule = MAKERS[name]()
    texts = [torch.randn(NUM_TOKENS, rule.input_size) for _ in range(2)]
    expected = [one_by_one(rule, x) for x in texts]
    cache, tables, draws = state_cache(rule, 5), [table_in(3), table_in(1)], random.Random(1)
    first = run(rule, cache, [(table, x[:37], 0) for table, x in zip(tables, texts, strict=True)])
    assert all(torch.equal(ours, theirs[:37]) for ours, theirs in zip(first, expected, strict=True))
    while (start := min(table.num_computed_tokens for table in tables)) < NUM_TOKENS - ROLLBACK - 1:
        assert start >= 0
        num_drafts = draws.choice((0, 1, 4, ROLLBACK))
        parts, kept = [], []
        for table, x in zip(tables, texts, strict=True):
            n = min(table.num_computed_tokens, NUM_TOKENS - ROLLBACK - 1)
            table.num_computed_tokens = n
            kept.append(draws.randint(0, num_drafts))
            wrong = torch.randn(num_drafts - kept[-1], x.shape[1])
            parts.append((table, torch.cat([x[n : n + 1 + kept[-1]], wrong]), num_drafts))
        for (table, _, _), accepted, theirs, output in zip(
            parts, kept, expected, run(rule, cache, parts), strict=True
        ):
            table.num_computed_tokens -= num_drafts - accepted
            n = table.num_computed_tokens
            assert table.num_folded_tokens <= n
            assert torch.equal(output[: 1 + accepted], theirs[n - 1 - accepted : n])


@pytest.mark.parametrize("name", SOME)
def test_a_draft_model_runs_ahead_of_what_is_certain(name: str) -> None:
    """Tokens that a draft model has drawn are stored one by one, before any of them is certain."""
    rule = MAKERS[name]()
    x = torch.randn(NUM_TOKENS, rule.input_size)
    expected = one_by_one(rule, x)
    cache, table, draws = state_cache(rule, 2), table_in(1), random.Random(2)
    while (certain := table.num_computed_tokens + 1) < NUM_TOKENS - ROLLBACK:
        kept = draws.randint(0, 12)
        for drawn in range(20):
            token = x[certain - 1 + drawn] if drawn <= kept else torch.randn(x.shape[1])
            output = run(rule, cache, [(table, token[None], drawn)])[0]
            if drawn <= kept:
                assert torch.equal(output[0], expected[certain - 1 + drawn])
        table.num_computed_tokens = certain + kept
        assert table.num_folded_tokens <= certain


@pytest.mark.parametrize("name", SOME)
def test_a_copied_state_serves_every_beginning_that_is_not_folded(name: str) -> None:
    """A copy made at 70 tokens is good for the first 64, or however many since the last fold."""
    rule = MAKERS[name]()
    x = torch.randn(NUM_TOKENS, rule.input_size)
    expected = one_by_one(rule, x)
    cache, table = state_cache(rule, 3), table_in(0)
    run(rule, cache, [(table, x[:70], 0)])
    run(rule, cache, [(table, torch.randn(ROLLBACK + 1, x.shape[1]), ROLLBACK)])
    cache.copy_state(0, 2)
    for length in range(64, 71):
        cache.copy_state(2, 1)
        other = table_in(1)
        other.num_computed_tokens, other.num_folded_tokens = length, table.num_folded_tokens
        assert table.num_folded_tokens == 64
        assert torch.equal(run(rule, cache, [(other, x[length:], 0)])[0], expected[length:])
