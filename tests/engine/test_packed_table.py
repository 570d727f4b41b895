"""Packed codes against numpy, for every combination of what a config says and what the tensors have.

Each layer is made by the formats' definitions. Its weights must be numpy's, to the bit, in every way that
they are kept, or it is refused; ``COUNTS`` has how many of either there are, and there is nothing else.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.gguf_blocks import dequantised
from truedraft.engine.checkpoints import packed
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.packed import open_packed
from truedraft.engine.errors import QuantizationError

ROWS, INPUTS = 16, 96
BASE = "model.layers.0.mlp.up_proj"
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
Array = npt.NDArray[Any]
# Layers that are equal, and that are refused, by method.
COUNTS = {"gptq": (2808, 2664), "awq": (112, 32), "compressed-tensors": (568, 200)}


class InMemory(Checkpoint):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(dict.fromkeys(tensors, "memory"))
        self.tensors = tensors

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in names}

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.tensors[name].shape) for name in names}


@dataclass(frozen=True)
class Layer:
    """``codes`` [out, in]; ``zeros``, as they are stored, and ``scales`` [out, groups]; ``order``: the group
    of each input."""

    bits: int
    codes: Array
    zeros: Array
    scales: torch.Tensor
    order: Array

    def weights(self, zeros: Array) -> Array:
        """Returns numpy's, with these zero points."""
        difference = self.codes.astype(np.int32) - zeros.astype(np.int32)[:, self.order]
        found: Array = difference.astype(np.float32) * self.scales.float().numpy()[:, self.order]
        return found


