"""Defines a forward pass as the layers see it: the operations between their weights, whatever computes them.

``TorchRun`` has torch's operations, ``engine.native.native_run`` kernels in C, for few rows on a CPU, and
``engine.cuda.triton_run`` kernels in Triton.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from truedraft.engine.layers.attention import AttentionCall
from truedraft.engine.layers.mlp import MlpRun
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Recurrence


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Says how one layer attends. ``norm`` is of queries and keys together, head by head: weight [heads + kv
    heads, size], before they are turned or after that; ``whole_norms`` are of all numbers of a token's
    queries, and of its keys. ``rotary`` is the number of its kind of angles; None turns nothing. They turn
    pairs of numbers: neighbours if ``interleaved``, or else halves of a head; ``turned`` says how many pairs,
    and how far apart, where that is not all of a kind's angles and their number. ``gated``: after the values
    come as many numbers as there are queries, whose sigmoid multiplies what is attended. ``sinks`` [heads],
    float32, are as in ``AttentionCall``. ``value_norm`` is of each head of values. ``source``: a layer
    before, at whose keys and values this one looks; it has queries only, and ``norm`` is of these.
    ``values_are_keys``: no values come in, and keys, as they are stored, are the values, too; what is
    attended of a head's numbers before ``value_start`` is not looked at. ``looks_ahead`` is as in
    ``AttentionCall``: each pass must have whole texts."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scaling: float
    sliding_window: int | None
    norm: Norm | None
    rotary: int | None = 0
    softcap: float | None = None
    whole_norms: tuple[Norm, Norm] | None = None
    norm_after_rotary: bool = False
    interleaved: bool = False
    gated: bool = False
    sinks: torch.Tensor | None = None
    turned: tuple[int, int] | None = None
    value_norm: Norm | None = None
    source: int | None = None
    values_are_keys: bool = False
    value_start: int = 0
    looks_ahead: bool = False

    @property
    def cached(self) -> int:
        """Returns the layer in whose cache its keys and values are."""
        return self.layer if self.source is None else self.source

    @property
    def num_stored_heads(self) -> int:
        """Returns the heads of keys that it computes."""
        return self.num_kv_heads if self.source is None else 0

    @property
    def num_value_heads(self) -> int:
        """Returns the heads of values that it computes."""
        return 0 if self.values_are_keys else self.num_stored_heads

    @property
    def call(self) -> AttentionCall:
        return AttentionCall(
            self.cached, self.scaling, self.sliding_window, self.softcap, self.sinks, self.looks_ahead
        )


class LayerRun(MlpRun, Protocol):
    """Runs one forward's operations; every tensor is [tokens, ...]."""

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        """Stores keys and values and attends: ``qkv`` [tokens, (heads + 2 kv heads) * size], or less
        where it has no values or keys, and the gate if there is one, which may be overwritten, to [tokens,
        heads * size], or without the numbers before ``value_start``."""
        ...

    def recur(self, recurrence: Recurrence, x: torch.Tensor) -> torch.Tensor:
        """Runs a recurrence over each sequence's state: ``x`` as its class says."""
        ...

    def cap(self, logits: torch.Tensor, softcap: float) -> torch.Tensor:
        """Returns c tanh(logit / c) of each; ``logits`` may be overwritten."""
        ...
