"""Asks at load whether recurrences in Triton compute what they do by torch's operations, on the same device.

That compiles them, too. Prompts, drafts that are taken back and folds are part of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate

import torch

from truedraft.engine.layers.recurrent import Recurrence, ShortConv
from truedraft.engine.layers.torch_recurrent import TorchStates
from truedraft.engine.memory.batch import Span, StateRows, state_rows
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.recurrent_state import LayerState, RecurrentCache

# New tokens of two rows in each pass, and how many of them are taken back.
PASSES = (((17, 40), 0), ((5, 2), 1), ((12, 12), 4), ((1, 1), 0))

RecurRows = Callable[[Recurrence, torch.Tensor, StateRows, LayerState], torch.Tensor]


def distinct(recurrences: Iterable[Recurrence]) -> list[Recurrence]:
    """Returns one recurrence of each shape."""
    return list({(type(r), r.state, r.convolution.weight.shape): r for r in recurrences}.values())


@torch.inference_mode()
def is_right(
    recur: RecurRows, rule: Recurrence, dtype: torch.dtype, device: torch.device, tolerance: float
) -> bool:
    """Tells whether ``recur`` computes ``rule`` like torch, but for ``tolerance`` of the largest number, and
    leaves what later passes need."""
    if not isinstance(rule, ShortConv):
        # Else old tokens are forgotten, and with them what was done wrong.
        rule = replace(rule, decay_rate=rule.decay_rate / 100)
    channels, width = rule.convolution.weight.shape
    spec = RecurrentCache(channels, width, rule.state, device)
    ours, theirs = (LayerState.zeros(spec, 3, HugePages()) for _ in range(2))
    for tensor in (*ours.tensors, *theirs.tensors):
        tensor.fill_(torch.nan)  # others have been here
    tables = [BlockTable(), BlockTable()]
    for slot, table in zip((2, 0), tables, strict=True):
        table.state_slot = slot
    generator = torch.Generator().manual_seed(channels)
    for counts, num_taken_back in PASSES:
        x = torch.randn(sum(counts), rule.input_size, generator=generator).to(device, dtype)
        spans = [
            Span(table, [0] * n, 0, table.num_computed_tokens + n - num_taken_back)
            for table, n in zip(tables, counts, strict=True)
        ]
        offsets = list(accumulate(counts, initial=0))
        found = recur(rule, x, state_rows(spans, offsets, device), ours)
        expected = TorchStates(spans, {rule.layer: theirs}).recur(rule, x)
        if not ((found - expected).abs().max() <= tolerance * expected.abs().max()).item():
            return False
        for span in spans:
            span.table.num_folded_tokens = span.num_folded_after
            span.table.num_computed_tokens = span.end - num_taken_back
    return True
