"""The shapes of captured rounds, and what a round reads: one tensor, sent once, and the drafts, which the
device has already.

From a row's first new position and the length of its draft the device works out the rest: where each token
stands, where its keys go, which of them are padding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.core.block_pool import BlockTable
from engine.models.graph_capture import Capture, SentNumbers
from engine.models.step_buckets import Bucket, plan_buckets
from engine.models.step_inputs import captured_batch
from engine.sampling.captured_draw import NUMBERS_PER_ROW, DrawKind, DrawRow, DrawTensors, pack

# Numbers over the vocabulary that one draw of all positions may look at: 128 MiB for each tensor of 8 bytes,
# of which a draw has some at a time.
MAX_DRAWN = 1 << 24


@dataclass(frozen=True, slots=True)
class RoundBucket:
    """The target's pass over ``shape``, whose rows are drawn as ``kind`` says."""

    kind: DrawKind
    shape: Bucket


def plan_rounds(
    max_rows: int,
    max_keys: int,
    block_size: int,
    num_draft: int | None,
    usual_queries: int,
    vocab_size: int,
    gathers: bool = True,
) -> list[RoundBucket]:
    """The most useful first, each shape drawn in every way: those of the target's passes. With a fixed
    ``num_draft`` a round has so many drafts, or none, and shorter ones take the same shape."""
    shapes = plan_buckets(max_rows, max_keys, block_size, usual_queries, gathers)
    if num_draft is not None:
        shapes = [shape for shape in shapes if shape.queries in (1, num_draft + 1)]
    return [
        RoundBucket(kind, shape)
        for shape in shapes
        for kind in DrawKind
        if kind is DrawKind.GREEDY or shape.num_tokens * vocab_size <= MAX_DRAWN
    ]


def smallest_round(
    captured: Iterable[RoundBucket], kind: DrawKind, rows: int, queries: int, blocks: int
) -> RoundBucket | None:
    """Of those that hold such a round; None if there is none."""
    fitting = (b for b in captured if b.kind is kind and b.shape.holds(rows, queries, blocks))
    return min(fitting, key=lambda b: (b.shape.num_tokens, b.shape.rows * b.shape.blocks), default=None)


class RoundBatch(NamedTuple):
    """What one round reads, on the device, computed there from the static inputs."""

    batch: ForwardBatch
    draw: DrawTensors
    first_positions: torch.Tensor  # [rows], of the first token that is drawn
    drafted: torch.Tensor  # [rows, queries - 1], with anything behind a row's drafts
    num_draft: torch.Tensor  # [rows]


class RoundInputs:
    """Every bucket lays out its own numbers in the same tensors, from their beginning.

    ``scratch_block`` belongs to no sequence: padding is stored there, and rows of padding read it. As to
    ``gathers`` see ``StepInputs``.
    """

    def __init__(
        self,
        buckets: Sequence[RoundBucket],
        block_size: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture,
        gathers: bool,
    ) -> None:
        self.block_size = block_size
        self.scratch_block = scratch_block
        self.gathers = gathers
        self.sent = SentNumbers(max(sum(_sizes(bucket.shape)) for bucket in buckets), device, capture)
        most = max(bucket.shape.num_tokens for bucket in buckets)
        self._drafted = torch.zeros(most, dtype=torch.int64, device=device)

    def drafted(self, shape: Bucket) -> torch.Tensor:
        """Where the drafts of a round are looked for: int64 [rows, queries - 1]."""
        width = shape.queries - 1
        return self._drafted[: shape.rows * width].view(shape.rows, width)

    def send(
        self,
        shape: Bucket,
        tables: Sequence[BlockTable],
        pending: Sequence[int],
        num_draft: Sequence[int],
        rows: Sequence[DrawRow],
    ) -> None:
        """For rows that bring one known token each, ``pending``, and so many drafts. All of the shape's
        numbers are written: nothing of the last round stays."""
        self.sent.wait()
        sizes = _sizes(shape)
        numbers = self.sent.host.numpy()[: sum(sizes)]
        first, known, counts, draws, blocks = np.split(numbers, np.cumsum(sizes)[:-1])
        padding = [0] * (shape.rows - len(rows))
        first[:] = [table.num_computed_tokens for table in tables] + padding
        known[:] = [*pending, *padding]
        counts[:] = [*num_draft, *padding]
        pack(rows, draws)
        by_row = blocks.reshape(shape.rows, shape.blocks)
        by_row[len(rows) :] = self.scratch_block
        for own, table, count in zip(by_row, tables, num_draft, strict=False):
            used = table.block_ids[: -(-(table.num_computed_tokens + count + 1) // self.block_size)]
            own[: len(used)] = used
            own[len(used) :] = used[0]
        self.sent.send(len(numbers))

    def batch(self, shape: Bucket) -> RoundBatch:
        """The round in ``sent`` and ``drafted``. This is captured."""
        sizes = _sizes(shape)
        parts = self.sent.numbers[: sum(sizes)].split_with_sizes(sizes)
        first, pending, num_draft, draws, blocks = parts
        tables, drafted = blocks.view(shape.rows, shape.blocks), self.drafted(shape)
        offsets = torch.arange(shape.queries, device=first.device)
        is_token = offsets <= num_draft[:, None]
        # A row's padding stands at its last position, and is stored where nobody looks.
        last = first + num_draft
        positions = torch.minimum(first[:, None] + offsets, last[:, None])
        block = tables.gather(1, positions // self.block_size)
        block = torch.where(is_token, block, self.scratch_block)
        slots = block * self.block_size + positions % self.block_size
        ids = torch.where(is_token, torch.cat([pending[:, None], drafted], dim=1), 0)
        logits_rows = torch.arange(shape.num_tokens, device=first.device)
        batch = captured_batch(
            ids.view(-1),
            positions.view(-1),
            slots.view(-1),
            logits_rows,
            last,
            tables,
            self.block_size,
            self.gathers,
        )
        return RoundBatch(batch, DrawTensors.unpack(draws), first + 1, drafted, num_draft)


def _sizes(shape: Bucket) -> list[int]:
    """First new positions, pending tokens, lengths of drafts, how each row draws; block tables."""
    rows = shape.rows
    return [rows, rows, rows, NUMBERS_PER_ROW * rows, rows * shape.blocks]
