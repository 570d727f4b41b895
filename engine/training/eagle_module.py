"""Trains an EAGLE-3 head with torch: over whole texts, several steps ahead at each place.

At inference a head's later steps see its own states where the first one sees the target's. So training takes
the same steps (arXiv 2503.01840, training-time test): the first sees all places before it, each further one
those as well, and the states that the earlier steps have left at its own place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class HeadShape:
    """Holds the sizes of a head. ``taps`` is the number of the target's layers that it reads, each of
    ``hidden_size`` numbers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: int
    num_drafted: int
    rope_theta: float
    eps: float


class EagleModule(nn.Module):
    """Names its parameters as the layout in parts does, except for a prefix of the layer's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        size, heads = shape.hidden_size, shape.num_heads * shape.head_dim
        kv_heads = shape.num_kv_heads * shape.head_dim
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, shape.eps) for _ in range(shape.taps))
        self.fc = _linear(shape.taps * size, size)
        self.input_layernorm = nn.RMSNorm(size, shape.eps)
        self.hidden_norm = nn.RMSNorm(size, shape.eps)
        self.q_proj = _linear(2 * size, heads)
        self.k_proj = _linear(2 * size, kv_heads)
        self.v_proj = _linear(2 * size, kv_heads)
        self.o_proj = _linear(heads, size)
        self.post_attention_layernorm = nn.RMSNorm(size, shape.eps)
        self.gate_proj = _linear(size, shape.intermediate_size)
        self.up_proj = _linear(size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, size)
        self.norm = nn.RMSNorm(size, shape.eps)
        self.lm_head = _linear(size, shape.num_drafted)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Sets weights with which the head passes on the last tapped state: the layer adds nothing yet."""
        size = self.shape.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        self.o_proj.weight.zero_()
        self.down_proj.weight.zero_()

    def forward(self, hidden: torch.Tensor, embedded: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each step's logits [texts, places, drafted tokens].

        ``hidden`` [texts, places, taps, hidden size] are the target's states, first those that the head
        reads, and ``embedded`` for each step the embeddings [texts, places, hidden size] of the tokens that
        it gets.
        """
        read = hidden[:, :, : self.shape.taps].unbind(2)
        normed = [norm(x) for norm, x in zip(self.fc_norm, read, strict=True)]
        states = self.fc(torch.cat(normed, dim=-1))
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for step, vectors in enumerate(embedded):
            residual = self.hidden_norm(states)
            joined = torch.cat((self.input_layernorm(vectors), residual), dim=-1)
            residual = residual + self.o_proj(self._attend(joined, step, keys, values))
            x = self.post_attention_layernorm(residual)
            states = self.norm(residual + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
            logits.append(self.lm_head(states))
        return logits

    def _attend(
        self, x: torch.Tensor, step: int, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attends and appends the step's keys and values [texts, heads, places, size]."""
        shape, (texts, places, _) = self.shape, x.shape

        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            y = y.view(texts, places, count, shape.head_dim).transpose(1, 2)
            return y.repeat_interleave(shape.num_heads // count, dim=1)

        query = _turn(heads(self.q_proj(x), shape.num_heads), step, shape.rope_theta)
        keys.append(_turn(heads(self.k_proj(x), shape.num_kv_heads), step, shape.rope_theta))
        values.append(heads(self.v_proj(x), shape.num_kv_heads))
        if step == 0:
            attended = F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        else:
            scale = shape.head_dim**-0.5
            is_later = torch.ones(places, places, dtype=torch.bool, device=x.device).triu(1)
            scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(is_later, -torch.inf)
            own = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
            weights = torch.cat((scores, *own), dim=-1).softmax(-1)
            attended = weights[..., :places] @ values[0]
            for number, value in enumerate(values[1:]):
                attended = attended + weights[..., places + number, None] * value
        return attended.transpose(1, 2).reshape(texts, places, -1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _turn(x: torch.Tensor, step: int, theta: float) -> torch.Tensor:
    """Rotates ``x`` [texts, heads, places, size] by the positions of a step, one further for each."""
    half, places = x.shape[-1] // 2, x.shape[-2]
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = (step + torch.arange(places, device=x.device))[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
