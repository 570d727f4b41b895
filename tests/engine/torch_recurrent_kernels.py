"""``engine.cuda.recurrent_kernels`` by torch's operations: token by token, from where states are folded.

A tape holds them, as no shape depends on a number. They take what surrounds the states from ``TorchStates``.
"""

import torch
import torch.nn.functional as F

from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence
from truedraft.engine.layers.torch_recurrent import TorchStates, _per_head
from truedraft.engine.memory.batch import StateRows
from truedraft.engine.memory.recurrent_state import NUM_RECORDS, LayerState


def recur(rule: Recurrence, x: torch.Tensor, rows: StateRows, state: LayerState) -> torch.Tensor:
    return _Rows(rows, state).recur(rule, x)


class _Rows(TorchStates):
    def __init__(self, rows: StateRows, state: LayerState) -> None:
        self.rows = rows
        self.state = state

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns each row's new tokens [rows, most, ...], and zeros after them."""
        place = torch.arange(self.rows.most)
        self.is_new = place < self.rows.counts[:, None]
        self.tokens = torch.where(self.is_new, self.rows.first_tokens[:, None] + place, len(x))
        return F.pad(x.flatten(1), (0, 0, 0, 1))[self.tokens].view(*self.tokens.shape, *x.shape[1:])

    def _packed(self, padded: torch.Tensor, num_tokens: int) -> torch.Tensor:
        output = padded.new_zeros(num_tokens + 1, *padded.shape[2:])
        return output.index_copy(0, self.tokens.flatten(), padded.flatten(0, 1))[:-1]

    def _keep(self, kept: torch.Tensor, new: torch.Tensor, is_kept: torch.Tensor) -> None:
        """Writes the newest of ``new`` [rows, most, n] that are to be kept to each slot's ring."""
        size, rows, place = kept.shape[1], self.rows, torch.arange(self.rows.most)
        is_kept = is_kept & (place >= rows.counts[:, None] - size)
        at = rows.slots[:, None] * size + (rows.num_stored[:, None] + place) % size
        _write(kept.flatten(0, 1), at.flatten(), new.flatten(0, 1), is_kept.flatten())

    def _convolve(self, convolution: Convolution, layer: int, x: torch.Tensor) -> torch.Tensor:
        width, inputs, rows = convolution.weight.shape[1], self.state.inputs, self.rows
        new, size = self._padded(x), inputs.shape[1]
        before = rows.num_stored[:, None] + torch.arange(1 - width, 0)
        past = inputs.flatten(0, 1)[rows.slots[:, None] * size + before % size]
        window = torch.cat((torch.where((before >= 0)[..., None], past, 0), new), 1)
        output = sum(window[:, i : i + rows.most] * convolution.weight[:, i] for i in range(width))
        assert isinstance(output, torch.Tensor)
        self._keep(inputs, new, self.is_new)
        output = output if convolution.bias is None else output + convolution.bias
        return self._packed(F.silu(output) if convolution.silu else output, len(x))

    def _anchored(
        self,
        rule: DeltaRule | Mamba2,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None = None,
        tiled: bool = False,
    ) -> torch.Tensor:
        shape, rows, layer = rule.state, self.rows, self.state
        given = (query, key, value, decay, decay if beta is None else beta)
        queries, keys, values, decays, betas = map(self._padded, given)
        is_fresh = (rows.num_folded == 0)[:, None, None, None]
        folded = state = torch.where(is_fresh, 0.0, layer.state[rows.slots])
        outputs, added = torch.zeros_like(values), values
        for step in range(NUM_RECORDS + rows.most):
            position = rows.num_folded + step
            is_old, place = position < rows.num_stored, position - rows.num_stored
            is_new = ~is_old & (place < rows.counts)
            at, place = rows.slots * NUM_RECORDS + position % NUM_RECORDS, place.clamp(0, rows.most - 1)
            picked = torch.arange(len(place)), place
            k = torch.where(is_old[:, None], layer.keys.flatten(0, 1)[at], keys[picked].flatten(1))
            k = _per_head(k.view(-1, shape.key_heads, shape.rows), shape.heads, tiled)
            factor = torch.where(is_old[:, None], layer.decays.flatten(0, 1)[at], decays[picked])
            left = factor.float()[..., None, None] * state
            v = values[picked]
            if beta is not None:
                v = betas[picked][..., None] * (v - (k[..., None] * left).sum(2))
            old = layer.values.flatten(0, 1)[at].view_as(v)
            v = torch.where(is_old[:, None, None], old, v)
            is_there = (is_old | is_new)[:, None, None, None]
            state = torch.where(is_there, left + k[..., None] * v[:, :, None], state)
            answer = (queries[picked][..., None] * state).sum(2)
            mine = (is_new[:, None] & (torch.arange(rows.most) == place[:, None]))[..., None, None]
            outputs = torch.where(mine, answer[:, None], outputs)
            added = torch.where(mine, v[:, None], added)
            is_folded = (position + 1 == rows.num_folded_after)[:, None, None, None]
            folded = torch.where(is_folded, state, folded)
        _write(layer.state, rows.slots, folded, rows.num_folded_after > rows.num_folded)
        position = rows.num_stored[:, None] + torch.arange(rows.most)
        is_kept = self.is_new & (position >= rows.num_folded_after[:, None])
        for kept, new in ((layer.keys, keys), (layer.values, added), (layer.decays, decays)):
            self._keep(kept, new.flatten(2).to(kept.dtype), is_kept)
        return self._packed(outputs, len(query))


def _write(into: torch.Tensor, at: torch.Tensor, new: torch.Tensor, is_wanted: torch.Tensor) -> None:
    """Writes those of ``new`` that are wanted to places that differ."""
    scratch = torch.cat((into, into[:1]))
    scratch.index_copy_(0, torch.where(is_wanted, at, len(into)), new)
    into.copy_(scratch[:-1])
