"""What must hold of products with quantised weights on a GPU, as functions that raise ``AssertionError``: of
torch's operations, in Triton's interpreter and on a device."""

import gguf
import torch
from gguf import GGMLQuantizationType

from tests.gguf_blocks import random_blocks
from truedraft.engine.cuda.blocks import PackedBlocks, pack
from truedraft.engine.cuda.quantised import BlockKernels
from truedraft.engine.layers.quantised_blocks import BLOCK_INPUTS, TYPES, QuantisedBlocks
from truedraft.engine.layers.weight import FP8, ScaledRows

# Shares of a product's size, by what is summed: float32 rounds sums of 800 numbers; the others are rounded to
# their type once more.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def inputs_of(name: str) -> int:
    """Returns an odd number of blocks, or of what they share: the last ones lie alone."""
    size = BLOCK_INPUTS[TYPES[name]]
    return 3 * size if size == 256 else 9 * size


def weights_of(blocks: QuantisedBlocks, device: str = "cpu") -> torch.Tensor:
    weights = torch.from_numpy(gguf.dequantize(blocks.data, GGMLQuantizationType(blocks.type)))
    if blocks.order is not None:
        weights = weights[torch.from_numpy(blocks.order)]
    return weights.to(device)


def packed(blocks: QuantisedBlocks, device: str = "cpu") -> PackedBlocks:
    return pack(blocks, torch.device(device))


def same_weights(kernels: BlockKernels, name: str, device: str = "cpu") -> None:
    """Weights are gguf's to the bit, in any order, with a last tile that is not full."""
    blocks = random_blocks(name, 71, inputs_of(name), seed=1)
    expected, ours = weights_of(blocks, device), packed(blocks, device)
    assert torch.equal(kernels.unpack(ours, torch.float32, range(5, 71)), expected[5:71])
    ids = torch.tensor([70, 0, 64, 64, 63], device=device)
    assert torch.equal(kernels.unpack(ours, torch.float16, ids), expected[ids].half())


def same_products(
    kernels: BlockKernels, name: str, dtype: torch.dtype, rows: int, device: str = "cpu"
) -> None:
    """Products are float64's, but for what their type rounds off; a bias, a factor and a residual count."""
    inputs = inputs_of(name)
    blocks = [random_blocks(each, n, inputs, seed=2) for each, n in ((name, 67), (name, 5))]
    generator = torch.Generator().manual_seed(rows)
    # Inputs whose sizes differ, among them zeros.
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-2, 1, inputs)
    x[:, 64:96] = 0
    x = x.to(device, dtype)
    bias = torch.linspace(-1, 1, 72).to(device, dtype)
    residual = torch.randn(rows, 72, generator=generator).to(device, dtype)
    parts = [packed(each, device) for each in blocks]
    weights = torch.cat([weights_of(each, device) for each in blocks]).to(dtype).double()
    expected, size = x.double() @ weights.t(), x.double().abs() @ weights.abs().t()
    close(kernels.multiply(x, parts, None, 1.0, None), expected, size, dtype)
    expected, size = (expected + bias) * 0.5 + residual, size + 2
    close(kernels.multiply(x, parts, bias, 0.5, residual), expected, size, dtype)


def close(ours: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    assert bool(((ours.double() - expected).abs() <= TOLERANCES[dtype] * size).all())


def rows_by_themselves(
    kernels: BlockKernels, name: str, dtype: torch.dtype, numbers: tuple[int, ...], device: str = "cpu"
) -> None:
    """The bits of a row are the same whatever is multiplied with it."""
    blocks = packed(random_blocks(name, 67, inputs_of(name), seed=3), device)
    x = torch.randn(max(numbers), blocks.in_features, generator=torch.Generator().manual_seed(1))
    x = x.to(device, dtype)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return kernels.multiply(rows, [blocks], None, 1.0, None)

    whole = product(x)
    assert whole.isfinite().all()
    assert len(whole.unique()) > 1000
    for rows in numbers:
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


def rounds_rows(kernels: BlockKernels, device: str = "cpu") -> None:
    """Rows become FP8 by their largest number, whatever the others are; zeros stay zeros."""
    x = torch.randn(5, 272, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 5)[:, None]
    x[2] = 0
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(device, dtype)
        values, scales = kernels.round_rows(given)
        expected = ScaledRows.of(given.float())
        assert values.dtype == FP8
        assert torch.allclose(scales, expected.scales, rtol=1e-6)
        steps = (values.view(torch.uint8).int() - expected.values.view(torch.uint8).int()).abs()
        assert int(steps[2].max()) == 0
        # A quotient in the middle of two numbers may become either.
        assert int(steps.max()) <= 1
        assert float(steps.ne(0).float().mean()) < 0.01
