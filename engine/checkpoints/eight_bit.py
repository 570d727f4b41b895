"""This module reads checkpoints of 8-bit weights with scales, FP8 or int8.

A weight is its 8 bits times the scale of its tensor, its row, a group of its row's inputs or its block.
Backends may take the bytes as they are; for others the weights are multiplied by their scales. Four
layouts differ in names only: DeepSeek's and Qwen's (``fp8``, whose ``weight_scale_inv`` is a factor, too),
``mxfp8``, ``fbgemm_fp8`` and compressed-tensors'. Layers whose tensors have 16 bits stay as they are. Inputs
of layers are not rounded, whatever the config says of them.
"""

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.errors import QuantizationError
from truedraft.engine.layers.weight import FP8, ScaledBytes, ScaledRows

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# The scales of a ``weight`` have one of these names; DeepSeek V4 uses the last one.
SCALES = ("weight_scale_inv", "weight_scale", "scale")
ZERO_POINT = "weight_zero_point"
# These tensors belong to inputs, which are not rounded here.
SCALES_OF_INPUTS = ("input_scale", "activation_scale", "input_scale_ub")
DEFAULT_BLOCK = (128, 128)
# A config names the types of weights by these words.
NAMED = {
    "e4m3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "float8_e5m2": torch.float8_e5m2,
}
OF_KIND = {"int": (torch.int8,), "float": (torch.float8_e4m3fn, torch.float8_e5m2)}
POWERS_OF_TWO = "ue8m0"
# Scales in uint8 are exponents of two, plus this number.
EXPONENT_BIAS = 127
# Numbers of ten significant bits are float16 numbers times a power of two (``half_scale``), unless they are
# negligible next to the largest of their layer. A weight has up to eight bits, and its scale up to 24.
PRECISION, FLOAT_PRECISION = 10, 24

logger = logging.getLogger(__name__)


