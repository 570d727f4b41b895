"""The shapes of captured draft chains, and what the passes of a chain read: one tensor, sent once a chain.

A pass of a chain finds everything else on the device: its token ids are the draws of the pass before, and how
many passes have run says where it stores their keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.core.block_pool import BlockTable
from engine.models.graph_capture import Capture, SentNumbers
from engine.models.step_buckets import MAX_GATHERED_KEYS, MIN_KEYS, powers
from engine.models.step_inputs import captured_batch
from engine.sampling.captured_draw import NUMBERS_PER_ROW, DrawKind, DrawRow, DrawTensors, pack


@dataclass(frozen=True, slots=True)
class ChainShape:
    """``rows`` sequences, drawn as ``kind`` says, each with up to ``blocks`` cache blocks."""

    kind: DrawKind
    rows: int
    blocks: int

    def holds(self, kind: DrawKind, rows: int, blocks: int) -> bool:
        return kind is self.kind and rows <= self.rows and blocks <= self.blocks


@dataclass(frozen=True, slots=True)
class ChainBucket:
    """``passes`` one after the other in one graph. Longer chains are several of them."""

    shape: ChainShape
    passes: int


def plan_chains(
    max_rows: int, max_keys: int, block_size: int, usual_passes: int, gathers: bool = True
) -> list[ChainBucket]:
    """The most useful first: few rows, greedy, short contexts. Each shape as one pass, which chains of any
    length can be made of, and as ``usual_passes``. None without passes. If attention ``gathers`` the keys,
    there is a limit to them."""
    if usual_passes < 1:
        return []
    rows = powers(1, max_rows)
    blocks = list(dict.fromkeys(-(-keys // block_size) for keys in powers(MIN_KEYS, max_keys)))
    places = sorted(product(range(len(DrawKind)), range(len(rows)), range(len(blocks))), key=sum)
    shapes = [ChainShape(DrawKind(kind), rows[row], blocks[block]) for kind, row, block in places]
    return [
        ChainBucket(shape, passes)
        for shape in shapes
        if not (gathers and shape.rows * shape.blocks * block_size > MAX_GATHERED_KEYS)
        for passes in dict.fromkeys([1, usual_passes])
    ]


def fitting(
    captured: Iterable[ChainBucket], kind: DrawKind, rows: int, blocks: int, passes: int
) -> list[ChainBucket]:
    """The fewest replays that make a chain of ``passes``, all of the smallest shape that holds it; none if
    there is no such shape."""
    holding = [bucket for bucket in captured if bucket.shape.holds(kind, rows, blocks)]
    if not holding:
        return []
    shape = min((b.shape for b in holding), key=lambda shape: (shape.rows, shape.blocks))
    lengths = sorted({bucket.passes for bucket in holding if bucket.shape == shape}, reverse=True)
    found: list[ChainBucket] = []
    for length in lengths:
        count, passes = divmod(passes, length)
        found += [ChainBucket(shape, length)] * count
    return found if passes == 0 else []


class ChainPass(NamedTuple):
    """What one pass of a chain reads, on the device, computed there from the static inputs."""

    batch: ForwardBatch
    is_running: torch.Tensor  # bool [rows]: the chain still goes on for this row
    draw: DrawTensors
    drawn_positions: torch.Tensor  # [rows], of the ids that this pass draws


class ChainInputs:
    """Every shape lays out its own numbers in the same tensors, from their beginning.

    ``scratch_block`` belongs to no sequence: rows of padding read and write it, and rows whose draft is over
    write it. As to ``gathers`` see ``StepInputs``.
    """

    def __init__(
        self,
        buckets: Sequence[ChainBucket],
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

    def send(
        self,
        shape: ChainShape,
        tables: Sequence[BlockTable],
        num_passes: Sequence[int],
        rows: Sequence[DrawRow],
    ) -> None:
        """All of the shape's numbers are written: nothing of the last chain stays."""
        self.sent.wait()
        sizes = _sizes(shape)
        numbers = self.sent.host.numpy()[: sum(sizes)]
        first, passes, draws, blocks = np.split(numbers, np.cumsum(sizes)[:-1])
        padding = shape.rows - len(rows)
        first[:] = [table.num_computed_tokens for table in tables] + [0] * padding
        passes[:] = [*num_passes, *[0] * padding]
        pack(rows, draws)
        by_row = blocks.reshape(shape.rows, shape.blocks)
        by_row[len(rows) :] = self.scratch_block
        for own, table, count in zip(by_row, tables, num_passes, strict=False):
            used = table.block_ids[: -(-(table.num_computed_tokens + count) // self.block_size)]
            own[: len(used)] = used
            own[len(used) :] = used[0]
        self.sent.send(len(numbers))

    def batch(self, shape: ChainShape, ids: torch.Tensor, num_done: torch.Tensor) -> ChainPass:
        """The pass after ``num_done`` [1] others, over ``ids`` [rows]. This is captured."""
        sizes = _sizes(shape)
        parts = self.sent.numbers[: sum(sizes)].split_with_sizes(sizes)
        first, passes, draws, blocks = parts
        tables = blocks.view(shape.rows, shape.blocks)
        is_running = num_done < passes
        positions = torch.where(is_running, first + num_done, 0)
        block = tables.gather(1, (positions // self.block_size)[:, None])[:, 0]
        block = torch.where(is_running, block, self.scratch_block)
        slots = block * self.block_size + positions % self.block_size
        logits_rows = torch.arange(shape.rows, device=ids.device)
        return ChainPass(
            captured_batch(
                ids, positions, slots, logits_rows, positions, tables, self.block_size, self.gathers
            ),
            is_running,
            DrawTensors.unpack(draws),
            positions + 1,
        )


def _sizes(shape: ChainShape) -> list[int]:
    """First positions, numbers of passes, how each row draws; block tables."""
    return [shape.rows, shape.rows, NUMBERS_PER_ROW * shape.rows, shape.rows * shape.blocks]
