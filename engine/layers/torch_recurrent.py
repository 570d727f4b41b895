"""Computes recurrences with torch's operations, on any device: chunk by chunk, as ``memory.recurrent_state``
says.

Products have the shape of a whole chunk however few of its tokens are there; missing ones are zeros.
Functions are computed in float64 and rounded: torch's vectorised ones give other bits than those for the end
of a row. So a token's numbers do not depend on how many others a pass brings.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.recurrent_state import CHUNK, LayerState, StateShape


class TorchStates:
    """Runs the recurrences of one forward over ``states``, the layers' tensors by their index."""

    def __init__(self, spans: Sequence[Span], states: dict[int, LayerState]) -> None:
        self.spans = spans
        self.states = states
        self.offsets = list(accumulate((len(span.token_ids) for span in spans), initial=0))

    def recur(self, recurrence: Recurrence, x: torch.Tensor) -> torch.Tensor:
        """Computes what ``LayerRun.recur`` says."""
        match recurrence:
            case ShortConv():
                return self.short_conv(recurrence, x.float()).to(x.dtype)
            case DeltaRule():
                return self.delta_rule(recurrence, x.float()).to(x.dtype)
            case Mamba2():
                return self.mamba2(recurrence, x.float()).to(x.dtype)

    def short_conv(self, rule: ShortConv, x: torch.Tensor) -> torch.Tensor:
        before, after, inner = x.chunk(3, dim=1)
        return after * self._convolve(rule.convolution, rule.layer, before * inner)

    def delta_rule(self, rule: DeltaRule, x: torch.Tensor) -> torch.Tensor:
        keys, values = rule.key_heads * rule.key_size, rule.heads * rule.value_size
        mixed, z, b, a = x.split_with_sizes((2 * keys + values, values, rule.heads, rule.heads), 1)
        mixed = self._convolve(rule.convolution, rule.layer, mixed)
        query, key, value = mixed.split_with_sizes((keys, keys, values), 1)
        query, key = (_unit(each.view(len(x), rule.key_heads, rule.key_size)) for each in (query, key))
        query = _per_head(query * rule.key_size**-0.5, rule.heads, rule.tiled)
        value = value.view(len(x), rule.heads, rule.value_size)
        decay = (rule.decay_rate * _softplus(a + rule.dt_bias)).double().exp()
        beta = b.double().sigmoid().float()
        output = _normed(self._anchored(rule, query, key, value, decay, beta, rule.tiled), rule.norm.eps)
        return (output * rule.norm.weight).flatten(1) * _silu(z)

    def mamba2(self, rule: Mamba2, x: torch.Tensor) -> torch.Tensor:
        inner, of_groups = rule.heads * rule.head_size, rule.groups * rule.state_size
        z, mixed, dt = x.split_with_sizes((inner, inner + 2 * of_groups, rule.heads), 1)
        mixed = self._convolve(rule.convolution, rule.layer, mixed)
        value, key, query = mixed.split_with_sizes((inner, of_groups, of_groups), 1)
        value = value.view(len(x), rule.heads, rule.head_size)
        key, query = (each.reshape(len(x), rule.groups, rule.state_size) for each in (key, query))
        dt = _softplus(dt + rule.dt_bias).clamp(*rule.dt_limits)
        decay = (rule.decay_rate * dt).double().exp()
        query = _per_head(query, rule.heads, tiled=False)
        output = self._anchored(rule, query, key, value * dt[:, :, None], decay)
        output = (output + value * rule.skip[:, None]).flatten(1) * _silu(z)
        if rule.norm is None:
            return output
        grouped = output.view(len(x), rule.norm_groups, -1)
        return _normed(grouped, rule.norm.eps).flatten(1) * rule.norm.weight

    def _convolve(self, convolution: Convolution, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Convolves each channel of ``x`` over a span's tokens and those before it, and keeps the newest."""
        width, inputs = convolution.weight.shape[1], self.states[layer].inputs
        num_kept, output = inputs.shape[1], torch.empty_like(x)
        for span, first, last in zip(self.spans, self.offsets, self.offsets[1:], strict=False):
            stored, count = span.table.num_computed_tokens, last - first
            mine, past = inputs[span.table.state_slot], x.new_zeros(width - 1, x.shape[1])
            known = min(stored, width - 1)
            past[width - 1 - known :] = mine[_places(stored - known, stored, num_kept, x.device)]
            window = torch.cat([past, x[first:last]])
            summed = window[:count] * convolution.weight[:, 0]
            for place in range(1, width):
                summed = summed + window[place : place + count] * convolution.weight[:, place]
            output[first:last] = summed
            kept = min(count, num_kept)
            places = _places(stored + count - kept, stored + count, num_kept, x.device)
            mine[places] = x[last - kept : last]
        if convolution.bias is not None:
            output = output + convolution.bias
        return _silu(output) if convolution.silu else output

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
        """Returns the states' outputs for ``query`` [tokens, heads, rows]. ``key`` [tokens, key heads, rows],
        ``value`` [tokens, heads, columns] and ``decay`` [tokens, heads] belong to the new tokens; with
        ``beta`` values are corrected by the delta rule."""
        output = torch.empty_like(value)
        layer = self.states[rule.layer]
        for span, first in zip(self.spans, self.offsets, strict=False):
            table = span.table
            stored, folded = table.num_computed_tokens, span.num_folded_after
            chunk = _Chunks(layer, table.state_slot, rule.state, tiled, table.num_folded_tokens)
            for start in range(table.num_folded_tokens, span.end, CHUNK):
                old = min(max(stored - start, 0), CHUNK)
                new = slice(first + start + old - stored, first + min(start + CHUNK, span.end) - stored)
                chunk.begin(start, old)
                if old < CHUNK:
                    betas = None if beta is None else beta[new]
                    output[new] = chunk.add(query[new], key[new], value[new], decay[new], betas)
                if start >= folded:
                    chunk.keep()
                if start + CHUNK <= span.end:
                    chunk.fold()
                    if start + CHUNK == folded:
                        layer.state[table.state_slot] = chunk.state
        return output


class _Chunks:
    """Walks through one sequence's chunks in one layer. ``state`` is the state before the chunk."""

    def __init__(
        self, layer: LayerState, slot: int | None, shape: StateShape, tiled: bool, num_folded: int
    ) -> None:
        assert slot is not None
        self.shape, self.tiled = shape, tiled
        self.stored = tuple(each[slot] for each in (layer.keys, layer.values, layer.decays))
        # A slot of which nothing is folded yet may have another text's state.
        self.state = layer.state[slot] if num_folded else torch.zeros_like(layer.state[slot])
        self.below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=self.state.device).tril()

    def begin(self, start: int, old: int) -> None:
        """Takes the ``old`` first records of the chunk at ``start`` from the log; the others are missing."""
        shape, first = self.shape, start % len(self.stored[0])
        self.log = slice(first, first + CHUNK)
        keys, values, decays = (each[self.log].clone() for each in self.stored)
        keys[old:], values[old:], decays[old:] = 0, 0, 1
        self.old = old
        self.keys = keys.view(CHUNK, shape.key_heads, shape.rows)
        self.values = values.view(CHUNK, shape.heads, shape.columns)
        self.decays = decays

    def add(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds the next tokens to the chunk, and returns the outputs for their queries."""
        new = slice(self.old, self.old + len(key))
        self.keys[new], self.decays[new] = key, decay
        queries = query.new_zeros(CHUNK, *query.shape[1:])
        queries[new] = query
        by_head, queries = self._keys(), queries.transpose(0, 1)
        through, whole = self._decays()
        if beta is None:
            self.values[new] = value
        else:
            known = whole[..., None] * (by_head @ self.state)
            others = torch.where(self.below.tril(-1), through, 0) * (by_head @ by_head.transpose(1, 2))
            values = self.values.transpose(0, 1)
            for place in range(new.start, new.stop):
                token = place - new.start
                answer = known[:, place] + (others[:, place, :, None] * values).sum(1)
                values[:, place] = beta[token][:, None] * (value[token] - answer)
        weights = torch.where(self.below, through, 0) * (queries @ by_head.transpose(1, 2))
        answers = whole[..., None] * (queries @ self.state) + weights @ self.values.transpose(0, 1)
        return answers.transpose(0, 1)[new]

    def keep(self) -> None:
        """Writes the chunk's records to the log."""
        for stored, ours in zip(self.stored, (self.keys, self.values, self.decays), strict=True):
            stored[self.log] = ours.view(CHUNK, -1)

    def fold(self) -> None:
        """Adds the whole chunk to the state."""
        through, whole = self._decays()
        keys = through[:, -1, :, None] * self._keys()
        added = keys.transpose(1, 2) @ self.values.transpose(0, 1)
        self.state = whole[:, -1, None, None] * self.state + added

    def _keys(self) -> torch.Tensor:
        """Returns each head's keys, [heads, chunk, rows]."""
        return _per_head(self.keys, self.shape.heads, self.tiled).transpose(0, 1)

    def _decays(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the share of token j's contribution that is left at token i [heads, i, j], and that of the
        state [heads, i], computed in float64."""
        factors = torch.where(self.below.tril(-1)[..., None], self.decays[:, None], 1.0)
        through, whole = factors.cumprod(0), self.decays.cumprod(0)
        return through.permute(2, 0, 1).float(), whole.T.float()


def _places(first: int, last: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns the places among ``size`` of positions from ``first`` to before ``last``."""
    return torch.arange(first, last, device=device) % size


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x.double()).float()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x.double()).float()


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Applies an RMSNorm to the last dimension, without its weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Divides the last dimension by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _per_head(x: torch.Tensor, heads: int, tiled: bool) -> torch.Tensor:
    """Gives each head the vector of its key head: [tokens, key heads, size] to [tokens, heads, size]."""
    shared = heads // x.shape[1]
    return x.repeat(1, shared, 1) if tiled else x.repeat_interleave(shared, 1)
