"""What changes from one replay of a captured pass to the next: one tensor, filled on the host, sent at once.

A replay reads the same addresses again and again. So all inputs lie in one static tensor on the device, and
what can be computed from fewer numbers (where the keys lie, who sees what) is computed there.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch import AttentionGroup, ForwardBatch, Span
from engine.models.graph_capture import Capture
from engine.models.step_buckets import Bucket


class StepInputs:
    """Every bucket lays out its own numbers in the same tensors, from their beginning.

    ``scratch_block`` belongs to no sequence: padding is stored there, and rows of padding read it.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        block_size: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.block_size = block_size
        self.scratch_block = scratch_block
        self.capture = capture
        size = max(sum(_sizes(bucket)) for bucket in buckets)
        self.host = capture.host_buffer(size)
        self.numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._wait_until_sent: Callable[[], None] = lambda: None

    def send(self, bucket: Bucket, spans: Sequence[Span]) -> int:
        """Fill in ``spans`` and start the copy to the device; returns the number of rows with logits."""
        self._wait_until_sent()
        num_logits = self._fill(bucket, spans)
        size = sum(_sizes(bucket))
        self._wait_until_sent = self.capture.send(self.numbers[:size], self.host[:size])
        return num_logits

    def _fill(self, bucket: Bucket, spans: Sequence[Span]) -> int:
        """All of the bucket's numbers are written: nothing of the last batch stays."""
        rows, queries, block_size = bucket.rows, bucket.queries, self.block_size
        sizes = np.cumsum(_sizes(bucket))
        parts = np.split(self.host.numpy()[: sizes[-1]], sizes[:-1])
        ids, positions, slots, logits_rows, last, tables = parts
        ids, positions, slots = (part.reshape(rows, queries) for part in (ids, positions, slots))
        tables = tables.reshape(rows, bucket.blocks)
        ids.fill(0)
        positions[len(spans) :] = 0
        slots.fill(self.scratch_block * block_size)
        last[len(spans) :] = 0
        tables[len(spans) :] = self.scratch_block
        with_logits: list[int] = []
        for row, span in enumerate(spans):
            start, length = span.table.num_computed_tokens, len(span.token_ids)
            end = start + length
            num_blocks = -(-end // block_size)
            table = tables[row]
            table[:num_blocks] = span.table.block_ids[:num_blocks]
            table[num_blocks:] = table[0]
            stored = np.arange(start, end)
            ids[row, :length] = span.token_ids
            positions[row, :length] = stored
            positions[row, length:] = end - 1
            slots[row, :length] = table[stored // block_size] * block_size + stored % block_size
            last[row] = end - 1
            first = row * queries + length
            with_logits += range(first - span.num_logits, first)
        logits_rows.fill(0)
        logits_rows[: len(with_logits)] = with_logits
        return len(with_logits)

    def batch(self, bucket: Bucket) -> ForwardBatch:
        """The static inputs as a batch: every call computes its keys' slots on the device. Static shapes,
        and nothing that depends on the numbers: this is captured."""
        rows, blocks, keys = bucket.rows, bucket.blocks, bucket.blocks * self.block_size
        sizes = _sizes(bucket)
        parts = self.numbers[: sum(sizes)].split_with_sizes(sizes)
        ids, positions, slots, logits_rows, last, tables = parts
        device = self.numbers.device
        offsets = torch.arange(self.block_size, device=device)
        key_slots = (tables.view(rows, blocks, 1) * self.block_size + offsets).view(rows, keys)
        # Beyond a row's own keys stands its first one, again and again. They are masked, but a mask does not
        # silence what others may have left in a block: infinities times zero.
        is_own = torch.arange(keys, device=device) <= last[:, None]
        key_slots = torch.where(is_own, key_slots, key_slots[:, :1])
        batch = ForwardBatch([], self.block_size, ids[None], positions[None], slots, logits_rows)
        batch.groups = [
            AttentionGroup(
                rows=rows,
                queries=bucket.queries,
                keys=keys,
                query_index=None,
                output_index=None,
                key_slots=key_slots.view(-1),
                query_positions=positions.view(rows, bucket.queries),
                keys_are_padded=True,
            )
        ]
        return batch


def _sizes(bucket: Bucket) -> list[int]:
    """Token ids, positions, slots, rows with logits, each row's last position, block tables."""
    return [bucket.num_tokens] * 4 + [bucket.rows, bucket.rows * bucket.blocks]
