"""A whole pass of a Llama-shaped decoder as one call of C (``decoder.c``), for a few tokens of each sequence.

The same functions as the calls one by one (``layer_parts``, ``linear``), in the same order: the same bits.
Long prompt chunks go the other way, where they are cut.
"""

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Any

import torch

from truedraft.engine.batch import MAX_GROUPED_QUERIES, Span
from truedraft.engine.kv_cache import KVCache
from truedraft.engine.models.layer_parts import ACTIVATIONS, Norm
from truedraft.engine.native.layer_parts import NativeKernels
from truedraft.engine.native.library import Decoder, DecoderLayer, NewTokens
from truedraft.engine.native.linear import WEIGHT_TYPES
from truedraft.engine.native.quantised import QuantisedEmbeddings

INTEGER_BYTES = 8
Weights = Any  # LlamaWeights, which is made of what is in this package


class PackedTokens:
    """Spans as C reads them. Must be kept as long as ``new`` is used."""

    def __init__(self, spans: Sequence[Span]) -> None:
        counts, stored, wanted, first_blocks = [], [], [], []
        token_ids: list[int] = []
        blocks: list[int] = []
        for span in spans:
            counts.append(len(span.token_ids))
            stored.append(span.table.num_computed_tokens)
            wanted.append(span.num_logits)
            first_blocks.append(len(blocks))
            token_ids += span.token_ids
            blocks += span.table.block_ids
        self.num_logits = sum(wanted)
        self._numbers = array("q", [*counts, *stored, *wanted, *first_blocks, *token_ids, *blocks])
        start, column = self._numbers.buffer_info()[0], INTEGER_BYTES * len(spans)
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
                    **_norm("input", layer.input_norm),
                    **_norm("output", layer.output_norm),
                    **_norm("mlp", layer.mlp_norm),
                    **_norm("down", layer.down_norm),
                )
                for layer, shape in zip(weights.layers, attention, strict=True)
            )
        )
        cos, sin = weights.rotary.table
        embeddings = weights.embeddings
        if isinstance(embeddings, QuantisedEmbeddings):
            embedding_type = embeddings.embedding_type
        else:
            embedding_type = WEIGHT_TYPES[embeddings.dtype]
        # Kept as long as C has their addresses.
        self._kept = attention, in_c, weights, cache
        self.decoder = Decoder(
            num_layers=len(attention),
            hidden_size=len(weights.norm.weight),
            block_size=cache.block_size,
            num_angles=cos.shape[1],
            rotary_size=cos.shape[2],
            layers=addressof(in_c),
            embeddings=embeddings.data_ptr(),
            embedding_type=embedding_type,
            norm=weights.norm.weight.data_ptr(),
            head=addressof(weights.head.struct),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
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
        packed = PackedTokens(spans)
        logits = torch.empty(packed.num_logits, self.vocab_size)
        if not self.library.decode(byref(self.decoder), byref(packed.new), logits.data_ptr()):
            raise MemoryError("no memory for a pass of the model")
        return logits

    def holds(self, spans: Sequence[Span]) -> bool:
        return all(len(span.token_ids) <= MAX_GROUPED_QUERIES for span in spans)


def _norm(name: str, norm: Norm | None) -> dict[str, Any]:
    """Fields of ``DecoderLayer``."""
    return {} if norm is None else {f"{name}_norm": norm.weight.data_ptr(), f"{name}_eps": norm.eps}
