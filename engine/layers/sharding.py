"""Makes a rank's share of a layer from its description, before weights are packed.

A rank computes some outputs of each linear layer, all of whose inputs it needs: some heads of queries, keys
and values, some numbers of an MLP, some hidden numbers, some of the vocabulary. What the others have computed
is gathered before the next layer. So no sum is divided, and each number has the bits that one process
computes. Two gathers stand around a mixer's or an MLP's output layer. Sums that are divided among ranks would
need one of them, but would round otherwise than one process, and otherwise for each number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.decoder import (
    Attention,
    DecoderLayer,
    Mixer,
    Mlp,
    Parallel,
    Recurrent,
    TokenBranch,
)
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.layers.linear import Embeddings, Linear, Linears, TorchLinear, WideLinear
from truedraft.engine.layers.mlp import (
    UNGATED,
    DenseAndExperts,
    Experts,
    GatedMlp,
    HeadLinears,
    MlpRun,
    scaled,
)
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.split_linear import Numbers, SplitLinear
from truedraft.engine.layers.weight import Weight
from truedraft.engine.memory.kv_cache import NOTHING, AttentionCache
from truedraft.engine.memory.recurrent_state import RecurrentCache
from truedraft.engine.parallel.group import Group

# Kernels pack this many outputs of a quantised matrix together.
PACKED_OUTPUTS = 32


@dataclass(frozen=True)
class Pending:
    """Is a linear layer that is not made yet, of ``weights`` with the same inputs."""

    weights: tuple[Weight, ...]
    bias: torch.Tensor | None
    multiplier: float
    is_wide: bool = False

    @property
    def in_features(self) -> int:
        return self.weights[0].shape[1]

    @property
    def out_features(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    def take(self, rows: Numbers) -> "Pending":
        """Returns the layer of some outputs, by their numbers."""
        ends = np.cumsum([weight.shape[0] for weight in self.weights])
        owners = np.searchsorted(ends, rows, side="right")
        taken = []
        for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(owners)) + 1):
            weight = self.weights[owners[run[0]]]
            taken.append(weight.take(rows[run] - (ends[owners[run[0]]] - weight.shape[0])))
        types = {None if weight.blocks is None else weight.blocks.type for weight in taken}
        if len(types) > 1 and any(weight.shape[0] % PACKED_OUTPUTS for weight in taken[:-1]):
            raise ModelLoadError(
                "its quantised weights of several types cannot be divided among so many ranks: a rank's "
                f"share of {taken[0].name} is no multiple of {PACKED_OUTPUTS} outputs"
            )
        bias = None if self.bias is None else self.bias[torch.from_numpy(rows)]
        return replace(self, weights=tuple(taken), bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("This layer is not made yet.")

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("This layer is not made yet.")


class PendingLinears:
    """Describes layers instead of making them; embeddings are made, as each rank has all."""

    def __init__(self, linears: Linears) -> None:
        self.linears = linears
        self.takes_halves = linears.takes_halves
        self.takes_blocks = linears.takes_blocks
        self.takes_scaled_rows = linears.takes_scaled_rows
        self.takes_scaled_bytes = linears.takes_scaled_bytes

    def make(self, weights: Sequence[Weight], bias: torch.Tensor | None, multiplier: float = 1.0) -> Linear:
        return Pending(tuple(weights), bias, multiplier)

    def embeddings(self, weight: Weight) -> Embeddings:
        return self.linears.embeddings(weight)


def widened(linear: Linear) -> Linear:
    """Returns a layer that multiplies in float32 where torch would do it in the model's type."""
    if isinstance(linear, Pending):
        return replace(linear, is_wide=True)
    return WideLinear(linear) if isinstance(linear, TorchLinear) else linear


