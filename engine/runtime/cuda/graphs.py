"""Drafting, and scoring with the verdict, as captured passes: one launch in place of hundreds.

On a GPU a pass over a few tokens is over before the host has launched the next one's kernels. One graph for
each number of rows is a draft model's pass with its draw, to be launched once a drafted token; one for each
number of rows and tokens is the target's pass with the verdict of every rule. What no captured shape holds
runs by phases, through the same caches.

The smallest and the largest pass of each kind are compared with the usual one on a short text. If one
deviates or cannot be captured, none is used, and the log says so.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.models.llama import TOLERANCES, Llama, same_logits
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.draft_model import in_width
from truedraft.engine.runtime.cuda.capture import Capture
from truedraft.engine.runtime.cuda.rows import DRAFT, TARGET, DeviceRows, Field
from truedraft.engine.runtime.cuda.sampling import Draws, draw_draft, verdict
from truedraft.engine.runtime.cuda.shapes import DRAFT_TOKENS, Shape, smallest

# Tokens in the cache before those of a comparison: more than a block, and not a multiple of it.
CHECK_CONTEXT = 19

logger = logging.getLogger(__name__)


class RoundGraphs:
    """The captured passes of a target and, if there is one, its draft model, over their caches. ``rows`` are
    what they read and, where drafts are drawn, write. ``enabled`` is for comparisons."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner | None,
        rows: DeviceRows,
        planned: Sequence[Shape],
        max_drawn: int,
        capture: Capture,
    ) -> None:
        self.target = target
        self.draft = draft
        self.rows = rows
        self.capture = capture
        self.max_drawn = max_drawn
        device, vocab_size = target.device, target.vocab_size
        num_tokens = max(shape.num_tokens for shape in planned)
        # In one place for all, as their pool is overwritten by every replay.
        self.logits = torch.zeros(num_tokens, vocab_size, device=device)
        width = vocab_size if draft is None else draft.vocab_size
        self.draft_logits = torch.zeros(rows.max_rows, width, device=device)
        self.draft_probs = torch.zeros(rows.max_rows, max_drawn, vocab_size, device=device)
        self.verdicts = torch.zeros(rows.max_rows, 3 + rows.max_drafts, dtype=torch.int64, device=device)
        self.replays: dict[Shape, Callable[[], None]] = {}
        self.enabled = True
        self.num_replays = 0
        self.num_misses = 0
        self._chosen: dict[tuple[Draws, int, int | None], Shape | None] = {}

    def find(self, draws: Draws, num_rows: int, queries: int | None) -> Shape | None:
        """The captured pass for a batch; None if there is none."""
        if not self.enabled:
            return None
        key = draws, num_rows, queries
        if key not in self._chosen:
            self._chosen[key] = smallest(*key, self.replays)
        return self._chosen[key]

    def replay(self, shape: Shape) -> None:
        self.num_replays += 1
        self.replays[shape]()

    def add(self, shape: Shape) -> None:
        """Capture one more. Raises whatever the device's library does."""
        self.rows.begin()
        self.rows.send(shape.rows)  # the runs before the capture are real: over no rows
        step = self._score if shape.queries else self._draft
        self.replays[shape] = self.capture.record(lambda: step(shape))
        self._chosen.clear()

    # What is captured: no Python decision here or below depends on the numbers.

    def _draft(self, shape: Shape) -> None:
        """A pass over the last two tokens of rows that still draft, and the draw of the next one."""
        assert self.draft is not None
        model, rows, num_rows = self.draft.model, self.rows, shape.rows
        assert isinstance(model, Llama)
        number, ids = rows.pass_number, rows.ids(num_rows)
        drafts_still = number < rows.field(num_rows, Field.NUM_DRAWN)
        last = number + torch.arange(DRAFT_TOKENS, device=ids.device)
        # Tokens that only the target knows have a stand-in.
        token_ids = ids.index_select(1, last).clamp(max=model.vocab_size - 1)
        # From the second pass on the first of both is stored.
        num_skipped = torch.maximum(rows.field(num_rows, Field.NUM_SKIPPED), number.clamp(max=1))
        counts = torch.where(drafts_still, DRAFT_TOKENS, 0)
        first = rows.field(num_rows, Field.NUM_STORED) - 1 + number
        index = torch.arange(num_rows, device=ids.device) * DRAFT_TOKENS + 1
        batch = rows.batch(DRAFT, token_ids, first, num_skipped, counts, index)
        own_logits = model.compute(batch, self.draft.cache).logits
        self.draft_logits[:num_rows].copy_(own_logits)
        logits = in_width(own_logits, self.target.vocab_size)
        drawn, probs = draw_draft(shape.draws, logits, rows, number)
        place = number + DRAFT_TOKENS
        kept = torch.where(drafts_still, drawn, ids.index_select(1, place).squeeze(1))
        ids.index_copy_(1, place, kept[:, None])
        if probs is not None:
            self.draft_probs[:num_rows].index_copy_(1, number, probs[:, None])
        # It stays within the tensors however often this runs: warm-ups are no rounds.
        number.add_(1).remainder_(self.max_drawn)

    def _score(self, shape: Shape) -> None:
        """The target's pass over pending tokens and drafts, and what becomes of them."""
        assert shape.queries is not None
        model, rows, num_rows = self.target.model, self.rows, shape.rows
        assert isinstance(model, Llama)
        num_drafts = shape.queries - 1
        ids = rows.ids(num_rows)
        num_stored = rows.field(num_rows, Field.NUM_STORED)
        counts = rows.field(num_rows, Field.NUM_DRAFTS) + 1
        every = torch.arange(shape.num_tokens, device=ids.device)
        token_ids = ids[:, 1 : 1 + shape.queries]
        batch = rows.batch(TARGET, token_ids, num_stored, torch.zeros_like(counts), counts, every)
        logits = self.logits[: shape.num_tokens]
        logits.copy_(model.compute(batch, self.target.cache).logits)
        is_draft = torch.arange(num_drafts, device=ids.device) < counts[:, None] - 1
        draft_ids = torch.where(is_draft, ids[:, 2 : 2 + num_drafts], 0)
        by_row = logits.view(num_rows, shape.queries, -1)
        self.verdicts[:num_rows, :3] = verdict(
            shape.draws, by_row, draft_ids, self.draft_probs[:num_rows, :num_drafts], rows
        )
        self.verdicts[:num_rows, 3 : 3 + num_drafts] = draft_ids


