"""Measures at start how long passes of different sizes take, on scratch blocks, whose memory is given back.

Forward passes run without sampling: measured rounds add the rest later. The time is bounded: a slow model
gets fewer points, but always the smallest ones. Every point is the fastest of several runs, spread over the
whole time: other work of the machine makes passes slower, never faster.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import inf
from typing import NamedTuple, TypeVar

import torch

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.recurrent_state import CHUNK, num_folded
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.speculation.costs import Costs, PassCosts
from truedraft.engine.speculation.routing import Routing

# Passes of these numbers of tokens are measured, the most telling first; larger ones are extrapolated.
SIZES = (1, 5, 2, 9, 16, 3, 4, 32, 12, 24, 48, 64, 128)
MIN_SIZES, MAX_REPEATS = 2, 5
# Experts are counted in passes of these numbers of tokens.
COUNTED_SIZES = (1, 2, 3, 5, 9, 16, 32, 64)
# Stored tokens are measured with this many in each of these numbers of rows: together they may or may not
# stay in the processor's cache.
NUM_STORED, MOST_ROWS, FEWER_ROWS = 256, 4, (1, 2)
# A pass is repeated for this many seconds, but no more often than this: the first runs find cold caches.
WARM_SECONDS, RUNS = 0.006, 12
# A scratch row has a prompt of this many tokens, where an encoder reads prompts.
ENCODER_TOKENS = 16
# A pass over one token counts as this many seconds where the caches are too small to measure any: drafting
# never pays then, as its tokens seem to take as long as passes of their own.
UNMEASURED = 1e-3
# A scratch row begins after this many tokens where there are states: one chunk is folded, and has records
# after it.
STATE_TOKENS = CHUNK + 4

Kind = TypeVar("Kind")


class Rows(NamedTuple):
    """Says how many tokens of a pass belong to one row: all if they are no more than ``alone``."""

    tokens: int
    alone: int


# A row that is scored brings its pending token and some drafts; up to nine tokens are one row.
SCORED, DRAFTING = Rows(5, alone=9), Rows(1, alone=1)


def calibrate(
    target: ModelRunner,
    target_pool: BlockPool,
    drafts: Mapping[str, tuple[ModelRunner, BlockPool]],
    max_tokens: int,
    step_seconds: float = 0.0,
    seconds: float = 1.0,
) -> Costs:
    """Measures the passes. ``drafts`` are models of proposers, by name. No step has more than ``max_tokens``,
    prompts apart. All caches must be allocated and unused."""
    seconds /= 1 + len(drafts)
    score = _measure(target, target_pool, SCORED, max_tokens, seconds)
    routing = _count_experts(target, target_pool, max_tokens)
    measured = {name: _measure(*draft, DRAFTING, max_tokens, seconds) for name, draft in drafts.items()}
    for model in (target, *(draft for draft, _ in drafts.values())):
        model.cache.forget()
    return Costs(score, measured, step_seconds, routing=routing)


def _count_experts(model: ModelRunner, pool: BlockPool, max_tokens: int) -> Routing | None:
    """Counts the experts that passes over tokens from all over the vocabulary read; None if there are
    none."""
    if (counted := model.model.touched) is None:
        return None
    numbers: dict[int, float] = {}
    for size in (size for size in COUNTED_SIZES if size <= max_tokens):
        before = counted()
        if pass_seconds(model, pool, _row_lengths(size, SCORED)) is not None:
            experts, layers = (now - then for now, then in zip(counted(), before, strict=True))
            numbers[size] = experts / layers
    return Routing(counted, numbers) if numbers else None


def _row_lengths(size: int, rows: Rows) -> list[int]:
    row = size if size <= rows.alone else rows.tokens
    return [min(row, size - start) for start in range(0, size, row)]


def _measure(model: ModelRunner, pool: BlockPool, rows: Rows, max_tokens: int, seconds: float) -> PassCosts:
    def rows_of(num_tokens: float) -> int:
        return len(_row_lengths(math.ceil(num_tokens), rows))

    def run(size: int) -> float | None:
        return None if size > max_tokens else pass_seconds(model, pool, _row_lengths(size, rows))

    _touch(model, pool, _row_lengths(min(max(SIZES), max_tokens), rows))
    by_tokens: dict[int, float] = {}
    for size, took in sorted(_fastest(run, SIZES, seconds, MIN_SIZES).items()):
        # A pass takes no longer than its successors, which are larger: otherwise it was measured at a busy
        # moment.
        in_parts = [-(-size // smaller) * other for smaller, other in by_tokens.items()]
        by_tokens[size] = min([took, *in_parts])

    row_seconds = _measure_rows(model, pool, seconds) if pool.states is not None else 0.0
    room = min(model.model.max_position or inf, pool.num_writable // MOST_ROWS * pool.block_size)
    room -= 0 if pool.states is None else STATE_TOKENS
    by_stored: dict[int, float] = {}
    share = 0.0
    has_room = room >= NUM_STORED + SCORED.tokens and pool.has_slots(MOST_ROWS)
    if not model.model.has_encoder and has_room and max_tokens >= MOST_ROWS:
        by_stored, share = _measure_stored(model, pool, seconds)
    return PassCosts(by_tokens or {1: UNMEASURED}, by_stored, share, row_seconds, rows_of)


def _measure_rows(model: ModelRunner, pool: BlockPool, seconds: float) -> float:
    """Returns the additional time of each row in a pass over the same number of tokens: a state is read once
    for all of a row's tokens."""
    kinds = [(MOST_ROWS, 1), (1, MOST_ROWS)]
    took = _fastest(lambda kind: pass_seconds(model, pool, [kind[1]] * kind[0]), kinds, seconds / 4, 2)
    if len(took) < len(kinds):
        return 0.0
    return max(0.0, took[kinds[0]] - took[kinds[1]]) / (MOST_ROWS - 1)


