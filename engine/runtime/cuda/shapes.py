"""Which passes are captured, and which of them holds a batch. Plain integers, no tensors.

A captured pass has one shape for ever, so a batch takes the smallest one that holds it and leaves the rest
empty. How long the rows' texts are is no part of a shape: kernels stop where a row's keys end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from truedraft.engine.core.planning import PROPOSER_LIMIT
from truedraft.engine.runtime.cuda.sampling import Draws

# Tokens that a draft model's pass takes of a row: after a full acceptance it lacks the one before the last.
DRAFT_TOKENS = 2
# Of a scored row where the draft length is open: the pending token and its drafts.
OPEN_QUERIES = (1, 3, 5, 9, 17)
# Up to about here a pass costs what it takes to read the weights; beyond, padding costs what it computes.
MAX_TOKENS = 320
# Positions x vocabulary, where every rule is computed: each of these numbers needs some 60 bytes.
MAX_NUMBERS = 1 << 25
MAX_GRAPHS = 100


@dataclass(frozen=True, slots=True)
class Shape:
    """``queries`` tokens of each of ``rows``: scored by the target, or None for a pass of the draft model."""

    draws: Draws
    rows: int
    queries: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.queries or DRAFT_TOKENS)


def max_drafts(num_speculative_tokens: int | str, has_draft: bool) -> tuple[int, int]:
    """The longest drafts that are captured: of any source, and of the draft model."""
    if isinstance(num_speculative_tokens, int):
        return num_speculative_tokens, num_speculative_tokens if has_draft else 0
    return OPEN_QUERIES[-1] - 1, PROPOSER_LIMIT if has_draft else 0


def plan_shapes(
    max_rows: int, vocab_size: int, num_speculative_tokens: int | str, has_draft: bool
) -> list[Shape]:
    """At most ``MAX_GRAPHS``, those first that serve most: greedy and default requests, few drafts."""
    longest, _ = max_drafts(num_speculative_tokens, has_draft)
    fixed = isinstance(num_speculative_tokens, int)
    queries = dict.fromkeys((1, longest + 1)) if fixed else dict.fromkeys(OPEN_QUERIES)
    passes = [None, *queries] if has_draft and longest else [*queries]
    shapes = [Shape(draws, rows, each) for draws in Draws for each in passes for rows in _powers(max_rows)]
    return [shape for shape in shapes if _is_worth_it(shape, vocab_size)][:MAX_GRAPHS]


def _is_worth_it(shape: Shape, vocab_size: int) -> bool:
    fits = shape.draws is not Draws.ANY or shape.num_tokens * vocab_size <= MAX_NUMBERS
    return fits and shape.num_tokens <= MAX_TOKENS


def smallest(draws: Draws, rows: int, queries: int | None, shapes: Iterable[Shape]) -> Shape | None:
    """Of those that hold ``rows`` of ``queries`` tokens and draw what they need; None if there is none."""
    fitting = (
        shape
        for shape in shapes
        if shape.draws >= draws
        and shape.rows >= rows
        and (shape.queries is None) == (queries is None)
        and (shape.queries or 0) >= (queries or 0)
    )
    return min(fitting, key=lambda shape: (shape.num_tokens, shape.draws), default=None)


def _powers(last: int) -> list[int]:
    """Powers of two below ``last``, then ``last`` itself."""
    return [1 << i for i in range((last - 1).bit_length())] + [last]
