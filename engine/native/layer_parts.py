"""What a Llama-shaped layer does between its matrix products, in C (``layers.c``,
``attention.c``): float32 on a CPU."""

import ctypes
from ctypes import byref
from itertools import accumulate

import numpy as np
import torch

from truedraft.engine.batch import ForwardBatch
from truedraft.engine.kv_cache import KVCache
from truedraft.engine.models.layer_parts import ACTIVATIONS, Activation, AttentionShape, Norm, Rotary
from truedraft.engine.native.library import Layer, Spans

# A head fills whole vector registers, up to as many as the kernels keep.
HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE = 16, 256


def serves(dtype: torch.dtype, device: torch.device, head_size: int) -> bool:
    """Whether the kernels can run a model like this."""
    fits = head_size % HEAD_SIZE_MULTIPLE == 0 and head_size <= MAX_HEAD_SIZE
    return device.type == "cpu" and dtype == torch.float32 and fits


class NativeKernels:
    """Makes the parts of each forward. Keeps what does not change from one to the next."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._cache: KVCache | None = None
        self._layers: dict[int, Layer] = {}

    def __call__(self, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> "NativeParts":
        return NativeParts(self, batch, cache, rotary)

    def layer(self, shape: AttentionShape, cache: KVCache) -> Layer:
        if cache is not self._cache:
            self._cache, self._layers = cache, {}
        layer = self._layers.get(shape.layer)
        if layer is None:
            layer = self._layers[shape.layer] = Layer(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_size,
                window=shape.sliding_window or 0,
                rotary=shape.rotary,
                scaling=shape.scaling,
                softcap=shape.softcap or 0.0,
                norm_eps=0.0 if shape.norm is None else shape.norm.eps,
                norm_weight=None if shape.norm is None else shape.norm.weight.data_ptr(),
                keys=cache.keys[shape.layer].data_ptr(),
                values=cache.values[shape.layer].data_ptr(),
            )
        return layer


class NativeParts:
    def __init__(self, kernels: NativeKernels, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> None:
        self.kernels = kernels
        self.batch = batch
        self.cache = cache
        first_block = accumulate((len(span.table.block_ids) for span in batch.spans[:-1]), initial=0)
        # Kept as long as the pointers into it are used.
        self.numbers = np.array(
            [
                *batch.offsets,
                *(span.table.num_computed_tokens for span in batch.spans),
                *first_block,
                *(block for span in batch.spans for block in span.table.block_ids),
            ],
            dtype=np.int64,
        )
        num_spans = len(batch.spans)
        start = self.numbers.ctypes.data
        if rotary.table is None:
            self.angles = (*rotary.compute(batch.positions[0]), torch.arange(batch.offsets[-1]))
        else:
            self.angles = (*rotary.table, batch.positions[0].contiguous())
        cos, sin, rows = self.angles
        self.spans = Spans(
            num_spans=num_spans,
            num_tokens=batch.offsets[-1],
            block_size=batch.block_size,
            slots=batch.slots.data_ptr(),
            first_token=start,
            num_stored=start + 8 * (num_spans + 1),
            first_block=start + 8 * (2 * num_spans + 1),
            blocks=start + 8 * (3 * num_spans + 1),
            angle=rows.data_ptr(),
            num_angles=cos.shape[1],
            rotary_size=cos.shape[2],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous()
        added = None if residual is None else residual.contiguous()
        out = torch.empty_like(x)
        self.kernels.library.rms_norm(
            *(out.data_ptr(), x.data_ptr(), norm.weight.data_ptr()),
            *(None if added is None else added.data_ptr(), x.shape[0], norm.size, norm.eps),
        )
        return out

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        qkv = qkv.contiguous()
        width = shape.num_heads * shape.head_size
        out = qkv.new_empty(qkv.shape[0], width)
        layer = self.kernels.layer(shape, self.cache)
        self.kernels.library.attend(byref(self.spans), byref(layer), qkv.data_ptr(), out.data_ptr())
        return out

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        number = ACTIVATIONS.index(activation)
        self.kernels.library.gate(out.data_ptr(), gate_up.data_ptr(), number, rows, size)
        return out

    def cap(self, logits: torch.Tensor, softcap: float) -> torch.Tensor:
        logits = logits.contiguous()
        self.kernels.library.cap(logits.data_ptr(), *logits.shape, softcap)
        return logits
