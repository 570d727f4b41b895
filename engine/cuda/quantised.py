"""Linear layers and embeddings keep their weights in 2 to 8 bits on a GPU, as files or ``quantize`` have
them.

Not a bit of a weight changes (``blocks``). Kernels unpack the weights in registers for a few rows; for many
rows a part of the weights is unpacked into memory at a time, and torch multiplies. Inputs are not rounded to
fewer bits.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import gguf
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType

from truedraft.engine.cuda import scaled
from truedraft.engine.cuda.blocks import BLOCK, COLUMNS, KINDS, PackedBlocks, pack, random_blocks
from truedraft.engine.cuda.scaled import RoundRows, ScaledLinear, can_scale, multiplies_fp8
from truedraft.engine.cuda.triton_run import TOLERANCES, serves
from truedraft.engine.layers.linear import DenseEmbeddings, Embeddings, Linear, TorchLinear
from truedraft.engine.layers.weight import Weight

# Up to this number of rows are multiplied where the weights are unpacked: 128 rows at a time, each time
# reading them anew. Unpacked weights are read and written in 16 bits, which takes as much as seven times 4.5
# bits.
MAX_ROWS = 320
# This many weights are unpacked at a time where there are more rows than that.
UNPACKED = 1 << 26
# Products of these numbers of rows are checked: one for every size of program, and more than one program.
CHECKED_ROWS = (1, 17, 33, COLUMNS + 1)

logger = logging.getLogger(__name__)


class BlockKernels(Protocol):
    """Is the interface of the module ``quantised_kernels``, which tests replace."""

    def multiply(
        self,
        x: torch.Tensor,
        parts: Sequence[PackedBlocks],
        bias: torch.Tensor | None,
        multiplier: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns (``x`` times the weights of ``parts``, one after the other, plus ``bias``) *
        ``multiplier`` + ``residual``, summed in float32 and rounded once. The bits of a row do not depend
        on the others."""
        ...

    def unpack(self, packed: PackedBlocks, dtype: torch.dtype, rows: range | torch.Tensor) -> torch.Tensor:
        """Returns the rows with these numbers, [rows, in features], to the bit as the package gguf has them,
        rounded to ``dtype``."""
        ...

    round_rows: RoundRows


