"""Quantised weights in C: gguf's numbers to the bit, and rows that do not depend on each other."""

import gguf
import numpy as np
import pytest
import torch

from tests.gguf_blocks import dequantised, random_blocks, rounded_inputs
from truedraft.engine.layers.quantised_blocks import TYPES, QuantisedBlocks
from truedraft.engine.native.library import load_library
from truedraft.engine.native.quantised import QuantisedEmbeddings, QuantisedLinear, dequantise
from truedraft.engine.native.threads import set_num_threads

pytestmark = pytest.mark.usefixtures("needs_compiler")

IN_FEATURES = 512
MOST_ROWS = 27  # more than two passes over the weights


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, one_thread_afterwards: None) -> int:
    set_num_threads(request.param)
    return int(request.param)


def inputs(rows: int, seed: int = 3) -> torch.Tensor:
    """Returns inputs whose sizes differ from block to block, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, IN_FEATURES, generator=generator)
    x *= torch.logspace(-3, 2, IN_FEATURES)
    x[:, 64:96] = 0
    return x


def layer(
    *parts: QuantisedBlocks, bias: torch.Tensor | None = None, multiplier: float = 1.0
) -> QuantisedLinear:
    library = load_library()
    assert library is not None
    return QuantisedLinear(library, parts, bias, multiplier)


def test_types_are_those_of_ggml() -> None:
    assert {name: int(gguf.GGMLQuantizationType[name]) for name in TYPES} == TYPES


@pytest.mark.parametrize("name", TYPES)
def test_dequantised_weights_are_those_of_gguf_to_the_bit(name: str) -> None:
    library = load_library()
    assert library is not None
    blocks = random_blocks(name, 37, IN_FEATURES, seed=1)
    ours = dequantise(library, blocks).numpy()
    assert np.array_equal(ours.view(np.uint32) << 1, dequantised(blocks).view(np.uint32) << 1)  # -0 is 0
    # Scales that are infinite, subnormal or no number come from files that are damaged, and from no other.
    extreme = random_blocks(name, 128, IN_FEATURES, seed=1, any_scale=True)
    with np.errstate(all="ignore"):
        expected = dequantised(extreme)
    assert np.array_equal(dequantise(library, extreme).numpy(), expected, equal_nan=True)
    ids = torch.tensor([5, 36, 5, 0])
    found = QuantisedEmbeddings(library, blocks).look_up(ids)
    assert np.array_equal(found.numpy(), ours[ids.numpy()])


@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_rounded_inputs(name: str) -> None:
    blocks = random_blocks(name, 37, IN_FEATURES, seed=1)
    x, bias = inputs(5), torch.linspace(-1, 1, 37)
    residual = torch.linspace(-2, 2, 5 * 37).view(5, 37)
    weights = dequantised(blocks).astype(np.float64)
    rounded = rounded_inputs(x.numpy())
    expected = rounded @ weights.T
    ours = layer(blocks, bias=bias)
    size = np.abs(rounded) @ np.abs(weights).T  # what float32 rounding is a share of
    assert np.all(np.abs(ours(x).numpy() - bias.numpy() - expected) <= 1e-6 * size)
    added = ours.add_to(residual, x).numpy() - (bias + residual).numpy()
    assert np.all(np.abs(added - expected) <= 2e-6 * size)
    # The inputs' own rounding adds at most half of a 127th of the largest of 32.
    error = np.abs(x.numpy().reshape(5, -1, 32)).max(-1).repeat(32, axis=-1) / 254
    exact = x.numpy().astype(np.float64) @ weights.T
    assert np.all(np.abs(expected - exact) <= 1.001 * error @ np.abs(weights).T + 1e-9)


@pytest.mark.parametrize("name", TYPES)
def test_rows_do_not_depend_on_their_number_or_on_threads(name: str, threads: int) -> None:
    # Enough columns for threads to share even a single row's.
    ours = layer(random_blocks(name, 4200, IN_FEATURES, seed=2))
    x = inputs(MOST_ROWS)
    set_num_threads(1)
    alone = torch.cat([ours(row[None]) for row in x])
    set_num_threads(threads)
    assert alone.isfinite().all()
    assert alone.abs().max() > 1
    for rows in range(1, MOST_ROWS + 1):
        assert torch.equal(ours(x[:rows]), alone[:rows])
        assert torch.equal(ours(x[-rows:]), alone[-rows:])


def test_parts_of_several_types_in_another_order_are_stacked() -> None:
    order = np.random.default_rng(1).permutation(32)
    first = random_blocks("Q4_K", 32, IN_FEATURES, seed=4)
    first = QuantisedBlocks(first.type, first.data, IN_FEATURES, order)
    second = random_blocks("Q6_K", 19, IN_FEATURES, seed=5)
    x = inputs(3)
    both = layer(first, second)(x)
    assert torch.equal(both, torch.cat([layer(first)(x), layer(second)(x)], dim=1))
    plain = layer(QuantisedBlocks(first.type, first.data, IN_FEATURES))(x)
    assert torch.equal(both[:, :32], plain[:, torch.from_numpy(order)])


def test_outputs_are_multiplied_with_their_bias() -> None:
    blocks, bias, residual = (
        random_blocks("Q4_K", 37, IN_FEATURES, seed=1),
        torch.arange(37.0),
        torch.ones(3, 37),
    )
    x = inputs(3)
    ours, plain = layer(blocks, bias=bias, multiplier=0.25), layer(blocks, bias=bias)
    assert torch.equal(ours(x), plain(x) * 0.25)
    assert torch.equal(ours.add_to(residual, x), residual + plain(x) * 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_stay_so(value: float) -> None:
    x = inputs(3)
    x[1, 200] = value
    out = layer(random_blocks("Q8_0", 32, IN_FEATURES, seed=1))(x)
    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().any()
