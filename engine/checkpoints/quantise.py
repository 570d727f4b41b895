"""Quantises checkpoints as they are read: symmetrically, with one scale for 32 weights of a row."""

from collections.abc import Iterable
from functools import lru_cache, partial

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from truedraft.engine.checkpoints.checkpoint import Checkpoint, DerivedCheckpoint
from truedraft.engine.checkpoints.stacks import DOWN, GATE_UP
from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.layers.weight import ScaledRows, Weight

# The setting ``quantize`` decides the type of the layers. Embeddings and output layers have 8 bits in any
# case.
LAYER_TYPES = {"int8": GGMLQuantizationType.Q8_0, "int4": GGMLQuantizationType.Q4_0}
OUTER_TYPE = GGMLQuantizationType.Q8_0
OUTER = (
    "model.embed_tokens.weight",
    "model.embed_tokens_per_layer.weight",
    "model.embeddings.weight",
    "lm_head.weight",
)
GROUP = 32
# A large matrix is converted this many rows at a time.
ROWS = 1 << 13
# Tensors of this many layers are kept, as each layer's are asked for twice.
KEPT, KEPT_STACKS = 8, 2
# Matrices of few weights that decide which experts a token takes stay as they are.
ROUTERS = (".gate.weight", ".router.weight", ".router.proj.weight", ".shared_expert_gate.weight")
# These matrices are read by their rows and by their columns, so one scale for each row does not serve.
LATENTS = ".kv_b_proj.weight"
# These small weights decide how a state decays and what it takes in; they get the bits of outer layers.
DECAYS = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")


def can_be_in_four_bits(weight: Weight) -> bool:
    """Tells whether the matrix has rows of whole groups, and more than four bits a weight now."""
    has_more = weight.blocks is None or _bits(weight.blocks.type) > _bits(LAYER_TYPES["int4"])
    return has_more and weight.shape[1] % GROUP == 0


def quantised_to_four_bits(weight: Weight) -> Weight:
    """Quantises a matrix, some rows at a time."""
    kind = LAYER_TYPES["int4"]
    parts = [gguf.quantize(rows.float().numpy(), kind) for rows in torch.split(weight.dense(), ROWS)]
    blocks = QuantisedBlocks(int(kind), np.concatenate(parts), weight.shape[1])
    return Weight(weight.name, weight.shape, partial(_dequantised, blocks), blocks)


class QuantisedCheckpoint(DerivedCheckpoint):
    """Quantises every matrix of ``source`` to ``layer_type`` whose rows are whole groups; those that have no
    more bits than that stay as they are. ``read`` gives the weights that the blocks stand for."""

    def __init__(self, source: Checkpoint, layer_type: GGMLQuantizationType) -> None:
        super().__init__(source)
        self.layer_type = layer_type
        self.made = lru_cache(KEPT)(self._quantise)
        self.stacks = lru_cache(KEPT_STACKS)(self._quantise_stack)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return self.made(name) or self.source.blocks(name)

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        return self.stacks(name)[number : number + 1] or self.source.expert_blocks(name, number)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            blocks = self.made(name)
            if blocks is not None:
                tensors[name] = _dequantised(blocks)
            elif stack := self.stacks(name):
                tensors[name] = torch.stack([_dequantised(each) for each in stack])
            else:
                tensors |= self.source.read([name])
        return tensors

    def _quantise(self, name: str) -> QuantisedBlocks | None:
        kind = OUTER_TYPE if name in OUTER or name.endswith(DECAYS) else self.layer_type
        stored = self.source.blocks(name)
        if stored is not None and _bits(stored.type) <= _bits(kind):
            return None
        if name.endswith((*ROUTERS, *GATE_UP, *DOWN, LATENTS)):
            return None
        tensor = self.source.read([name])[name]
        return self._blocks(tensor, kind) if tensor.dim() == 2 and tensor.shape[1] % GROUP == 0 else None

    def _quantise_stack(self, name: str) -> list[QuantisedBlocks]:
        """Returns the matrices of a stack of experts; an empty list if it stays as it is."""
        if not name.endswith(GATE_UP + DOWN):
            return []
        stored = self.source.expert_blocks(name, 0)
        if stored and max(_bits(part.type) for part in stored) <= _bits(self.layer_type):
            return []
        tensor = self.source.read([name])[name]
        return [] if tensor.shape[2] % GROUP else [self._blocks(each, self.layer_type) for each in tensor]

    def _blocks(self, tensor: torch.Tensor, kind: GGMLQuantizationType) -> QuantisedBlocks:
        return QuantisedBlocks(int(kind), gguf.quantize(tensor.float().numpy(), kind), tensor.shape[1])


def _dequantised(blocks: QuantisedBlocks) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(blocks.data, GGMLQuantizationType(blocks.type)))


class ScaledCheckpoint(DerivedCheckpoint):
    """Gives the matrices of the layers of ``source`` in 8-bit floating point with a scale for each row. What
    is quantised already stays as it is; so do embeddings, output layer and experts with their routers."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.made = lru_cache(KEPT)(self._scale)

    def scaled_rows(self, name: str) -> ScaledRows | None:
        return self.made(name)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            rows = self.made(name)
            tensors |= self.source.read([name]) if rows is None else {name: rows.dense()}
        return tensors

    def _scale(self, name: str) -> ScaledRows | None:
        if name in OUTER or name.endswith((*ROUTERS, LATENTS)) or self.source.blocks(name) is not None:
            return None
        stored = self.source.scaled_rows(name)
        if stored is not None:
            return stored
        tensor = self.source.read([name])[name]
        return ScaledRows.of(tensor.float()) if tensor.dim() == 2 else None


def _bits(kind: int) -> float:
    """Returns the number of bits of one weight."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return 8 * int(size) / int(block)
