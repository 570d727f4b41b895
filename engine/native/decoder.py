"""Runs a whole pass of a decoder as one call of C (``decoder.c``), for a few tokens of each sequence.

The structures in C are made from the same description that Python runs through. The functions are those that
are called one by one elsewhere (``native_run``, ``linear``), in the same order, and so are the bits. Long
prompt chunks go the other way, where they are cut.
"""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Structure, addressof, byref
from typing import Any

import torch

from truedraft.engine.layers.decoder import (
    Attention,
    DecoderLayer,
    DecoderWeights,
    Joint,
    LayerInputs,
    Mixer,
    Parallel,
    Recurrent,
    TokenBranch,
)
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.layers.linear import DenseEmbeddings, Embeddings, Linear
from truedraft.engine.layers.mlp import ACTIVATIONS
from truedraft.engine.layers.norm import Norm
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES, Span, states_of
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.pointers import PointerError, address, new, shape_of
from truedraft.engine.native import library as in_c
from truedraft.engine.native.library import Decoder, NewTokens, Part, Taps
from truedraft.engine.native.linear import WEIGHT_TYPES
from truedraft.engine.native.mlp import linear_at, mlp_structure, native
from truedraft.engine.native.native_run import FLOAT, NativeKernels, check_rotary, qkv_width
from truedraft.engine.native.quantised import QuantisedEmbeddings
from truedraft.engine.native.recurrence import state_columns, state_fields
from truedraft.engine.native.shared import PartKind

INTEGER_BYTES = 8
KINDS = {
    in_c.Attention: PartKind.ATTENTION,
    in_c.GatedMlp: PartKind.GATED_MLP,
    in_c.Experts: PartKind.EXPERTS,
    in_c.Recurrent: PartKind.RECURRENT,
    in_c.Parallel: PartKind.PARALLEL,
    in_c.DenseAndExperts: PartKind.DENSE_AND_EXPERTS,
    in_c.LatentAttention: PartKind.LATENT_ATTENTION,
}


class PackedTokens:
    """Has spans as C reads them, which sees neither how long a table of blocks is nor what lies before a
    span. They must be kept as long as ``new`` is used."""

    def __init__(
        self,
        spans: Sequence[Span],
        block_size: int,
        has_states: bool,
        *,
        is_adapted: bool = False,
        has_windows: bool = False,
    ) -> None:
        counts, stored, wanted, first_blocks = [], [], [], []
        self.end = 0  # The longest text reaches up to this position.
        token_ids: list[int] = []
        blocks: list[int] = []
        for span in spans:
            end = span.table.num_computed_tokens + len(span.token_ids)
            if has_windows != (span.table.window_ids is not None):
                raise PointerError("a table has blocks for windows where the cache has none, or has none")
            if end > block_size * len(span.table.block_ids) or span.num_logits > len(span.token_ids):
                raise PointerError(
                    f"{len(span.table.block_ids)} blocks are too few for {end} tokens, or "
                    f"{len(span.token_ids)} new tokens too few for the logits of {span.num_logits}"
                )
            counts.append(len(span.token_ids))
            stored.append(span.table.num_computed_tokens)
            wanted.append(span.num_logits)
            first_blocks.append(len(blocks))
            token_ids += span.token_ids
            blocks += span.table.entries if has_windows else span.table.block_ids
            self.end = max(self.end, end)
        self.num_logits = sum(wanted)
        adapters = [span.table.adapter for span in spans] if is_adapted else []
        states = state_columns(spans) if has_states else []
        shifts = [span.table.shift for span in spans]
        shifts = shifts if any(shifts) else []
        numbers = [*counts, *stored, *wanted, *first_blocks, *states, *token_ids, *blocks, *shifts, *adapters]
        self._numbers = array("q", numbers)
        start = address(self._numbers, torch.int64, (len(self._numbers),))
        column = INTEGER_BYTES * len(spans)
        first_id = start + 4 * column + INTEGER_BYTES * len(states)
        first_shift = first_id + INTEGER_BYTES * (len(token_ids) + len(blocks))
        self.new = NewTokens(
            len(spans),
            start,
            start + column,
            start + 2 * column,
            start + 3 * column,
            first_id,
            first_id + INTEGER_BYTES * len(token_ids),
            **(state_fields(start + 4 * column, column) if states else {}),
            adapter=first_shift + INTEGER_BYTES * len(shifts) if adapters else None,
            shift=first_shift if shifts else None,
        )


