"""Measures at start what passes of different sizes cost, on scratch blocks that are given back.

Forwards without sampling: the moving averages bring the rest in. Bounded in time: a slow model gets fewer
points, but always its smallest ones, as the shape matters more than the precision. Stored tokens are measured
last, with one row of a long text.
"""

import time
from itertools import product
from math import inf
from statistics import median

import torch

from engine.batch import Span
from engine.core.block_pool import BlockPool, BlockTable
from engine.draft_length.costs import PADDING, CostCurve, CostModel
from engine.models.decoder_only import DecoderModel

# Tokens in one pass, in the order of what they tell; larger ones are extrapolated. The products in C work in
# groups of 12 rows: a pass of 48 tokens is cheaper than its neighbours tell.
SIZES = (1, 5, 2, 9, 16, 3, 4, 32, 12, 24, 48, 64, 128)
MIN_SIZES = 2
# The most tokens of the long text.
NUM_STORED = 1024
MAX_REPEATS = 5
# A row that is scored brings its pending token and some drafts.
SCORE_TOKENS_PER_ROW = 5
# A pass runs again for so many seconds, so often at most, and the fastest run counts: the first ones find the
# processor's caches full of what ran before, some other size, and all of them are to find the same.
WARM, RUNS = 0.006, 12
# What a scratch row of an encoder-decoder model has for a prompt.
ENCODER_TOKENS = 16


def calibrate(
    target: DecoderModel,
    target_pool: BlockPool,
    draft: DecoderModel | None,
    draft_pool: BlockPool | None,
    max_tokens: int,
    seconds: float = 1.0,
) -> CostModel:
    """``max_tokens``: no step has more, prompts apart. Both caches must be allocated and unused."""
    models = 1 if draft is None else 2
    padding = 0.0 if target.is_native else PADDING
    score = _measure(target, target_pool, SCORE_TOKENS_PER_ROW, max_tokens, seconds / models)
    if draft is None or draft_pool is None:
        costs = CostModel({}, score, padding)
    else:
        costs = CostModel(_measure(draft, draft_pool, 1, max_tokens, seconds / models), score, padding)
        _measure_stored(draft, draft_pool, costs.draft, seconds / models)
    _measure_stored(target, target_pool, costs.score, seconds / models)
    return costs


def _measure_stored(model: DecoderModel, pool: BlockPool, curve: CostCurve, seconds: float) -> None:
    """What each token in the cache costs, where there is room for a long text: by medians of passes over one
    new token and over some, with few and with many stored."""
    room: int = min(pool.num_free * pool.block_size, model.max_position or NUM_STORED, NUM_STORED)
    if model.has_encoder or room < NUM_STORED // 4:
        return
    deadline = time.perf_counter() + seconds
    table = BlockTable()
    pool.reserve(table, room)
    few, many = 1, room - SCORE_TOKENS_PER_ROW
    samples: dict[tuple[int, int], list[float]] = {}
    try:
        for repeat in range(1 + MAX_REPEATS):
            if repeat >= 2 and time.perf_counter() > deadline:
                break
            for queries, stored in product((1, SCORE_TOKENS_PER_ROW), (few, many)):
                table.num_computed_tokens = stored
                took = _forward_seconds(model, [(table, queries)])
                samples.setdefault((queries, stored), []).append(took)
    finally:
        pool.release(table)
    one, some = (
        max(0.0, median(samples[queries, many][1:]) - median(samples[queries, few][1:])) / (many - few)
        for queries in (1, SCORE_TOKENS_PER_ROW)
    )
    curve.seconds_per_stored = one
    if one:
        curve.share_per_query = min(max(some / one - 1, 0.0) / (SCORE_TOKENS_PER_ROW - 1), 1.0)


def _measure(
    model: DecoderModel, pool: BlockPool, tokens_per_row: int, max_tokens: int, seconds: float
) -> dict[int, float]:
    """Every size in turn, again and again: a busy moment then spoils one sample of several points."""
    deadline = time.perf_counter() + seconds
    samples: dict[int, list[float]] = {}
    for _ in range(1 + MAX_REPEATS):
        for size in SIZES:
            late = len(samples) >= MIN_SIZES and time.perf_counter() > deadline
            rows = _row_lengths(size, tokens_per_row)
            tables = None if late or size > max_tokens else _reserve(pool, rows, model.has_encoder)
            if tables is None:
                continue
            try:
                samples.setdefault(size, []).append(_forward_seconds(model, tables))
            finally:
                for table, _ in tables:
                    pool.release(table)
    # What else the machine does makes passes slower, and some sizes more often than others.
    return _plausible({size: min(seconds) for size, seconds in samples.items()})


def _plausible(costs: dict[int, float]) -> dict[int, float]:
    """A pass takes no longer than smaller ones in its place would: what says so was measured at a bad moment,
    and would never be measured again, as nobody drafts at that price."""
    found: dict[int, float] = {}
    for size in sorted(costs):
        in_parts = [-(-size // smaller) * seconds for smaller, seconds in found.items()]
        found[size] = min([costs[size], *in_parts])
    return found


def _row_lengths(size: int, tokens_per_row: int) -> list[int]:
    """``size`` tokens as rows of about ``tokens_per_row``; up to nine are one row with its drafts."""
    if tokens_per_row > 1 and size <= 9:
        return [size]
    return [min(tokens_per_row, size - start) for start in range(0, size, tokens_per_row)]


def _reserve(
    pool: BlockPool, row_lengths: list[int], has_encoder: bool
) -> list[tuple[BlockTable, int]] | None:
    """A scratch table for each row, with its number of tokens; None if the pool is too small."""
    num_encoder_tokens = ENCODER_TOKENS if has_encoder else 0
    if sum(pool.blocks_for(num_encoder_tokens + length) for length in row_lengths) > pool.num_free:
        return None
    tables = [(BlockTable(num_encoder_tokens), length) for length in row_lengths]
    for table, length in tables:
        pool.reserve(table, num_encoder_tokens + length)
        table.num_computed_tokens = num_encoder_tokens
    return tables


def _forward_seconds(model: DecoderModel, tables: list[tuple[BlockTable, int]]) -> float:
    spans = [Span(table, [0] * length, length) for table, length in tables]
    num_stored = [table.num_computed_tokens for table, _ in tables]
    seconds, total = inf, 0.0
    for _ in range(RUNS):
        for (table, _), stored in zip(tables, num_stored, strict=True):
            table.num_computed_tokens = stored
        _synchronize(model.device)
        started = time.perf_counter()
        model.forward(spans)
        _synchronize(model.device)
        took = time.perf_counter() - started
        seconds, total = min(seconds, took), total + took
        if total > WARM:
            break
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
