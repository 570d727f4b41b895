"""Runs linear layers in C (``linear.c``): weights in float32, float16 or bfloat16, float32 rows and sums.

The libraries' calls take ten microseconds before they multiply anything, which is most of what a small
layer takes for few rows; this one starts in three. Of large weights it keeps the memory busier than oneDNN
does. Weights are laid out once, in panels of a few columns that are read from end to end.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from ctypes import byref

import torch
import torch.nn.functional as F

from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.pointers import FLOATS, PointerError, address, as_floats, shape_of
from truedraft.engine.native.library import Linear, load_library
from truedraft.engine.native.shared import WeightType

# Weights this much smaller than the largest may lose bits: a float32 sum loses more.
NEGLIGIBLE = 2.0**-30
# Weights that are converted at a time, so that a large layer's copies are never whole.
CHUNK_WEIGHTS = 1 << 22

# The layer that shows at load whether C computes what torch does: it fills neither panels nor vectors.
PROBE_SHAPE, PROBE_ROWS, TOLERANCE = (45, 37), (1, 5, 14), 1e-5
# Layers in bfloat16 have a multiple of these, with zeros at the end (linear.c).
PAIRED_INPUTS = 32
WEIGHT_TYPES = {
    torch.float32: WeightType.FLOAT32,
    torch.float16: WeightType.FLOAT16,
    torch.bfloat16: WeightType.BFLOAT16,
}

logger = logging.getLogger(__name__)

# All weights are in the same few: most of a small model's are smaller than a page.
_pages = HugePages()


def linear_library() -> ctypes.CDLL | None:
    """Returns the kernels, if they can be had and a small layer of theirs is torch's; else None, and a
    warning."""
    library = load_library()
    if library is None or _agrees(library):
        return library
    logger.warning("The native linear layers differ from torch's and are not used")
    return None


class NativeLinear:
    """Stacks ``weights`` [out features, in features] of any floating type, panel by panel. ``scale``:
    float16 holds them all without loss times this power of two; None: keep float32. ``bf16``: in bfloat16,
    to which inputs are rounded, too, if the library ``multiplies_bfloat16``. ``multiplier`` is of all
    outputs, with the bias."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        scale: float | None,
        bf16: bool = False,
        multiplier: float = 1.0,
    ) -> None:
        self.out_features, in_features = _stacked_shape(weights)
        self.in_features = in_features
        self.multiply = library.multiply
        panel = library.panel_size()
        self.dtype = torch.bfloat16 if bf16 else torch.float32 if scale is None else torch.float16
        # Kept for as long as the structure points to them. Two bfloat16 numbers are one of 32 bits.
        factors = -(-in_features // PAIRED_INPUTS) * PAIRED_INPUTS // 2 if bf16 else in_features
        panels = -(-self.out_features // panel), factors, panel
        self.weights = _pages.zeros(*panels, dtype=torch.int32 if bf16 else self.dtype)
        column = 0
        for weight in weights:
            for part in torch.split(weight, max(panel, CHUNK_WEIGHTS // in_features // panel * panel)):
                # In its last type first: torch transposes fast where it need not convert.
                self._store(column, _in_pairs(part) if bf16 else _scaled(part, scale))
                column += len(part)
        self.struct = Linear(
            in_features=in_features,
            out_features=self.out_features,
            type=WEIGHT_TYPES[self.dtype],
            weights=address(self.weights, self.weights.dtype, panels),
            scale=multiplier if bf16 or scale is None else multiplier / scale,
            bias=self._keep_bias(bias, multiplier),
        )

    def _store(self, column: int, weight: torch.Tensor) -> None:
        """Writes ``weight`` [columns, in features or pairs of them] into the panels, from ``column`` on."""
        panel = self.weights.shape[2]
        while len(weight):
            number, offset = divmod(column, panel)
            whole = 0 if offset else len(weight) // panel
            if whole:
                taken = whole * panel
                columns = weight[:taken].reshape(whole, panel, -1).transpose(1, 2)
                self.weights[number : number + whole].copy_(columns)
            else:
                taken = min(len(weight), panel - offset)
                self.weights[number, :, offset : offset + taken] = weight[:taken].T
            column, weight = column + taken, weight[taken:]

    def _keep_bias(self, bias: torch.Tensor | None, multiplier: float) -> int | None:
        """Keeps the bias in float32 and returns its address."""
        self.bias = None if bias is None else as_floats(bias) * multiplier
        return None if self.bias is None else address(self.bias, torch.float32, (self.out_features,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x.contiguous(), None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x.contiguous(), residual.contiguous())

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows = len(x)
        shape = rows, self.out_features
        out = torch.empty(shape, dtype=torch.float32)
        self.multiply(
            byref(self.struct),
            address(out, torch.float32, shape),
            address(x, torch.float32, (rows, self.in_features)),
            None if residual is None else address(residual, torch.float32, shape),
            rows,
        )
        return out


def _stacked_shape(weights: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Returns outputs and inputs of a layer of all ``weights``."""
    shapes = [shape_of(weight, 2) for weight in weights]
    if len({size for _, size in shapes}) != 1 or not all(weight.dtype in FLOATS for weight in weights):
        raise PointerError(f"these are not one layer's weights: {[(w.dtype, w.shape) for w in weights]}")
    return sum(rows for rows, _ in shapes), shapes[0][1]


def _in_pairs(weight: torch.Tensor) -> torch.Tensor:
    """Returns rows of pairs of bfloat16 numbers."""
    return F.pad(weight.bfloat16(), (0, -weight.shape[1] % PAIRED_INPUTS)).view(torch.int32)


def _scaled(weight: torch.Tensor, scale: float | None) -> torch.Tensor:
    return weight.float() if scale is None else (weight.float() * scale).half()


def _agrees(library: ctypes.CDLL) -> bool:
    generator = torch.Generator().manual_seed(1)
    weight, bias = (
        torch.randn(*shape, generator=generator).half().float() for shape in (PROBE_SHAPE, PROBE_SHAPE[:1])
    )
    ways = [(None, False), (1.0, False)] + [(None, True)] * library.multiplies_bfloat16()
    for scale, bf16 in ways:
        linear = NativeLinear(library, [weight], bias, scale, bf16)
        for rows in PROBE_ROWS:
            x = torch.randn(rows, PROBE_SHAPE[1], generator=generator)
            inputs, weights = (each.bfloat16().float() if bf16 else each for each in (x, weight))
            residual, expected = x[:, :1].expand(rows, len(weight)), F.linear(inputs, weights, bias)
            both = (linear(x), expected), (linear.add_to(residual, x), residual + expected)
            if not all(torch.allclose(*pair, rtol=TOLERANCE, atol=TOLERANCE) for pair in both):
                return False
    return True


def half_scale(weights: Sequence[torch.Tensor]) -> float | None:
    """Returns the power of two times which float16 holds all of ``weights`` without loss; None if there is
    none."""
    largest = torch.stack([weight.abs().max().float() for weight in weights]).max()  # NaN if there is one
    if not largest.isfinite():
        return None
    dtypes = {weight.dtype for weight in weights}
    if dtypes == {torch.float16}:
        return 1.0
    if dtypes == {torch.float32} and all(_holds(part, 1.0, None) for part in _parts(weights)):
        return 1.0
    _, exponent = torch.frexp(largest)
    scale = 2.0 ** (15 - int(exponent))
    if dtypes == {torch.bfloat16}:
        return scale  # eight bits of precision: whatever is not negligible keeps them, if subnormal
    return scale if all(_holds(part, scale, largest) for part in _parts(weights)) else None


def _holds(weight: torch.Tensor, scale: float, largest: torch.Tensor | None) -> bool:
    scaled = weight * scale
    kept = scaled.half().float() == scaled
    if largest is not None and not kept.all():
        kept |= weight.abs() < largest * NEGLIGIBLE
    return bool(kept.all())


def _parts(weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields some rows at a time, in float32."""
    for weight in weights:
        rows = max(1, CHUNK_WEIGHTS // weight.shape[1])
        yield from (part.float() for part in torch.split(weight, rows))