class EightBitCheckpoint(Checkpoint):
    """Gives the weights that ``source`` stores as 8 bits and scales. ``block`` is the number of rows and of
    inputs that share a scale where there is a table of them. ``compact`` rounds weights that no backend takes
    in bytes, so that they fit into 16 bits. ``types`` are the config's types of weights, empty if it names
    none. ``has_powers`` says that scales are powers of two."""

    def __init__(
        self,
        source: Checkpoint,
        block: tuple[int, int] | None,
        compact: bool,
        types: Collection[torch.dtype] = (),
        has_powers: bool = False,
    ) -> None:
        super().__init__(source.files)
        self.types = types
        self.has_powers = has_powers
        self.source = source
        self.block = block
        self.compact = compact
        self.parts = frozenset(
            f"{base}.{last}"
            for name in self.files
            if (base := name.removesuffix(".weight")) != name and self._is_scaled(name)
            for last in (*SCALES, *SCALES_OF_INPUTS, *self._zeros_of(base))
        )

    def _zeros_of(self, base: str) -> list[str]:
        """Returns the name of the zero points if there are some and all of them are zero, so that they change
        nothing."""
        name = f"{base}.{ZERO_POINT}"
        return [] if name not in self.files or self.source.read([name])[name].any() else [ZERO_POINT]

    def _is_scaled(self, name: str) -> bool:
        return self.source.read([name])[name].dtype in TYPES

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors = self.source.read(names)
        return {
            name: self._dequantised(name, tensor) if tensor.dtype in TYPES else tensor
            for name, tensor in tensors.items()
        }

    def scaled_rows(self, name: str) -> ScaledRows | None:
        """Returns a weight as it is stored, if it has one scale for the tensor or one for each row."""
        found = None if self.block is not None else self.scaled_bytes(name)
        if found is None or found.values.dtype != FP8 or found.scales.shape[1] != 1:
            return None
        return ScaledRows(found.values, found.scales.flatten())

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        stored = self.source.read([name])[name]
        if stored.dtype not in (FP8, torch.int8) or stored.dim() != 2:
            return None
        found = self._scaled(name, stored)
        return found if found.is_finite else None

    @property
    def is_scaled_by_rows(self) -> bool:
        """Tells whether ``scaled_rows`` can return every weight that is stored in 8 bits."""
        weights = [name for name in self.files if name.endswith(".weight") and self._is_scaled(name)]
        return all(self.scaled_rows(name) is not None for name in weights)

    def scale_of(self, name: str) -> str:
        """Returns the name of the tensor that scales an 8-bit weight."""
        base, _, last = name.rpartition(".")
        found = [scale for each in SCALES if (scale := f"{base}.{each}") in self.files]
        has_zeros = f"{base}.{ZERO_POINT}" in self.files and not self._zeros_of(base)
        if last != "weight" or len(found) != 1 or has_zeros:
            raise QuantizationError(f"{name} has 8 bits, but not one tensor of scales with it and no other")
        return found[0]

    def _dequantised(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        if stored.dim() != 2:
            return stored.float() * self._one_scale(name, stored)
        weights = self._scaled(name, stored).dense()
        return rounded(weights) if self.compact and self.scaled_bytes(name) is None else weights

    def _scales(self, name: str) -> torch.Tensor:
        scale_name = self.scale_of(name)
        scales = self.source.read([scale_name])[scale_name]
        if self.has_powers and scales.is_floating_point() and (torch.frexp(scales.float())[0] != 0.5).any():
            raise QuantizationError(
                f"{scale_name} has other scales than powers of two, which scale_fmt {POWERS_OF_TWO} in its "
                "quantization_config says: one of the two is wrong"
            )
        return torch.exp2(scales.float() - EXPONENT_BIAS) if scales.dtype == torch.uint8 else scales.float()

    def _one_scale(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        if (scales := self._scales(name)).numel() == 1:
            return scales.reshape(())
        raise _damaged(name, stored, scales)

    def _scaled(self, name: str, stored: torch.Tensor) -> ScaledBytes:
        """Returns a matrix in 8 bits of any kind together with its scales."""
        rows, inputs = stored.shape
        if self.types and stored.dtype not in self.types:
            said = " or ".join(str(each).removeprefix("torch.") for each in self.types)
            raise QuantizationError(
                f"{name} is stored in {str(stored.dtype).removeprefix('torch.')}, but the "
                f"quantization_config says {said}: one of the two is wrong"
            )
        scales, group = self._scales(name), inputs
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).repeat(rows, 1)
        elif self.block is not None:
            height, group = self.block
            if scales.shape != (-(-rows // height), -(-inputs // group)):
                raise _damaged(name, stored, scales)
            scales = scales.repeat_interleave(height, 0)[:rows]
        elif scales.shape in ((rows,), (rows, 1)):
            scales = scales.reshape(rows, 1)
        elif scales.dim() == 2 and len(scales) == rows and inputs % scales.shape[1] == 0:
            group = inputs // scales.shape[1]
        else:
            raise _damaged(name, stored, scales)
        return ScaledBytes(stored, scales, group)


def _damaged(name: str, stored: torch.Tensor, scales: torch.Tensor) -> QuantizationError:
    return QuantizationError(f"it is damaged: {name} {list(stored.shape)} has scales {list(scales.shape)}")


def open_eight_bit(
    source: Checkpoint, quantization: dict[str, Any], compact: bool
) -> EightBitCheckpoint | None:
    """Opens a checkpoint by its ``quantization_config``; returns None if its weights do not have 8 bits."""
    method = str(quantization.get("quant_method", "")).lower()
    if method == "fbgemm_fp8":
        return EightBitCheckpoint(source, None, compact)
    if method in ("fp8", "mxfp8"):
        has_blocks = any(name.endswith((".weight_scale_inv", ".scale")) for name in source.files)
        block = quantization.get("weight_block_size") or (DEFAULT_BLOCK if has_blocks else None)
        form = str(quantization.get("fmt") or "").lower().removeprefix("torch.")
        if form and form not in NAMED:
            known = ", ".join(NAMED)
            raise QuantizationError(f"its quantization_config has the fmt {form}; {known} are known")
        has_powers = str(quantization.get("scale_fmt") or "").lower() == POWERS_OF_TWO
        types = [NAMED[form]] if form else []
        return EightBitCheckpoint(source, _block(block), compact, types, has_powers)
    if method != "compressed-tensors" or quantization.get("format") == "pack-quantized":
        return None
    return open_groups(source, [*(quantization.get("config_groups") or {}).values()], compact)


def open_groups(source: Checkpoint, groups: list[dict[str, Any]], compact: bool) -> EightBitCheckpoint | None:
    """Opens a checkpoint in the format of compressed-tensors."""
    weights = [group.get("weights") or {} for group in groups]
    blocks = {
        _block(group.get("block_structure")) if group.get("strategy") == "block" else None
        for group in weights
    }
    if len(blocks) != 1 or not all(_is_supported(group) for group in weights):
        return None
    kinds = {str(group.get("type", "")) for group in weights}
    types = [each for kind in sorted(kinds) for each in OF_KIND.get(kind, TYPES)]
    return EightBitCheckpoint(source, blocks.pop(), compact, types)


def _is_supported(weights: dict[str, Any]) -> bool:
    is_in_order = weights.get("actorder") in (None, False, "static", "weight")
    return weights.get("num_bits") == 8 and weights.get("symmetric", True) and is_in_order


def check_whole_blocks(source: Checkpoint, block: Any) -> None:
    """Refuses a weight whose last blocks are smaller (``QuantizationError``): transformers divides it into
    equal ones instead."""
    sizes = _block(block) or DEFAULT_BLOCK
    for name in source.files:
        scale_name = f"{name}_scale_inv"
        if scale_name not in source.files:
            continue
        tensors = source.read([name, scale_name])
        shapes = tensors[name].shape[-2:], tensors[scale_name].shape[-2:]
        # A single scale has no shape of two numbers.
        for size, count, whole in zip(*shapes, sizes, strict=False):
            if count > 1 and size % whole:
                raise QuantizationError(f"{name} is not made of whole blocks of {list(sizes)} weights")


def compact_linears(module: nn.Module, source: Checkpoint | None) -> None:
    """Rounds the linear layers that transformers has dequantised, so that 16 bits hold them. Experts that lie
    in one tensor stay in float32."""
    for name, child in module.named_modules():
        weight = f"{name}.weight"
        if source is None or type(child) is not nn.Linear or weight not in source.files:
            continue
        if source.read([weight])[weight].dtype in TYPES:
            child.weight.data = rounded(child.weight.data)
    if any(".experts." in name and parameter.dim() > 2 for name, parameter in module.named_parameters()):
        logger.warning("The quantised experts of this model are kept in float32, in four bytes a weight")


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if not (
        isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    ):
        raise QuantizationError(f"its blocks of weights are {sizes}, not two numbers")
    return sizes[0], sizes[1]


def rounded(weights: torch.Tensor) -> torch.Tensor:
    """Returns float32 ``weights`` rounded to ``PRECISION`` bits, ties away from zero."""
    dropped = FLOAT_PRECISION - PRECISION
    bits = weights.contiguous().view(torch.int32)
    return ((bits + (1 << dropped - 1)) & (-1 << dropped)).view(torch.float32)
