"""Captures the passes of a round: one launch in place of hundreds.

On a GPU a pass over a few tokens is over before the host has launched the next one's kernels. So a pass of
the target, of a draft model or of a head over some numbers of rows and tokens is recorded once, and replayed
from then on. Rounds know nothing of it: a captured pass takes spans as any pass does, and batches that no
captured pass holds are computed as usual, through the same caches.

The smallest and the largest pass of each kind are compared with the usual one on a short text. If one
deviates or cannot be captured, none is used, and the log says so.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from truedraft.engine.memory.batch import Span, states_of
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.models.agreement import TOLERANCES, same_logits
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.rounds.capture.capture import Capture
from truedraft.engine.rounds.capture.head_passes import HeadPasses
from truedraft.engine.rounds.capture.rows import DRAFT, TARGET, DeviceRows
from truedraft.engine.rounds.capture.shapes import (
    DRAFT_TOKENS,
    MAX_READ_ONCE,
    Shape,
    smallest,
)
from truedraft.engine.rows.columns import IDS_AT, Field

# A comparison has this many tokens in the cache: more than a block, and not a multiple of it.
CHECK_CONTEXT = 19

# A batch that no captured pass holds is divided, unless its longest row makes the passes larger by more than
# this factor: the usual pass reads the weights once.
MOST_PADDING = 2

logger = logging.getLogger(__name__)


class RoundGraphs:
    """Holds the captured passes of a target and of its draft model or ``head``, if any, over their caches.
    The passes read ``rows``. The target's passes leave the states after the layers ``taps``, too. Comparisons
    switch ``enabled``."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner | None,
        rows: DeviceRows,
        planned: Sequence[Shape],
        capture: Capture,
        taps: Sequence[int] = (),
        head: HeadPasses | None = None,
    ) -> None:
        self.target = target
        self.head = head
        self.draft = draft
        self.rows = rows
        self.capture = capture
        self.taps = list(taps)
        for runner in (target, draft, None if head is None else head.runner):
            if runner is not None and isinstance(runner.model, FusedDecoder):
                runner.model.rotary.reach_all()
        device, vocab_size = target.device, target.vocab_size
        num_tokens = max(shape.num_tokens for shape in planned)
        # All passes leave results in one place, as every replay overwrites their pool.
        self.logits = torch.zeros(num_tokens, vocab_size, device=device)
        self.tapped: torch.Tensor | None = None  # [tokens, taps, hidden size]
        if taps:
            assert isinstance(target.model, FusedDecoder)
            size = target.model.weights.norm.size
            self.tapped = torch.zeros(num_tokens, len(taps), size, dtype=target.model.dtype, device=device)
        width = vocab_size if draft is None else draft.vocab_size
        num_drafting = 0 if draft is None and head is None else rows.max_rows
        self.draft_logits = torch.zeros(num_drafting, width, device=device)
        self.replays: dict[Shape, Callable[[], None]] = {}
        self.enabled = True
        self.num_replays = 0
        self.num_misses = 0
        self._found: dict[tuple[int, int | None, int], Shape | None] = {}

    def find(self, num_rows: int, queries: int | None, fed: int = 1) -> Shape | None:
        """Returns the captured pass for a batch; None if there is none."""
        if not self.enabled:
            return None
        key = num_rows, queries, fed
        if key not in self._found:
            self._found[key] = smallest(*key, self.replays)
        return self._found[key]

    def pieces(
        self, spans: list[Span], queries: int | None, fed: int = 1
    ) -> list[tuple[Shape, list[Span]]] | None:
        """Returns the captured passes that hold a batch, as few as can be; None, which is counted, if none
        do."""
        pieces = self._pieces(spans, queries, fed) if self.find(1, queries, fed) else None
        self.num_misses += pieces is None and self.enabled
        return pieces

    def _pieces(self, spans: list[Span], queries: int | None, fed: int) -> list[tuple[Shape, list[Span]]]:
        shape, half = self.find(len(spans), queries, fed), len(spans) // 2
        if shape is not None:
            return [(shape, spans)]
        return self._pieces(spans[:half], queries, fed) + self._pieces(spans[half:], queries, fed)

    def replay(self, shape: Shape) -> None:
        self.num_replays += 1
        self.replays[shape]()

    def add(self, shape: Shape) -> None:
        """Captures one more pass. Raises whatever the device's library raises."""
        self.rows.begin()
        self.rows.send(shape.rows)  # The runs before the capture are real ones, over no rows.
        self.replays[shape] = self.capture.record(lambda: self.run(shape))
        self._found.clear()

    def run(self, shape: Shape) -> None:
        """Runs the captured function: no Python decision here or below depends on the numbers."""
        if shape.queries is not None:
            self._score(shape)
        elif self.head is not None:
            self.head.run(shape, self.draft_logits[: shape.rows])
        else:
            self._draft(shape)

    def _draft(self, shape: Shape) -> None:
        """Runs a pass over the last two tokens of rows."""
        assert self.draft is not None
        model, rows, num_rows = self.draft.model, self.rows, shape.rows
        assert isinstance(model, FusedDecoder)
        ids = rows.ids(num_rows)
        # A stand-in replaces tokens that only the target knows.
        token_ids = ids[:, :DRAFT_TOKENS].clamp(max=model.vocab_size - 1)
        num_skipped = rows.field(num_rows, Field.NUM_SKIPPED)
        counts = torch.where(rows.field(num_rows, Field.NUM_DRAFTS) < 0, 0, DRAFT_TOKENS)
        first = rows.field(num_rows, Field.NUM_STORED) - 1
        index = torch.arange(num_rows, device=ids.device) * DRAFT_TOKENS + 1
        batch = rows.batch(DRAFT, token_ids, first, num_skipped, counts, index)
        if self.draft.cache.states:
            batch.state_rows = rows.states(DRAFT, first, num_skipped, counts, DRAFT_TOKENS)
        self.draft_logits[:num_rows].copy_(model.compute(batch, self.draft.cache).logits)
        rows.go_on(num_rows)

    def _score(self, shape: Shape) -> None:
        """Runs the target over pending tokens and drafts."""
        assert shape.queries is not None
        model, rows, num_rows = self.target.model, self.rows, shape.rows
        assert isinstance(model, FusedDecoder)
        ids = rows.ids(num_rows)
        num_stored = rows.field(num_rows, Field.NUM_STORED)
        counts = rows.field(num_rows, Field.NUM_DRAFTS) + 1
        every = torch.arange(shape.num_tokens, device=ids.device)
        token_ids = ids[:, 1 : 1 + shape.queries]
        num_skipped = torch.zeros_like(counts)
        batch = rows.batch(TARGET, token_ids, num_stored, num_skipped, counts, every)
        if self.target.cache.states:
            batch.state_rows = rows.states(TARGET, num_stored, num_skipped, counts, shape.queries)
        logits, hidden = model.compute(batch, self.target.cache, self.taps)
        self.logits[: shape.num_tokens].copy_(logits)
        if self.tapped is not None and hidden is not None:
            self.tapped[: shape.num_tokens].copy_(hidden)


