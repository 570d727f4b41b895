"""Describes recurrences once for every backend: layers that keep a state of the text in place of keys.

A linear layer before a recurrence computes its inputs for each token, in the order that its class says;
another one after it takes its outputs (``Recurrent`` in ``decoder``).
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from truedraft.engine.layers.norm import Norm
from truedraft.engine.memory.recurrent_state import StateShape


@dataclass(frozen=True, slots=True)
class Convolution:
    """Sums each channel over the newest tokens: ``weight`` [channels, width] has the oldest one first. All is
    float32. ``silu`` says that silu is applied to the sums."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    silu: bool = False


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Multiplies C by a convolution of B x (LFM2): inputs are [B | C | x], each as wide as the output."""

    layer: int
    convolution: Convolution

    @property
    def state(self) -> None:
        return None

    @property
    def input_size(self) -> int:
        """Returns the number of inputs of each token."""
        return 3 * len(self.convolution.weight)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Is Gated DeltaNet (arXiv 2412.06464): each head's state forgets, and what it would answer to a key
    moves towards the value.

    [queries | keys | values | z | b | a] come in, [values] go out: ``key_heads`` of queries and of keys,
    ``heads`` of all else. Queries, keys and values go through the convolution. Head h has the key head
    h modulo ``key_heads`` if ``tiled``, or else as many heads running share one. ``decay_rate`` and
    ``dt_bias`` [heads] are float32; ``norm`` is of each head's values, before z gates them.
    """

    layer: int
    convolution: Convolution
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: Norm
    tiled: bool = False

    @property
    def state(self) -> StateShape:
        return StateShape(self.heads, self.key_size, self.value_size, self.key_heads)

    @property
    def input_size(self) -> int:
        return len(self.convolution.weight) + self.heads * (self.value_size + 2)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Is Mamba 2 (arXiv 2405.21060): each head's state forgets, and adds the token's values by its B.

    [z | x | B | C | dt] come in, [x] goes out: ``heads`` of z and x, ``groups`` of B and C of ``state_size``
    numbers each, one dt for each head. x, B and C go through the convolution. As many heads running share a
    group. ``decay_rate``, ``skip`` and ``dt_bias`` [heads] are float32; dt is kept within ``dt_limits``.
    ``norm`` is of what z has gated, in ``norm_groups`` equal parts of its weight.
    """

    layer: int
    convolution: Convolution
    heads: int
    head_size: int
    groups: int
    state_size: int
    decay_rate: torch.Tensor
    skip: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]
    norm: Norm | None
    norm_groups: int = 1

    @property
    def state(self) -> StateShape:
        return StateShape(self.heads, self.state_size, self.head_size, self.groups)

    @property
    def input_size(self) -> int:
        return len(self.convolution.weight) + self.heads * (self.head_size + 1)


Recurrence: TypeAlias = ShortConv | DeltaRule | Mamba2
