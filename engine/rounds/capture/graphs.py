"""Captures drafting, and scoring with the verdict: a few launches in place of hundreds.

On a GPU a pass over a few tokens is over before the host has launched the next one's kernels. There is one
graph of a draft model's pass for each number of rows, and one of the target's for each number of rows and
tokens. Draws from their logits, and verdicts, are captured apart: between a pass and its verdict the logits
of rows that ask for more are adjusted. Batches that no captured shape holds run by phases, through the same
caches.

The smallest and the largest pass of each kind are compared with the usual one on a short text, and their
verdicts with those of the same operations uncaptured. If one deviates or cannot be captured, none is used,
and the log says so.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from truedraft.engine.cuda.triton_sampling import Sampling
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
    Captured,
    Shape,
    Stage,
    shape_of,
    smallest,
    smallest_stage,
)
from truedraft.engine.rows.columns import RULES, Field
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.probes import PARAMS

# A comparison has this many tokens in the cache: more than a block, and not a multiple of it.
CHECK_CONTEXT = 19

logger = logging.getLogger(__name__)


class RoundGraphs:
    """Holds the captured passes of a target and of its draft model or ``head``, if any, over their caches.
    The passes read ``rows`` and, where drafts are drawn, write to them; ``sampling`` draws and verifies. The
    target's passes leave the states after the layers ``taps``, too. Comparisons switch ``enabled``."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner | None,
        rows: DeviceRows,
        planned: Sequence[Captured],
        max_drawn: int,
        sampling: Sampling,
        capture: Capture,
        taps: Sequence[int] = (),
        head: HeadPasses | None = None,
    ) -> None:
        self.target = target
        self.head = head
        self.draft = draft
        self.rows = rows
        self.sampling = sampling
        self.capture = capture
        self.max_drawn = max_drawn
        self.taps = list(taps)
        for runner in (target, draft, None if head is None else head.runner):
            if runner is not None and isinstance(runner.model, FusedDecoder):
                runner.model.rotary.reach_all()
        device, vocab_size = target.device, target.vocab_size
        num_tokens = max(item.num_tokens for item in planned if isinstance(item, Shape))
        # All passes leave results in one place, as every replay overwrites their pool.
        self.logits = torch.zeros(num_tokens, vocab_size, device=device)
        self.tapped: torch.Tensor | None = None  # [tokens, taps, hidden size]
        if taps:
            assert isinstance(target.model, FusedDecoder)
            size = target.model.weights.norm.size
            self.tapped = torch.zeros(num_tokens, len(taps), size, dtype=target.model.dtype, device=device)
        width = vocab_size if draft is None else draft.vocab_size
        self.draft_logits = torch.zeros(rows.max_rows, width, device=device)
        self.draft_probs = torch.zeros(rows.max_rows, max_drawn, vocab_size, device=device)
        self.verdicts = torch.zeros(rows.max_rows, 3 + rows.max_drafts, dtype=torch.int64, device=device)
        self.replays: dict[Captured, Callable[[], None]] = {}
        self.enabled = True
        self.num_replays = 0  # counts passes
        self.num_misses = 0
        self._passes: dict[tuple[int, int | None], Shape | None] = {}
        self._stages: dict[tuple[int, int | None], Stage | None] = {}

    def find_pass(self, num_rows: int, queries: int | None) -> Shape | None:
        """Returns the captured pass for a batch; None if there is none."""
        if not self.enabled:
            return None
        key = num_rows, queries
        if key not in self._passes:
            self._passes[key] = smallest(*key, self.replays)
        return self._passes[key]

    def find(self, num_rows: int, queries: int | None) -> Stage | None:
        """Returns the captured draws or verdicts for a batch whose pass is captured, too; None if there are
        none."""
        if not self.enabled:
            return None
        key = num_rows, queries
        if key not in self._stages:
            self._stages[key] = smallest_stage(*key, self.replays)
        return self._stages[key]

    def most_queries(self, num_rows: int, queries: int) -> int:
        """Returns how many of a row's ``queries`` tokens can be verified at once; 0 if not even one."""
        return next((n for n in range(queries, 0, -1) if self.find(num_rows, n)), 0)

    def replay(self, item: Captured) -> None:
        self.num_replays += isinstance(item, Shape)
        self.replays[item]()

    def replay_drafts(self, stage: Stage, num_drafts: int) -> None:
        """Launches the passes and draws of this many drafts."""
        for number in range(num_drafts):
            is_later = self.head is not None and number > 0
            self.replay(stage.shape.later if is_later else stage.shape)
            self.replay(stage)

    def add(self, item: Captured) -> None:
        """Captures one more; a stage's pass must be captured already. Raises whatever the device's library
        raises."""
        shape = shape_of(item)
        self.rows.begin()
        self.rows.send(shape.rows)  # The runs before the capture are real ones, over no rows.
        self.replays[item] = self.capture.record(lambda: self.run(item))
        self._passes.clear()
        self._stages.clear()

    def run(self, item: Captured) -> None:
        """Runs the captured function: no Python decision here or below depends on the numbers."""
        if isinstance(item, Shape) and item.queries is None and self.head is not None:
            self.head.run(item, self.draft_logits[: item.rows])
        elif isinstance(item, Shape):
            (self._score if item.queries else self._draft)(item)
        else:
            (self._judge if item.shape.queries else self._draw)(item)

    def _draft(self, shape: Shape) -> None:
        """Runs a pass over the last two tokens of rows that still draft."""
        assert self.draft is not None
        model, rows, num_rows = self.draft.model, self.rows, shape.rows
        assert isinstance(model, FusedDecoder)
        number, ids = rows.pass_number, rows.ids(num_rows)
        drafts_still = number < rows.field(num_rows, Field.NUM_DRAWN)
        last = number + torch.arange(DRAFT_TOKENS, device=ids.device)
        # A stand-in replaces tokens that only the target knows.
        token_ids = ids.index_select(1, last).clamp(max=model.vocab_size - 1)
        # From the second pass on, the first of both is stored already.
        num_skipped = torch.maximum(rows.field(num_rows, Field.NUM_SKIPPED), number.clamp(max=1))
        counts = torch.where(drafts_still, DRAFT_TOKENS, 0)
        first = rows.field(num_rows, Field.NUM_STORED) - 1 + number
        index = torch.arange(num_rows, device=ids.device) * DRAFT_TOKENS + 1
        batch = rows.batch(DRAFT, token_ids, first, num_skipped, counts, index)
        if self.draft.cache.states:
            batch.state_rows = rows.states(DRAFT, first, num_skipped, counts, DRAFT_TOKENS, number)
        self.draft_logits[:num_rows].copy_(model.compute(batch, self.draft.cache).logits)

    def _draw(self, stage: Stage) -> None:
        """Draws the next token of rows that still draft."""
        num_rows, number = stage.shape.rows, self.rows.pass_number
        numbers = self.rows.numbers[:num_rows]
        self.sampling.draw_drafts(self.draft_logits[:num_rows], self.draft_probs[:num_rows], numbers, number)
        # The index stays within the tensors however often this runs, as warm-ups are no rounds.
        number.add_(1).remainder_(self.max_drawn)

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

    def set_spans(self, shape: Shape, spans: Sequence[Span], rows: Iterable[int]) -> list[range]:
        """Tells the target's pass of this shape what to score in these rows, given spans whose tokens are
        known; returns the places of their results."""
        assert shape.queries is not None
        places: list[range] = []
        for row, span in zip(rows, spans, strict=True):
            length = len(span.token_ids)
            self.rows.set_row(row, span.table.num_computed_tokens, [0, *span.token_ids], length - 1)
            self.rows.set_table(TARGET, row, span.table)
            self.rows.set_states(TARGET, row, span.table, span.certain)
            places.append(range(row * shape.queries, row * shape.queries + length))
        return places

    def output_of(self, spans: Sequence[Span], places: Sequence[range]) -> ForwardOutput:
        """Returns the results of the last pass for spans in these places."""
        index = [
            place
            for span, own in zip(spans, places, strict=True)
            for place in own[len(own) - span.num_logits :]
        ]
        logits = self.logits.index_select(0, on_device(index, self.logits.device))
        if self.tapped is None:
            return ForwardOutput(logits)
        every = [place for own in places for place in own]
        return ForwardOutput(logits, self.tapped.index_select(0, on_device(every, self.logits.device)))

    def logits_of(self, shape: Shape) -> torch.Tensor:
        """Returns the logits of the last pass of this shape: [rows, queries, V]."""
        assert shape.queries is not None
        return self.logits[: shape.num_tokens].view(shape.rows, shape.queries, -1)

    def tapped_of(self, shape: Shape) -> torch.Tensor | None:
        """Returns the tapped states of the last pass of this shape: [rows, queries, taps, hidden size]."""
        assert shape.queries is not None
        if self.tapped is None:
            return None
        return self.tapped[: shape.num_tokens].view(shape.rows, shape.queries, *self.tapped.shape[1:])

    def _judge(self, stage: Stage) -> None:
        """Decides how many drafts are accepted, and which token follows them."""
        logits, num_rows = self.logits_of(stage.shape), stage.shape.rows
        numbers, verdicts = self.rows.numbers[:num_rows], self.verdicts[:num_rows]
        self.sampling.judge(logits, self.draft_probs[:num_rows], numbers, verdicts)


