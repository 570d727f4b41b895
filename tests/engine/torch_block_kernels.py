"""``engine.cuda.quantised_kernels`` by torch's operations: what they must compute, and, on a CPU, in their
place. A tape holds them."""

from collections.abc import Sequence

import torch

from truedraft.engine.cuda.blocks import (
    POWER,
    SCALE,
    SCALE_MIN,
    SUPER,
    SUPER_HALF,
    SUPER_HALF_MIN,
    SUPER_SCALE,
    PackedBlocks,
)
from truedraft.engine.layers.weight import ScaledRows


def multiply(
    x: torch.Tensor,
    parts: Sequence[PackedBlocks],
    bias: torch.Tensor | None,
    multiplier: float,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    weights = torch.cat([unpack(part, x.dtype, range(part.rows)) for part in parts])
    # In float64, so that no row depends on the others but in bits that are rounded off.
    total = x.double() @ weights.double().t()
    if bias is not None:
        total = total + bias
    total = total * multiplier
    return (total if residual is None else total + residual).to(x.dtype)


def unpack(packed: PackedBlocks, dtype: torch.dtype, rows: range | torch.Tensor) -> torch.Tensor:
    weights = _weights(packed).flatten(0, 1).flatten(1)[: packed.rows]
    if isinstance(rows, range):
        return weights[rows.start : rows.stop].to(dtype)
    return weights.index_select(0, rows).to(dtype)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rounded = ScaledRows.of(x.float())
    return rounded.values, rounded.scales


def _weights(packed: PackedBlocks) -> torch.Tensor:
    """Returns float32 [tiles, columns, blocks, 32]."""
    kind, blocks = packed.kind, packed.num_blocks
    codes = _codes(packed.low, kind.low_bits, blocks)
    if (high := kind.bits - kind.low_bits) > 0:
        codes = codes | _codes(packed.high, high, blocks) << kind.low_bits
    values = (codes.int() - kind.offset).float()
    if kind.levels:
        values = torch.tensor(kind.levels, dtype=torch.float32)[codes.int()]
    is_signed = kind.scaling in (SUPER_HALF, SUPER_SCALE)
    scales = packed.scales.view(torch.int8) if is_signed else packed.scales
    if kind.scaling == SUPER_HALF_MIN:
        scales = torch.cat((scales & 15, scales >> 4), 2)
    first, *others = scales.float().permute(2, 0, 3, 1)[..., None]
    if kind.scaling == SCALE:
        return values * first
    if kind.scaling == SCALE_MIN:
        return values * first + others[0]
    if kind.scaling == POWER:
        return values * torch.ldexp(torch.tensor(1.0), first - 128)
    supers = packed.supers.float().permute(2, 0, 3, 1)[..., None].repeat_interleave(8, -2)
    if kind.scaling == SUPER:
        return values * (supers[0] * first) - supers[1] * others[0]
    if kind.scaling == SUPER_SCALE:
        return values * (supers[0] * first)
    weights = values * (supers[0] * _halves(first, others[0]))
    return weights if kind.scaling == SUPER_HALF else weights - supers[1] * _halves(*others[1:])


def _halves(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns numbers of 16 inputs for each of 32."""
    return torch.cat([each.expand(*each.shape[:-1], 16) for each in (first, second)], -1)


def _codes(plane: torch.Tensor, bits: int, blocks: int) -> torch.Tensor:
    """Returns uint8 [tiles, columns, blocks, 32] of bytes in which blocks of few ``bits`` lie together."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1, 1)
    apart = plane[:, :, None] >> shifts & (1 << bits) - 1
    return apart.flatten(1, 2)[:, :blocks].transpose(1, 2)