@dataclass(frozen=True, slots=True)
class SplitExperts(Experts):
    """Is experts of each of which a rank has some of ``inner`` numbers and some of ``hidden`` outputs."""

    group: Group | None = None
    inner: int = 0
    hidden: int = 0
    num_own: int = 0  # the rank's outputs

    def __call__(
        self,
        x: torch.Tensor,
        run: MlpRun,
        residual: torch.Tensor | None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the same sums as ``by_definition``, for the rank's outputs."""
        assert self.group is not None
        chosen, weights = self.router.choose(x if routed is None else routed, run)
        numbers = sorted(set(chosen.flatten().tolist()))
        self.touched.add(len(numbers))
        places = [(chosen == number).nonzero(as_tuple=True) for number in numbers]
        gated = []
        for number, (tokens, _) in zip(numbers, places, strict=True):
            expert = self.experts[number]
            gate_up = scaled(run.linear(expert.gate_up, x[tokens]), expert.scales)
            gated.append(run.gate(expert.activation, gate_up))
        inputs = self.group.gather(torch.cat(gated))[:, : self.inner]
        found = x.new_zeros(len(x), self.num_own)
        parts = torch.split(inputs, [len(tokens) for tokens, _ in places])
        for number, (tokens, place), part in zip(numbers, places, parts, strict=True):
            output = run.linear(self.experts[number].down, part.contiguous())
            found[tokens] += (output * weights[tokens, place, None]).to(x.dtype)
        found = self.group.gather(found)[:, : self.hidden]
        if (shared := self.shared_output(x, run)) is not None:
            found = found + shared
        return found if residual is None else residual + found


class Sharding:
    """Makes a rank's share of layers that ``PendingLinears`` has described, with ``linears``."""

    def __init__(self, group: Group, linears: Linears) -> None:
        self.group = group
        self.linears = linears

    def layer(self, layer: DecoderLayer) -> DecoderLayer:
        return replace(
            layer,
            mixer=None if layer.mixer is None else self._mixer(layer.mixer),
            mlp=None if layer.mlp is None else self._mlp(layer.mlp),
            token_branch=None if layer.token_branch is None else self._token_branch(layer.token_branch),
        )

    def output(self, linear: Linear) -> Linear:
        """Returns the rank's share of a layer whose inputs every rank has."""
        return self._split(linear, None)

    def _mixer(self, mixer: Mixer) -> Mixer:
        match mixer:
            case Parallel():
                first, second = map(self._lone_mixer, mixer.mixers)
                return Parallel((first, second))
            case _:
                return self._lone_mixer(mixer)

    def _lone_mixer(self, mixer: Attention | Recurrent) -> Attention | Recurrent:
        return self._attention(mixer) if isinstance(mixer, Attention) else self._recurrent(mixer)

    def _attention(self, mixer: Attention) -> Attention:
        shape = mixer.shape
        if shape.whole_norms is not None:
            # Norms over all heads need all of them: each rank attends with all, and keeps all keys.
            assert not isinstance(mixer.qkv, LatentProjection)
            return replace(mixer, qkv=self.output(mixer.qkv), output=self.output(mixer.output))
        heads, kv_heads = self._heads(shape.num_heads, shape.num_kv_heads)
        norm = shape.norm
        if norm is not None:
            stored = kv_heads[: shape.num_stored_heads]
            norm = _norm_of(norm, np.concatenate((heads, shape.num_heads + stored)))
        own = replace(
            shape,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            norm=norm,
            sinks=None if shape.sinks is None else shape.sinks[torch.from_numpy(heads)],
        )
        return Attention(
            own,
            self._projection(mixer.qkv, shape, heads, kv_heads),
            self._split(mixer.output, pending(mixer.output).in_features),
            _cache_of(mixer.cache, own),
        )

    def _projection(
        self, qkv: Linear | LatentProjection, shape: AttentionShape, heads: Numbers, kv_heads: Numbers
    ) -> Linear | LatentProjection:
        """Returns what makes the rank's queries, keys and values; of latent vectors each rank makes all."""
        if not isinstance(qkv, LatentProjection):
            stored = (shape.num_stored_heads, kv_heads), (shape.num_value_heads, kv_heads)
            parts = (shape.num_heads, heads), *stored, (shape.num_heads if shape.gated else 0, heads)
            return self._rows(qkv, _outputs(parts, shape.head_size))
        own = _channels(heads, qkv.query_size)
        down, query_up = pending(qkv.down), qkv.query_up
        others = np.arange(qkv.num_queries, down.out_features)
        return replace(
            qkv,
            down=self._rows(down, np.concatenate((own, others))) if query_up is None else self._made(down),
            key_up=self._of_heads(qkv.key_up, heads),
            value_up=self._of_heads(qkv.value_up, heads),
            query_up=None if query_up is None else self._rows(query_up, own),
        )

    def _of_heads(self, linears: HeadLinears, heads: Numbers) -> HeadLinears:
        return HeadLinears(tuple(self._made(linears.linears[head]) for head in heads))

    def _recurrent(self, mixer: Recurrent) -> Recurrent:
        rule, order = mixer.recurrence, None
        if isinstance(rule, Mamba2) and rule.norm is not None and rule.norm_groups % self.group.size:
            # Each rank computes all of what a norm needs at once, and keeps the whole state.
            return replace(mixer, inputs=self.output(mixer.inputs), output=self.output(mixer.output))
        own: Recurrence
        match rule:
            case ShortConv():
                own, rows = self._short_conv(rule)
            case DeltaRule():
                own, rows, order = self._delta_rule(rule)
            case Mamba2():
                own, rows = self._mamba2(rule)
        channels, width = own.convolution.weight.shape
        return Recurrent(
            own,
            self._rows(mixer.inputs, rows),
            self._split(mixer.output, pending(mixer.output).in_features, order),
            RecurrentCache(channels, width, own.state, mixer.cache.device),
            None if mixer.scales is None else mixer.scales[torch.from_numpy(rows)],
        )

    def _short_conv(self, rule: ShortConv) -> tuple[ShortConv, Numbers]:
        size = len(rule.convolution.weight)
        own = self._share(size)
        rows = np.concatenate([own, size + own, 2 * size + own])
        return replace(rule, convolution=_convolution_of(rule.convolution, own)), rows

    def _delta_rule(self, rule: DeltaRule) -> tuple[DeltaRule, Numbers, torch.Tensor | None]:
        """Returns the rank's part, the outputs of the layer before it, and the order of values where they are
        tiled: a rank has one value head of each of its key heads, then another."""
        heads, key_heads = self._heads(rule.heads, rule.key_heads)
        if len(key_heads) * self.group.size != rule.key_heads:
            raise self._refusal(f"with {rule.key_heads} heads of keys in a recurrent layer")
        order = None
        if rule.tiled:
            tiles = np.arange(rule.heads).reshape(-1, self.group.size, len(key_heads))
            heads = tiles[:, self.group.rank].ravel()
            gathered = _channels(tiles.transpose(1, 0, 2).ravel(), rule.value_size)
            order = torch.from_numpy(gathered.argsort())
        keys, values = _channels(key_heads, rule.key_size), _channels(heads, rule.value_size)
        num_keys, num_values = rule.key_heads * rule.key_size, rule.heads * rule.value_size
        channels = np.concatenate((keys, num_keys + keys, 2 * num_keys + values))
        begin = 2 * num_keys + num_values
        gates = (begin + values, begin + num_values + heads, begin + num_values + rule.heads + heads)
        taken = torch.from_numpy(heads)
        own = replace(
            rule,
            convolution=_convolution_of(rule.convolution, channels),
            key_heads=len(key_heads),
            heads=len(heads),
            decay_rate=rule.decay_rate[taken],
            dt_bias=rule.dt_bias[taken],
        )
        return own, np.concatenate((channels, *gates)), order

    def _mamba2(self, rule: Mamba2) -> tuple[Mamba2, Numbers]:
        heads, groups = self._heads(rule.heads, rule.groups)
        norm, norm_groups = rule.norm, rule.norm_groups
        values, states = _channels(heads, rule.head_size), _channels(groups, rule.state_size)
        if norm is not None:
            norm, norm_groups = _norm_of(norm, values), norm_groups // self.group.size
        inner, of_groups = rule.heads * rule.head_size, rule.groups * rule.state_size
        channels = np.concatenate((values, inner + states, inner + of_groups + states))
        taken = torch.from_numpy(heads)
        own = replace(
            rule,
            convolution=_convolution_of(rule.convolution, channels),
            heads=len(heads),
            groups=len(groups),
            decay_rate=rule.decay_rate[taken],
            skip=rule.skip[taken],
            dt_bias=rule.dt_bias[taken],
            norm=norm,
            norm_groups=norm_groups,
        )
        return own, np.concatenate((values, inner + channels, 2 * inner + 2 * of_groups + heads))

    def _mlp(self, mlp: Mlp) -> Mlp:
        match mlp:
            case GatedMlp():
                return self._gated_mlp(mlp)
            case DenseAndExperts():
                return replace(mlp, dense=self._gated_mlp(mlp.dense), experts=self._experts(mlp.experts))
            case Experts():
                return self._experts(mlp)

    def _gated_mlp(self, mlp: GatedMlp) -> GatedMlp:
        inner = pending(mlp.down).in_features
        return replace(self._gating(mlp), down=self._split(mlp.down, inner))

    def _gating(self, mlp: GatedMlp) -> GatedMlp:
        """Returns an MLP that makes the rank's share of the numbers between its layers."""
        inner = pending(mlp.down).in_features
        own = self._share(inner)
        rows = own if mlp.activation in UNGATED else np.concatenate((own, inner + own))
        scales = None if mlp.scales is None else mlp.scales[torch.from_numpy(rows)]
        return replace(mlp, gate_up=self._rows(mlp.gate_up, rows), scales=scales)

    def _experts(self, mlp: Experts) -> SplitExperts:
        down = pending(mlp.experts[0].down)
        own = self._share(down.out_features)
        return SplitExperts(
            replace(mlp.router, linear=self._made(mlp.router.linear)),
            tuple(replace(self._gating(each), down=self._rows(each.down, own)) for each in mlp.experts),
            None if mlp.shared is None else self._gated_mlp(mlp.shared),
            None if mlp.shared_gate is None else self._made(mlp.shared_gate),
            mlp.touched,
            self.group,
            down.in_features,
            down.out_features,
            len(own),
        )

    def _token_branch(self, branch: TokenBranch) -> TokenBranch:
        """Returns the whole branch, which is small."""
        return replace(branch, gate=self._made(branch.gate), output=self._made(branch.output))

    def _heads(self, heads: int, shared_by: int) -> tuple[Numbers, Numbers]:
        """Returns the rank's heads, and the heads of keys that these share; several ranks may have the same
        ones of the latter."""
        count, shared = heads // self.group.size, heads // shared_by
        if heads % self.group.size or (count % shared and shared % count):
            raise self._refusal(f"with {heads} heads, and {shared_by} of keys")
        own = np.arange(count * self.group.rank, count * (self.group.rank + 1))
        return own, np.unique(own // shared)

    def _share(self, total: int) -> Numbers:
        """Returns the rank's share of ``total`` numbers. Shares are equally large: the last number fills up
        those at the end, which is cut off when they are gathered."""
        size = -(-total // self.group.size)
        if total >= PACKED_OUTPUTS * self.group.size:
            size = -(-size // PACKED_OUTPUTS) * PACKED_OUTPUTS
        return np.minimum(np.arange(size * self.group.rank, size * (self.group.rank + 1)), total - 1)

    def _split(
        self, linear: Linear, in_features: int | None, order: torch.Tensor | None = None
    ) -> SplitLinear:
        whole = pending(linear)
        rows = self._share(whole.out_features)
        own = self._rows(whole, rows)
        return SplitLinear(self.group, own, rows, whole.out_features, in_features, order)

    def _rows(self, linear: Linear, rows: Numbers) -> Linear:
        return self._made(pending(linear).take(rows))

    def _made(self, linear: Linear) -> Linear:
        whole = pending(linear)
        made = self.linears.make(whole.weights, whole.bias, whole.multiplier)
        return widened(made) if whole.is_wide else made

    def _refusal(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"a model {what} is not divided among {self.group.size} ranks; set tensor_parallel_size to 1, or "
            "to a divisor"
        )


def pending(linear: Linear) -> Pending:
    """Returns the layer, whose weights must not be packed yet."""
    if not isinstance(linear, Pending):
        raise ModelLoadError("layers of transformers' modules are not divided among ranks")
    return linear


def _channels(heads: Numbers, size: int) -> Numbers:
    """Returns the numbers of all channels of some heads."""
    return (heads[:, None] * size + np.arange(size)).ravel()


def _outputs(parts: Sequence[tuple[int, Numbers]], size: int) -> Numbers:
    """Returns the outputs of some heads of each part, which has so many heads, or none."""
    begin, found = 0, list[Numbers]()
    for total, heads in parts:
        if total:
            found.append(begin + _channels(heads, size))
        begin += total * size
    return np.concatenate(found)


def _norm_of(norm: Norm, rows: Numbers) -> Norm:
    return Norm(norm.weight[torch.from_numpy(rows)], norm.eps, centres=norm.centres)


def _convolution_of(convolution: Convolution, channels: Numbers) -> Convolution:
    taken = torch.from_numpy(channels)
    bias = None if convolution.bias is None else convolution.bias[taken]
    return replace(convolution, weight=convolution.weight[taken], bias=bias)


def _cache_of(cache: AttentionCache, shape: AttentionShape) -> AttentionCache:
    """Returns the cache of the rank's heads of keys and values."""

    def of(whole: tuple[int, int]) -> tuple[int, int]:
        return whole if whole == NOTHING else (shape.num_kv_heads, whole[1])

    return replace(cache, key=of(cache.key), value=None if cache.value is None else of(cache.value))
