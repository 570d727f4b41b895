"""Drafting several tokens without asking the host in between: each pass reads what the one before it drew.

The usual loop reads every drafted id before it can launch the next pass. Here passes and draws are captured
together, as ``StepGraphs`` captures passes, and the host learns all ids of a round at once, when it launches
the target's pass. What no captured chain holds is drafted by the usual loop.

Every captured chain is compared with the usual passes. If one deviates or cannot be captured, none is used.
Exactness does not depend on it: drafts are guesses, which the target judges.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import Span, table_slots
from engine.core.block_pool import BlockTable
from engine.models.chain_inputs import ChainBucket, ChainInputs, ChainPass, fitting
from engine.models.decoder_only import DecoderModel
from engine.models.graph_capture import Capture, capture_planned
from engine.models.layer_parts import TorchParts
from engine.models.lean_decoder import same_logits
from engine.models.step_buckets import Bucket
from engine.models.step_graphs import StepGraphs, Text, check_texts
from engine.sampling.captured_draw import DrawKind, DrawRow, DrawTensors, captured_draw
from engine.sampling.random import counters

# No draft is longer.
MAX_PASSES = 32
# Rows of the comparison at start: those of a kind, and of lower ones beside them.
CHECK_ROWS = {
    DrawKind.GREEDY: DrawRow(is_greedy=True, seed=0),
    DrawKind.SAMPLED: DrawRow(is_greedy=False, seed=11, temperature=0.8),
    DrawKind.CUT: DrawRow(is_greedy=False, seed=-5, temperature=1.2, top_k=7, top_p=0.9, min_p=0.01),
}


def in_width(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A draft's ``logits`` [rows, its vocabulary] in the target's width: ids that only one of both knows have
    probability zero in the draft."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return F.pad(logits, (0, missing), value=-torch.inf)
    return logits if missing == 0 else logits[:, :vocab_size]


class DraftChain:
    """The captured chains of the draft model whose passes are ``steps``; ``vocab_size`` is the target's.

    Called as ``DecoderModel.draft_chain``. Every replay goes on where the last one ended.
    """

    def __init__(self, steps: StepGraphs, planned: Sequence[ChainBucket], vocab_size: int) -> None:
        self.steps = steps
        self.vocab_size = vocab_size
        self.device = steps.logits.device
        scratch_block, capture = steps.inputs.scratch_block, steps.capture
        gathers = not steps.lean.reads_in_place
        self.inputs = ChainInputs(planned, steps.block_size, scratch_block, self.device, capture, gathers)
        num_rows = max(bucket.shape.rows for bucket in planned)
        # In one place for all, as their pool is overwritten by every replay.
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.num_done = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.drawn = torch.zeros(MAX_PASSES, num_rows, dtype=torch.int64, device=self.device)
        self.logits = torch.zeros(num_rows, vocab_size, device=self.device)  # the last pass's
        self.counters = counters(vocab_size, self.device)
        self.replays: dict[ChainBucket, Callable[[], None]] = {}
        self.num_replays = 0
        self.num_misses = 0
        self._chosen: dict[tuple[DrawKind, int, int, int], list[ChainBucket]] = {}

    def __call__(
        self,
        tables: Sequence[BlockTable],
        num_passes: Sequence[int],
        first_ids: torch.Tensor,
        rows: Sequence[DrawRow],
    ) -> torch.Tensor | None:
        """The ids drawn after ``first_ids`` [rows], on the device: int64 [rows, most passes], with zeros
        behind the ends of shorter rows; good until the next chain. None if no captured chain holds them.

        Row i stores ``num_passes[i]`` tokens, which are counted as computed; room must be reserved.
        """
        if not self.steps.enabled:
            return None
        ends = [table.num_computed_tokens + count for table, count in zip(tables, num_passes, strict=True)]
        blocks = -(-max(ends) // self.steps.block_size)
        wanted = max(row.kind for row in rows), len(rows), blocks, max(num_passes)
        if wanted not in self._chosen:
            self._chosen[wanted] = fitting(self.replays, *wanted)
        buckets = self._chosen[wanted]
        if not buckets or max(num_passes) > MAX_PASSES:
            self.num_misses += 1
            return None
        self.num_replays += len(buckets)
        drawn = self.replay(buckets, tables, num_passes, first_ids, rows)
        for table, end in zip(tables, ends, strict=True):
            table.num_computed_tokens = end
        return drawn

    def replay(
        self,
        buckets: Sequence[ChainBucket],
        tables: Sequence[BlockTable],
        num_passes: Sequence[int],
        first_ids: torch.Tensor,
        rows: Sequence[DrawRow],
    ) -> torch.Tensor:
        self.inputs.send(buckets[0].shape, tables, num_passes, rows)
        self.ids[: len(rows)].copy_(first_ids)
        self.num_done.zero_()
        for bucket in buckets:
            self.replays[bucket]()
        return self.drawn[: max(num_passes), : len(rows)].t()

    @torch.inference_mode()
    def add(self, bucket: ChainBucket) -> None:
        """Capture one more. Raises whatever the device's library does."""
        self.inputs.send(bucket.shape, [], [], [])  # as in ``StepGraphs.add``
        self.replays[bucket] = self.steps.capture.record(partial(self._passes, bucket))
        self._chosen.clear()

    def _passes(self, bucket: ChainBucket) -> None:
        """What is captured: no Python decision here or below depends on the inputs' values."""
        for _ in range(bucket.passes):
            self._pass(bucket)

    def _pass(self, bucket: ChainBucket) -> None:
        lean, shape = self.steps.lean, bucket.shape
        # A broken model may have drawn an id that only the target has: any stand-in will do.
        ids = self.ids[: shape.rows].clamp(max=lean.embeddings.shape[0] - 1)
        inputs = self.inputs.batch(shape, ids, self.num_done)
        parts = TorchParts(inputs.batch, self.steps.cache, lean.rotary, lean.attention)
        logits = in_width(lean.logits(lean.hidden(ids, parts), parts).float(), self.vocab_size)
        self.logits[: shape.rows].copy_(logits)
        self._draw(bucket, logits, inputs)

    def _draw(self, bucket: ChainBucket, logits: torch.Tensor, inputs: ChainPass) -> None:
        kind = bucket.shape.kind
        drawn = captured_draw(kind, logits, inputs.draw, inputs.drawn_positions, self.counters)
        drawn = torch.where(inputs.is_running, drawn, 0)
        self.ids[: len(drawn)].copy_(drawn)
        # The runs before a capture may go on for longer than any chain.
        place = self.num_done.clamp(max=MAX_PASSES - 1)
        self.drawn[:, : len(drawn)].index_copy_(0, place, drawn[None])
        self.num_done.add_(1)


