"""What a Llama-shaped layer does between its matrix products, with torch's operations, on any device.

``engine.native.native_run`` does the same in C, for few rows on a CPU, and
``engine.cuda.triton_run`` in Triton.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F

from truedraft.engine.layers.attention import AttentionCall, PagedAttention
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import KVCache

MAX_TABLE_POSITIONS = 1 << 17
# Of gates, by transformers' names and in the order of kernels.h.
Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class Norm:
    """RMSNorm over the last dimension, in float32 as transformers computes it."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        # On a CPU torch's rms_norm is six operations. sum(x^2) + n * eps is a hypotenuse: four, two of them
        # on one number a row.
        self.short = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.scaled_weight = weight * self.size**0.5
        self.leg = torch.tensor((self.size * eps) ** 0.5, dtype=torch.float32, device=weight.device)

    @classmethod
    def of(cls, module: Any) -> "Norm":
        weight = module.weight.detach()
        if hasattr(module, "variance_epsilon"):
            return cls(weight, module.variance_epsilon)
        return cls(1 + weight.float(), module.eps)  # Gemma's, in float32 whatever the model's type

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._normed(x.to(self.weight.dtype)).to(x.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.short:
            length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.leg)
            return (x / length).mul_(self.scaled_weight)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x, (self.size,), None, self.eps) * self.weight


def rotary_kinds(config: Any) -> list[str | None]:
    """Types of layers that have angles of their own; [None]: all layers have the same."""
    types = sorted(set(getattr(config, "layer_types", None) or ()))
    return [kind for kind in types if kind in config.rope_parameters] or [None]


class Rotary:
    """cos and signed sin of every position, from the model's own rotary module, by ``rotary_kinds``.

    Angles are a function of the position alone: ``choose_rotary_factors`` leaves longrope one set of factors,
    and dynamic frequencies change beyond the context only.
    """

    def __init__(self, module: Any, config: Any, like: torch.Tensor) -> None:
        self.module = module
        self.kinds = rotary_kinds(config)
        self.like = like
        # Numbers of a head that are rotated, the first ones.
        self.size = self.compute(torch.zeros(1, dtype=torch.int64, device=like.device))[0].shape[-1]
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None
        num_positions = int(config.max_position_embeddings)
        if num_positions <= MAX_TABLE_POSITIONS:
            self.table = self.compute(torch.arange(num_positions, device=like.device))
        # Dynamic frequencies are looked after by the host, which must not take part in a captured graph.
        types = module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type]
        self.needs_host = self.table is None and any("dynamic" in each for each in types)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For ``positions`` [tokens]: cos and signed sin, [kinds, tokens, ``size``]."""
        if self.table is None:
            return self.compute(positions)
        cos, sin = self.table
        return cos.index_select(1, positions), sin.index_select(1, positions)

    def compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more = [() if kind is None else (kind,) for kind in self.kinds]
        found = [self.module(self.like, positions[None], *kind) for kind in more]
        cos, sin = (torch.cat(parts) for parts in zip(*found, strict=True))
        half = sin.shape[-1] // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention. ``norm`` is of queries and keys together: weight [heads + kv heads, size];
    ``rotary`` the number of its kind of angles."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scaling: float
    sliding_window: int | None
    norm: Norm | None
    rotary: int = 0
    softcap: float | None = None

    @property
    def call(self) -> AttentionCall:
        return AttentionCall(self.layer, self.scaling, self.sliding_window, self.softcap)


class LayerRun(Protocol):
    """Of one forward; every tensor is [tokens, ...]."""

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Plus ``residual``, if there is one."""
        ...

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        """Stores keys and values and attends: ``qkv`` [tokens, (heads + 2 kv heads) * size], which may be
        overwritten, to [tokens, heads * size]."""
        ...

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * size] to [tokens, size]; ``gate_up`` may be overwritten."""
        ...

    def cap(self, logits: torch.Tensor, softcap: float) -> torch.Tensor:
        """c tanh(logit / c) of each; ``logits`` may be overwritten."""
        ...


class TorchPointwise:
    """Parts that look at one token at a time, with torch's operations."""

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return norm(x) if residual is None else residual + norm(x)

    def split_heads(self, shape: AttentionShape, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``qkv`` [tokens, (heads + 2 kv heads) * size] as queries and keys, normed where the model norms
        them, [tokens, heads + kv heads, size], and values [tokens, kv heads, size]."""
        sizes = shape.num_heads + shape.num_kv_heads, shape.num_kv_heads
        query_key, value = qkv.view(len(qkv), -1, shape.head_size).split_with_sizes(sizes, 1)
        return query_key if shape.norm is None else self.norm(shape.norm, query_key), value

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def cap(self, logits: torch.Tensor, softcap: float) -> torch.Tensor:
        return torch.tanh(logits / softcap) * softcap


class TorchRun(TorchPointwise):
    """On any device; attention gathers."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> None:
        self.context = PagedAttention(batch, cache)
        cos, sin = rotary.angles(batch.positions[0])
        self.angles = list(zip(cos[:, :, None], sin[:, :, None], strict=True))

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        query_key, value = self.split_heads(shape, qkv)
        query_key = _rotate(query_key, *self.angles[shape.rotary])
        query, key = query_key.split_with_sizes((shape.num_heads, shape.num_kv_heads), 1)
        attended = self.context.attend(shape.call, query, key, value)
        return attended.reshape(len(qkv), -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x`` [tokens, heads, size], or of as many numbers of a head as there are angles:
    (a, b) to (a cos - b sin, b cos + a sin)."""
    tokens, heads, size = x.shape
    if (rotated := cos.shape[-1]) < size:
        return torch.cat((_rotate(x[..., :rotated].contiguous(), cos, sin), x[..., rotated:]), dim=-1)
    swapped = x.view(tokens, heads, 2, size // 2).flip(2).view(tokens, heads, size)
    return torch.addcmul(x * cos, swapped, sin)
