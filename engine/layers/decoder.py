"""Describes what a decoder is made of: layers of one or two branches, described once for every backend.

A layer's first branch, the mixer, is how tokens see each other, the second one, the MLP, what becomes of each
by itself. The descriptions are what torch's operations and Triton's kernels run through (``LayerRun``) and
what the structures in C are made from (``engine.native.decoder``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.layers.adapters import Place
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.layers.linear import Embeddings, Linear
from truedraft.engine.layers.mlp import Activation, DenseAndExperts, Experts, GatedMlp, scaled
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import AttentionShape, LayerRun
from truedraft.engine.layers.split_linear import own_linear
from truedraft.engine.memory.kv_cache import AttentionCache
from truedraft.engine.memory.recurrent_state import RecurrentCache
from truedraft.engine.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Attention:
    """Is a mixer in which each token looks at those before it. ``qkv`` computes queries, keys and values;
    ``cache`` is what is kept of each token."""

    shape: AttentionShape
    qkv: Linear | LatentProjection
    output: Linear
    cache: AttentionCache

    @property
    def linears(self) -> tuple[Linear, ...]:
        projection = self.qkv.linears if isinstance(self.qkv, LatentProjection) else (self.qkv,)
        return *projection, self.output

    def __call__(self, x: torch.Tensor, run: LayerRun, residual: torch.Tensor | None) -> torch.Tensor:
        if isinstance(self.qkv, LatentProjection):
            attended = self.qkv.values(run.attend(self.shape, self.qkv(x, run)), run)
        else:
            attended = run.attend(self.shape, run.linear(self.qkv, x))
        return run.linear(self.output, attended, residual)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Is a mixer in which each token sees a running state of those before it. ``inputs`` computes what the
    recurrence gets, which ``scales``, float32, multiply; ``cache`` is what is kept of each sequence."""

    recurrence: Recurrence
    inputs: Linear
    output: Linear
    cache: RecurrentCache
    scales: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inputs, self.output

    def __call__(self, x: torch.Tensor, run: LayerRun, residual: torch.Tensor | None) -> torch.Tensor:
        inputs = scaled(run.linear(self.inputs, x), self.scales)
        return run.linear(self.output, run.recur(self.recurrence, inputs), residual)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Is two mixers that get the same input; their outputs are added."""

    mixers: tuple[Attention | Recurrent, Attention | Recurrent]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixers[0].linears, *self.mixers[1].linears

    def __call__(self, x: torch.Tensor, run: LayerRun, residual: torch.Tensor | None) -> torch.Tensor:
        return self.mixers[1](x, run, self.mixers[0](x, run, residual))


Mixer: TypeAlias = Attention | Recurrent | Parallel
Mlp: TypeAlias = GatedMlp | Experts | DenseAndExperts


class Part(Protocol):
    """Is a mixer or an MLP: computes ``x`` [tokens, hidden size], and adds ``residual`` if there is one."""

    @property
    def linears(self) -> tuple[Linear, ...]: ...

    def __call__(self, x: torch.Tensor, run: LayerRun, residual: torch.Tensor | None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenBranch:
    """Is a layer's last branch, whose input has a number to be multiplied by for each that ``gate`` computes
    of a token (``LayerInputs``); ``norm`` is of what it adds to the hidden states."""

    activation: Activation
    gate: Linear
    output: Linear
    norm: Norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate, self.output

    def __call__(self, hidden: torch.Tensor, run: LayerRun, given: torch.Tensor) -> torch.Tensor:
        gates = torch.cat((run.linear(self.gate, hidden), given), dim=1)
        return run.norm(self.norm, run.linear(self.output, run.gate(self.activation, gates)), hidden)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Is one layer. Norms may stand before each branch, and after it, of what is added to the hidden states.

    ``is_parallel``: both branches get what the mixer's norm makes of the layer's input. ``mixer`` or ``mlp``
    is None where the other one is all there is. In the end hidden states are multiplied by ``scale``. With
    ``norms_sums`` a norm after a branch is of the sum of what it adds and the hidden states.
    """

    mixer: Mixer | None
    mlp: Mlp | None
    mixer_norm: Norm | None
    mlp_norm: Norm | None
    mixer_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    is_parallel: bool = False
    token_branch: TokenBranch | None = None
    scale: float = 1.0
    norms_sums: bool = False

    @property
    def linears(self) -> Iterator[Linear]:
        for part in (self.mixer, self.mlp, self.token_branch):
            yield from () if part is None else part.linears

    def __post_init__(self) -> None:
        others = self.mlp_norm, self.mixer_post_norm, self.mlp_post_norm
        if self.is_parallel and (self.mixer_norm is None or any(norm is not None for norm in others)):
            raise ValueError("branches that run in parallel have the mixer's norm, and no other")
        if self.mlp is None and (self.is_parallel or self.mlp_norm or self.mlp_post_norm):
            raise ValueError("a layer without an MLP has no norm of it, and nothing that runs in parallel")
        if self.mixer is None and (self.mlp is None or self.mixer_norm or self.mixer_post_norm):
            raise ValueError("a layer without a mixer has an MLP, and no norm of a mixer")
        if isinstance(self.mixer, Parallel) and (self.mixer_norm is None or self.mixer_post_norm is not None):
            raise ValueError("mixers that run in parallel have a norm before them, and none after them")

    @property
    def mixers(self) -> tuple[Attention | Recurrent, ...]:
        """Returns those that have a cache, one after the other."""
        if isinstance(self.mixer, Parallel):
            return self.mixer.mixers
        return () if self.mixer is None else (self.mixer,)

    def __call__(
        self,
        hidden: torch.Tensor,
        run: LayerRun,
        joined: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes ``hidden`` [tokens, hidden size], which may be overwritten. The mixer gets ``joined``
        [tokens, 2 * hidden size] in its place, if that is given; ``given`` is of the token branch."""
        hidden = self._branches(hidden, run, joined)
        if self.token_branch is not None:
            assert given is not None
            hidden = self.token_branch(hidden, run, given)
        return hidden if self.scale == 1 else hidden * self.scale

    def _branches(self, hidden: torch.Tensor, run: LayerRun, joined: torch.Tensor | None) -> torch.Tensor:
        if self.is_parallel:
            assert self.mixer_norm is not None
            assert self.mixer is not None
            assert self.mlp is not None
            x = run.norm(self.mixer_norm, hidden)
            return self.mlp(x, run, self.mixer(x, run, hidden))
        if joined is not None:
            assert self.mixer is not None
            hidden = self.mixer(joined, run, hidden)
        elif self.mixer is not None:
            hidden = self._branch(self.mixer, self.mixer_norm, self.mixer_post_norm, hidden, run)
        if self.mlp is None:
            return hidden
        return self._branch(self.mlp, self.mlp_norm, self.mlp_post_norm, hidden, run)

    def _branch(
        self, part: Part, norm: Norm | None, post_norm: Norm | None, hidden: torch.Tensor, run: LayerRun
    ) -> torch.Tensor:
        x = hidden if norm is None else run.norm(norm, hidden)
        if post_norm is None:
            return part(x, run, hidden)
        if self.norms_sums:
            return run.norm(post_norm, part(x, run, hidden))
        return run.norm(post_norm, part(x, run, None), hidden)


@dataclass(frozen=True, slots=True)
class Joint:
    """Lets a decoder take a hidden state with each token, as draft heads do.

    Embeddings and states, each normed, stand side by side. What ``projection`` makes of that are the first
    hidden states. Without it the first layer's mixer, which has no norm of its own, gets them as they are,
    and what it computes is added to the states, or to what their norm makes of them (``adds_to_normed``).
    """

    embedding_norm: Norm
    state_norm: Norm
    adds_to_normed: bool = False
    projection: Linear | None = None

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor, run: LayerRun
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the first hidden states, and what the first mixer gets in their place, if anything."""
        normed = run.norm(self.state_norm, states)
        joined = torch.cat((run.norm(self.embedding_norm, embedded), normed), dim=-1)
        if self.projection is not None:
            return run.linear(self.projection, joined), None
        return normed if self.adds_to_normed else states.clone(), joined


class MakeOutput(Protocol):
    """Makes another output layer of a decoder's own weights."""

    def __call__(self, rows: npt.NDArray[np.int64] | None, in_four_bits: bool) -> Linear | None:
        """Returns one of some ``rows``, in any order, or of all (None). Returns None where there are no
        kernels for weights in four bits (on a GPU), or where they have no more bits anyway."""
        ...


@dataclass(frozen=True)
class LayerInputs:
    """Gives each token some numbers for each layer (``TokenBranch``): a row of a table of its own, times
    ``scale``, plus what ``norm`` makes of ``projection``'s outputs for its embedding, layer by layer."""

    embeddings: Embeddings
    projection: Linear
    norm: Norm
    scale: float

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor, run: LayerRun) -> torch.Tensor:
        """Returns them, [tokens, layers, size]; ``hidden`` are the tokens' embeddings."""
        size = self.norm.size
        rows = self.embeddings.look_up(token_ids).to(hidden.dtype) * self.scale
        projected = run.linear(self.projection, hidden).reshape(-1, size)
        return run.norm(self.norm, projected, rows.reshape(-1, size)).view(len(hidden), -1, size)