def capture_chains(
    model: DecoderModel,
    planned: Sequence[ChainBucket],
    vocab_size: int,
    num_blocks: int,
    capture: Capture,
    deadline: float,
    min_free: int,
) -> None:
    """As ``capture_steps``, after it and for a draft model; without its passes there are no chains either.

    Leaves the model as it was if anything goes wrong.
    """
    if not isinstance(model.graphs, StepGraphs):
        return
    steps = model.graphs

    def texts_for(bucket: ChainBucket, number: int) -> list[Text]:
        as_pass = Bucket(bucket.shape.rows, bucket.passes, bucket.shape.blocks)
        return check_texts(model, as_pass, num_blocks, number)

    with steps.left_out():  # chains are compared with the usual passes
        chain = capture_planned(
            "draft chains",
            "passes",
            planned,
            lambda: DraftChain(steps, planned, vocab_size),
            texts_for,
            partial(_is_right, model),
            capture,
            deadline,
            min_free,
        )
    if chain is not None:
        model.draft_chain = chain


@torch.inference_mode()
def _is_right(model: DecoderModel, chain: DraftChain, bucket: ChainBucket, texts: list[Text]) -> bool:
    """Whether a chain over ``texts`` is as it should be. As many passes as a text has new tokens are for its
    row, and only the first of these tokens is given."""
    kind, tables = bucket.shape.kind, [text.table for text in texts]
    rows = [CHECK_ROWS[DrawKind(kind - i % (kind + 1))] for i in range(len(texts))]
    num_passes = [len(text.new) for text in texts]
    first_ids = torch.tensor([text.new[0] for text in texts], device=model.device)
    model.forward([Span(text.table, text.context, 1) for text in texts])
    drawn = chain.replay([bucket], tables, num_passes, first_ids, rows)
    # The first row is one of the longest. Of the others only the caches are looked at.
    logits, last = chain.logits[:1].clone(), drawn[:1, -1]
    position = torch.tensor([len(texts[0].context) + num_passes[0]], device=model.device)
    numbers = DrawTensors(
        *(torch.tensor(column, device=model.device) for column in zip(rows[0], strict=True))
    )
    if not torch.equal(last, captured_draw(kind, logits, numbers, position, chain.counters)):
        return False
    # The usual pass goes on with what was drawn: rounding may tell two close ids apart.
    ids = torch.cat([first_ids[:, None], drawn], dim=1).tolist()
    slots = _new_slots(model, texts)
    stored = _stored(model, slots)
    expected = model.forward([Span(t, i[:n], 1) for t, i, n in zip(tables, ids, num_passes, strict=True)])
    known = min(model.vocab_size, chain.vocab_size)  # beyond, one of both has no logits
    ours = [*stored, logits[:, :known]]
    theirs = [*_stored(model, slots), expected[:1, :known]]
    return all(same_logits(*pair, model.dtype) for pair in zip(ours, theirs, strict=True))


def _new_slots(model: DecoderModel, texts: list[Text]) -> torch.Tensor:
    """Where the keys and values of all new tokens go."""
    new = [
        table_slots(text.table, len(text.context) + len(text.new), model.block_size)[len(text.context) :]
        for text in texts
    ]
    return torch.from_numpy(np.concatenate(new)).to(model.device)


def _stored(model: DecoderModel, slots: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values there, of every layer."""
    assert model.cache is not None
    return [x for layer in range(len(model.layers)) for x in model.cache.gather(layer, slots)]
