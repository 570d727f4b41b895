"""Makes linear layers of a checkpoint's weights for the kernels."""

import ctypes
from collections.abc import Sequence

import torch

from truedraft.engine.layers.linear import DenseEmbeddings, Embeddings
from truedraft.engine.layers.quantised_blocks import merged
from truedraft.engine.layers.weight import Weight
from truedraft.engine.native.linear import NativeLinear, half_scale
from truedraft.engine.native.quantised import QuantisedEmbeddings, QuantisedLinear, can_stack
from truedraft.engine.native.scaled_bytes import BytesLinear, are_alike
from truedraft.engine.native.shared import COLUMNS


class NativeLinears:
    """Makes layers for float32 rows on a CPU. ``compact`` ones keep weights in 16 bits where that loses
    nothing, and quantised blocks as they are; otherwise both are in float32. Bytes with scales are kept in
    either case: they compute the same bits. With ``bf16`` all weights that are not in blocks are in bfloat16,
    to which their inputs are rounded, too."""

    takes_scaled_rows = False

    def __init__(self, library: ctypes.CDLL, compact: bool, bf16: bool = False) -> None:
        self.library = library
        self.takes_blocks = compact
        self.takes_halves = compact or bf16
        self.takes_scaled_bytes = not bf16
        self.bf16 = bf16

    def make(
        self, weights: Sequence[Weight], bias: torch.Tensor | None, multiplier: float = 1.0
    ) -> NativeLinear:
        blocks = [weight.blocks for weight in weights if weight.blocks is not None]
        is_quantised = self.takes_blocks and len(blocks) == len(weights)
        if is_quantised and can_stack(blocks := merged(blocks, COLUMNS)):
            return QuantisedLinear(self.library, blocks, bias, multiplier)
        scaled = [weight.scaled_bytes for weight in weights if weight.scaled_bytes is not None]
        if self.takes_scaled_bytes and len(scaled) == len(weights) and are_alike(scaled):
            return BytesLinear(self.library, scaled, bias, multiplier)
        dense = [weight.dense() for weight in weights]
        scale = half_scale(dense) if self.takes_halves and not self.bf16 else None
        return NativeLinear(self.library, dense, bias, scale, self.bf16, multiplier)

    def embeddings(self, weight: Weight) -> Embeddings:
        if self.takes_blocks and weight.blocks is not None:
            return QuantisedEmbeddings(self.library, weight.blocks)
        return DenseEmbeddings(weight.dense(torch.bfloat16 if self.bf16 else None))