@dataclass(frozen=True)
class DecoderWeights:
    """Describes a whole decoder. ``softcap`` is of the logits, as in ``AttentionCall``. A decoder with a
    ``joint`` takes hidden states, too. ``make_output`` makes other output layers of what ``head`` is made of,
    where that can be read again. ``places`` has those of transformers' modules that adapters can change, by
    the modules' names. With a ``group`` layers are a rank's share."""

    embeddings: Embeddings
    layers: list[DecoderLayer]
    norm: Norm
    head: Linear
    rotary: Rotary
    embedding_scale: float
    softcap: float | None
    joint: Joint | None = None
    make_output: MakeOutput | None = None
    layer_inputs: LayerInputs | None = None
    places: dict[str, list[Place]] = field(default_factory=dict)
    group: Group | None = None

    @property
    def linears(self) -> Iterator[Linear]:
        """Yields all linear layers that this process computes, the output layer first."""
        yield own_linear(self.head)
        if self.joint is not None and self.joint.projection is not None:
            yield self.joint.projection
        for layer in self.layers:
            yield from map(own_linear, layer.linears)
        if self.layer_inputs is not None:
            yield self.layer_inputs.projection

    @property
    def whole_head(self) -> Linear:
        """Returns the output layer with all of its outputs, for others than the ranks that share ``head``."""
        made = self.head if self.make_output is None or self.group is None else self.make_output(None, False)
        assert made is not None
        return made

    @property
    def mixers(self) -> list[Attention | Recurrent]:
        """Returns those of all layers: a mixer's ``layer`` is its place here, and its cache's."""
        return [mixer for layer in self.layers for mixer in layer.mixers]

    @property
    def attention(self) -> list[AttentionShape]:
        """Returns the shapes of its layers of attention."""
        return [mixer.shape for mixer in self.mixers if isinstance(mixer, Attention)]

    @property
    def recurrences(self) -> list[Recurrence]:
        return [mixer.recurrence for mixer in self.mixers if isinstance(mixer, Recurrent)]

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the first hidden states [tokens, hidden size]."""
        rows = self.embeddings.look_up(token_ids).to(dtype)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale
