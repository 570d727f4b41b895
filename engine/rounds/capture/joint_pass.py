"""One pass of the target over prompts together with rows, whose drafts only the device may know.

Prompts have any length, so no graph holds them. Drafts are drawn by graphs before this pass, which reads
their ids on the device, and verdicts are given by graphs after it, which find the rows' logits where a
captured pass leaves them: the weights are read once, and the host does not wait.
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
    """Passes over ``others`` and over the ``spans`` of ``rows``, of whose tokens the last ``num_drawn`` are
    known on the device alone. What it makes of rows lies where a captured pass of ``shape`` leaves it;
    what it makes of others is returned."""
    assert shape.queries is not None
    drawn = graphs.rows.numbers
    token_ids = [token_id for span in (*others, *spans) for token_id in span.token_ids]
    end = sum(len(span.token_ids) for span in others)
    # Drawn tokens come from these places in the rows' numbers, and go to those in the packed tokens.
    sources: list[int] = []
    places: list[int] = []
    index: list[int] = []  # where the rows' logits go
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
