"""Runs one pass of the target over prompts together with rows, whose drafts only the device may know.

Prompts have any length, so no graph holds them. Graphs draw drafts before this pass, which reads their ids on
the device, and graphs give verdicts after it, which find the rows' logits in the place where a captured pass
leaves them: the weights are read once, and the host does not wait.
"""

from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.capture.shapes import Shape
from truedraft.engine.rows.columns import DRAFTS_AT


def score_together(
    graphs: RoundGraphs,
    shape: Shape,
    others: list[Span],
    spans: list[Span],
    rows: list[int],
    num_drawn: list[int],
) -> ForwardOutput:
    """Runs a pass over ``others`` and over the ``spans`` of ``rows``, whose last ``num_drawn`` tokens only
    the device knows. The rows' results lie where a captured pass of ``shape`` leaves them; those of the
    others are returned."""
    assert shape.queries is not None
    drawn = graphs.rows.numbers
    token_ids = [token_id for span in (*others, *spans) for token_id in span.token_ids]
    end = sum(len(span.token_ids) for span in others)
    # Drawn tokens come from these places in the rows' numbers, and go to these in the packed tokens.
    sources: list[int] = []
    places: list[int] = []
    index: list[int] = []  # These are the places of the rows' logits.
    for span, row, number in zip(spans, rows, num_drawn, strict=True):
        end += len(span.token_ids)
        places += range(end - number, end)
        first = row * drawn.shape[1] + DRAFTS_AT
        sources += range(first, first + number)
        index += range(row * shape.queries, row * shape.queries + len(span.token_ids))
    sizes = len(token_ids), len(places), len(sources), len(index)
    numbers = on_device([*token_ids, *places, *sources, *index], drawn.device).split_with_sizes(sizes)
    ids, into, taken, scored = numbers
    ids.index_copy_(0, into, drawn.view(-1).index_select(0, taken))
    logits, hidden = graphs.target.forward([*others, *spans], ids, graphs.taps)
    of_others, of_rows = logits.split_with_sizes((len(logits) - len(index), len(index)))
    graphs.logits.index_copy_(0, scored, of_rows)
    if graphs.tapped is None or hidden is None:
        return ForwardOutput(of_others)
    seen_of_others, seen_of_rows = hidden.split_with_sizes((len(hidden) - len(index), len(index)))
    graphs.tapped.index_copy_(0, scored, seen_of_rows)
    return ForwardOutput(of_others, seen_of_others)