class NativeDecoder:
    """Is a ``FastPass`` of ``weights``, whose linear layers are all ``NativeLinear``, over ``cache``."""

    def __init__(
        self,
        kernels: NativeKernels,
        weights: DecoderWeights,
        cache: KVCache,
        adapted: in_c.AdaptedRows | None = None,
    ) -> None:
        """``adapted``: what linear layers look at for which rows have adapters."""
        assert weights.rotary.table is not None
        self.library = kernels.library
        self.vocab_size = native(weights.head).out_features
        cos, sin = weights.rotary.table
        angles = kinds, num_angles, rotary_size = shape_of(cos, 3)
        vocab_size, hidden_size, embedding_type, embeddings = _embeddings(weights.embeddings)
        self.hidden_size = hidden_size
        for shape in weights.attention:
            check_rotary(shape, kinds, rotary_size)
        is_wide = weights.joint is not None and weights.joint.projection is None
        inputs = 2 * hidden_size if is_wide else hidden_size
        given = 0 if weights.layer_inputs is None else weights.layer_inputs.norm.size
        parts = [
            _Parts(kernels, layer, cache, hidden_size, hidden_size if index else inputs, given)
            for index, layer in enumerate(weights.layers)
        ]
        layers = (in_c.DecoderLayer * len(parts))(*(each.layer for each in parts))
        self.inputs: in_c.LayerInputs | None = None
        if weights.layer_inputs is not None:
            self.inputs = _layer_inputs(weights.layer_inputs, len(parts), vocab_size, hidden_size)
        # These are kept as long as C has their addresses, which are checked here, once.
        self._kept = parts, layers, weights, cache, adapted
        self._rotary = weights.rotary
        self.decoder = Decoder(
            num_layers=len(parts),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_blocks=cache.num_blocks,
            num_window_blocks=cache.num_window_blocks or 0,
            block_size=cache.block_size,
            num_state_slots=min((len(state.inputs) for state in cache.states.values()), default=0),
            num_angles=num_angles,
            rotary_size=rotary_size,
            layers=addressof(layers),
            embeddings=embeddings,
            embedding_type=embedding_type,
            centres=weights.norm.centres,
            norm=address(weights.norm.weight, FLOAT, (hidden_size,)),
            head=linear_at("head", weights.head, hidden_size, self.vocab_size),
            cos=address(cos, FLOAT, angles),
            sin=address(sin, FLOAT, angles),
            norm_eps=weights.norm.eps,
            embedding_scale=weights.embedding_scale,
            softcap=weights.softcap or 0.0,
            adapted=None if adapted is None else addressof(adapted),
            **_joint(weights.joint, hidden_size),
            **({} if self.inputs is None else {"layer_inputs": addressof(self.inputs)}),
        )

    def __call__(
        self,
        spans: list[Span],
        ids_on_device: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns logits, and states if there are ``taps``; None if a span is too long, or has a picture."""
        if ids_on_device is not None:
            # C reads ids from the spans, and here the host is the device.
            for span, token_id in zip(spans, ids_on_device.tolist(), strict=True):
                span.token_ids = [token_id]
        if not self.holds(spans):
            return None
        is_adapted = bool(self.decoder.adapted)
        packed = PackedTokens(
            spans,
            self.decoder.block_size,
            self.has_states,
            is_adapted=is_adapted,
            has_windows=bool(self.decoder.num_window_blocks),
        )
        self.reach(packed.end)
        num_tokens = sum(len(span.token_ids) for span in spans)
        if (given := states_of(spans)) is not None:
            packed.new.states = address(given, FLOAT, (num_tokens, self.hidden_size))
        logits, place = new((packed.num_logits, self.vocab_size), FLOAT)
        states, tapped = self._taps(taps, num_tokens) if taps else (None, None)
        at_taps = None if tapped is None else byref(tapped)
        if not self.library.decode(byref(self.decoder), byref(packed.new), at_taps, place):
            raise MemoryError("no memory for a pass of the model, or no such blocks in its cache")
        return logits, states

    def reach(self, num_positions: int) -> None:
        """Gives C the angles of this many positions, as far as there are any; those of later positions are
        NaN."""
        if num_positions > self.decoder.num_reached:
            self.decoder.num_reached = min(self._rotary.reach(num_positions), self.decoder.num_angles)

    def reach_blocks(self, num_blocks: int) -> None:
        """Gives C the angles of all positions that ``num_blocks`` blocks hold."""
        self.reach(num_blocks * self.decoder.block_size)

    def _taps(self, taps: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, Taps]:
        """Returns the tensor that C writes the states of some layers to, and its description in C."""
        if not all(0 <= tap <= self.decoder.num_layers for tap in taps):
            raise PointerError(
                f"there are {self.decoder.num_layers} layers, and no states after {list(taps)}"
            )
        states, place = new((num_tokens, len(taps), self.hidden_size), FLOAT)
        self._tapped = array("q", taps)
        layers = address(self._tapped, torch.int64, (len(taps),))
        return states, Taps(num_taps=len(taps), layers=layers, states=place)

    @property
    def has_states(self) -> bool:
        return bool(self.decoder.num_state_slots)

    def holds(self, spans: Sequence[Span]) -> bool:
        return all(
            len(span.token_ids) <= MAX_GROUPED_QUERIES and span.table.is_past_pictures for span in spans
        )


class _Parts:
    """Keeps the objects to which a layer in C points."""

    def __init__(
        self,
        kernels: NativeKernels,
        layer: DecoderLayer,
        cache: KVCache,
        hidden_size: int,
        inputs: int,
        given: int,
    ) -> None:
        self.kept: list[object] = []
        self.mixer: Structure | None = None
        if layer.mixer is not None:
            self.mixer = self._mixer(kernels, layer.mixer, cache, hidden_size, inputs)
        self.mlp: Structure | None = None
        if layer.mlp is not None:
            self.mlp, self.of_mlp = mlp_structure(layer.mlp, hidden_size)
        self.branch: in_c.TokenBranch | None = None
        if layer.token_branch is not None:
            self.branch = _branch(layer.token_branch, hidden_size, given)
        self.layer = in_c.DecoderLayer(
            mixer=_part(self.mixer),
            mlp=_part(self.mlp),
            **_norm("mixer_norm", layer.mixer_norm, hidden_size),
            **_norm("mixer_post_norm", layer.mixer_post_norm, hidden_size),
            **_norm("mlp_norm", layer.mlp_norm, hidden_size),
            **_norm("mlp_post_norm", layer.mlp_post_norm, hidden_size),
            is_parallel=layer.is_parallel,
            token_branch=None if self.branch is None else addressof(self.branch),
            scale=layer.scale,
        )

    def _mixer(
        self, kernels: NativeKernels, mixer: Mixer, cache: KVCache, hidden_size: int, inputs: int
    ) -> Structure:
        match mixer:
            case Attention(shape=shape):
                attended = shape.num_heads * shape.head_size
                heads = kernels.heads(shape, cache)
                self.kept.append(heads)
                if isinstance(mixer.qkv, LatentProjection):
                    latents = _Latents(mixer.qkv, mixer, heads, inputs, hidden_size)
                    self.kept.append(latents)
                    return latents.struct
                return in_c.Attention(
                    qkv=linear_at("qkv", mixer.qkv, inputs, qkv_width(shape)),
                    output=linear_at("output", mixer.output, attended, hidden_size),
                    heads=addressof(heads),
                )
            case Recurrent(recurrence=rule):
                recurrence = kernels.recurrence(rule, cache)
                self.kept.append(recurrence)
                struct, given = recurrence.struct, recurrence.outputs
                needed, scales = kernels.library.recurrence_inputs(byref(struct)), mixer.scales
                return in_c.Recurrent(
                    inputs=linear_at("inputs", mixer.inputs, inputs, needed),
                    output=linear_at("output", mixer.output, given, hidden_size),
                    recurrence=addressof(struct),
                    scales=None if scales is None else address(scales, FLOAT, (needed,)),
                )
            case Parallel(mixers=mixers):
                both = [self._mixer(kernels, each, cache, hidden_size, inputs) for each in mixers]
                self.kept += both
                return in_c.Parallel(first=_part(both[0]), second=_part(both[1]))


class _Latents:
    """Keeps the objects to which ``struct`` points."""

    def __init__(
        self, latent: LatentProjection, attention: Attention, heads: in_c.Heads, inputs: int, hidden_size: int
    ) -> None:
        number, vector, shape = latent.num_heads, latent.norm.size, attention.shape
        counts = shape.num_heads, shape.num_stored_heads, shape.head_size
        if counts != (number, 1, latent.key_size) or not shape.values_are_keys or shape.gated:
            raise PointerError(f"C does not attend with {shape} to what {latent} computes")
        others, queries = latent.query_size - latent.num_turned, latent.num_queries
        self.key_up = _each("key_up", latent.key_up.linears, others, vector)
        self.value_up = _each("value_up", latent.value_up.linears, vector, latent.value_size)
        query_up = None
        if latent.query_up is not None:
            query_up = linear_at("query_up", latent.query_up, queries, number * latent.query_size)
        self.struct = in_c.LatentAttention(
            down=linear_at("down", latent.down, inputs, queries + vector + latent.num_turned),
            query_up=query_up,
            key_up=addressof(self.key_up),
            value_up=addressof(self.value_up),
            output=linear_at("output", attention.output, number * latent.value_size, hidden_size),
            heads=addressof(heads),
            **_norm("query_norm", latent.query_norm, queries),
            **_norm("norm", latent.norm, vector),
        )


def _each(
    name: str, linears: Sequence[Linear], in_features: int, out_features: int
) -> "ctypes.Array[in_c.Linear]":
    """Returns layers of these sizes as structures of C, one after the other."""
    places = [linear_at(name, linear, in_features, out_features) for linear in linears]
    return (in_c.Linear * len(places))(*(in_c.Linear.from_address(place) for place in places))


def _branch(branch: TokenBranch, hidden_size: int, size: int) -> in_c.TokenBranch:
    return in_c.TokenBranch(
        gate=linear_at("gate", branch.gate, hidden_size, size),
        output=linear_at("output", branch.output, size, hidden_size),
        activation=ACTIVATIONS.index(branch.activation),
        **_norm("norm", branch.norm, hidden_size),
    )


def _layer_inputs(
    inputs: LayerInputs, num_layers: int, vocab_size: int, hidden_size: int
) -> in_c.LayerInputs:
    rows, numbers, kept_in, table = _embeddings(inputs.embeddings)
    size = inputs.norm.size
    if rows < vocab_size or numbers != num_layers * size:
        raise PointerError(f"a table of {rows} rows of {numbers} is not of {num_layers} layers of {size}")
    return in_c.LayerInputs(
        table=table,
        table_type=kept_in,
        size=size,
        projection=linear_at("projection", inputs.projection, hidden_size, numbers),
        scale=inputs.scale,
        **_norm("norm", inputs.norm, size),
    )


def _part(structure: Structure | None) -> Part:
    """Tells C what kind of part a structure is, by its type, or that there is none; the caller keeps it."""
    return Part() if structure is None else Part(kind=KINDS[type(structure)], data=addressof(structure))


def _norm(name: str, norm: Norm | None, size: int) -> dict[str, Any]:
    """Returns a norm's fields of a structure."""
    if norm is None:
        return {}
    if norm.bias is not None:
        raise PointerError(f"C has no {name} with a bias in a pass of its own")
    return {name: address(norm.weight, FLOAT, (size,)), f"{name}_eps": norm.eps}


def _joint(joint: Joint | None, size: int) -> dict[str, Any]:
    """Returns the fields of ``Decoder`` for a joint."""
    if joint is None:
        return {}
    norms = {"embedding_norm": joint.embedding_norm, "state_norm": joint.state_norm}
    fields = {name: address(norm.weight, FLOAT, (size,)) for name, norm in norms.items()}
    epsilons = {f"{name}_eps": norm.eps for name, norm in norms.items()}
    if joint.projection is not None:
        fields["projection"] = linear_at("projection", joint.projection, 2 * size, size)
    return fields | epsilons | {"adds_to_normed": joint.adds_to_normed}


def _embeddings(embeddings: Embeddings) -> tuple[int, int, int, int]:
    """Returns the number of embeddings, their size, their type and their address."""
    if isinstance(embeddings, QuantisedEmbeddings):
        blocks = embeddings.blocks
        return len(blocks.data), blocks.in_features, embeddings.embedding_type, embeddings.address()
    if not isinstance(embeddings, DenseEmbeddings) or embeddings.weight.dtype not in WEIGHT_TYPES:
        raise PointerError(f"C has no embeddings like {embeddings}")
    weight = embeddings.weight
    rows, size = shape_of(weight, 2)
    return rows, size, WEIGHT_TYPES[weight.dtype], address(weight, weight.dtype, (rows, size))
