"""Reads AWQ, GPTQ and compressed-tensors checkpoints of packed codes, as weights that our kernels multiply.

A weight is scale * (code - zero point), with one scale and one zero point for a group of inputs. Where all
zero points of a layer are 8 that is Q4_0; else five bits hold every difference, which is Q5_0. Scales are
repeated for the blocks of a group, so weights are the checkpoint's exactly. What these blocks do not hold,
such as eight bits, groups of 16 or scales that are no float16 numbers, is kept in bytes with scales, and
inputs in another order in 16 bits. Formats: AutoGPTQ and AutoAWQ (``gemm``), whose words run along inputs and
along outputs, and compressed-tensors' ``pack-quantized``.

The config's statements about the codes are compared with the tensors: where they do not agree, the tensors
are believed if they can be read in one way only, and refused otherwise.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.checkpoints.checkpoint import Checkpoint, DerivedCheckpoint
from truedraft.engine.checkpoints.eight_bit import open_groups, rounded
from truedraft.engine.checkpoints.packed_config import (
    AWQ,
    COMPRESSED,
    FIRST_FORMAT,
    GPTQ,
    SECOND_FORMAT,
    WHOLE_ROW,
    WIDTHS,
    Said,
    other_groups,
    read_said,
)
from truedraft.engine.errors import QuantizationError
from truedraft.engine.layers.quantised_blocks import TYPES, QuantisedBlocks
from truedraft.engine.layers.weight import ScaledBytes, ScaledRows

GROUP, WORD = 32, 32
# Q4_0 and Q5_0 hold these differences of code and zero point.
SYMMETRIC_ZERO = 8
# AWQ has the codes of eight outputs at these places of a word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Each format has a name for a layer's words.
WORDS = {GPTQ: "qweight", AWQ: "qweight", COMPRESSED: "weight_packed"}
# A layer's weights are put together from the tensors with these names.
PARTS = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    COMPRESSED: ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
}
# These among them have zero points, and the group of each input.
ZEROS = {GPTQ: "qzeros", AWQ: "qzeros", COMPRESSED: "weight_zero_point"}
ORDERS = {GPTQ: "g_idx", COMPRESSED: "weight_g_idx"}
# Setting names and values that say that all zero points are in the middle.
SAYS_SYMMETRIC = {GPTQ: "sym true", AWQ: "zero_point false", COMPRESSED: "symmetric true"}
# Tensors of this many layers are kept, as each layer's are asked for twice.
KEPT = 8

logger = logging.getLogger(__name__)


class _Codes(NamedTuple):
    """Holds a layer's codes and scales.

    ``differences`` int8 or int16 [out features, in features] are codes less zero points; ``scales`` are
    float32 [out features, groups]; ``groups`` has the group of each input; ``size`` is the number of
    neighbouring inputs in a group, or None where a group's inputs are not neighbours.
    """

    differences: npt.NDArray[np.int16] | npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int64]
    size: int | None


class PackedCheckpoint(DerivedCheckpoint):
    """Gives the packed layers of ``source`` under the names of their weights. ``others`` reads tensors that
    are not packed. ``compact`` rounds weights that neither blocks nor bytes hold, so that they fit into 16
    bits."""

    def __init__(self, source: Checkpoint, said: Said, others: Checkpoint, compact: bool) -> None:
        suffix = f".{WORDS[said.method]}"
        self.packed = {
            f"{name.removesuffix(suffix)}.weight": name.removesuffix(suffix)
            for name in source.files
            if name.endswith(suffix)
        }
        if not self.packed:
            raise QuantizationError(
                f"it is said to be quantised by {said.method}, but has no {suffix} tensors"
            )
        super().__init__(
            others,
            source.files | {name: source.files[f"{base}{suffix}"] for name, base in self.packed.items()},
        )
        self.stored = source
        own = {f"{base}.{part}" for base in self.packed.values() for part in PARTS[said.method]}
        self.parts = others.parts | own
        self.said = said
        self.compact = compact
        self.has_warned = False
        self.codes = lru_cache(KEPT)(self._codes)

    @property
    def is_in_blocks(self) -> bool:
        """Tells whether blocks may hold everything that is quantised, as far as the config tells."""
        bits = self.said.bits or {max(WIDTHS)}
        return max(bits) < max(WIDTHS) and self.said.is_ordered and self.source is self.stored

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return _blocks(self.codes(name)) if name in self.packed else None

    def scaled_rows(self, name: str) -> ScaledRows | None:
        return None if name in self.packed else self.source.scaled_rows(name)

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        if name not in self.packed:
            return self.source.scaled_bytes(name)
        codes = self.codes(name)
        if codes.size is None or codes.differences.dtype != np.int8:
            return None
        found = ScaledBytes(torch.from_numpy(codes.differences), torch.from_numpy(codes.scales), codes.size)
        return found if found.is_finite else None

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors = {}
        for name in names:
            if name in self.packed:
                codes = self.codes(name)
                weights = torch.from_numpy(codes.differences * codes.scales[:, codes.groups])
                is_kept = not self.compact or self.scaled_bytes(name) is not None
                tensors[name] = weights if is_kept else rounded(weights)
            else:
                tensors |= self.source.read([name])
        return tensors

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {
            name: self._shape(self.packed[name]) if name in self.packed else self.source.shapes([name])[name]
            for name in names
        }

    def _shape(self, base: str) -> tuple[int, int]:
        if self.said.method == COMPRESSED:
            (shape,) = self._parts(base, "weight_shape")
            if shape.numel() != 2:
                raise QuantizationError(
                    f"it is damaged: {base} has a weight_shape of {shape.numel()} numbers"
                )
            return int(shape[0]), int(shape[1])
        rows, columns = self._shape_of(base, "qweight")
        codes = WORD // self._bits(base)
        return (columns, rows * codes) if self.said.method == GPTQ else (columns * codes, rows)

    def _bits(self, base: str) -> int:
        """Returns the number of bits of a code in a layer's words, which the shapes of its tensors tell.
        Raises ``QuantizationError`` if the config says otherwise."""
        words = self._shape_of(base, WORDS[self.said.method])
        if self.said.method == COMPRESSED:
            rows, inputs = self._shape(base)
            found = [bits for bits in WIDTHS if words == (rows, -(-inputs * bits // WORD))]
        else:
            _, outputs = self._shape_of(base, "scales")
            of_outputs = self._shape_of(base, "qzeros")[1] if self.said.method == GPTQ else words[1]
            found = [bits for bits in WIDTHS if of_outputs * WORD == outputs * bits]
        if not found:
            raise QuantizationError(
                f"it is damaged: {base} has words of the shape {words}, which fit no scales"
            )
        if self.said.bits and found[0] not in self.said.bits:
            said = " or ".join(map(str, sorted(self.said.bits)))
            raise QuantizationError(
                f"{base} has {found[0]} bits by its shapes, but its quantization_config says {said}"
            )
        return found[0]

    def _codes(self, name: str) -> _Codes:
        base = self.packed[name]
        bits, (rows, inputs) = self._bits(base), self._shape(base)
        scales = self._scales(base, rows)
        size = self._group_size(base, inputs, scales.shape[1])
        zeros = self._zeros(base, bits, scales.shape)
        words = self._parts(base, WORDS[self.said.method])[0].numpy()
        if self.said.method == GPTQ:
            codes = _unpacked(words.T, bits)
        elif self.said.method == AWQ:
            codes = _unpacked(words, bits, AWQ_ORDER).T
        else:
            codes = _unpacked(words, bits)[:, :inputs]
        groups = np.arange(inputs) // size
        order = self._order(base, inputs, scales.shape[1])
        is_ordered = order is None or np.array_equal(order, groups)
        if order is not None and not is_ordered:
            if self.said.is_ordered:
                raise QuantizationError(
                    f"{base} has its inputs in another order ({ORDERS[self.said.method]}), but its "
                    "quantization_config does not say so (desc_act, actorder): one of the two is wrong"
                )
            groups = order
        differences = codes.astype(np.int16) - zeros.astype(np.int16)[:, groups]
        limits = np.iinfo(np.int8)
        if limits.min <= differences.min() and differences.max() <= limits.max:
            differences = differences.astype(np.int8)
        return _Codes(differences, scales, groups, size if is_ordered else None)

    def _scales(self, base: str, rows: int) -> npt.NDArray[np.float32]:
        (scales,) = self._parts(base, "weight_scale" if self.said.method == COMPRESSED else "scales")
        found = (scales if self.said.method == COMPRESSED else scales.t()).float().contiguous().numpy()
        if found.ndim != 2 or len(found) != rows or not found.size or not np.isfinite(found).all():
            raise QuantizationError(
                f"it is damaged: {base} has scales of the shape {found.shape}, or some that are no numbers"
            )
        return found

    def _group_size(self, base: str, inputs: int, count: int) -> int:
        """Returns the number of inputs that share a scale; raises ``QuantizationError`` if the config says
        otherwise."""
        said = {inputs if size == WHOLE_ROW else size for size in self.said.group_sizes if size}
        for size in sorted(said) or [-(-inputs // count)]:
            if size > 0 and -(-inputs // size) == count:
                return size
        sizes = " or ".join(map(str, sorted(said))) or "equal"
        raise QuantizationError(f"{base} has {count} groups for {inputs} inputs, but {sizes} inputs are one")

    def _zeros(self, base: str, bits: int, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Returns the zero points [out features, groups]."""
        method, symmetric, middle = self.said.method, self.said.is_symmetric, 1 << bits - 1
        name = ZEROS[method]
        may_lack = symmetric or (symmetric is None and method == COMPRESSED)
        if may_lack and f"{base}.{name}" not in self.stored.files:
            return np.full(shape, middle, dtype=np.uint8)
        stored = self._parts(base, name)[0].numpy()
        if method == GPTQ:
            zeros = self._added(base, _unpacked(stored, bits).T, bits)
        elif method == AWQ:
            zeros = _unpacked(stored, bits, AWQ_ORDER).T
        elif stored.dtype == np.int8 and stored.shape == shape:
            zeros = (stored.astype(np.int16) + middle).astype(np.uint8)  # These tensors are not packed.
        else:
            zeros = _unpacked(stored.T, bits)[:, : shape[0]].T
        if zeros.shape != shape:
            raise QuantizationError(
                f"it is damaged: {base} has zero points of the shape {zeros.shape}, and scales of {shape}"
            )
        if symmetric and (zeros != middle).any():
            raise QuantizationError(
                f"by {SAYS_SYMMETRIC[method]} in its quantization_config all zero points are {middle}, "
                f"but {base} has some from {zeros.min()} to {zeros.max()}: one of the two is wrong"
            )
        return zeros

    def _added(self, base: str, stored: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
        """Returns the number that GPTQ's stored zero points lack: its first format stores them less one.
        Files that name the wrong format are recognised: by the other format all zero points are in the
        middle."""
        middle, said = 1 << bits - 1, self.said.checkpoint_format
        first = (stored + np.uint8(1)) & np.uint8(2 * middle - 1)
        by_format = {FIRST_FORMAT: first, SECOND_FORMAT: stored}
        other = FIRST_FORMAT if said == SECOND_FORMAT else SECOND_FORMAT
        if (by_format[said] == middle).all() or (by_format[other] != middle).any():
            return by_format[said]
        if self.said.is_symmetric is False:
            raise QuantizationError(
                f"{base} has zero points that are all {by_format[said].flat[0]} by its checkpoint_format, "
                f"{said}, but all {middle} by {other}, and sym is false: write the right format, or sym as "
                "true, into its quantization_config"
            )
        if not self.has_warned:
            logger.warning(
                "Its zero points are all %d by the checkpoint format %s, which its quantization_config does "
                "not say: they are read so",
                middle,
                other,
            )
        self.has_warned = True
        return by_format[other]

    def _order(self, base: str, inputs: int, count: int) -> npt.NDArray[np.int64] | None:
        """Returns the group of each input; None if each group's inputs are neighbours."""
        name = ORDERS.get(self.said.method)
        if name is None or (count == 1 and f"{base}.{name}" not in self.stored.files):
            return None
        if f"{base}.{name}" not in self.stored.files and self.said.is_ordered:
            return None
        found = self._parts(base, name)[0].long().numpy()
        if found.shape != (inputs,) or found.min() < 0 or found.max() >= count:
            raise QuantizationError(f"it is damaged: {base}.{name} names groups that there are not")
        return found

    def _shape_of(self, base: str, part: str) -> tuple[int, ...]:
        name = f"{base}.{part}"
        if name not in self.stored.files:
            raise QuantizationError(f"it lacks {name}")
        shape = self.stored.shapes([name])[name]
        if len(shape) != 2:
            raise QuantizationError(f"it is damaged: {name} has the shape {shape}")
        return shape

    def _parts(self, base: str, *names: str) -> list[torch.Tensor]:
        wanted = [f"{base}.{name}" for name in names]
        if missing := [name for name in wanted if name not in self.stored.files]:
            raise QuantizationError(f"it lacks {missing[0]}")
        read = self.stored.read(wanted)
        return [read[name] for name in wanted]


def open_packed(source: Checkpoint, quantization: dict[str, Any], compact: bool) -> PackedCheckpoint | None:
    """Opens a checkpoint by its ``quantization_config``. Returns None for methods that are left to
    transformers; raises ``QuantizationError`` for variants of ours that are not supported."""
    said = read_said(quantization)
    if said is None:
        return None
    others: Checkpoint | None = source
    if said.method == COMPRESSED and (rest := other_groups(quantization)):
        others = open_groups(source, rest, compact)
    return None if others is None else PackedCheckpoint(source, said, others, compact)


def _unpacked(
    words: npt.NDArray[np.int32], bits: int, order: Sequence[int] | None = None
) -> npt.NDArray[np.uint8]:
    """Returns the codes [rows, 32 / bits * columns] that ``words`` [rows, columns] hold, each of ``bits``;
    ``order`` has the place of each code in its word."""
    if words.ndim != 2 or words.dtype != np.int32:
        raise QuantizationError(f"it is damaged: it has words of {words.dtype} and the shape {words.shape}")
    shifts = bits * np.array(order or range(WORD // bits), dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def _blocks(codes: _Codes) -> QuantisedBlocks | None:
    """Returns blocks of 32 inputs with a float16 scale each; None where such blocks do not hold the
    weights."""
    differences = codes.differences
    rows, inputs = differences.shape
    lowest, highest = differences.min(), differences.max()
    is_in_groups = codes.size is not None and not inputs % GROUP and not codes.size % GROUP
    if not is_in_groups or lowest < -2 * SYMMETRIC_ZERO or highest >= 2 * SYMMETRIC_ZERO:
        return None
    is_symmetric = lowest >= -SYMMETRIC_ZERO and highest < SYMMETRIC_ZERO
    grouped = differences.reshape(rows, -1, GROUP)
    per_block = codes.scales[:, codes.groups[::GROUP]]
    with np.errstate(over="ignore"):
        halves = per_block.astype("<f2")
    lost = halves != per_block
    if lost.any():
        if grouped[lost].any():
            return None
        halves[lost] = 0  # All weights of such a block are zero.
    offset = SYMMETRIC_ZERO if is_symmetric else 2 * SYMMETRIC_ZERO
    values = (grouped + offset).astype(np.uint8)
    parts = [np.ascontiguousarray(halves)[:, :, None].view(np.uint8)]
    if not is_symmetric:
        parts.append(np.packbits(values >> 4, axis=-1, bitorder="little"))
    low, half = values & 0xF, GROUP // 2
    parts.append((low[:, :, :half] | low[:, :, half:] << 4).astype(np.uint8))
    data = np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(rows, -1))
    return QuantisedBlocks(TYPES["Q4_0" if is_symmetric else "Q5_0"], data, inputs)