class ScorePass:
    """Runs the target's captured passes over a few tokens of each row, for callers that need their logits, or
    the tapped states as well."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        graphs = self.graphs
        queries = max(len(span.token_ids) for span in spans)
        is_short = queries <= graphs.rows.max_drafts + 1 and all(span.num_logits for span in spans)
        if ids_on_device is not None or list(taps) not in ([], graphs.taps) or not is_short:
            return None
        shape = graphs.find_pass(len(spans), queries)
        if shape is None:
            graphs.num_misses += graphs.enabled
            return None
        return self.run(shape, spans)

    def run(self, shape: Shape, spans: list[Span]) -> ForwardOutput:
        graphs, rows = self.graphs, self.graphs.rows
        rows.begin()
        places = graphs.set_spans(shape, spans, range(len(spans)))
        rows.send(shape.rows)
        graphs.replay(shape)
        return graphs.output_of(spans, places)


class DraftPass:
    """Runs the draft model's captured passes over one or two tokens of each row for such callers."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        graphs = self.graphs
        if taps or not all(len(span.token_ids) <= DRAFT_TOKENS and span.num_logits == 1 for span in spans):
            return None
        shape = graphs.find_pass(len(spans), None)
        if shape is None:
            graphs.num_misses += graphs.enabled
            return None
        return self.run(shape, spans, ids_on_device)

    def run(
        self, shape: Shape, spans: list[Span], ids_on_device: torch.Tensor | None = None
    ) -> ForwardOutput:
        graphs, rows = self.graphs, self.graphs.rows
        rows.begin()
        for row, span in enumerate(spans):
            num_skipped = DRAFT_TOKENS - len(span.token_ids)
            last = span.table.num_computed_tokens + len(span.token_ids) - 1
            rows.set_row(row, last, [0] * num_skipped + span.token_ids, 1, 1, num_skipped)
            rows.set_table(DRAFT, row, span.table)
            rows.set_states(DRAFT, row, span.table, span.certain)
        rows.send(shape.rows)
        if ids_on_device is not None:
            last_ids = rows.ids(len(spans))[:, 1]
            graphs.capture.launch(lambda: last_ids.copy_(ids_on_device))
        graphs.replay(shape)
        return ForwardOutput(graphs.draft_logits[: len(spans)].clone())