def in_words(codes: Array, bits: int, places: Iterable[int] | None = None) -> torch.Tensor:
    """int32 [rows, words]: code ``places[i]`` of a word is in its bits from ``bits`` * i on."""
    count = 32 // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // count) * count), dtype=np.uint32)
    padded[:, :columns] = codes
    words = np.zeros((rows, padded.shape[1] // count), dtype=np.uint32)
    for place, column in enumerate(places or range(count)):
        words |= padded[:, column::count] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def scales_of(kind: str, shape: tuple[int, int], draws: np.random.Generator) -> torch.Tensor:
    scales = torch.from_numpy(draws.uniform(0.01, 0.05, shape).astype(np.float16))
    match kind:
        case "float32":
            return scales.float() * 1.0001
        case "bfloat16, one of them tiny":
            scales = scales.bfloat16()
            scales[3, 0] = 1e-8
        case "bfloat16, a group of zeros":
            scales = scales.bfloat16()
            scales[5, -1] = 1e-8
    return scales


def layer(bits: int, stored: str, size: int, scales: str, order: str) -> Layer:
    """``stored``: zero points that are all one number, relative to the middle, or varied."""
    draws = np.random.default_rng(1)
    middle, count = 1 << bits - 1, 1 if size < 0 else INPUTS // size
    codes = draws.integers(0, 2 * middle, (ROWS, INPUTS))
    shape = ROWS, count
    zeros = (
        draws.integers(0, 2 * middle, shape) if stored == "varied" else np.full(shape, middle + int(stored))
    )
    groups = np.arange(INPUTS) // (INPUTS // count)
    made = Layer(bits, codes, zeros, scales_of(scales, shape, draws), groups)
    if scales == "bfloat16, a group of zeros":
        codes[5, groups == count - 1] = zeros[5, -1]
    return Layer(bits, codes, zeros, made.scales, draws.permutation(groups) if order == "another" else groups)


def outcome(config: dict[str, Any], tensors: dict[str, torch.Tensor], expected: Array | None) -> str:
    """``expected`` None: it is to be refused."""
    source = InMemory({f"{BASE}.{name}": tensor.contiguous() for name, tensor in tensors.items()})
    name = f"{BASE}.weight"
    try:
        checkpoint = open_packed(source, config, compact=False)
        assert checkpoint is not None
        found = [checkpoint.read([name])[name].numpy()]
        blocks, scaled = checkpoint.blocks(name), checkpoint.scaled_bytes(name)
    except QuantizationError as error:
        return "refused" if expected is None and "\n" not in str(error) else f"refused: {error}"
    if blocks is not None:
        found.append(dequantised(blocks))
    if scaled is not None:
        found.append(scaled.dense().numpy())
    same = expected is not None and all(np.array_equal(each, expected) for each in found)
    return "equal" if same else "another"


def counted(outcomes: Iterable[tuple[Any, str]], method: str) -> None:
    found = list(outcomes)
    wrong = [case for case, result in found if result not in ("equal", "refused")]
    assert not wrong, f"{len(wrong)} of {len(found)}, such as {wrong[:3]}"
    numbers = Counter(result for _, result in found)
    assert (numbers["equal"], numbers["refused"]) == COUNTS[method]


SIZES = (16, 32, 48, -1)
SCALES = ("float16", "float32", "bfloat16, one of them tiny", "bfloat16, a group of zeros")


def gptq_outcomes() -> Iterable[tuple[Any, str]]:
    forms, symmetric = (None, "gptq", "gptq_v2"), (None, True, False)
    orders = ("none", "said none", "ordered", "another", "another, unsaid")
    stored = ("-1", "0", "1", "varied")
    for case in itertools.product(forms, symmetric, stored, SIZES, SCALES, orders, (4, 8)):
        form, sym, zeros, size, scales, order, bits = case
        if order == "said none" and size == -1:
            continue  # one group has one order
        made = layer(bits, zeros, size, scales, order.partition(",")[0])
        config = {"quant_method": "gptq", "bits": bits, "group_size": size}
        config |= {
            "checkpoint_format": form,
            "sym": sym,
            "desc_act": order in ("said none", "ordered", "another"),
        }
        config = {name: value for name, value in config.items() if value is not None}
        tensors = {
            "qweight": in_words(made.codes, bits).T,
            "qzeros": in_words(made.zeros.T, bits),
            "scales": made.scales.T,
        }
        if "none" not in order:
            tensors["g_idx"] = torch.from_numpy(made.order).int()
        middle = 1 << bits - 1
        by_first = (made.zeros + 1) % (2 * middle)
        said, other = (made.zeros, by_first) if form == "gptq_v2" else (by_first, made.zeros)
        truth: Array | None = said
        if not (said == middle).all() and (other == middle).all():
            truth = None if sym is False else other
        elif sym and not (said == middle).all():
            truth = None
        is_another = order == "another, unsaid" and not np.array_equal(made.order, np.sort(made.order))
        if order == "said none" or is_another:
            truth = None
        yield case, outcome(config, tensors, None if truth is None else made.weights(truth))


def awq_outcomes() -> Iterable[tuple[Any, str]]:
    for case in itertools.product((None, True, False), ("0", "1", "varied"), SIZES, SCALES):
        has_zeros, zeros, size, scales = case
        made = layer(4, zeros, size, scales, "ordered")
        config = {"quant_method": "awq", "w_bit": "4", "q_group_size": str(size), "zero_point": has_zeros}
        tensors = {
            "qweight": in_words(made.codes.T, 4, AWQ_PLACES),
            "qzeros": in_words(made.zeros.T, 4, AWQ_PLACES),
            "scales": made.scales.T,
        }
        is_refused = has_zeros is False and zeros != "0"
        yield case, outcome(config, tensors, None if is_refused else made.weights(made.zeros))


def compressed_outcomes() -> Iterable[tuple[Any, str]]:
    stored = ("none", "0", "1", "varied", "unpacked")
    for case in itertools.product((None, True, False), stored, SIZES, SCALES, ("none", "another"), (4, 8)):
        symmetric, zeros, size, scales, order, bits = case
        if order == "another" and (size == -1 or zeros == "unpacked"):
            continue
        number = {"none": "0", "unpacked": "varied"}.get(zeros, zeros)
        made = layer(bits, number, size, scales, order)
        weights = {"num_bits": bits, "type": "int", "strategy": "channel" if size < 0 else "group"}
        weights |= {"group_size": size if size > 0 else None, "symmetric": symmetric}
        weights |= {"actorder": "group" if order == "another" else None}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        tensors = {
            "weight_packed": in_words(made.codes, bits),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(made.codes.shape),
        }
        if zeros == "unpacked":
            tensors["weight_zero_point"] = torch.from_numpy((made.zeros - (1 << bits - 1)).astype(np.int8))
        elif zeros != "none":
            tensors["weight_zero_point"] = in_words(made.zeros.T, bits).T
        if order == "another":
            tensors["weight_g_idx"] = torch.from_numpy(made.order).int()
        lacks = symmetric is False and zeros == "none"
        is_refused = lacks or (symmetric is True and zeros not in ("none", "0"))
        truth = None if is_refused else made.weights(made.zeros)
        yield case, outcome(config | {"config_groups": groups}, tensors, truth)


OUTCOMES = {"gptq": gptq_outcomes, "awq": awq_outcomes, "compressed-tensors": compressed_outcomes}


def test_a_reader_that_trusts_the_format_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_format(self: Any, base: str, stored: Array, bits: int) -> Array:
        added: Array = stored.astype(np.int16) + (self.said.checkpoint_format == "gptq")
        return (added % (1 << bits)).astype(np.uint8)

    monkeypatch.setattr(packed.PackedCheckpoint, "_added", by_format)
    with pytest.raises(AssertionError, match="such as"):
        counted(gptq_outcomes(), "gptq")


@pytest.mark.parametrize("method", OUTCOMES)
def test_every_combination_is_numpys_or_refused(method: str) -> None:
    counted(OUTCOMES[method](), method)
