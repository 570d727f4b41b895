"""Plans which passes are captured, and finds the one that holds a batch: plain integers.

A captured pass has one shape for ever, so a batch takes the smallest one that holds it and leaves the rest
empty. The lengths of the rows' texts are no part of a shape: kernels stop where a row's keys end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from truedraft.engine.core.step import PROPOSER_LIMIT

# A draft model's pass takes this many tokens of a row: after a full acceptance it lacks the one before the
# last.
DRAFT_TOKENS = 2
# A scored row has one of these numbers of tokens where the draft length is open: the pending one and its
# drafts.
OPEN_QUERIES = (1, 3, 5, 9, 17)
# Up to about this many tokens a pass costs what it takes to read the weights; beyond, padding costs as much
# as real tokens.
MAX_TOKENS = 320
# A pass over this many tokens reads quantised weights once.
MAX_READ_ONCE = 64
MAX_PASSES = 64
# These numbers of rows lie between powers of two: a batch of 17 rows should not pay for 32.
FINE_ROWS = (24, 48, 96)


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a pass over ``queries`` tokens of each of ``rows``: scored by the target, or None for a pass
    of the draft model or head, which is fed up to ``fed`` tokens of a row."""

    rows: int
    queries: int | None = None
    fed: int = DRAFT_TOKENS

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.queries or self.fed)

    @property
    def later(self) -> "Shape":
        """Returns the shape of a head's passes over its own states, after a first one of this shape."""
        return replace(self, fed=1)


def max_drafts(num_speculative_tokens: int | str, has_draft: bool) -> tuple[int, int]:
    """Returns the longest drafts that are captured: of any source, and of the draft model."""
    if isinstance(num_speculative_tokens, int):
        return num_speculative_tokens, num_speculative_tokens if has_draft else 0
    return OPEN_QUERIES[-1] - 1, PROPOSER_LIMIT if has_draft else 0


def plan_shapes(max_rows: int, num_speculative_tokens: int | str, has_draft: bool) -> list[Shape]:
    """Returns at most ``MAX_PASSES`` passes. Those of most rows come first, which hold any batch; then the
    smallest ones, which are needed most."""
    longest, _ = max_drafts(num_speculative_tokens, has_draft)
    fixed = isinstance(num_speculative_tokens, int)
    queries = dict.fromkeys((1, longest + 1)) if fixed else dict.fromkeys(OPEN_QUERIES)
    passes = [None, *queries] if has_draft and longest else [*queries]
    columns = [_column(each, max_rows) for each in passes]
    shapes = [column[i] for i in range(max(map(len, columns))) for column in columns if i < len(column)]
    return shapes[:MAX_PASSES]


def with_head(planned: Sequence[Shape], longest: int) -> list[Shape]:
    """Returns the plan with a head in the draft model's place. After a round one state more waits than tokens
    were accepted: a first pass takes all of them, if that is not too much for this many rows."""
    found: list[Shape] = []
    for shape in planned:
        if shape.queries is None:
            first = replace(shape, fed=max(2, min(1 + longest, MAX_TOKENS // shape.rows)))
            found += [first, first.later]
        else:
            found.append(shape)
    return found


def _column(queries: int | None, max_rows: int) -> list[Shape]:
    """Returns the passes of this many tokens a row: that of most rows, then the others in rising order."""
    sizes = {1 << i for i in range((max_rows - 1).bit_length())} | {n for n in FINE_ROWS if n < max_rows}
    rising = sorted(sizes | {max_rows})
    fitting = [shape for rows in rising if (shape := Shape(rows, queries)).num_tokens <= MAX_TOKENS]
    return fitting[-1:] + fitting[:-1]


def holds(shape: Shape, rows: int, queries: int | None, fed: int = 1) -> bool:
    """Tells whether a pass of this shape holds ``rows`` of ``queries`` tokens, or of ``fed`` ones."""
    if (shape.queries is None) != (queries is None) or shape.rows < rows:
        return False
    return shape.fed >= fed if shape.queries is None or queries is None else shape.queries >= queries


def smallest(rows: int, queries: int | None, fed: int, captured: Iterable[Shape]) -> Shape | None:
    """Returns the smallest pass that holds such rows; None if there is none."""
    fitting = (shape for shape in captured if holds(shape, rows, queries, fed))
    return min(fitting, key=lambda shape: shape.num_tokens, default=None)
