"""``engine.cuda.recurrent_kernels`` by torch's operations: to a tape, which holds them, each launch is one
operation, that reads its numbers when it runs."""

import torch

from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.layers.torch_recurrent import TorchStates
from truedraft.engine.memory.batch import Span, StateRows
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.recurrent_state import CHUNK, LayerState

# Operations take numbers and tensors only.
RULES: list[Recurrence] = []


def recur(rule: Recurrence, x: torch.Tensor, rows: StateRows, state: LayerState) -> torch.Tensor:
    number = next((i for i, known in enumerate(RULES) if known is rule), len(RULES))
    if number == len(RULES):
        RULES.append(rule)
    told = rows.first_tokens, rows.counts, rows.num_stored, rows.slots
    folded = rows.num_folded, rows.num_folded_after
    output: torch.Tensor = _recur(x, *told, *folded, *state.tensors, number)
    return output


@torch.library.custom_op(
    "truedraft_tests::recur", mutates_args=("state", "keys", "values", "decays", "inputs")
)
def _recur(
    x: torch.Tensor,
    first_tokens: torch.Tensor,
    counts: torch.Tensor,
    num_stored: torch.Tensor,
    slots: torch.Tensor,
    num_folded: torch.Tensor,
    num_folded_after: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    inputs: torch.Tensor,
    number: int,
) -> torch.Tensor:
    rule = RULES[number]
    size = len(rule.convolution.weight) if rule.state is None else rule.state.heads * rule.state.columns
    output = x.new_zeros(len(x), size)
    states = {rule.layer: LayerState(state, keys, values, decays, inputs)}
    told = torch.stack((first_tokens, counts, num_stored, slots, num_folded, num_folded_after), 1)
    for first, count, stored, slot, folded, folded_after in told.tolist():
        if count:
            table = BlockTable()
            table.num_computed_tokens, table.state_slot, table.num_folded_tokens = stored, slot, folded
            span = Span(table, [0] * count, 0, min(stored + count, folded_after + CHUNK))
            output[first : first + count] = TorchStates([span], states).recur(rule, x[first : first + count])
    return output