class ScorePass:
    """The target's passes over a few tokens of each row, for callers that need their logits."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs

    def __call__(self, spans: list[Span], ids_on_device: torch.Tensor | None) -> torch.Tensor | None:
        graphs = self.graphs
        queries = max(len(span.token_ids) for span in spans)
        is_short = queries <= graphs.rows.max_drafts + 1 and all(span.num_logits for span in spans)
        if ids_on_device is not None or not is_short:
            return None
        shape = graphs.find(Draws.GREEDY, len(spans), queries)
        if shape is None:
            graphs.num_misses += graphs.enabled
            return None
        return self.run(shape, spans)

    def run(self, shape: Shape, spans: list[Span]) -> torch.Tensor:
        assert shape.queries is not None
        graphs, rows = self.graphs, self.graphs.rows
        rows.begin()
        index: list[int] = []
        for row, span in enumerate(spans):
            length = len(span.token_ids)
            rows.set_row(row, span.table.num_computed_tokens, [0, *span.token_ids], length - 1)
            rows.set_table(TARGET, row, span.table.block_ids)
            end = row * shape.queries + length
            index += range(end - span.num_logits, end)
        rows.send(shape.rows)
        graphs.replay(shape)
        return graphs.logits.index_select(0, on_device(index, graphs.logits.device))


class DraftPass:
    """The draft model's passes over one or two tokens of each row, likewise."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs

    def __call__(self, spans: list[Span], ids_on_device: torch.Tensor | None) -> torch.Tensor | None:
        graphs = self.graphs
        if not all(len(span.token_ids) <= DRAFT_TOKENS and span.num_logits == 1 for span in spans):
            return None
        shape = graphs.find(Draws.GREEDY, len(spans), None)
        if shape is None:
            graphs.num_misses += graphs.enabled
            return None
        return self.run(shape, spans, ids_on_device)

    def run(self, shape: Shape, spans: list[Span], ids_on_device: torch.Tensor | None = None) -> torch.Tensor:
        graphs, rows = self.graphs, self.graphs.rows
        rows.begin()
        for row, span in enumerate(spans):
            num_skipped = DRAFT_TOKENS - len(span.token_ids)
            last = span.table.num_computed_tokens + len(span.token_ids) - 1
            rows.set_row(row, last, [0] * num_skipped + span.token_ids, 1, 1, num_skipped)
            rows.set_table(DRAFT, row, span.table.block_ids)
        rows.send(shape.rows)
        if ids_on_device is not None:
            last_ids = rows.ids(len(spans))[:, 1]
            graphs.capture.launch(lambda: last_ids.copy_(ids_on_device))
        graphs.replay(shape)
        return graphs.draft_logits[: len(spans)].clone()


