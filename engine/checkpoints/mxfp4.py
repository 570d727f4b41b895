"""Reads MXFP4 checkpoints of gpt-oss, whose experts have numbers of four bits, 32 of a row times a power of
two.

A checkpoint has ``_blocks`` [experts, out features, groups, 16], two numbers to a byte, the lower half first,
and ``_scales`` [experts, out features, groups] in place of a parameter. Products are exact in bfloat16.
"""

from collections.abc import Iterable

import torch

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.errors import QuantizationError

BLOCKS, SCALES = "_blocks", "_scales"
# These are the numbers by their codes; a scale is two to the power of its code less EXPONENT.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT, BITS = 127, 4
# A block of this many bytes has one scale.
GROUP_BYTES = 16


class Mxfp4Checkpoint(Checkpoint):
    """Replaces blocks and scales of ``source`` by the parameters that they stand for, as transformers has
    them."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        names = (name.removesuffix(BLOCKS) for name in source.files if name.endswith(BLOCKS))
        self.packed = {name for name in names if f"{name}{SCALES}" in source.files}
        self.parts = frozenset(f"{name}{part}" for name in self.packed for part in (BLOCKS, SCALES))
        super().__init__(source.files | {name: source.files[f"{name}{BLOCKS}"] for name in self.packed})

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= {name: self._read(name)} if name in self.packed else self.source.read([name])
        return tensors

    def _read(self, name: str) -> torch.Tensor:
        """Returns bfloat16 [experts, in features, out features]."""
        stored = self.source.read([f"{name}{BLOCKS}", f"{name}{SCALES}"])
        blocks, scales = stored[f"{name}{BLOCKS}"], stored[f"{name}{SCALES}"]
        is_whole = blocks.shape == (*scales.shape, GROUP_BYTES)
        if not is_whole or not blocks.dtype == scales.dtype == torch.uint8:
            raise QuantizationError(
                f"it is damaged: {name} has blocks {list(blocks.shape)} of {blocks.dtype} and scales "
                f"{list(scales.shape)} of {scales.dtype}, where MXFP4 has bytes, {GROUP_BYTES} to a scale"
            )
        numbers = torch.tensor(NUMBERS, dtype=torch.bfloat16)
        parts = []
        for codes, exponents in zip(blocks, scales, strict=True):
            both = torch.stack((codes & 0xF, codes >> BITS), dim=-1).flatten(-2)
            rows = torch.ldexp(numbers[both.int()].float(), exponents.int()[..., None] - EXPONENT)
            parts.append(rows.bfloat16().flatten(-2).T)
        return torch.stack(parts)

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            if name in self.packed:
                found = self.source.shapes([f"{name}{BLOCKS}"])[f"{name}{BLOCKS}"]
                shapes[name] = (found[0], 2 * found[-1] * found[-2], found[1])
            else:
                shapes |= self.source.shapes([name])
        return shapes