class HeadPass:
    """Runs the head's captured passes over one token of each row for such callers; comparisons run passes
    over several tokens."""

    def __init__(self, graphs: RoundGraphs) -> None:
        assert graphs.head is not None
        self.graphs = graphs
        self.passes = graphs.head

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        graphs = self.graphs
        is_one = all(len(span.token_ids) == span.num_logits == 1 for span in spans)
        if list(taps) not in ([], [self.passes.head.output]) or not is_one:
            return None
        shape = graphs.find_pass(len(spans), None)
        if shape is None or shape.fed > 1:
            graphs.num_misses += graphs.enabled
            return None
        return self.run(shape, spans, ids_on_device)

    def run(
        self, shape: Shape, spans: list[Span], ids_on_device: torch.Tensor | None = None
    ) -> ForwardOutput:
        """Returns logits and the head's own state of each row's last token."""
        graphs, rows, num_rows = self.graphs, self.graphs.rows, len(spans)
        rows.begin()
        for row, span in enumerate(spans):
            rows.set_row(row, span.end, [0, span.token_ids[-1]], 1, 1)
            rows.set_table(DRAFT, row, span.table)
        rows.send(shape.rows)
        states = states_of(spans)
        if shape.fed > 1:
            self.passes.feed(range(num_rows), spans)
        elif states is not None:  # A pass that only measures costs has none.
            self.passes.own[:num_rows].copy_(states)
        if ids_on_device is not None:
            last_ids = rows.ids(num_rows)[:, 1]
            graphs.capture.launch(lambda: last_ids.copy_(ids_on_device))
        graphs.replay(shape)
        head, logits = self.passes.head, graphs.draft_logits[:num_rows]
        logits = logits.clone() if head.token_ids is None else logits.index_select(1, head.token_ids)
        return ForwardOutput(logits[:, : head.model.vocab_size], self.passes.own[:num_rows, None].clone())


