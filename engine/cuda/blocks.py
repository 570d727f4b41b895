"""Quantised weights as they lie on a GPU: kinds of blocks, and blocks repacked in tiles of rows.

Blocks are repacked once, at load, so that a program of the kernels reads whole lines of memory from end to
end (``PackedBlocks``); not a bit of a weight changes. Launchers and kernels both stand on this module.
"""

from dataclasses import dataclass
from typing import TypeAlias

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType

from truedraft.engine.layers.quantised_blocks import TYPES, QuantisedBlocks

# A block has this many weights with a scale in common; some types have super-blocks that share more.
BLOCK, BLOCKS_OF_SUPER = 32, 8
# One program computes this many outputs; a tile of codes has 32 times as many bytes.
COLUMNS = 64
# This many rows are repacked at a time; each code takes a byte meanwhile.
REPACKED_ROWS = 1 << 13

# Codes become weights in one of these ways, which kernels know by their numbers. SCALE: float16 of a block.
# SCALE_MIN: the same, and a float16 minimum to add. SUPER: scale and minimum in 8 bits each, times float16 of
# 256 inputs. SUPER_HALF: scales in 8 bits of 16 inputs, times float16 of 256. SUPER_HALF_MIN: scales and
# minima in 4 bits each of 16 inputs, times float16 of 256. SUPER_SCALE: a scale in 8 bits, times float16 of
# 256. POWER: a power of two.
SCALE, SCALE_MIN, SUPER, SUPER_HALF, SUPER_HALF_MIN, SUPER_SCALE, POWER = range(7)
# Codes of four bits are indices into these levels in some types.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LEVEL_OFFSET = 128
# A function of this type returns codes uint8 [rows, blocks, 32], scales [rows, blocks, fields], and the
# numbers that eight blocks share [rows, blocks / 8, fields].
Fields: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """Describes a type of blocks. A weight is its scale times (its code of ``bits`` + ``offset``) or, with
    ``levels``, its scale times the level that the code names."""

    bits: int
    scaling: int
    offset: int = 0
    levels: tuple[int, ...] = ()

    @property
    def fields(self) -> int:
        """Returns how many numbers a block has in addition to its codes."""
        return 1 if self.scaling in (SCALE, SUPER_SCALE, POWER) else 2

    @property
    def super_fields(self) -> int:
        """Returns how many numbers eight blocks share."""
        return {SUPER: 2, SUPER_HALF: 1, SUPER_HALF_MIN: 2, SUPER_SCALE: 1}.get(self.scaling, 0)

    @property
    def low_bits(self) -> int:
        """Returns how many bits of a code lie in ``PackedBlocks.low``."""
        return 8 if self.bits == 8 else 4 if self.bits >= 4 else 2

    @property
    def constants(self) -> tuple[int, ...]:
        """Returns the numbers that kernels know of the kind, in the order of ``block_weights``. A level is a
        byte of two integers, with ``LEVEL_OFFSET`` added."""
        bytes_ = bytes(level + LEVEL_OFFSET for level in self.levels) or bytes(16)
        first, last = (int.from_bytes(bytes_[at : at + 8], "little", signed=True) for at in (0, 8))
        offset = LEVEL_OFFSET if self.levels else self.offset
        return self.bits, self.low_bits, self.scaling, offset, first, last


KINDS = {
    TYPES["Q4_0"]: Kind(4, SCALE, 8),
    TYPES["Q4_1"]: Kind(4, SCALE_MIN),
    TYPES["Q5_0"]: Kind(5, SCALE, 16),
    TYPES["Q5_1"]: Kind(5, SCALE_MIN),
    TYPES["Q8_0"]: Kind(8, SCALE, 128),
    TYPES["Q2_K"]: Kind(2, SUPER_HALF_MIN),
    TYPES["Q3_K"]: Kind(3, SUPER_HALF, 4),
    TYPES["Q4_K"]: Kind(4, SUPER),
    TYPES["Q5_K"]: Kind(5, SUPER),
    TYPES["Q6_K"]: Kind(6, SUPER_HALF, 32),
    TYPES["IQ4_NL"]: Kind(4, SCALE, levels=IQ4_LEVELS),
    TYPES["IQ4_XS"]: Kind(4, SUPER_SCALE, levels=IQ4_LEVELS),
    TYPES["MXFP4"]: Kind(4, POWER, levels=FP4_LEVELS),
}


