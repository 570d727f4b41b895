"""A whole pass of a Llama-shaped decoder as one call of C (``decoder.c``), for a few tokens of each sequence.

The same functions as the calls one by one (``native_run``, ``linear``), in the same order: the same bits.
Long prompt chunks go the other way, where they are cut.
"""

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Any

import torch

from truedraft.engine.layers.parts import ACTIVATIONS, Norm
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES, Span
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.pointers import PointerError, address, new, shape_of
from truedraft.engine.native.library import Decoder, DecoderLayer, NewTokens
from truedraft.engine.native.linear import WEIGHT_TYPES, NativeLinear
from truedraft.engine.native.native_run import FLOAT, NativeKernels, check_rotary
from truedraft.engine.native.quantised import QuantisedEmbeddings

INTEGER_BYTES = 8
Weights = Any  # DecoderWeights, which is made of what is in this package


class PackedTokens:
    """Spans as C reads them, which sees neither how long a table of blocks is nor what lies before a span.
    They must be kept as long as ``new`` is used."""

    def __init__(self, spans: Sequence[Span], block_size: int) -> None:
        counts, stored, wanted, first_blocks = [], [], [], []
        token_ids: list[int] = []
        blocks: list[int] = []
        for span in spans:
            end = span.table.num_computed_tokens + len(span.token_ids)
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
            blocks += span.table.block_ids
        self.num_logits = sum(wanted)
        self._numbers = array("q", [*counts, *stored, *wanted, *first_blocks, *token_ids, *blocks])
        start = address(self._numbers, torch.int64, (len(self._numbers),))
        column = INTEGER_BYTES * len(spans)
        self.new = NewTokens(
            len(spans),
            start,
            start + column,
            start + 2 * column,
            start + 3 * column,
            start + 4 * column,
            start + 4 * column + INTEGER_BYTES * len(token_ids),
        )


class NativeDecoder:
    """A ``FastPass`` of ``weights``, all of whose linear layers are ``NativeLinear``s, over ``cache``."""

    def __init__(self, kernels: NativeKernels, weights: Weights, cache: KVCache) -> None:
        assert weights.rotary.table is not None
        self.library = kernels.library
        self.vocab_size = weights.head.out_features
        cos, sin = weights.rotary.table
        angles = kinds, num_angles, rotary_size = shape_of(cos, 3)
        vocab_size, hidden_size, embedding_type, embeddings = _embeddings(weights.embeddings)
        for layer in weights.layers:
            _check_sizes(layer, hidden_size, weights.layers[0].down.in_features)
            check_rotary(layer.attention, kinds, rotary_size)
        _check_size("head", weights.head, hidden_size, self.vocab_size)
        attention = [kernels.layer(layer.attention, cache) for layer in weights.layers]
        in_c = (DecoderLayer * len(attention))(
            *(
                DecoderLayer(
                    qkv=addressof(layer.qkv.struct),
                    output=addressof(layer.output.struct),
                    gate_up=addressof(layer.gate_up.struct),
                    down=addressof(layer.down.struct),
                    attention=addressof(shape),
                    activation=ACTIVATIONS.index(layer.activation),
                    **_norm("input", layer.input_norm, hidden_size),
                    **_norm("output", layer.output_norm, hidden_size),
                    **_norm("mlp", layer.mlp_norm, hidden_size),
                    **_norm("down", layer.down_norm, hidden_size),
                )
                for layer, shape in zip(weights.layers, attention, strict=True)
            )
        )
        # Kept as long as C has their addresses, which are checked here, once.
        self._kept = attention, in_c, weights, cache
        self.decoder = Decoder(
            num_layers=len(attention),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_blocks=len(cache.keys[0]) // cache.block_size,
            block_size=cache.block_size,
            num_angles=num_angles,
            rotary_size=rotary_size,
            layers=addressof(in_c),
            embeddings=embeddings,
            embedding_type=embedding_type,
            norm=address(weights.norm.weight, FLOAT, (hidden_size,)),
            head=addressof(weights.head.struct),
            cos=address(cos, FLOAT, angles),
            sin=address(sin, FLOAT, angles),
            norm_eps=weights.norm.eps,
            embedding_scale=weights.embedding_scale,
            softcap=weights.softcap or 0.0,
        )

    def __call__(self, spans: list[Span], ids_on_device: torch.Tensor | None = None) -> torch.Tensor | None:
        """None if a span is too long."""
        if ids_on_device is not None:
            # C reads ids from the spans, and here the host is the device.
            for span, token_id in zip(spans, ids_on_device.tolist(), strict=True):
                span.token_ids = [token_id]
        if not self.holds(spans):
            return None
        packed = PackedTokens(spans, self.decoder.block_size)
        shape = packed.num_logits, self.vocab_size
        logits, place = new(shape, FLOAT)
        if not self.library.decode(byref(self.decoder), byref(packed.new), place):
            raise MemoryError("no memory for a pass of the model, or no such blocks in its cache")
        return logits

    def holds(self, spans: Sequence[Span]) -> bool:
        return all(len(span.token_ids) <= MAX_GROUPED_QUERIES for span in spans)


def _norm(name: str, norm: Norm | None, size: int) -> dict[str, Any]:
    """Fields of ``DecoderLayer``."""
    if norm is None:
        return {}
    return {f"{name}_norm": address(norm.weight, FLOAT, (size,)), f"{name}_eps": norm.eps}


def _embeddings(of: torch.Tensor | QuantisedEmbeddings) -> tuple[int, int, int, int]:
    """Returns how many there are, of how many numbers, of which type, and where."""
    if isinstance(of, QuantisedEmbeddings):
        return len(of.blocks.data), of.blocks.in_features, of.embedding_type, of.address()
    if of.dtype not in WEIGHT_TYPES:
        raise PointerError(f"C has no embeddings of the type {of.dtype}")
    rows, size = shape_of(of, 2)
    return rows, size, WEIGHT_TYPES[of.dtype], address(of, of.dtype, (rows, size))


def _check_sizes(layer: Any, hidden_size: int, mlp_size: int) -> None:
    """C makes room for what lies between the linear layers by the sizes of the first one's."""
    shape = layer.attention
    attended = shape.num_heads * shape.head_size
    heads = attended + 2 * shape.num_kv_heads * shape.head_size
    _check_size("qkv", layer.qkv, hidden_size, heads)
    _check_size("output", layer.output, attended, hidden_size)
    _check_size("gate_up", layer.gate_up, hidden_size, 2 * mlp_size)
    _check_size("down", layer.down, mlp_size, hidden_size)


def _check_size(name: str, linear: NativeLinear, in_features: int, out_features: int) -> None:
    if (linear.in_features, linear.out_features) != (in_features, out_features):
        raise PointerError(
            f"{name} is a layer of {linear.in_features} inputs and {linear.out_features} outputs, "
            f"not of {in_features} and {out_features}"
        )
