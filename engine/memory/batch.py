"""Makes the tensors of one forward pass over several sequences of different lengths, packed into one row.

Each entry is (sequence's slots so far, new token ids): decoding rows bring one token or a few, prompts a
chunk. Nothing is padded in the model's linear layers; only attention groups rows of similar size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.host_to_device import on_device, send
from truedraft.engine.memory.recurrent_state import ROLLBACK, num_folded

# Rows with up to this many query tokens share one padded attention call; longer chunks get their own.
MAX_GROUPED_QUERIES = 33


# The class is not frozen: many are made in every step, and freezing would take five times as long.
@dataclass(slots=True)
class Span:
    """Holds new tokens of one sequence: they are stored after ``table.num_computed_tokens`` others.

    The last ``num_logits`` tokens need logits: 0 inside a prompt, 1 at its end, k + 1 when scoring.
    ``token_ids`` may be placeholders where a forward pass is given the ids on its device. The first
    ``num_certain_tokens`` of the sequence can never be taken back; None: all of its tokens. ``states``
    [tokens, hidden size] come with the tokens of a model that takes states (``Joint``).
    """

    table: BlockTable
    token_ids: list[int]
    num_logits: int
    num_certain_tokens: int | None = None
    states: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """Returns the number of computed tokens after the pass, before it has run."""
        return self.table.num_computed_tokens + len(self.token_ids)

    @property
    def certain(self) -> int:
        """Returns the number of the sequence's tokens that can never be taken back."""
        return self.end if self.num_certain_tokens is None else self.num_certain_tokens

    @property
    def num_folded_after(self) -> int:
        """Returns the number of tokens over which states are folded after the pass, before it has run."""
        assert self.end - self.certain <= ROLLBACK, "more may be taken back than the log has records for"
        return folded_after(self.table, self.certain)


def folded_after(table: BlockTable, num_certain_tokens: int) -> int:
    """Returns the number of certain tokens that are folded into states after a pass."""
    return max(table.num_folded_tokens, num_folded(num_certain_tokens))


