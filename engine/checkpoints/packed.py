"""AWQ, GPTQ and compressed-tensors checkpoints of 4-bit weights, as blocks that our kernels multiply.

A weight is scale * (code - zero point), with one scale and one zero point for a group of inputs. Where all
zero points of a layer are 8 that is Q4_0; else five bits hold every difference, which is Q5_0. Scales are
repeated for the blocks of a group, so weights are the checkpoint's exactly. Formats: AutoGPTQ and AutoAWQ
(``gemm``), whose words of eight codes run along inputs and along outputs, and compressed-tensors'
``pack-quantized``.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.errors import QuantizationError
from truedraft.engine.layers.quantised_blocks import TYPES, QuantisedBlocks

GROUP = 32
CODES, BITS = 8, 4  # in a word of 32 bits
SYMMETRIC_ZERO = 8
# Where in a word AWQ has the codes of eight outputs.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# What a layer's words are called, by format.
WORDS = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
# All that a layer's weights are put together from.
PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
}
# Tensors of one layer, which are asked for twice.
KEPT = 8


class _Codes(NamedTuple):
    """``differences`` int8 [out features, in features]: codes less zero points; ``scales`` float32 [out
    features, groups]."""

    differences: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]


class PackedCheckpoint(Checkpoint):
    """``source`` with its packed layers under the names of their weights."""

    def __init__(self, source: Checkpoint, method: str, adds_one: bool) -> None:
        suffix = f".{WORDS[method]}"
        self.packed = {
            f"{name.removesuffix(suffix)}.weight": name.removesuffix(suffix)
            for name in source.files
            if name.endswith(suffix)
        }
        if not self.packed:
            raise QuantizationError(f"it is said to be quantised by {method}, but has no {suffix} tensors")
        super().__init__(
            source.files | {name: source.files[f"{base}{suffix}"] for name, base in self.packed.items()}
        )
        self.source = source
        self.parts = frozenset(f"{base}.{part}" for base in self.packed.values() for part in PARTS[method])
        self.method = method
        self.adds_one = adds_one
        self.codes = lru_cache(KEPT)(self._codes)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return _blocks(self.codes(name)) if name in self.packed else None

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors = {}
        for name in names:
            if name in self.packed:
                differences, scales = self.codes(name)
                weights = differences.reshape(*scales.shape, -1) * scales[:, :, None]
                tensors[name] = torch.from_numpy(weights.reshape(differences.shape))
            else:
                tensors |= self.source.read([name])
        return tensors

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {
            name: self._shape(self.packed[name]) if name in self.packed else self.source.shapes([name])[name]
            for name in names
        }

    def _shape(self, base: str) -> tuple[int, ...]:
        if self.method == "compressed-tensors":
            (shape,) = self._parts(base, "weight_shape")
            return tuple(int(size) for size in shape)
        words = f"{base}.qweight"
        rows, columns = self.source.shapes([words])[words]
        return (columns, rows * CODES) if self.method == "gptq" else (columns * CODES, rows)

    def _codes(self, name: str) -> _Codes:
        base = self.packed[name]
        zeros: npt.NDArray[np.uint8]
        if self.method == "compressed-tensors":
            words, scales, shape = self._parts(base, "weight_packed", "weight_scale", "weight_shape")
            codes = _unpacked(words.numpy())[:, : int(shape[1])]
            zeros = np.full((1, 1), SYMMETRIC_ZERO, dtype=np.uint8)
            if f"{base}.weight_zero_point" in self.source.files:
                (packed,) = self._parts(base, "weight_zero_point")
                zeros = _unpacked(packed.numpy().T)[:, : len(codes)].T
        else:
            words, packed, scales = self._parts(base, "qweight", "qzeros", "scales")
            scales = scales.t()
            if self.method == "gptq":
                codes = _unpacked(words.numpy().T)
                # AutoGPTQ's first format stores zero points less one.
                zeros = (_unpacked(packed.numpy()).T + self.adds_one) % (1 << BITS)
            else:
                codes, zeros = (_unpacked(each.numpy(), AWQ_ORDER).T for each in (words, packed))
        factors = scales.float().numpy()
        if factors.ndim != 2 or len(factors) != len(codes) or not factors.size:
            raise QuantizationError(f"it is damaged: {base} has scales of the shape {factors.shape}")
        group = codes.shape[1] // factors.shape[1]
        if group % GROUP or codes.shape[1] % factors.shape[1]:
            raise QuantizationError(f"{base} has groups of {group} inputs, which is no multiple of {GROUP}")
        if self.method == "gptq" and f"{base}.g_idx" in self.source.files:
            (groups,) = self._parts(base, "g_idx")
            if groups.tolist() != [place // group for place in range(codes.shape[1])]:
                raise QuantizationError(
                    f"{base} has its inputs in another order (g_idx), which is not supported"
                )
        if not np.array_equal(factors.astype(np.float16), factors):
            raise QuantizationError(f"the scales of {base} are no float16 numbers")
        grouped = codes.reshape(*factors.shape, group).astype(np.int8)
        differences = grouped - np.broadcast_to(zeros, factors.shape).astype(np.int8)[:, :, None]
        return _Codes(differences.reshape(codes.shape), factors)

    def _parts(self, base: str, *names: str) -> list[torch.Tensor]:
        wanted = [f"{base}.{name}" for name in names]
        if missing := [name for name in wanted if name not in self.source.files]:
            raise QuantizationError(f"it lacks {missing[0]}")
        read = self.source.read(wanted)
        return [read[name] for name in wanted]


def open_packed(source: Checkpoint, quantization: dict[str, Any]) -> PackedCheckpoint | None:
    """Opens it by ``quantization_config``. None for methods that are transformers' business;
    ``QuantizationError`` for variants of these that are not supported."""
    method = str(quantization.get("quant_method", "")).lower()
    if method not in WORDS:
        return None
    if method == "compressed-tensors":
        if quantization.get("format") != "pack-quantized":
            return None
        for group in quantization.get("config_groups", {}).values():
            weights = group.get("weights") or {}
            _refuse(
                method,
                {
                    f"{weights.get('num_bits')} bits": weights.get("num_bits") != BITS,
                    f"the strategy {weights.get('strategy')}": weights.get("strategy")
                    not in ("group", "channel"),
                    "act-order (actorder)": weights.get("actorder") not in (None, False, "static", "weight"),
                    "quantised activations": group.get("input_activations") is not None,
                },
            )
        return PackedCheckpoint(source, method, adds_one=False)
    layout = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    stored = str(quantization.get("checkpoint_format") or "gptq").lower()
    _refuse(
        method,
        {
            f"{quantization.get('bits')} bits": quantization.get("bits") != BITS,
            "act-order (desc_act)": bool(quantization.get("desc_act")),
            f"the layout {layout}": method == "awq" and layout != "gemm",
            f"the checkpoint format {stored}": method == "gptq" and stored not in ("gptq", "gptq_v2"),
        },
    )
    return PackedCheckpoint(source, method, adds_one=stored == "gptq")


def _refuse(method: str, unsupported: dict[str, bool]) -> None:
    if found := [words for words, is_so in unsupported.items() if is_so]:
        raise QuantizationError(
            f"it is quantised by {method} with {' and '.join(found)}, which is not supported"
        )


def _unpacked(words: npt.NDArray[np.int32], order: Iterable[int] = range(CODES)) -> npt.NDArray[np.uint8]:
    """Codes [rows, 8 * columns] of ``words`` [rows, columns]; ``order``: the place of each in its word."""
    shifts = BITS * np.array(list(order), dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts & 0xF
    return codes.astype(np.uint8).reshape(len(words), -1)


def _blocks(codes: _Codes) -> QuantisedBlocks:
    differences, scales = codes
    rows, inputs = differences.shape
    is_symmetric = differences.min() >= -SYMMETRIC_ZERO and differences.max() < SYMMETRIC_ZERO
    offset = SYMMETRIC_ZERO if is_symmetric else 2 * SYMMETRIC_ZERO
    values = (differences.reshape(rows, -1, GROUP) + offset).astype(np.uint8)
    per_block = np.repeat(scales, values.shape[1] // scales.shape[1], axis=1).astype("<f2")
    parts = [np.ascontiguousarray(per_block)[:, :, None].view(np.uint8)]
    if not is_symmetric:
        parts.append(np.packbits(values >> BITS, axis=-1, bitorder="little"))
    low, half = values & 0xF, GROUP // 2
    parts.append((low[:, :, :half] | low[:, :, half:] << BITS).astype(np.uint8))
    data = np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(rows, -1))
    return QuantisedBlocks(TYPES["Q4_0" if is_symmetric else "Q5_0"], data, inputs)
