"""Checkpoints as if they were files quantised further: symmetric, 32 weights of a row to a scale."""

from collections.abc import Iterable
from functools import lru_cache

import gguf
import torch
from gguf import GGMLQuantizationType

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.models.checkpoint import Checkpoint

# The setting ``quantize`` decides the type of the layers. Embeddings and output layers have 8 bits.
LAYER_TYPES = {"int8": GGMLQuantizationType.Q8_0, "int4": GGMLQuantizationType.Q4_0}
OUTER_TYPE = GGMLQuantizationType.Q8_0
OUTER = ("model.embed_tokens.weight", "lm_head.weight")
GROUP = 32
# Tensors of one layer, which are asked for twice.
KEPT = 8


class QuantisedCheckpoint(Checkpoint):
    """``source`` with every matrix in the ``layer_type`` whose rows are whole groups; those that have no more
    bits than that stay as they are. ``read`` gives the weights that the blocks stand for."""

    def __init__(self, source: Checkpoint, layer_type: GGMLQuantizationType) -> None:
        super().__init__(source.files)
        self.source = source
        self.layer_type = layer_type
        self.made = lru_cache(KEPT)(self._quantise)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return self.made(name) or self.source.blocks(name)

    def rotary_factors(self) -> torch.Tensor | None:
        return self.source.rotary_factors()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            blocks = self.made(name)
            if blocks is None:
                tensors |= self.source.read([name])
            else:
                weights = gguf.dequantize(blocks.data, GGMLQuantizationType(blocks.type))
                tensors[name] = torch.from_numpy(weights)
        return tensors

    def _quantise(self, name: str) -> QuantisedBlocks | None:
        kind = OUTER_TYPE if name in OUTER else self.layer_type
        stored = self.source.blocks(name)
        if stored is not None and _bits(stored.type) <= _bits(kind):
            return None
        tensor = self.source.read([name])[name]
        if tensor.dim() != 2 or tensor.shape[1] % GROUP:
            return None
        return QuantisedBlocks(int(kind), gguf.quantize(tensor.float().numpy(), kind), tensor.shape[1])


def _bits(kind: int) -> float:
    """Per weight."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return 8 * int(size) / int(block)
