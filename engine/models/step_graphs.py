"""Decoding, scoring and drafting as captured passes: one launch in place of hundreds.

On a GPU a pass over a few tokens is over before the host has launched the next one's kernels. ``StepGraphs``
captures a ``Llama``'s passes for some shapes (``step_buckets``) at start and replays them. What no
captured shape holds runs as before, through the same cache: long chunks of prompts, and whatever the time or
the memory at start did not suffice for, which is not made up for later.

Every captured pass is compared with the usual one on a short text. If one deviates or cannot be captured,
none is used.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Span
from engine.core.block_pool import BlockTable
from engine.models.graph_capture import Capture
from engine.models.llama import TOLERANCES, Llama, same_logits
from engine.models.model_runner import ModelRunner
from engine.models.step_buckets import Bucket, shape_of, smallest
from engine.models.step_inputs import StepInputs

# Tokens in the cache before those of a comparison: more than a block, and not a multiple of it.
CHECK_CONTEXT = 19

logger = logging.getLogger(__name__)


class StepGraphs:
    """The captured passes of one model over its cache, in which no sequence owns ``scratch_block``.

    ``eager`` runs the same model over the same cache. ``enabled`` is for comparisons.
    """

    def __init__(
        self, eager: ModelRunner, planned: Sequence[Bucket], scratch_block: int, capture: Capture
    ) -> None:
        assert isinstance(eager.model, Llama)
        self.model = eager.model
        self.cache = eager.cache
        self.block_size = eager.cache.block_size
        self.capture = capture
        self.inputs = StepInputs(
            planned, self.block_size, scratch_block, eager.device, capture, not self.model.reads_in_place
        )
        # In one place for all, as their pool is overwritten by every replay.
        self.logits = torch.zeros(
            max(bucket.num_tokens for bucket in planned), eager.vocab_size, device=eager.device
        )
        self.replays: dict[Bucket, Callable[[], None]] = {}
        self.enabled = True
        self.num_replays = 0
        self.num_misses = 0
        self._chosen: dict[tuple[int, int, int], Bucket | None] = {}

    def __call__(self, spans: list[Span], ids_on_device: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [sum of num_logits, vocab], float32; None if no captured pass holds ``spans``."""
        shape = shape_of(spans, self.block_size) if self.enabled else None
        if shape is None:
            return None
        if shape not in self._chosen:
            self._chosen[shape] = smallest(shape, self.replays)
        bucket = self._chosen[shape]
        if bucket is None:
            self.num_misses += 1
            return None
        self.num_replays += 1
        return self.replay(bucket, spans, ids_on_device)

    def replay(
        self, bucket: Bucket, spans: list[Span], ids_on_device: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_logits = self.inputs.send(bucket, spans, ids_on_device)
        self.replays[bucket]()
        return self.logits[:num_logits].clone()

    @torch.inference_mode()
    def add(self, bucket: Bucket) -> None:
        """Capture one more. Raises whatever the device's library does."""
        self.inputs.send(bucket, [])  # the runs before the capture are real: nothing but padding
        self.replays[bucket] = self.capture.record(lambda: self._step(bucket))
        self._chosen.clear()

    def _step(self, bucket: Bucket) -> None:
        """What is captured: no Python decision here or below depends on the inputs' values."""
        output = self.model.compute(self.inputs.batch(bucket), self.cache)
        self.logits[: bucket.num_tokens].copy_(output.logits)


def capture_steps(
    eager: ModelRunner,
    planned: Sequence[Bucket],
    num_blocks: int,
    capture: Capture,
    deadline: float,
    min_free: int,
) -> StepGraphs | None:
    """The ``planned`` passes of a model, whose cache is unused, in order, until ``deadline`` (monotonic) or
    until fewer than ``min_free`` bytes are free. The cache has one block behind ``num_blocks``.

    None, with a line in the log, if anything goes wrong.
    """
    started = time.monotonic()
    try:
        graphs = StepGraphs(eager, planned, num_blocks, capture)
        for number, bucket in enumerate(planned):
            if time.monotonic() > deadline or capture.free_memory() < min_free:
                break
            texts = check_texts(eager, bucket, num_blocks, number)
            if not texts:
                continue
            graphs.add(bucket)
            if not _is_right(eager, graphs, bucket, texts):
                logger.warning("CUDA graphs differ from the usual pass (%s) and are not used", bucket)
                return None
    except Exception as error:  # drivers and kernels fail in many ways; the usual passes need none of this
        logger.warning("CUDA graphs cannot be captured and are not used: %s", error)
        return None
    took = time.monotonic() - started
    logger.info("Captured %d of %d CUDA graphs in %.1f s", len(graphs.replays), len(planned), took)
    return graphs if graphs.replays else None


@dataclass(frozen=True, slots=True)
class Text:
    """A text to compare passes on: ``context`` is in the cache, ``new`` is what they bring."""

    table: BlockTable
    context: list[int]
    new: list[int]


def check_texts(eager: ModelRunner, bucket: Bucket, num_blocks: int, number: int) -> list[Text]:
    """Texts of different lengths for ``bucket``, in every other one a row less than it has; as many as fit
    into the cache. ``number`` makes them differ from those whose keys lie there still."""
    model, block_size = eager.model, eager.cache.block_size
    room = min(bucket.blocks * block_size, model.max_position or CHECK_CONTEXT + bucket.queries)
    context = min(CHECK_CONTEXT, room - bucket.queries)
    if context < 1:
        return []
    blocks_each = -(-(context + bucket.queries) // block_size)
    rows = min(max(1, bucket.rows - number % 2), num_blocks // blocks_each)
    texts = []
    for row in range(rows):
        table = BlockTable()
        # Not in order, so that a slot must come from the table.
        first = num_blocks - 1 - row * blocks_each
        table.block_ids = [first - i for i in range(blocks_each)]
        length = context - row % context
        ids = [
            (7 * i * i + 3 * i + 11 * row + 13 * number + 1) % model.vocab_size
            for i in range(length + bucket.queries - row % bucket.queries)
        ]
        texts.append(Text(table, ids[:length], ids[length:]))
    return texts


def _is_right(eager: ModelRunner, graphs: StepGraphs, bucket: Bucket, texts: list[Text]) -> bool:
    eager.forward([Span(text.table, text.context, 1) for text in texts])
    spans = [Span(text.table, text.new, len(text.new)) for text in texts]
    # First, as the usual pass stores what this one should have stored.
    replayed = graphs.replay(bucket, spans)
    return same_logits(replayed, eager.forward(spans).logits, TOLERANCES[eager.model.dtype])