def _measure_stored(model: ModelRunner, pool: BlockPool, seconds: float) -> tuple[dict[int, float], float]:
    """Returns the additional time that stored tokens take in a pass, by their number, and the share of it for
    each further new token."""

    def run(kind: tuple[int, int, int]) -> float | None:
        rows, queries, stored = kind
        return pass_seconds(model, pool, [queries] * rows, stored)

    _touch(model, pool, [NUM_STORED + SCORED.tokens] * MOST_ROWS)
    kinds = [(MOST_ROWS, queries, stored) for queries in (1, SCORED.tokens) for stored in (1, NUM_STORED)]
    took = _fastest(run, kinds, seconds / 2, len(kinds))
    # The stored tokens of a large model are read from memory however few they are.
    if took[kinds[0]] < WARM_SECONDS:
        kinds = [(rows, 1, stored) for rows in FEWER_ROWS for stored in (1, NUM_STORED)]
        took |= _fastest(run, kinds, seconds / 2, len(kinds))
    added = {
        (rows, queries): max(0.0, long - took[rows, queries, 1])
        for (rows, queries, stored), long in took.items()
        if stored > 1
    }
    by_stored: dict[int, float] = {}
    of_a_token = inf
    for rows in sorted((rows for rows, queries in added if queries == 1), reverse=True):
        # A token takes no longer where fewer are stored: otherwise that was measured at a busy moment.
        of_a_token = min(of_a_token, added[rows, 1] / (rows * NUM_STORED))
        by_stored[rows * NUM_STORED] = rows * NUM_STORED * of_a_token
    one, some = added[MOST_ROWS, 1], added[MOST_ROWS, SCORED.tokens]
    share = min(max(some / one - 1, 0.0) / (SCORED.tokens - 1), 1.0) if one else 0.0
    return by_stored, share


def _touch(model: ModelRunner, pool: BlockPool, row_lengths: list[int]) -> None:
    """Writes zeros to the scratch blocks of such rows, as many as fit: the first write to memory may take
    longer than the passes that are measured there."""
    num_rows = pool.num_writable // pool.blocks_for(max(row_lengths))
    if pool.states is not None:
        num_rows = min(num_rows, pool.states.num_free)
    with _scratch(pool, row_lengths[:num_rows]) as tables:
        model.cache.clear([block for table in tables for block in table.block_ids])
        if own := [block for table in tables for block in table.window_ids or ()]:
            model.cache.clear(own, own_blocks=True)


def _fastest(
    run: Callable[[Kind], float | None], kinds: Sequence[Kind], seconds: float, min_kinds: int
) -> dict[Kind, float]:
    """Returns the fastest run of each kind, all of them in turn until the time is over."""
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


def pass_seconds(
    model: ModelRunner, pool: BlockPool, row_lengths: list[int], num_stored: int = 0
) -> float | None:
    """Returns the seconds of a pass over such rows after ``num_stored`` tokens each; None if the pool is too
    small."""
    num_encoder_tokens = ENCODER_TOKENS if model.model.has_encoder else 0
    num_stored += num_encoder_tokens + (0 if pool.states is None else STATE_TOKENS)
    room = [num_stored + length for length in row_lengths]
    if sum(map(pool.blocks_for, room)) > pool.num_writable or not pool.has_slots(len(room)):
        return None
    with _scratch(pool, room, num_encoder_tokens) as tables:
        num_tokens = sum(row_lengths)
        # Where there are no experts the first ids serve: few pages are read of embeddings that lie in a file.
        vocab_size = min(model.vocab_size, num_tokens) if model.model.touched is None else model.vocab_size
        token_ids = iter(distinct_ids(num_tokens, vocab_size))
        spans = [
            Span(table, list(islice(token_ids, length)), length)
            for table, length in zip(tables, row_lengths, strict=True)
        ]
        fastest, total = inf, 0.0
        for _ in range(RUNS):
            for table in tables:
                table.num_computed_tokens, table.num_folded_tokens = num_stored, num_folded(num_stored)
            synchronize(model.device)
            started = time.perf_counter()
            model.forward(spans)
            synchronize(model.device)
            took = time.perf_counter() - started
            fastest, total = min(fastest, took), total + took
            if total > WARM_SECONDS:
                break
        return fastest


def distinct_ids(num_tokens: int, vocab_size: int) -> list[int]:
    """Returns ids from all over the vocabulary: for equal tokens a mixture of experts reads the same few
    experts, which takes less than half as long."""
    step = max(1, vocab_size // num_tokens)
    return [number * step % vocab_size for number in range(num_tokens)]


@contextmanager
def _scratch(pool: BlockPool, room: list[int], num_encoder_tokens: int = 0) -> Iterator[list[BlockTable]]:
    """Yields block tables with blocks for these numbers of tokens. They always get the same blocks."""
    tables = [BlockTable(num_encoder_tokens) for _ in room]
    try:
        for table, num_tokens in zip(tables, room, strict=True):
            pool.reserve(table, num_tokens)
            pool.extend(table, num_tokens)
        yield tables
    finally:
        for table in tables:
            pool.release(table)


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