def capture_rounds(
    graphs: RoundGraphs, planned: Sequence[Captured], num_blocks: int, deadline: float, min_free: int
) -> bool:
    """Captures the ``planned`` items, in order, until ``deadline`` (monotonic) or until fewer than
    ``min_free`` bytes are free. The caches are unused, and have a block after ``num_blocks``.

    Returns False, with a line in the log, if anything goes wrong or no round was captured.
    """
    started = time.monotonic()
    checked = _to_check(planned)
    try:
        for number, item in enumerate(planned):
            if time.monotonic() > deadline or graphs.capture.free_memory() < min_free:
                break
            graphs.add(item)
            if item in checked and not _is_right(graphs, item, num_blocks, number):
                logger.warning("Not using CUDA graphs: the results of %s differ from the usual pass", item)
                return False
    except Exception as error:  # Drivers and kernels fail in many ways; the usual passes need none of this.
        logger.warning("CUDA graphs cannot be captured and are not used: %s", error, exc_info=True)
        return False
    took = time.monotonic() - started
    logger.info("Captured %d of %d CUDA graphs in %.1f s", len(graphs.replays), len(planned), took)
    return any(isinstance(item, Stage) for item in graphs.replays)


def _to_check(planned: Sequence[Captured]) -> set[Captured]:
    """Returns the smallest and the largest of each model's passes, and their stages."""
    checked: set[Captured] = set()
    for is_draft in (True, False):
        shapes = [item for item in planned if isinstance(item, Shape) and (item.queries is None) == is_draft]
        if shapes:
            checked |= {pick(shapes, key=lambda shape: shape.num_tokens) for pick in (min, max)}
    return checked | {item for item in planned if isinstance(item, Stage) and item.shape in checked}


def _is_right(graphs: RoundGraphs, item: Captured, num_blocks: int, number: int) -> bool:
    """Compares captured work with the same work uncaptured; ``number`` makes texts differ from earlier
    ones."""
    if isinstance(item, Stage):
        return _says_the_same(graphs, item)
    return _has_the_same_logits(graphs, item, num_blocks, number)


def _says_the_same(graphs: RoundGraphs, stage: Stage) -> bool:
    """Compares draws and verdicts bit for bit: over the logits of the last pass, by every rule. Each row
    drafts as many tokens as fit, or one less."""
    rows, shape = graphs.rows, stage.shape
    num_drafts = graphs.max_drawn if shape.queries is None else shape.queries - 1
    found = []
    checked = RowTable().rows_of(probes := [_probe(row) for row in range(shape.rows)])
    for run in (graphs.replays[stage], lambda: graphs.capture.launch(lambda: graphs.run(stage))):
        rows.begin()
        for row in range(shape.rows):
            length = max(0, num_drafts - row % 2)
            # Drafts that the draft model could not have drawn are certain: they have no distribution.
            drawn = length if length <= graphs.max_drawn else 0
            ids = [number % graphs.target.vocab_size for number in range(2 + length)]
            rows.set_row(row, CHECK_CONTEXT, ids, length, drawn)
            rows.set_sampling(row, checked[row])
        rows.send(shape.rows)
        run()
        written = rows.ids(shape.rows), graphs.draft_probs[: shape.rows], graphs.verdicts[: shape.rows]
        found.append([tensor.clone() for tensor in written])
    rows.forget()
    del probes  # Their rows end with them.
    return all(map(torch.equal, *found))


def _probe(row: int) -> LoneText:
    return LoneText(PARAMS[row % len(PARAMS)], RULES[row % len(RULES)], seed=row + 1)


def _has_the_same_logits(graphs: RoundGraphs, shape: Shape, num_blocks: int, number: int) -> bool:
    """Compares logits over rows of different lengths; every other comparison has a row less than fits."""
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