class ScorePass:
    """Runs the target's passes over a few tokens of each row, and over pieces of prompts that are no
    longer."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> ForwardOutput | None:
        graphs = self.graphs
        if list(taps) not in ([], graphs.taps) or self._is_mostly_padding(spans):
            return None
        pieces = graphs.pieces(spans, max(len(span.token_ids) for span in spans))
        if pieces is None:
            return None
        num_padded = sum(shape.num_tokens for shape, _ in pieces)
        if len(pieces) > 1 and num_padded > MOST_PADDING * sum(len(span.token_ids) for span in spans):
            graphs.num_misses += 1
            return None
        return _in_pieces(self.run, pieces, ids_on_device, lambda span: len(span.token_ids))

    def _is_mostly_padding(self, spans: list[Span]) -> bool:
        """Tells whether pieces of prompts would make a pass over rows much larger."""
        rows = [span for span in spans if span.num_logits == len(span.token_ids)]
        if len(rows) == len(spans):
            return False
        shape = self.graphs.find(len(spans), max(len(span.token_ids) for span in spans))
        own = self.graphs.find(len(rows), max(len(span.token_ids) for span in rows)) if rows else None
        most = max(MAX_READ_ONCE, 0 if own is None else 2 * own.num_tokens)
        return shape is None or shape.num_tokens > most

    def run(
        self, shape: Shape, spans: list[Span], ids_on_device: torch.Tensor | None = None
    ) -> ForwardOutput:
        """Returns logits, which the next pass may overwrite."""
        graphs, rows = self.graphs, self.graphs.rows
        assert shape.queries is not None
        rows.begin()
        placed = rows.places_of(TARGET, [span.table for span in spans], shape.rows)
        index: list[int] = []  # These are the places of logits, tokens, and ids.
        tokens: list[int] = []
        ids: list[int] = []
        for place, span in zip(placed, spans, strict=True):
            length = len(span.token_ids)
            rows.set_row(place, span.table.num_computed_tokens, [0, *span.token_ids])
            rows.set_table(TARGET, place, span.table)
            rows.set_states(TARGET, place, span.table, span.certain)
            first, end = place * shape.queries, place * shape.queries + length
            index += range(end - span.num_logits, end)
            if graphs.tapped is not None:
                tokens += range(first, end)
            if ids_on_device is not None:
                at = place * rows.width + IDS_AT + 1
                ids += range(at, at + length)
        rows.send(shape.rows)
        index = [] if (dense := _as_slice(index)) else index
        numbers = on_device([*index, *tokens, *ids], graphs.logits.device)
        of_logits, of_tokens, of_ids = numbers.split_with_sizes((len(index), len(tokens), len(ids)))
        if ids_on_device is not None:
            known = rows.numbers.view(-1)
            graphs.capture.launch(lambda: known.index_copy_(0, of_ids, ids_on_device))
        graphs.replay(shape)
        hidden = None if graphs.tapped is None else graphs.tapped.index_select(0, of_tokens)
        logits = graphs.logits[dense] if dense else graphs.logits.index_select(0, of_logits)
        return ForwardOutput(logits, hidden)


class DrawingPass:
    """Runs passes of the model that draws drafts, over the last token or the last few of each row. Tokens
    that rows lack before these, and pieces of prompts that draw nothing, are computed before as usual.

    The device has drawn the tokens of a second pass and later ones. Where these go on with the same rows, the
    pass before has written to the rows what they read: nothing is sent.
    """

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs
        self._tables: list[BlockTable] = []
        self._index: slice | torch.Tensor = slice(0)  # the places of its rows
        self._ends: list[int] = []
        self._shape: Shape | None = None
        self._message = -1

    def goes_on(self, spans: list[Span], ids_on_device: torch.Tensor | None) -> bool:
        """Tells whether these are the rows of the last pass, with one more token that is drawn already. If
        not, no later pass may continue the last one."""
        goes_on = (
            ids_on_device is not None
            and self._message == self.graphs.rows.num_messages
            and [span.table for span in spans] == self._tables
            and [span.table.num_computed_tokens for span in spans] == self._ends
        )
        if not goes_on:
            self._message = -1
        return goes_on

    def begin(self, shape: Shape, spans: list[Span]) -> list[int]:
        """Begins a message; returns the places of its rows."""
        rows = self.graphs.rows
        rows.begin()
        self._tables = [span.table for span in spans]
        places = rows.places_of(DRAFT, self._tables, shape.rows)
        self._index = _as_slice(places) or on_device(places, self.graphs.draft_logits.device)
        self._shape, self._message = shape, rows.num_messages
        return places

    def replay(self, spans: list[Span], ids_on_device: torch.Tensor | None) -> torch.Tensor:
        """Replays the pass that has been begun. Returns its rows' logits, which the next pass may
        overwrite."""
        graphs, shape = self.graphs, self._shape
        assert shape is not None
        self._ends = [span.end for span in spans]
        if ids_on_device is not None:
            last_ids, index = graphs.rows.ids(shape.rows)[:, 1], self._index
            graphs.capture.launch(lambda: last_ids.__setitem__(index, ids_on_device))
        graphs.replay(shape)
        return graphs.draft_logits[self._index]


class DraftPass(DrawingPass):
    """Makes the draft model's passes."""

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> ForwardOutput | None:
        if self.goes_on(spans, ids_on_device):
            return ForwardOutput(self.replay(spans, ids_on_device))
        drawing = [span for span in spans if span.num_logits]
        if taps or not drawing or any(span.num_logits > 1 for span in drawing):
            return None
        pieces = self.graphs.pieces(drawing, None)
        if pieces is None:
            return None
        lacking = [span for span in spans if not span.num_logits or len(span.token_ids) > DRAFT_TOKENS]
        if lacking:
            assert self.graphs.draft is not None
            self.graphs.draft.forward([_beginning(span, DRAFT_TOKENS) for span in lacking])
        pieces = [(shape, [_end(span, DRAFT_TOKENS) for span in members]) for shape, members in pieces]
        return _in_pieces(self.run, pieces, ids_on_device, lambda _: 1)

    def run(
        self, shape: Shape, spans: list[Span], ids_on_device: torch.Tensor | None = None
    ) -> ForwardOutput:
        rows = self.graphs.rows
        for place, span in zip(self.begin(shape, spans), spans, strict=True):
            num_skipped = DRAFT_TOKENS - len(span.token_ids)
            rows.set_row(place, span.end - 1, [0] * num_skipped + span.token_ids, num_skipped)
            rows.set_table(DRAFT, place, span.table)
            rows.set_states(DRAFT, place, span.table, span.certain)
        rows.send(shape.rows)
        return ForwardOutput(self.replay(spans, ids_on_device))