def capture_rounds(
    graphs: RoundGraphs, planned: Sequence[Shape], num_blocks: int, deadline: float, min_free: int
) -> bool:
    """Capture the ``planned`` passes in order, until ``deadline`` (monotonic) or until fewer than
    ``min_free`` bytes are free. The caches are unused, and have a block behind ``num_blocks``.

    False, with a line in the log, if anything goes wrong or nothing was captured.
    """
    started = time.monotonic()
    checked = {shape for kind in _kinds(planned) for shape in (kind[0], kind[-1])}
    try:
        for number, shape in enumerate(planned):
            if time.monotonic() > deadline or graphs.capture.free_memory() < min_free:
                break
            graphs.add(shape)
            if shape in checked and not _is_right(graphs, shape, num_blocks, number):
                logger.warning("CUDA graphs differ from the usual pass (%s) and are not used", shape)
                return False
    except Exception as error:  # drivers and kernels fail in many ways; the usual passes need none of this
        logger.warning("CUDA graphs cannot be captured and are not used: %s", error, exc_info=True)
        return False
    took = time.monotonic() - started
    logger.info("Captured %d of %d CUDA graphs in %.1f s", len(graphs.replays), len(planned), took)
    return bool(graphs.replays)


def _kinds(planned: Sequence[Shape]) -> list[list[Shape]]:
    """By what they draw, and by model; the smallest first."""
    kinds: dict[tuple[Draws, bool], list[Shape]] = {}
    for shape in planned:
        kinds.setdefault((shape.draws, shape.queries is None), []).append(shape)
    return [sorted(kind, key=lambda shape: shape.num_tokens) for kind in kinds.values()]


def _is_right(graphs: RoundGraphs, shape: Shape, num_blocks: int, number: int) -> bool:
    """Whether the captured pass's logits are the usual one's, over rows of different lengths, in every other
    comparison a row less than there is place for. ``number`` makes texts differ from those before."""
    model = graphs.draft if shape.queries is None else graphs.target
    assert model is not None
    queries = shape.queries or DRAFT_TOKENS
    block_size = model.cache.block_size
    context = min(CHECK_CONTEXT, (model.model.max_position or CHECK_CONTEXT + queries) - queries)
    blocks_each = -(-(context + queries) // block_size)
    num_rows = min(max(1, shape.rows - number % 2), num_blocks // blocks_each)
    if context < 1 or num_rows == 0:
        return True  # no text fits
    spans = []
    for row in range(num_rows):
        table = BlockTable()
        # Not in order, so that a slot must come from the table.
        first = num_blocks - 1 - row * blocks_each
        table.block_ids = [first - i for i in range(blocks_each)]
        length = context - row % context
        ids = [
            (7 * i * i + 3 * i + 11 * row + 13 * number + 1) % model.vocab_size
            for i in range(length + queries)
        ]
        model.forward([Span(table, ids[:length], 1)])
        new = ids[length : length + queries - row % queries]
        spans.append(Span(table, new, 1 if shape.queries is None else len(new)))
    # First, as the usual pass stores what this one should have stored.
    replayed = (DraftPass if shape.queries is None else ScorePass)(graphs).run(shape, spans)
    return same_logits(replayed, model.forward(spans).logits, TOLERANCES[model.model.dtype])