@dataclass
class AttentionGroup:
    """Holds spans that attend together, padded to the longest: ``rows`` spans, ``queries``, ``keys``
    positions."""

    rows: int
    queries: int
    keys: int
    query_index: torch.Tensor | None  # [rows * queries] into the packed tokens; None: all, in order
    output_index: torch.Tensor | None  # [real queries] into rows * queries; None: all, in order
    key_slots: torch.Tensor | None  # [rows * keys]; None: the ``keys`` slots from ``first_slot`` on
    query_positions: torch.Tensor  # [rows, queries]
    first_slot: int = 0
    keys_are_padded: bool = False  # more keys than even the longest row has are possible
    is_lone: bool = False  # one row, whose queries are the tokens of its newest keys

    def bias(
        self, sliding_window: int | None, repeats: int, dtype: torch.dtype, *, looks_ahead: bool = False
    ) -> torch.Tensor | None:
        """Returns ``mask`` as numbers to add to the scores: [rows, 1, repeats * queries, keys]. It is made
        once a forward, as the layers share it."""
        key = sliding_window, repeats, looks_ahead
        if key not in self._biases:
            mask = self.mask_ahead(sliding_window) if looks_ahead else self.mask(sliding_window)
            if mask is not None:
                bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
                mask = bias.masked_fill_(~mask, -torch.inf).repeat(1, 1, repeats, 1)
            self._biases[key] = mask
        return self._biases[key]

    @cached_property
    def _biases(self) -> dict[tuple[int | None, int, bool], torch.Tensor | None]:
        return {}

    def to(self, device: torch.device) -> "AttentionGroup":
        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            query_index=moved(self.query_index),
            output_index=moved(self.output_index),
            key_slots=moved(self.key_slots),
            query_positions=self.query_positions.to(device),
        )

    def mask(self, sliding_window: int | None) -> torch.Tensor | None:
        """Returns bool [rows, 1, queries, keys], True where a query may attend; None if everywhere."""
        if sliding_window is None:
            return self._causal_mask
        window_start = self.query_positions[:, None, :, None] - sliding_window
        return self._visible & (self._key_positions > window_start)

    def mask_ahead(self, sliding_window: int | None) -> torch.Tensor:
        """Returns the same mask for texts that are computed at once, whose queries attend to later keys,
        too."""
        of_text = self._key_positions <= self.query_positions[:, None, -1:, None]
        if sliding_window is None:
            return of_text.expand(-1, -1, self.queries, -1)
        distance = (self._key_positions - self.query_positions[:, None, :, None]).abs()
        return of_text & (distance < sliding_window)

    @cached_property
    def _causal_mask(self) -> torch.Tensor | None:
        # One query of the newest position attends to every key; so does a lone decoding row.
        sees_all = self.rows == self.queries == 1 and not self.keys_are_padded
        return None if sees_all else self._visible

    @cached_property
    def _visible(self) -> torch.Tensor:
        return self._key_positions <= self.query_positions[:, None, :, None]

    @cached_property
    def _key_positions(self) -> torch.Tensor:
        return torch.arange(self.keys, device=self.query_positions.device)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Holds spans to be attended without gathering their keys."""

    tables: torch.Tensor  # [rows, blocks] block ids; a row's own ids are followed by arbitrary valid ones
    first_tokens: torch.Tensor  # [rows] first token in the packed tokens
    counts: torch.Tensor  # [rows] number of new tokens
    queries: int  # the largest number of new tokens


@dataclass(frozen=True, slots=True)
class StateRows:
    """Tells recurrences the tokens of each row, ``most`` at most, and the slot of its states. Tensors are
    int64 [rows]."""

    most: int
    first_tokens: torch.Tensor  # first token in the packed tokens
    counts: torch.Tensor  # number of new tokens; 0: there is no row
    num_stored: torch.Tensor  # number of tokens before those
    slots: torch.Tensor
    num_folded: torch.Tensor  # number of tokens over which states are folded, before the pass and after it
    num_folded_after: torch.Tensor


@dataclass
class ForwardBatch:
    """Holds the packed inputs of one forward: ``tokens`` is the sum of all spans' new tokens.

    In an encoder-decoder model they are the decoder's tokens: positions count from its start, ``groups``
    attend to the decoder's keys, ``cross_groups`` to those of the encoder.
    """

    spans: list[Span]
    block_size: int
    token_ids: torch.Tensor  # [1, tokens]
    positions: torch.Tensor  # [1, tokens]
    slots: torch.Tensor  # [tokens], the slots of the new keys and values
    logits_index: torch.Tensor  # [rows with logits] into the packed tokens
    is_there: torch.Tensor | None = None  # bool [tokens], False for padding; None: no token is padding
    states: torch.Tensor | None = None  # [tokens, hidden size], for a model that takes states
    window_slots: torch.Tensor | None = None  # slots in layers with a window, if these have their own blocks
    # [3, tokens] positions by which tokens are turned; None: ``positions``, as no span has a picture
    axes: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        spans: list[Span],
        block_size: int,
        device: torch.device,
        ids_on_device: torch.Tensor | None = None,
    ) -> "ForwardBatch":
        """Builds the batch. ``ids_on_device`` [tokens], if given, replace the spans' ids."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        window_slots: list[int] = []
        logits_index: list[int] = []
        for span in spans:
            first = span.table.num_computed_tokens - span.table.num_encoder_tokens
            token_ids += span.token_ids
            positions += range(first, first + len(span.token_ids))
            slots += new_slots(span, block_size)
            if span.table.window_ids is not None:
                window_slots += new_slots(span, block_size, has_window=True)
            logits_index += range(len(token_ids) - span.num_logits, len(token_ids))
        # All numbers go into one tensor, which needs one copy to the device.
        numbers = on_device([*token_ids, *positions, *slots, *window_slots, *logits_index], device)
        num_tokens, num_own = len(token_ids), len(window_slots)
        assert num_own in (0, num_tokens), "all tables have blocks for windows, or none has"
        sizes = num_tokens, num_tokens, num_tokens, num_own, len(logits_index)
        packed_ids, packed_positions, packed_slots, own_slots, index = numbers.split_with_sizes(sizes)
        if ids_on_device is not None:
            packed_ids = ids_on_device.to(device)
        return cls(
            spans,
            block_size,
            token_ids=packed_ids[None],
            positions=packed_positions[None],
            slots=packed_slots,
            logits_index=index,
            states=states_of(spans),
            axes=_axes(spans, device),
            window_slots=own_slots if num_own else None,
        )

    @cached_property
    def pictures(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns which of the packed tokens are a picture's, and their features (``PromptPictures``); None
        if none are. It is asked before the pass has counted its tokens as computed."""
        rows, features = [], []
        for span, offset in zip(self.spans, self.offsets, strict=False):
            if span.table.pictures is not None:
                found, seen = span.table.pictures.rows(span.table.num_computed_tokens, span.end)
                rows.append(torch.from_numpy(found + offset))
                features.append(seen)
        if not sum(map(len, rows)):
            return None
        return torch.cat(rows).to(self.slots.device), torch.cat(features)

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """Returns the groups for layers without a window."""
        return self.groups_of(None)

    def groups_of(self, sliding_window: int | None) -> list[AttentionGroup]:
        """Returns the groups for layers with such a window, for attention that needs them. They leave out the
        blocks of keys that a window hides from all of a span's tokens."""
        if len(self.spans) == 1 and not self.spans[0].table.num_encoder_tokens:
            return [self.lone_group(0, sliding_window)]
        # A row's keys begin here, and its positions count from here.
        begins = [
            span.table.num_encoder_tokens or self.block_size * self._num_hidden(span.table, sliding_window)
            for span in self.spans
        ]
        slots = [
            table_slots(span.table, span.end, self.block_size, sliding_window is not None)[begin:]
            for span, begin in zip(self.spans, begins, strict=True)
        ]
        positions = [
            np.arange(span.table.num_computed_tokens, span.end) - begin
            for span, begin in zip(self.spans, begins, strict=True)
        ]
        lengths, device = self._lengths(), self.slots.device
        return [
            _group(members, self.offsets, positions, slots, device) for members in _group_members(lengths)
        ]

    def _num_hidden(self, table: BlockTable, sliding_window: int | None) -> int:
        """Returns how many of the first blocks a window hides from all new tokens."""
        if sliding_window is None:
            return 0
        return max(0, table.num_computed_tokens + 1 - sliding_window) // self.block_size

    @cached_property
    def cross_groups(self) -> list[AttentionGroup]:
        encoded = [span.table.num_encoder_tokens for span in self.spans]
        if not any(encoded):
            return []
        slots = [
            table_slots(span.table, first, self.block_size)
            for span, first in zip(self.spans, encoded, strict=True)
        ]
        return _cross_groups(self._lengths(), self.offsets, slots, self.slots.device)

    @cached_property
    def short_rows(self) -> PagedRows | None:
        """Returns the spans of a decoder-only model that are not in ``long_spans``; None if there are
        none."""
        return self._paged([i for i, n in enumerate(self._lengths()) if n <= MAX_GROUPED_QUERIES])

    @cached_property
    def long_rows(self) -> PagedRows | None:
        """Returns ``long_spans`` in the same form, for attention to any number of tokens without
        gathering."""
        return self._paged(self.long_spans)

    def _paged(self, members: list[int]) -> PagedRows | None:
        if not members:
            return None
        ends = [self.spans[i].table.num_computed_tokens + len(self.spans[i].token_ids) for i in members]
        num_blocks = [-(-end // self.block_size) for end in ends]
        counts = [len(self.spans[i].token_ids) for i in members]
        rows, width = len(members), max(num_blocks)
        numbers = np.zeros(rows * (width + 2), dtype=np.int64)
        tables = numbers[: rows * width].reshape(rows, width)
        for row, (i, used) in enumerate(zip(members, num_blocks, strict=True)):
            tables[row, :used] = self.spans[i].table.block_ids[:used]
        numbers[tables.size :] = [*(self.offsets[i] for i in members), *counts]
        sent = send(torch.from_numpy(numbers), self.slots.device)
        sent_tables, first_tokens, sent_counts = sent.split_with_sizes((tables.size, rows, rows))
        return PagedRows(sent_tables.view(tables.shape), first_tokens, sent_counts, max(counts))

    @cached_property
    def state_rows(self) -> StateRows:
        """Returns the rows of all spans, which have slots for states."""
        return state_rows(self.spans, self.offsets, self.slots.device)

    @cached_property
    def long_spans(self) -> list[int]:
        """Returns the spans with more than ``MAX_GROUPED_QUERIES`` new tokens."""
        return [i for i, length in enumerate(self._lengths()) if length > MAX_GROUPED_QUERIES]

    def lone_group(self, member: int, sliding_window: int | None = None) -> AttentionGroup:
        """Returns one span of a decoder-only model as if it were alone in the batch, from the block of the
        first key on that a window lets it see. Positions count from there."""
        span = self.spans[member]
        first, length = self.offsets[member], len(span.token_ids)
        stored = span.table.num_computed_tokens
        num_left_out = self._num_hidden(span.table, sliding_window)
        begin = num_left_out * self.block_size
        keys = stored + length - begin
        ids = span.table.ids_of(sliding_window is not None)
        blocks = ids[num_left_out : num_left_out - (-keys // self.block_size)]
        # Blocks that lie one after the other need no index.
        is_run = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        slots = None if is_run else torch.from_numpy(_slots(blocks, keys, self.block_size))
        return AttentionGroup(
            rows=1,
            queries=length,
            keys=keys,
            query_index=None,
            output_index=None,
            key_slots=None if slots is None else send(slots, self.slots.device),
            query_positions=self.positions[:, first : first + length] - begin,
            first_slot=blocks[0] * self.block_size,
            is_lone=True,
        )

    def _lengths(self) -> list[int]:
        return [len(span.token_ids) for span in self.spans]

    @property
    def adapters(self) -> list[int]:
        """Returns the number of each token's adapter, or -1."""
        return [span.table.adapter for span in self.spans for _ in span.token_ids]

    @cached_property
    def offsets(self) -> list[int]:
        """Returns where each span's tokens begin in the packed ones, and where the last ones end."""
        return list(accumulate(self._lengths(), initial=0))


def state_rows(spans: Sequence[Span], offsets: Sequence[int], device: torch.device) -> StateRows:
    """Returns the rows of spans that have slots for states; ``offsets`` are where their tokens begin."""
    tables = [span.table for span in spans]
    assert all(table.state_slot is not None for table in tables)
    counts = [len(span.token_ids) for span in spans]
    numbers = [
        *(*offsets[: len(spans)], *counts, *(table.num_computed_tokens for table in tables)),
        *(table.state_slot or 0 for table in tables),
        *(*(table.num_folded_tokens for table in tables), *(span.num_folded_after for span in spans)),
    ]
    return StateRows(max(counts), *on_device(numbers, device).view(6, len(spans)).unbind())


def _axes(spans: Sequence[Span], device: torch.device) -> torch.Tensor | None:
    """Returns ``ForwardBatch.axes``."""
    if all(span.table.pictures is None for span in spans):
        return None
    found = []
    for span in spans:
        first, end = span.table.num_computed_tokens, span.end
        seen = span.table.pictures
        found.append(np.arange(first, end)[None].repeat(3, 0) if seen is None else seen.axes_of(first, end))
    return send(torch.from_numpy(np.concatenate(found, axis=1)), device)


def states_of(spans: list[Span]) -> torch.Tensor | None:
    """Returns the states of the tokens of all spans, packed; None if some span has none."""
    states = [span.states for span in spans if span.states is not None]
    if len(states) < len(spans) or not states:
        return None
    return states[0] if len(states) == 1 else torch.cat(states)


def new_slots(span: Span, block_size: int, has_window: bool = False) -> list[int]:
    """Returns the slots of the keys and values of a span's tokens, in layers with a window or in the others.
    For a few tokens a list is faster than an array."""
    blocks, start = span.table.ids_of(has_window), span.table.num_computed_tokens
    stored = range(start, start + len(span.token_ids))
    block, offset = divmod(start, block_size)
    if 0 < len(stored) <= block_size - offset:  # Most often all of them lie in one block.
        first = blocks[block] * block_size + offset
        return list(range(first, first + len(stored)))
    return [blocks[i // block_size] * block_size + i % block_size for i in stored]


def table_slots(table: BlockTable, num_tokens: int, block_size: int, has_window: bool = False) -> np.ndarray:
    """Returns the slots of the first ``num_tokens`` tokens, in layers with a window or in the others."""
    return _slots(table.ids_of(has_window)[: -(-num_tokens // block_size)], num_tokens, block_size)


def _slots(blocks: list[int], num_tokens: int, block_size: int) -> np.ndarray:
    """Returns the first slots of ``blocks``."""
    first = np.asarray(blocks, dtype=np.int64) * block_size
    return (first[:, None] + np.arange(block_size)).reshape(-1)[:num_tokens]


def _group_members(lengths: list[int]) -> list[list[int]]:
    short = [i for i, length in enumerate(lengths) if length <= MAX_GROUPED_QUERIES]
    long = [[i] for i, length in enumerate(lengths) if length > MAX_GROUPED_QUERIES]
    return ([short] if short else []) + long


def _cross_groups(
    lengths: list[int], offsets: list[int], slots: list[np.ndarray], device: torch.device
) -> list[AttentionGroup]:
    """Returns groups in which every query attends to all keys of its sequence's encoder, as if it stood at
    the encoder's last token."""
    positions = [np.full(length, len(s) - 1) for length, s in zip(lengths, slots, strict=True)]
    return [_group(members, offsets, positions, slots, device) for members in _group_members(lengths)]


def _group(
    members: list[int],
    offsets: list[int],
    positions: list[np.ndarray],
    slots: list[np.ndarray],
    device: torch.device,
) -> AttentionGroup:
    """Pads the members' queries with their own last one and their keys with their own first one, which is
    masked there: a mask does not silence numbers that others may have stored, infinities times zero."""
    rows = len(members)
    queries = max(len(positions[m]) for m in members)
    keys = max(len(slots[m]) for m in members)
    query_index = np.zeros((rows, queries), dtype=np.int64)
    query_positions = np.zeros((rows, queries), dtype=np.int64)
    key_slots = np.zeros((rows, keys), dtype=np.int64)
    output_index = []
    for row, m in enumerate(members):
        num_queries = len(positions[m])
        query_index[row] = offsets[m + 1] - 1
        query_index[row, :num_queries] = np.arange(offsets[m], offsets[m + 1])
        query_positions[row] = positions[m][-1]
        query_positions[row, :num_queries] = positions[m]
        key_slots[row] = slots[m][0]
        key_slots[row, : len(slots[m])] = slots[m]
        output_index.append(np.arange(row * queries, row * queries + num_queries))
    every_query = rows * queries == offsets[-1]
    all_outputs = rows * queries == sum(len(part) for part in output_index)
    return AttentionGroup(
        rows=rows,
        queries=queries,
        keys=keys,
        query_index=None if every_query else send(torch.from_numpy(query_index.reshape(-1)), device),
        output_index=None if all_outputs else send(torch.from_numpy(np.concatenate(output_index)), device),
        key_slots=send(torch.from_numpy(key_slots.reshape(-1)), device),
        query_positions=send(torch.from_numpy(query_positions), device),
    )