class HeadPass(DrawingPass):
    """Makes the head's passes, over states that wait or over its own."""

    def __init__(self, graphs: RoundGraphs) -> None:
        assert graphs.head is not None
        super().__init__(graphs)
        self.passes = graphs.head

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> ForwardOutput | None:
        later = None if self._shape is None else self._shape.later
        if self.goes_on(spans, ids_on_device) and later in self.graphs.replays:
            self._shape = later
            return self._output(self.replay(spans, ids_on_device))
        if list(taps) not in ([], [self.passes.head.output]) or any(span.num_logits != 1 for span in spans):
            return None
        longest = min(max(len(span.token_ids) for span in spans), self.passes.max_fed)
        longest = next((fed for fed in range(longest, 1, -1) if self.graphs.find(len(spans), None, fed)), 1)
        pieces = self.graphs.pieces(spans, None, longest)
        # Where only the device knows the tokens, a pass that is fed several would take others from the host.
        if pieces is None or (ids_on_device is not None and any(shape.fed > 1 for shape, _ in pieces)):
            return None
        lacking = [span for span in spans if len(span.token_ids) > longest]
        if lacking:
            self.passes.runner.forward([_beginning(span, 1) for span in lacking])
        pieces = [
            (shape, [_end(span, 1) if len(span.token_ids) > longest else span for span in members])
            for shape, members in pieces
        ]
        return _in_pieces(self.run, pieces, ids_on_device, lambda _: 1)

    def run(
        self, shape: Shape, spans: list[Span], ids_on_device: torch.Tensor | None = None
    ) -> ForwardOutput:
        """Returns logits and the head's own state of each row's last token."""
        rows = self.graphs.rows
        places = self.begin(shape, spans)
        for place, span in zip(places, spans, strict=True):
            rows.set_row(place, span.end, [0, span.token_ids[-1]])
            rows.set_table(DRAFT, place, span.table)
        rows.send(shape.rows)
        states = states_of(spans)
        if shape.fed > 1:
            self.passes.feed(places, spans)
        elif states is not None:  # A pass that only measures costs has none.
            self.passes.own[self._index] = states
        return self._output(self.replay(spans, ids_on_device))

    def _output(self, logits: torch.Tensor) -> ForwardOutput:
        head = self.passes.head
        if head.token_ids is not None:
            logits = logits.index_select(1, head.token_ids)
        own = self.passes.own[self._index].clone()
        return ForwardOutput(logits[:, : head.model.vocab_size], own[:, None])


