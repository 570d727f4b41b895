"""Checks at load that recurrences in Triton compute the same as torch's operations on the same device.

The check compiles the kernels, too. It covers prompts, drafts that are taken back, and folds.
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

# Each pass has this many new tokens for two rows; this many of them are taken back.
PASSES = (((17, 40), 0), ((5, 2), 1), ((12, 12), 4), ((1, 1), 0))

RecurRows = Callable[[Recurrence, torch.Tensor, StateRows, LayerState], torch.Tensor]


def distinct(recurrences: Iterable[Recurrence]) -> list[Recurrence]:
    """Returns one recurrence of each shape."""
    return list({(type(r), r.state, r.convolution.weight.shape): r for r in recurrences}.values())


@torch.inference_mode()
def is_right(
    recur: RecurRows, rule: Recurrence, dtype: torch.dtype, device: torch.device, tolerance: float
) -> bool:
    """Tells whether ``recur`` computes ``rule`` as torch does, within ``tolerance`` of the largest number,
    and leaves the state that later passes need."""
    if not isinstance(rule, ShortConv):
        # Otherwise states forget old tokens, and errors with them.
        rule = replace(rule, decay_rate=rule.decay_rate / 100)
    channels, width = rule.convolution.weight.shape
    spec = RecurrentCache(channels, width, rule.state, device)
    ours, theirs = (LayerState.zeros(spec, 3, HugePages()) for _ in range(2))
    for tensor in (*ours.tensors, *theirs.tensors):
        tensor.fill_(torch.nan)  # Slots hold the states of earlier texts.
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