@dataclass(frozen=True)
class PackedBlocks:
    """A matrix on the device, in tiles of ``COLUMNS`` rows, whose numbers of a block lie together.

    ``low`` uint8 [tiles, n, columns, 32]: the codes' low four bits of two blocks in a byte, or 8 of one, or 2
    of four. ``high``, likewise, the next bits of eight blocks, or the next two of four. ``scales`` [tiles,
    blocks, fields, columns], float16 or uint8. ``supers`` float16 [tiles, blocks / 8, fields, columns].
    """

    type: int
    rows: int
    in_features: int
    low: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor
    supers: torch.Tensor

    @property
    def kind(self) -> Kind:
        return KINDS[self.type]

    @property
    def num_blocks(self) -> int:
        return self.in_features // BLOCK

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.low, self.high, self.scales, self.supers))


def pack(blocks: QuantisedBlocks, device: torch.device) -> PackedBlocks:
    """Repacks a matrix of one of ``KINDS`` on ``device``."""
    parts, rows = [], blocks.rows
    for first in range(0, len(rows), REPACKED_ROWS):
        wanted = rows[first : first + REPACKED_ROWS]
        # Rows that lie side by side are not copied before they are sent.
        data = blocks.data[first : first + len(wanted)] if blocks.order is None else blocks.data[wanted]
        stored = torch.from_numpy(np.array(data)).to(device)
        codes, scales, supers = _fields(blocks.type, stored, blocks.in_features // BLOCK)
        low, high = _planes(_tiled(codes), KINDS[blocks.type])
        parts.append((low, high, _tiled_fields(scales), _tiled_fields(supers)))
    joined = [torch.cat(each) for each in zip(*parts, strict=True)]
    return PackedBlocks(blocks.type, len(rows), blocks.in_features, *joined)


def _fields(type_: int, stored: torch.Tensor, blocks: int) -> Fields:
    """Reads ``stored`` uint8 [rows, bytes]."""
    rows, kind = len(stored), KINDS[type_]
    name = GGMLQuantizationType(type_).name
    if name in _SUPERS:
        return _SUPERS[name](stored.view(rows, blocks // BLOCKS_OF_SUPER, -1), kind.bits)
    data, none = stored.view(rows, blocks, -1), stored.new_empty(rows, 0, 0, dtype=torch.float16)
    if kind.scaling == POWER:
        return _nibbles(data[..., 1:]), data[..., :1], none
    at = 2 * kind.fields
    scales = _halves(data[..., :at])
    if kind.bits == 8:
        return data[..., at:] ^ 128, scales, none
    if name.startswith("Q5"):
        high, at = data[..., at : at + 4], at + 4
        places = torch.arange(BLOCK, device=stored.device)
        fifth = high[..., places // 8] >> (places % 8).to(torch.uint8) & 1
        return _nibbles(data[..., at:]) | fifth << 4, scales, none
    return _nibbles(data[..., at:]), scales, none


def _q4_k(data: torch.Tensor, bits: int) -> Fields:
    """Reads Q4_K and Q5_K, [rows, supers, bytes]."""
    rows, supers = data.shape[:2]
    packed, at = data[..., 4:16], 16 if bits == 4 else 48
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat((low & 63, high & 15 | low >> 2 & 48), -1)
    minimum = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), -1)
    codes = _nibbles(data[..., at:].reshape(rows, supers, 4, BLOCK)).view(rows, supers, -1, BLOCK)
    if bits == 5:
        shifts = torch.arange(BLOCKS_OF_SUPER, dtype=torch.uint8, device=data.device)
        codes = codes | (data[..., None, 16:48] >> shifts[:, None] & 1) << 4
    scales = torch.stack((scale, minimum), -1).view(rows, -1, 2)
    return codes.view(rows, -1, BLOCK), scales, _halves(data[..., :4])


def _q6_k(data: torch.Tensor, _: int) -> Fields:
    """Reads Q6_K, [rows, supers, bytes]. In each half of 128 inputs, the low bits of two blocks lie before
    those of the next two."""
    rows, supers = data.shape[:2]
    low = data[..., :128].reshape(rows, supers, 2, 1, 2, BLOCK)
    low = torch.cat((low & 15, low >> 4), 3)
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=data.device).view(2, 2, 1)
    high = data[..., 128:192].reshape(rows, supers, 2, 1, 1, BLOCK) >> shifts & 3
    return (
        (low | high << 4).view(rows, -1, BLOCK),
        data[..., 192:208].reshape(rows, -1, 2),
        _halves(data[..., 208:]),
    )


def _q2_k(data: torch.Tensor, _: int) -> Fields:
    """Reads Q2_K, [rows, supers, bytes]."""
    rows = len(data)
    return _pairs_of_bits(data[..., 16:80]), data[..., :16].reshape(rows, -1, 2), _halves(data[..., 80:])


def _q3_k(data: torch.Tensor, _: int) -> Fields:
    """Reads Q3_K, [rows, supers, bytes]. Scales have 6 bits: the low ones
    of two lie in a byte, and after them the high ones of four."""
    rows, supers = data.shape[:2]
    low, high = _nibbles(data[..., 96:104]), data[..., None, 104:108]
    twos = 2 * torch.arange(4, dtype=torch.uint8, device=data.device)
    scales = (low | (high >> twos[:, None] & 3).flatten(2) << 4) - 32  # The six bits are a signed number.
    shifts = torch.arange(BLOCKS_OF_SUPER, dtype=torch.uint8, device=data.device)
    third = (data[..., None, :32] >> shifts[:, None] & 1).view(rows, -1, BLOCK)
    codes = _pairs_of_bits(data[..., 32:96]) | third << 2
    return codes, scales.view(rows, -1, 2), _halves(data[..., 108:])


def _iq4_xs(data: torch.Tensor, _: int) -> Fields:
    """Reads IQ4_XS, [rows, supers, bytes]. Scales have 6 bits, of which two lie before the others."""
    rows, supers = data.shape[:2]
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=data.device)
    high = (data[..., 2:4, None] >> shifts & 3).flatten(2)
    low = torch.stack((data[..., 4:8] & 15, data[..., 4:8] >> 4), -1).flatten(2)
    codes = _nibbles(data[..., 8:].reshape(rows, -1, BLOCK // 2))
    return codes, ((low | high << 4) - 32).view(rows, -1, 1), _halves(data[..., :2])


_SUPERS = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q4_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}


def _pairs_of_bits(data: torch.Tensor) -> torch.Tensor:
    """Returns codes [rows, blocks, 32] of two bits each, of which four blocks lie in 32 bytes."""
    rows, supers = data.shape[:2]
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=data.device)
    return (data.reshape(rows, supers, 2, 1, BLOCK) >> shifts[:, None] & 3).view(rows, -1, BLOCK)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Returns the low bits of the last dimension, followed by the high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16)