def _beginning(span: Span, num_last: int) -> Span:
    """Returns the part of a span that is computed before its last tokens; all of a span that draws
    nothing."""
    end = len(span.token_ids) - (num_last if span.num_logits else 0)
    states = None if span.states is None else span.states[:end]
    certain = min(span.certain, span.table.num_computed_tokens + end)
    return Span(span.table, span.token_ids[:end], 0, certain, states)


def _end(span: Span, num_last: int) -> Span:
    """Returns a span's last tokens, after its beginning has been computed."""
    states = None if span.states is None else span.states[-num_last:]
    return replace(span, token_ids=span.token_ids[-num_last:], states=states)


def _as_slice(places: list[int]) -> slice | None:
    """Returns ``places`` as a slice, where they follow each other. A piece of a prompt may have none."""
    if not places:
        return slice(0)
    first, end = places[0], places[0] + len(places)
    return slice(first, end) if places == [*range(first, end)] else None


def _in_pieces(
    run: Callable[[Shape, list[Span], torch.Tensor | None], ForwardOutput],
    pieces: list[tuple[Shape, list[Span]]],
    ids_on_device: torch.Tensor | None,
    num_ids: Callable[[Span], int],
) -> ForwardOutput:
    """Runs a batch's ``pieces`` one after the other. Each has its part of ``ids_on_device``, which holds
    ``num_ids`` for each span, and overwrites the logits of the one before."""
    outputs, end = [], 0
    for shape, members in pieces:
        start, end = end, end + sum(map(num_ids, members))
        output = run(shape, members, None if ids_on_device is None else ids_on_device[start:end])
        if len(pieces) == 1:
            return output
        outputs.append(ForwardOutput(output.logits.clone(), output.hidden))
    logits, hidden = zip(*outputs, strict=True)
    return ForwardOutput(torch.cat(logits), _joined(hidden))