class PackedLinear:
    """Multiplies by blocks. ``parts`` have the same number of inputs and may be of several types."""

    def __init__(
        self,
        kernels: BlockKernels,
        parts: Sequence[PackedBlocks],
        bias: torch.Tensor | None,
        multiplier: float = 1.0,
    ) -> None:
        self.kernels = kernels
        self.parts = parts
        self.bias = bias
        self.multiplier = multiplier
        self.out_features = sum(part.rows for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x, None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x, residual)

    def _compute(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if len(x) <= MAX_ROWS:
            return self.kernels.multiply(x, self.parts, self.bias, self.multiplier, residual)
        products = []
        for part in self.parts:
            step = max(COLUMNS, UNPACKED // part.in_features // COLUMNS * COLUMNS)
            for first in range(0, part.rows, step):
                numbers = range(first, min(first + step, part.rows))
                products.append(F.linear(x, self.kernels.unpack(part, x.dtype, numbers)))
        y = products[0] if len(products) == 1 else torch.cat(products, 1)
        if self.bias is not None:
            y += self.bias
        if residual is None:
            return y if self.multiplier == 1 else y * self.multiplier
        return torch.add(residual, y, alpha=self.multiplier)


class PackedEmbeddings:
    """Vectors of tokens are unpacked as they are looked up."""

    def __init__(self, kernels: BlockKernels, packed: PackedBlocks, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.packed = packed
        self.dtype = dtype

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.kernels.unpack(self.packed, self.dtype, token_ids.to(self.packed.low.device))


class BlockLinears:
    """Is a ``Linears`` backend that keeps blocks as they are, 8-bit floating point where ``has_fp8``, and
    everything else in ``dtype``."""

    takes_halves, takes_blocks, takes_scaled_bytes = False, True, False

    def __init__(
        self, kernels: BlockKernels, dtype: torch.dtype, device: torch.device, has_fp8: bool = False
    ) -> None:
        self.takes_scaled_rows = has_fp8
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        # Says for each type met so far whether the kernels compute its weights correctly on this device.
        self.checked: dict[int, bool] = {}
        # An output layer may share the weights of the embeddings, which are then in memory once.
        self.embedded: list[tuple[Weight, PackedBlocks]] = []

    def make(self, weights: Sequence[Weight], bias: torch.Tensor | None, multiplier: float = 1.0) -> Linear:
        packed = [self._packed(weight) for weight in weights]
        parts = [part for part in packed if part is not None]
        if len(parts) == len(weights):
            return PackedLinear(self.kernels, parts, bias, multiplier)
        rows = [weight.scaled_rows.to(self.device) for weight in weights if weight.scaled_rows is not None]
        if len(rows) == len(weights) and all(can_scale(weight.shape) for weight in weights):
            return ScaledLinear(self.kernels.round_rows, rows, bias, multiplier)
        dense = [weight.dense() for weight in weights]
        return TorchLinear(dense[0].contiguous() if len(dense) == 1 else torch.cat(dense), bias, multiplier)

    def embeddings(self, weight: Weight) -> Embeddings:
        packed = self._packed(weight)
        if packed is None:
            return DenseEmbeddings(weight.dense())
        self.embedded.append((weight, packed))
        return PackedEmbeddings(self.kernels, packed, self.dtype)

    def _packed(self, weight: Weight) -> PackedBlocks | None:
        blocks = weight.blocks
        if blocks is None or not self._is_served(blocks.type):
            return None
        kept = (packed for embedded, packed in self.embedded if embedded is weight)
        return next(kept, None) or pack(blocks, self.device)

    def _is_served(self, type_: int) -> bool:
        if type_ not in KINDS:
            return False
        if type_ not in self.checked:
            self.checked[type_] = is_right(self.kernels, type_, self.dtype, self.device)
            if not self.checked[type_]:
                name = GGMLQuantizationType(type_).name
                logger.warning("The kernel for %s differs from its numbers; they become %s", name, self.dtype)
        return self.checked[type_]


def find_linears(dtype: torch.dtype, device: torch.device) -> BlockLinears | None:
    """Returns the backend if there are kernels for ``device``; each type of blocks is checked when it is
    first met."""
    if not serves([], dtype, device):
        return None
    try:
        # This imports triton.
        kernels: BlockKernels = import_module("truedraft.engine.cuda.quantised_kernels")
    except Exception as error:  # compilers and drivers fail in many ways; dense weights need none of this
        logger.warning("The kernels for quantised weights cannot be used: %s", error, exc_info=True)
        return None
    has_fp8 = multiplies_fp8(dtype, device) and scaled.is_right(kernels.round_rows, device)
    return BlockLinears(kernels, dtype, device, has_fp8)


@torch.inference_mode()
def is_right(kernels: BlockKernels, type_: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether weights of a type are gguf's to the bit, and products those of float64, for each size of
    program: they are compiled by that, too."""
    try:
        # An odd number of blocks where there may be one, and a last tile that is not full.
        in_features = 512 if KINDS[type_].super_fields else 9 * BLOCK
        blocks = random_blocks(type_, COLUMNS + 7, in_features)
        weights = torch.from_numpy(gguf.dequantize(blocks.data, GGMLQuantizationType(type_))).to(device)
        packed = pack(blocks, device)
        ids = torch.arange(len(weights) - 1, -1, -3, device=device)
        for rows, wanted in ((range(len(weights)), weights), (ids, weights[ids])):
            if not torch.equal(kernels.unpack(packed, torch.float32, rows), wanted):
                return False
            kernels.unpack(packed, dtype, rows)  # This compiles the kernels.
        generator = torch.Generator().manual_seed(type_)
        x = torch.randn(COLUMNS + 1, blocks.in_features, generator=generator).to(device, dtype)
        expected = x.double() @ weights.to(dtype).double().t()
        tolerance = TOLERANCES[dtype] * expected.abs().max()
        products = (kernels.multiply(x[:rows], [packed], None, 1.0, None) for rows in CHECKED_ROWS)
        return all(bool(((y - expected[: len(y)]).abs().max() <= tolerance).item()) for y in products)
    except Exception as error:
        name = GGMLQuantizationType(type_).name
        logger.warning("The kernel for %s cannot be used: %s", name, error, exc_info=True)
        return False
