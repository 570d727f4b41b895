"""Runs the operations of a forward pass with torch, on any device: attention gathers its keys."""

import torch
import torch.nn.functional as F

from truedraft.engine.layers.attention import PagedAttention
from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import SWISH_LIMIT, SWISH_SLOPE, Activation, Experts, HeadLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.torch_recurrent import TorchStates
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import KVCache


class TorchPointwise:
    """Runs what looks at one token at a time."""

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return norm(x) if residual is None else residual + norm(x)

    def linear(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x) if residual is None else linear.add_to(residual, x)

    def by_head(self, linears: HeadLinears, x: torch.Tensor) -> torch.Tensor:
        return linears.by_definition(x, self)

    def split_heads(self, shape: AttentionShape, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits ``qkv`` [tokens, (heads + 2 kv heads) * size] into queries and keys, normed where the model
        norms them, [tokens, heads + kv heads, size], and values [tokens, kv heads, size]."""
        sizes = shape.num_heads + shape.num_stored_heads, shape.num_value_heads
        query_key, value = qkv.view(len(qkv), -1, shape.head_size).split_with_sizes(sizes, 1)
        if shape.norm is not None and not shape.norm_after_rotary:
            query_key = self.norm(shape.norm, query_key)
        if shape.whole_norms is not None:
            parts = query_key.split_with_sizes((shape.num_heads, shape.num_kv_heads), 1)
            pairs = zip(shape.whole_norms, parts, strict=True)
            query_key = torch.cat([self.norm(norm, x.flatten(1)).view_as(x) for norm, x in pairs], 1)
        if shape.value_norm is not None:
            value = self.norm(shape.value_norm, value)
        return query_key, value

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        if activation == "relu2":
            return F.relu(gate_up).square()
        if activation == "lone_gelu":
            return F.gelu(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        if activation == "clamped_swish":
            gate, up = gate.clamp(max=SWISH_LIMIT), up.clamp(-SWISH_LIMIT, SWISH_LIMIT)
            return gate * torch.sigmoid(SWISH_SLOPE * gate) * (up + 1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh").mul_(up)

    def experts(
        self,
        experts: Experts,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return experts.by_definition(x, self, residual, routed)

    def cap(self, logits: torch.Tensor, softcap: float) -> torch.Tensor:
        return torch.tanh(logits / softcap) * softcap


class TorchRun(TorchPointwise):
    """Is a ``LayerRun``."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> None:
        self.context = PagedAttention(batch, cache)
        self.states = TorchStates(batch.spans, cache.states)
        cos, sin = rotary.angles(batch.positions[0]) if batch.axes is None else rotary.mixed(batch.axes)
        self.angles = list(zip(cos[:, :, None], sin[:, :, None], strict=True))

    def recur(self, recurrence: Recurrence, x: torch.Tensor) -> torch.Tensor:
        return self.states.recur(recurrence, x)

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        gate = None
        if shape.gated:
            qkv, gate = qkv.tensor_split((-shape.num_heads * shape.head_size,), dim=1)
            qkv = qkv.contiguous()
        query_key, value = self.split_heads(shape, qkv)
        if shape.rotary is not None and shape.turned is not None:
            query_key = _rotate_apart(query_key, *self.angles[shape.rotary], *shape.turned)
        elif shape.rotary is not None:
            turn = _rotate_neighbours if shape.interleaved else _rotate
            query_key = turn(query_key, *self.angles[shape.rotary])
        if shape.norm is not None and shape.norm_after_rotary:
            query_key = self.norm(shape.norm, query_key)
        query, key = query_key.split_with_sizes((shape.num_heads, shape.num_stored_heads), 1)
        if shape.source is None:
            attended = self.context.attend(shape.call, query, key, key if shape.values_are_keys else value)
        else:
            attended = self.context.attend_to_stored(shape.call, query)
        attended = attended.reshape(len(qkv), -1)
        return attended if gate is None else attended * gate.sigmoid()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates ``x`` [tokens, heads, size], or as many numbers of a head as there are angles: (a, b) to
    (a cos - b sin, b cos + a sin)."""
    tokens, heads, size = x.shape
    if (rotated := cos.shape[-1]) < size:
        return torch.cat((_rotate(x[..., :rotated].contiguous(), cos, sin), x[..., rotated:]), dim=-1)
    swapped = x.view(tokens, heads, 2, size // 2).flip(2).view(tokens, heads, size)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)  # angles may be float32 whatever the model is in


def _rotate_apart(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: int, distance: int
) -> torch.Tensor:
    """Rotates the first ``pairs`` of numbers that stand ``distance`` apart."""
    first, rest = x.tensor_split((pairs,), dim=-1)
    middle, second, last = rest.tensor_split((distance - pairs, distance), dim=-1)
    turned = _rotate(torch.cat((first, second), dim=-1), cos[..., : 2 * pairs], sin[..., : 2 * pairs])
    return torch.cat((turned[..., :pairs], middle, turned[..., pairs:], last), dim=-1)


def _rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbours of each head by the angles of ``_rotate``'s pairs."""
    tokens, heads, size = x.shape
    rotated = cos.shape[-1]
    pairs = x[..., :rotated].view(tokens, heads, rotated // 2, 2)
    turned = _rotate(pairs.transpose(2, 3).reshape(tokens, heads, rotated), cos, sin)
    neighbours = turned.view(tokens, heads, 2, rotated // 2).transpose(2, 3).reshape(tokens, heads, rotated)
    return torch.cat((neighbours, x[..., rotated:]), dim=-1)
