"""The shapes of passes that are captured, and which of them holds a batch. Plain integers, no tensors.

A captured pass has one shape for ever, so a batch takes the smallest one that holds it and fills the rest
with padding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from engine.batch import MAX_GROUPED_QUERIES, Span

# Rows that score k drafts bring k + 1 tokens. A draft model brings one, or two after full acceptance.
QUERIES = (1, 2, 3, 5, 9, 17, MAX_GROUPED_QUERIES)
# Shorter contexts are not worth a shape of their own.
MIN_KEYS = 256
# Up to about here a pass costs what it takes to read the weights; beyond, padding costs what it computes.
MAX_TOKENS = 320
# Keys of all rows are gathered in every layer: for 8 heads of 128 numbers in 16 bits, these are 256 MiB.
MAX_GATHERED_KEYS = 1 << 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """``rows`` sequences of up to ``queries`` new tokens, each with up to ``blocks`` cache blocks."""

    rows: int
    queries: int
    blocks: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.queries

    def holds(self, rows: int, queries: int, blocks: int) -> bool:
        return rows <= self.rows and queries <= self.queries and blocks <= self.blocks


def plan_buckets(
    max_rows: int, max_keys: int, block_size: int, usual_queries: int, gathers: bool = True
) -> list[Bucket]:
    """The most useful first: few rows, plain decoding or ``usual_queries``, short contexts, and from there
    on in all three directions at once. If attention ``gathers`` the keys, there is a limit to them."""
    queries = [1, usual_queries, *QUERIES] if usual_queries <= MAX_GROUPED_QUERIES else [*QUERIES]
    levels = [
        powers(1, max_rows),
        list(dict.fromkeys(queries)),
        list(dict.fromkeys(-(-keys // block_size) for keys in powers(MIN_KEYS, max_keys))),
    ]
    places = product(*(range(len(level)) for level in levels))
    buckets = [
        Bucket(*(level[i] for level, i in zip(levels, place, strict=True)))
        for place in sorted(places, key=sum)
    ]
    most_blocks = MAX_GATHERED_KEYS // block_size
    return [
        bucket
        for bucket in buckets
        if bucket.num_tokens <= MAX_TOKENS and not (gathers and bucket.rows * bucket.blocks > most_blocks)
    ]


def shape_of(spans: Sequence[Span], block_size: int) -> tuple[int, int, int] | None:
    """Rows, queries and blocks of a batch. None if it holds long chunks of prompts, or some that want no
    logits: those passes are bound by the device anyway, and each has a length of its own."""
    queries = max(len(span.token_ids) for span in spans)
    if queries > MAX_GROUPED_QUERIES or not all(span.num_logits for span in spans):
        return None
    keys = max(span.table.num_computed_tokens + len(span.token_ids) for span in spans)
    return len(spans), queries, -(-keys // block_size)


def smallest(shape: tuple[int, int, int], buckets: Iterable[Bucket]) -> Bucket | None:
    """Of those that hold ``shape``; None if there is none."""
    fitting = (bucket for bucket in buckets if bucket.holds(*shape))
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.rows * bucket.blocks), default=None)


def powers(first: int, last: int) -> list[int]:
    """``first`` times powers of two below ``last``, then ``last`` itself."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]
