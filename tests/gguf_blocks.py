"""Random quantised weights of every type that the kernels have."""

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks

# Where a block's float16 numbers are.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def random_blocks(
    name: str, rows: int, in_features: int, seed: int, *, any_scale: bool = False
) -> QuantisedBlocks:
    """Draws every bit, but scales are of one size without ``any_scale``."""
    kind = GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, in_features // block, size), dtype=np.uint8)
    for at in () if any_scale else HALVES[name]:
        scales = generator.uniform(-0.02, 0.02, (rows, in_features // block, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8).reshape(rows, -1, 2)
    if name == "MXFP4" and not any_scale:
        data[:, :, 0] = generator.integers(116, 122, data.shape[:2])
    return QuantisedBlocks(int(kind), data.reshape(rows, -1), in_features)


def dequantised(blocks: QuantisedBlocks) -> npt.NDArray[np.float32]:
    """Returns the values as the package gguf computes them."""
    weights: npt.NDArray[np.float32] = gguf.dequantize(blocks.data, GGMLQuantizationType(blocks.type))
    return weights if blocks.order is None else weights[blocks.order]


def rounded_inputs(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """``x`` [rows, in features] as the kernels see it: 8 bits and a scale per 32."""
    parts = x.reshape(len(x), -1, 32)
    scale = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(parts * inverse)
    return (codes.astype(np.float64) * scale).reshape(x.shape)