def _joined(hidden: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [each for each in hidden if each is not None]
    return torch.cat(found) if found else None


def capture_rounds(
    graphs: RoundGraphs, planned: Sequence[Shape], num_blocks: int, deadline: float, min_free: int
) -> bool:
    """Captures the ``planned`` items, in order, until ``deadline`` (monotonic) or until fewer than
    ``min_free`` bytes are free. The caches are unused, and have a block after ``num_blocks``.

    Returns False, with a line in the log, if anything goes wrong or nothing was captured.
    """
    started = time.monotonic()
    checked = _to_check(planned)
    try:
        for number, shape in enumerate(planned):
            if time.monotonic() > deadline or graphs.capture.free_memory() < min_free:
                break
            graphs.add(shape)
            if shape in checked and not _is_right(graphs, shape, num_blocks, number):
                logger.warning("Not using CUDA graphs: the results of %s differ from the usual pass", shape)
                return False
    except Exception as error:  # Drivers and kernels fail in many ways; the usual passes need none of this.
        logger.warning("CUDA graphs cannot be captured and are not used: %s", error, exc_info=True)
        return False
    took = time.monotonic() - started
    logger.info("Captured %d of %d CUDA graphs in %.1f s", len(graphs.replays), len(planned), took)
    return bool(graphs.replays)


def _to_check(planned: Sequence[Shape]) -> set[Shape]:
    """Returns the smallest and the largest of each model's passes."""
    checked: set[Shape] = set()
    for is_draft in (True, False):
        shapes = [shape for shape in planned if (shape.queries is None) == is_draft]
        if shapes:
            checked |= {pick(shapes, key=lambda shape: shape.num_tokens) for pick in (min, max)}
    return checked


def _is_right(graphs: RoundGraphs, shape: Shape, num_blocks: int, number: int) -> bool:
    """Compares the pass with the usual one over rows of different lengths, in every other comparison a row
    less than there is place for. ``number`` makes texts differ from those before."""
    drafting = graphs.draft if graphs.head is None else graphs.head.runner
    model = drafting if shape.queries is None else graphs.target
    assert model is not None
    head = graphs.head if shape.queries is None else None
    queries = shape.queries or shape.fed
    block_size, layers = model.cache.block_size, model.cache.states.values()
    context = min(CHECK_CONTEXT, (model.model.max_position or CHECK_CONTEXT + queries) - queries)
    blocks_each = -(-(context + queries) // block_size)
    num_rows = min(max(1, shape.rows - number % 2), num_blocks // blocks_each)
    num_rows = min([num_rows, *(len(layer.inputs) for layer in layers)])
    if context < 1 or num_rows == 0:
        return True  # No text fits.

    def stored() -> list[Span]:
        """Stores the beginnings of texts, and returns their continuations."""
        spans = []
        for row in range(num_rows):
            table = BlockTable()
            # The blocks are not in order, so that a slot must come from the table.
            first = num_blocks - 1 - row * blocks_each
            table.block_ids = [first - i for i in range(blocks_each)]
            table.state_slot = num_rows - 1 - row if layers else None
            length = context - row % context
            ids = [
                (7 * i * i + 3 * i + 11 * row + 13 * number + 1) % model.vocab_size
                for i in range(length + queries)
            ]
            states = None if head is None else _states_to_check(head, len(ids), row)
            before, after = (None, None) if states is None else (states[:length], states[length:])
            model.forward([Span(table, ids[:length], 1, states=before)])
            new = ids[length : length + queries - row % queries]
            after = None if after is None else after[: len(new)]
            spans.append(Span(table, new, 1 if shape.queries is None else len(new), states=after))
        return spans

    spans = stored()
    # The usual pass runs first, and stores the tokens that this one should have stored.
    kind = ScorePass if shape.queries else DraftPass if head is None else HeadPass
    replayed = kind(graphs).run(shape, spans)
    # States have been folded by that.
    taps = graphs.taps if shape.queries else () if head is None else (head.head.output,)
    usual = model.forward(stored() if layers else spans, taps=taps)
    if head is not None and usual.hidden is not None:
        lasts = [end - 1 for end in accumulate(len(span.token_ids) for span in spans)]
        usual = usual._replace(hidden=usual.hidden[lasts])
    tolerance = TOLERANCES[model.model.dtype]
    return all(
        same_logits(ours.float(), theirs.float(), tolerance)
        for ours, theirs in zip(replayed, usual, strict=True)
        if ours is not None and theirs is not None
    )


def _states_to_check(head: HeadPasses, num_tokens: int, row: int) -> torch.Tensor:
    """Returns states that differ in all places."""
    numbers = torch.arange(num_tokens * head.own.shape[1], device=head.own.device, dtype=torch.float32)
    return (numbers * (0.37 + 0.01 * row)).sin().view(num_tokens, -1).to(head.own.dtype)
