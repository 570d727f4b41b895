"""What changes from one replay of a captured pass to the next: one tensor, filled on the host, sent at once.

A replay reads the same addresses again and again. So all inputs lie in one static tensor on the device, and
what can be computed from fewer numbers (where the keys lie, who sees what) is computed there.
"""

from collections.abc import Sequence

import torch

from engine.batch import AttentionGroup, ForwardBatch, PagedRows, Span, new_slots
from engine.models.graph_capture import Capture, SentNumbers
from engine.models.step_buckets import Bucket


class StepInputs:
    """Every bucket lays out its own numbers in the same tensors. The first ``num_ids`` are token ids and
    never anything else, a bucket's at their end; its other numbers follow. So either all of it is sent in one
    copy, or the others alone where the ids are on the device already.

    ``scratch_block`` belongs to no sequence: padding is stored there, and rows of padding read it. Attention
    that ``gathers`` keys gets their slots, other attention the block tables.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        block_size: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture,
        gathers: bool = True,
    ) -> None:
        self.block_size = block_size
        self.scratch_block = scratch_block
        self.gathers = gathers
        self.num_ids = max(bucket.num_tokens for bucket in buckets)
        size = self.num_ids + max(sum(_sizes(bucket)) for bucket in buckets)
        self.sent = SentNumbers(size, device, capture)
        self.host, self.numbers = self.sent.host, self.sent.numbers

    def send(self, bucket: Bucket, spans: Sequence[Span], ids_on_device: torch.Tensor | None = None) -> int:
        """Fill in ``spans`` and start the copy to the device; returns the number of rows with logits.

        ``ids_on_device`` [spans], if given, are the ids of spans of one token each.
        """
        self.sent.wait()
        num_logits = self._fill(bucket, spans)
        first_id, end = self.num_ids - bucket.num_tokens, self.num_ids + sum(_sizes(bucket))
        if ids_on_device is None:
            self.sent.send(first_id, end)
        else:
            self.sent.send(self.num_ids, end)
            # Padding keeps the ids of an earlier batch: any id will do there.
            ids = self.numbers[first_id : self.num_ids].view(bucket.rows, bucket.queries)
            ids[: len(spans), 0].copy_(ids_on_device)
        return num_logits

    def _fill(self, bucket: Bucket, spans: Sequence[Span]) -> int:
        """All of the bucket's numbers are written: nothing of the last batch stays."""
        queries, block_size = bucket.queries, self.block_size
        scratch_slot = self.scratch_block * block_size
        num_table_numbers = bucket.rows * bucket.blocks
        size = bucket.num_tokens + sum(_sizes(bucket))
        numbers = self.host.numpy()[self.num_ids - bucket.num_tokens :][:size]
        tables = numbers[size - num_table_numbers :].reshape(bucket.rows, bucket.blocks)
        tables[len(spans) :] = self.scratch_block
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_rows: list[int] = []
        last: list[int] = []
        # Lists: for so few numbers a row, faster than arrays.
        for row, span in enumerate(spans):
            blocks, start, length = span.table.block_ids, span.table.num_computed_tokens, len(span.token_ids)
            end, padding = start + length, queries - length
            num_blocks = -(-end // block_size)
            tables[row, :num_blocks] = blocks[:num_blocks]
            tables[row, num_blocks:] = blocks[0]
            ids += span.token_ids + [0] * padding
            positions += [*range(start, end), *[end - 1] * padding]
            slots += new_slots(span, block_size) + [scratch_slot] * padding
            last.append(end - 1)
            first = row * queries + length
            logits_rows += range(first - span.num_logits, first)
        num_logits, padding = len(logits_rows), bucket.num_tokens - len(ids)
        ids += [0] * padding
        positions += [0] * padding
        slots += [scratch_slot] * padding
        logits_rows += [0] * (bucket.num_tokens - num_logits)
        last += [0] * (bucket.rows - len(last))
        numbers[: size - num_table_numbers] = [*ids, *positions, *slots, *logits_rows, *last]
        return num_logits

    def batch(self, bucket: Bucket) -> ForwardBatch:
        """The static inputs as a batch. Static shapes, and nothing that depends on the numbers: this is
        captured."""
        sizes = _sizes(bucket)
        ids = self.numbers[self.num_ids - bucket.num_tokens : self.num_ids]
        parts = self.numbers[self.num_ids :][: sum(sizes)].split_with_sizes(sizes)
        positions, slots, logits_rows, last, tables = parts
        rows, queries, keys = bucket.rows, bucket.queries, bucket.blocks * self.block_size
        tables, device = tables.view(rows, bucket.blocks), tables.device
        batch = ForwardBatch([], self.block_size, ids[None], positions[None], slots, logits_rows)
        if not self.gathers:
            # A row's padding stands at its last position, so every row has all its queries.
            counts = torch.full((rows,), queries, device=device)
            first_tokens = torch.arange(rows, device=device) * queries
            batch.short_rows = PagedRows(tables, first_tokens, counts, queries)
            return batch
        offsets = torch.arange(self.block_size, device=device)
        key_slots = (tables[..., None] * self.block_size + offsets).view(rows, keys)
        # Beyond a row's own keys stands its first one, again and again. They are masked, but a mask does not
        # silence what others may have left in a block: infinities times zero.
        is_own = torch.arange(keys, device=device) <= last[:, None]
        key_slots = torch.where(is_own, key_slots, key_slots[:, :1])
        batch.groups = [
            AttentionGroup(
                rows=rows,
                queries=queries,
                keys=keys,
                query_index=None,
                output_index=None,
                key_slots=key_slots.view(-1),
                query_positions=positions.view(rows, queries),
                keys_are_padded=True,
            )
        ]
        return batch


def _sizes(bucket: Bucket) -> list[int]:
    """Positions, slots, rows with logits, each row's last position, block tables."""
    return [bucket.num_tokens] * 3 + [bucket.rows, bucket.rows * bucket.blocks]
