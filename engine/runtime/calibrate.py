"""Measures at start what passes of different sizes take, on scratch blocks that are given back.

Forwards without sampling: measured rounds bring the rest in. Bounded in time: a slow model gets fewer points,
but always the smallest ones. Every point is the fastest of several runs, spread over the whole time: whatever
else the machine does makes passes slower, never faster.
"""

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

import torch

from engine.batch import Span
from engine.core.block_pool import BlockPool, BlockTable
from engine.models.model_runner import ModelRunner
from engine.speculation.costs import Costs, PassCosts

# Tokens of a pass, in the order of what they tell; larger ones are extrapolated.
SIZES = (1, 5, 2, 9, 16, 3, 4, 32, 12, 24, 48, 64, 128)
MIN_SIZES, MAX_REPEATS = 2, 5
# Tokens of the long text by which the cost of stored tokens is measured.
NUM_STORED = 1024
# A row that is scored brings its pending token and some drafts; up to nine tokens are one row.
SCORE_TOKENS_PER_ROW, ONE_ROW = 5, 9
# Seconds for which a pass is repeated, and the most repetitions: the first runs find cold caches.
WARM_SECONDS, RUNS = 0.006, 12
# Tokens of a scratch row's prompt, where an encoder reads prompts.
ENCODER_TOKENS = 16

Kind = TypeVar("Kind")


def calibrate(
    target: ModelRunner,
    target_pool: BlockPool,
    draft: ModelRunner | None,
    draft_pool: BlockPool | None,
    max_tokens: int,
    step_seconds: float = 0.0,
    seconds: float = 1.0,
) -> Costs:
    """``max_tokens``: no step has more, prompts apart. Both caches must be allocated and unused."""
    if draft is None or draft_pool is None:
        return Costs(
            _measure(target, target_pool, SCORE_TOKENS_PER_ROW, max_tokens, seconds), None, step_seconds
        )
    return Costs(
        _measure(target, target_pool, SCORE_TOKENS_PER_ROW, max_tokens, seconds / 2),
        _measure(draft, draft_pool, 1, max_tokens, seconds / 2),
        step_seconds,
    )


def _measure(
    model: ModelRunner, pool: BlockPool, tokens_per_row: int, max_tokens: int, seconds: float
) -> PassCosts:
    def run(size: int) -> float | None:
        row = size if tokens_per_row > 1 and size <= ONE_ROW else tokens_per_row
        lengths = [min(row, size - start) for start in range(0, size, row)]
        return None if size > max_tokens else _pass_seconds(model, pool, lengths)

    by_tokens: dict[int, float] = {}
    for size, took in sorted(_fastest(run, SIZES, seconds, MIN_SIZES).items()):
        # A pass takes no longer than smaller ones in its place: else it was measured at a busy moment.
        in_parts = [-(-size // smaller) * other for smaller, other in by_tokens.items()]
        by_tokens[size] = min([took, *in_parts])

    room = min(pool.num_free * pool.block_size, model.model.max_position or NUM_STORED, NUM_STORED)
    if model.model.has_encoder or room < NUM_STORED // 4:
        return PassCosts(by_tokens)
    few, many = 1, room - SCORE_TOKENS_PER_ROW
    kinds = [(queries, stored) for stored in (few, many) for queries in (1, SCORE_TOKENS_PER_ROW)]
    took_by = _fastest(
        lambda kind: _pass_seconds(model, pool, [kind[0]], kind[1]), kinds, seconds, len(kinds)
    )
    one, some = (
        max(0.0, took_by[queries, many] - took_by[queries, few]) / (many - few)
        for queries in (1, SCORE_TOKENS_PER_ROW)
    )
    share = min(max(some / one - 1, 0.0) / (SCORE_TOKENS_PER_ROW - 1), 1.0) if one else 0.0
    return PassCosts(by_tokens, one, share)


def _fastest(
    run: Callable[[Kind], float | None], kinds: Sequence[Kind], seconds: float, min_kinds: int
) -> dict[Kind, float]:
    """The fastest run of each kind, all of them in turn until the time is over."""
    deadline = time.perf_counter() + seconds
    best: dict[Kind, float] = {}
    for repeat in range(MAX_REPEATS):
        for kind in kinds:
            if (repeat or len(best) >= min_kinds) and time.perf_counter() > deadline:
                continue
            took = run(kind)
            if took is not None:
                best[kind] = min(took, best.get(kind, inf))
    return best


def _pass_seconds(
    model: ModelRunner, pool: BlockPool, row_lengths: list[int], num_stored: int = 0
) -> float | None:
    """Seconds of a pass over such rows behind ``num_stored`` tokens each; None if the pool is too small."""
    num_encoder_tokens = ENCODER_TOKENS if model.model.has_encoder else 0
    num_stored += num_encoder_tokens
    if sum(pool.blocks_for(num_stored + length) for length in row_lengths) > pool.num_free:
        return None
    tables = [BlockTable(num_encoder_tokens) for _ in row_lengths]
    try:
        for table, length in zip(tables, row_lengths, strict=True):
            pool.reserve(table, num_stored + length)
        spans = [Span(table, [0] * length, length) for table, length in zip(tables, row_lengths, strict=True)]
        fastest, total = inf, 0.0
        for _ in range(RUNS):
            for table in tables:
                table.num_computed_tokens = num_stored
            _synchronize(model.device)
            started = time.perf_counter()
            model.forward(spans)
            _synchronize(model.device)
            took = time.perf_counter() - started
            fastest, total = min(fastest, took), total + took
            if total > WARM_SECONDS:
                break
        return fastest
    finally:
        for table in tables:
            pool.release(table)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
