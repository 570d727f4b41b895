"""Runs recurrences in C (``recurrence.c``, ``convolution.c``): float32 rows, and states in their caches."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import addressof, byref
from itertools import accumulate
from typing import Any

import torch

from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.pointers import PointerError, address, new, shape_of
from truedraft.engine.memory.recurrent_state import CHUNK, ROLLBACK, LayerState, StateShape
from truedraft.engine.native import library as in_c
from truedraft.engine.native.shared import RecurrenceRule

FLOAT, INTEGER = torch.float32, torch.int64


class NativeRecurrence:
    """Describes a layer's recurrence to C, and keeps the objects to which ``struct`` points."""

    def __init__(self, rule: Recurrence, state: LayerState) -> None:
        self.num_slots = len(state.inputs)
        self._convolution, self._weight = _convolution(rule.convolution, state)
        self._kept = rule, state
        fields: dict[str, Any] = {"rule": RecurrenceRule.SHORT_CONV}
        self.outputs = self._convolution.channels
        if not isinstance(rule, ShortConv):
            shape = rule.state
            self.outputs = shape.heads * shape.columns
            fields = {
                **(_delta_rule(rule) if isinstance(rule, DeltaRule) else _mamba2(rule)),
                **_log(shape, state),
                "heads": shape.heads,
                "key_heads": shape.key_heads,
                "rows": shape.rows,
                "columns": shape.columns,
                "decay_rate": address(rule.decay_rate, FLOAT, (shape.heads,)),
                "dt_bias": address(rule.dt_bias, FLOAT, (shape.heads,)),
            }
            keys, values = shape.key_heads * shape.rows, shape.heads * shape.columns
            if shape.heads % shape.key_heads or self._convolution.channels != 2 * keys + values:
                raise PointerError(f"{shape} does not go with {self._convolution.channels} channels")
        self.struct = in_c.Recurrence(convolution=addressof(self._convolution), **fields)


class NativeStates:
    """Runs the recurrences of one forward, as ``TorchStates`` does."""

    def __init__(self, library: ctypes.CDLL, spans: Sequence[Span]) -> None:
        self.library = library
        offsets = list(accumulate((len(span.token_ids) for span in spans), initial=0))
        self.num_tokens = offsets[-1]
        stored = [span.table.num_computed_tokens for span in spans]
        columns = state_columns(spans)
        self.num_slots = max((_num_slots(span) for span in spans), default=0)
        # These are kept as long as the pointers into them are used.
        self._numbers = array("q", [*offsets, *stored, *columns])
        start = address(self._numbers, INTEGER, (len(self._numbers),))
        column = INTEGER.itemsize * len(spans)
        first_column = start + column + INTEGER.itemsize
        self.spans = in_c.Spans(
            num_spans=len(spans),
            num_tokens=self.num_tokens,
            first_token=start,
            num_stored=first_column,
            **state_fields(first_column + column, column),
        )

    def recur(self, recurrence: NativeRecurrence, x: torch.Tensor) -> torch.Tensor:
        """Computes what ``LayerRun.recur`` says, for ``x``, which is overwritten."""
        if self.num_slots > recurrence.num_slots:
            raise PointerError(f"there are {recurrence.num_slots} slots for states, not {self.num_slots}")
        struct, tokens, x = byref(recurrence.struct), self.num_tokens, x.contiguous()
        shape = tokens, self.library.recurrence_inputs(struct)
        # Scratch memory is kept until C has finished with it.
        scratch, work = new((self.library.recurrence_scratch(struct, tokens),), FLOAT)
        out, to = new((tokens, recurrence.outputs), FLOAT)
        self.library.recur(byref(self.spans), struct, address(x, FLOAT, shape), to, work)
        del scratch
        return out


def state_columns(spans: Sequence[Span]) -> list[int]:
    """Returns for each span the slot of its states, the number of folded tokens, and that of certain ones."""
    slots = [-1 if (slot := span.table.state_slot) is None else slot for span in spans]
    return [*slots, *(span.table.num_folded_tokens for span in spans), *(span.certain for span in spans)]


def state_fields(start: int, column: int) -> dict[str, int]:
    """Returns the fields of ``Spans`` and ``NewTokens`` for columns at this address."""
    return {"state_slot": start, "num_folded": start + column, "num_certain": start + 2 * column}


def _num_slots(span: Span) -> int:
    """Returns the number of slots that a span requires; its log has no more than it can hold."""
    slot, folded, stored = span.table.state_slot, span.table.num_folded_tokens, span.table.num_computed_tokens
    if (
        slot is None
        or min(slot, folded) < 0
        or folded % CHUNK
        or not 0 <= stored - folded <= CHUNK + ROLLBACK
        or not 0 <= span.end - span.certain <= ROLLBACK
    ):
        raise PointerError(
            f"slot {slot} cannot have states folded over {folded} of {stored} tokens, "
            f"and {span.certain} of {span.end} certain"
        )
    return slot + 1


def _convolution(convolution: Convolution, state: LayerState) -> tuple[in_c.Convolution, torch.Tensor]:
    channels, width = shape_of(convolution.weight, 2)
    weight = convolution.weight.T.contiguous()
    num_slots, num_inputs, _ = shape_of(state.inputs, 3)
    if num_inputs < ROLLBACK + width - 1:
        raise PointerError(f"{num_inputs} inputs are too few for a convolution over {width} tokens")
    bias = convolution.bias
    struct = in_c.Convolution(
        channels=channels,
        width=width,
        silu=convolution.silu,
        weight=address(weight, FLOAT, (width, channels)),
        bias=None if bias is None else address(bias, FLOAT, (channels,)),
        num_inputs=num_inputs,
        inputs=address(state.inputs, FLOAT, (num_slots, num_inputs, channels)),
    )
    return struct, weight


def _log(shape: StateShape, state: LayerState) -> dict[str, Any]:
    _, num_records, _ = shape_of(state.keys, 3)
    if num_records % CHUNK or num_records < CHUNK + ROLLBACK:
        raise PointerError(f"a log of {num_records} records does not hold what may be taken back")
    log = len(state.inputs), num_records
    return {
        "num_records": num_records,
        "state": address(state.state, FLOAT, (len(state.inputs), shape.heads, shape.rows, shape.columns)),
        "keys": address(state.keys, FLOAT, (*log, shape.key_heads * shape.rows)),
        "values": address(state.values, FLOAT, (*log, shape.heads * shape.columns)),
        "decays": address(state.decays, torch.float64, (*log, shape.heads)),
    }


def _delta_rule(rule: DeltaRule) -> dict[str, Any]:
    return {
        "rule": RecurrenceRule.DELTA_RULE,
        "tiled": rule.tiled,
        "norm": address(rule.norm.weight, FLOAT, (rule.value_size,)),
        "norm_eps": rule.norm.eps,
    }


def _mamba2(rule: Mamba2) -> dict[str, Any]:
    least, most = rule.dt_limits
    fields: dict[str, Any] = {
        "rule": RecurrenceRule.MAMBA2,
        "skip": address(rule.skip, FLOAT, (rule.heads,)),
        "least_dt": least,
        "most_dt": most,
    }
    if rule.norm is None:
        return fields
    inner = rule.heads * rule.head_size
    if inner % rule.norm_groups:
        raise PointerError(f"{rule.norm_groups} norms are not of {inner} numbers")
    norm = address(rule.norm.weight, FLOAT, (inner,))
    return {**fields, "norm": norm, "norm_eps": rule.norm.eps, "norm_groups": rule.norm_groups}