def _tiled(numbers: torch.Tensor) -> torch.Tensor:
    """Turns [rows, blocks, n] into [tiles, blocks, columns, n]; zeros fill the last tile."""
    padded = F.pad(numbers, (0, 0, 0, 0, 0, -len(numbers) % COLUMNS))
    return padded.view(-1, COLUMNS, *numbers.shape[1:]).transpose(1, 2).contiguous()


def _tiled_fields(numbers: torch.Tensor) -> torch.Tensor:
    if not numbers.numel():
        return numbers.flatten()
    return _tiled(numbers).transpose(2, 3).contiguous()


def _planes(codes: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides codes [tiles, blocks, columns, 32] into ``low`` and ``high``."""
    low, high = kind.low_bits, kind.bits - kind.low_bits
    first = _overlaid(codes & (1 << low) - 1, low)
    return first, _overlaid(codes >> low, high) if high else codes.new_empty(0)


def _overlaid(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Lays consecutive blocks of few bits over each other in bytes, the first one in the lowest bits."""
    together = 8 // bits
    tiles, blocks, *rest = codes.shape
    padded = F.pad(codes, (0, 0, 0, 0, 0, -blocks % together)).view(tiles, -1, together, *rest)
    bytes_ = padded[:, :, 0].clone()
    for place in range(1, together):
        bytes_ |= padded[:, :, place] << bits * place
    return bytes_


def random_blocks(type_: int, rows: int, in_features: int) -> QuantisedBlocks:
    """Draws every bit at random, except that scales have one size."""
    kind = KINDS[type_]
    block, size = (int(number) for number in gguf.GGML_QUANT_SIZES[GGMLQuantizationType(type_)])
    generator = np.random.default_rng(type_)
    data = generator.integers(0, 256, (rows, in_features // block, size), dtype=np.uint8)
    if kind.scaling == POWER:
        data[..., 0] = generator.integers(116, 122, data.shape[:2])
        return QuantisedBlocks(type_, data.reshape(rows, -1), in_features)
    halves = kind.super_fields or kind.fields
    at = size - 2 * halves if kind.scaling in (SUPER_HALF, SUPER_HALF_MIN) else 0
    drawn = generator.uniform(-0.02, 0.02, (*data.shape[:2], halves)).astype(np.float16)
    data[..., at : at + 2 * halves] = drawn.view(np.uint8)
    return QuantisedBlocks(type_, data.reshape(rows, -1), in_features)
