"""Experts as a part: C, torch and the definition agree, and a row's bits are its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import FAMILIES, SHAPE, VOCAB_SIZE, save_family, save_random
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.layers.linear import Linear, Linears, TorchLinears
from truedraft.engine.layers.mlp import UNGATED, Activation, ExpertGroups, Experts, GatedMlp, Router
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.layers.weight import Weight
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pointers import PointerError
from truedraft.engine.models import agreement
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.probe_texts import packed_logits
from truedraft.engine.native import library
from truedraft.engine.native.linears import NativeLinears
from truedraft.engine.native.mlp import NativeExperts
from truedraft.engine.native.native_run import NativeKernels, NativeRun
from truedraft.engine.rounds.calibrate import calibrate

pytestmark = pytest.mark.usefixtures("needs_compiler")

HIDDEN, SIZE, SHARED, NUMBER = 48, 40, 72, 12
ROWS = 16

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalised": {"renormalises": True, "num_chosen": 3},
    "sigmoid with a bias": {
        "scoring": "sigmoid",
        "choice_bias": True,
        "renormalises": True,
        "added_to_sum": 0.3,
        "multiplier": 2.5,
        "shared": True,
    },
    "shared with a gate": {"shared": True, "shared_gate": True},
    "biases and a clamped gate": {"activation": "clamped_swish", "bias": True, "renormalises": True},
    "squares without a gate": {"activation": "relu2", "shared": True, "bias": True},
    "all of them": {"num_chosen": NUMBER},
    "groups by their best": {"num_chosen": 3, "groups": ExpertGroups(4, 2, 1)},
    "groups by their two best, with a bias": {
        "scoring": "sigmoid",
        "choice_bias": True,
        "num_chosen": 3,
        "groups": ExpertGroups(2, 1, 2),
    },
}


def experts(linears: Linears, variant: dict[str, Any]) -> Experts:
    generator = torch.Generator().manual_seed(5)
    settings = dict(variant)
    activation: Activation = settings.pop("activation", "silu")
    has_bias, has_shared = settings.pop("bias", False), settings.pop("shared", False)
    has_gate, has_choice = settings.pop("shared_gate", False), settings.pop("choice_bias", False)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    def linear(rows: int, columns: int, bias: bool = has_bias) -> Linear:
        weight, added = drawn(rows, columns), drawn(rows)
        return linears.make([Weight("drawn", (rows, columns), lambda: weight)], added if bias else None)

    def mlp(size: int) -> GatedMlp:
        each = 1 if activation in UNGATED else 2
        return GatedMlp(activation, linear(each * size, HIDDEN), linear(HIDDEN, size))

    router = linear(NUMBER, HIDDEN)
    choice_bias = drawn(NUMBER) * 4
    return Experts(
        Router(
            router,
            NUMBER,
            **{"num_chosen": 2, "scoring": "softmax", **settings},
            choice_bias=choice_bias if has_choice else None,
        ),
        tuple(mlp(SIZE) for _ in range(NUMBER)),
        mlp(SHARED) if has_shared else None,
        linear(1, HIDDEN) if has_gate else None,
    )


class Torch(TorchRun):
    """Runs what looks at one token at a time."""

    def __init__(self) -> None:
        pass


class Native(NativeRun):
    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels


def in_c() -> tuple[NativeRun, Linears]:
    kernels = library.load_library()
    assert kernels is not None
    return Native(NativeKernels(kernels)), NativeLinears(kernels, compact=False)


def rows(number: int = ROWS) -> torch.Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(9)) * 2


def definition(part: Experts, x: torch.Tensor) -> torch.Tensor:
    """Computes each row alone, in float64 after the linear layers, by the papers' formulas."""
    router, found = part.router, []
    for row in x:
        numbers = router.linear(row[None])[0].double()
        scores = torch.softmax(numbers, -1) if router.scoring == "softmax" else torch.sigmoid(numbers)
        wanted = scores if router.choice_bias is None else scores + router.choice_bias
        allowed = range(NUMBER)
        if (groups := router.groups) is not None:
            size = NUMBER // groups.number
            best = [sorted(each.tolist())[-groups.num_summed :] for each in wanted.split(size)]
            order = sorted(range(groups.number), key=lambda group: (-sum(best[group]), group))
            allowed = [expert for expert in allowed if expert // size in order[: groups.num_chosen]]
        chosen = sorted(allowed, key=lambda expert: (-float(wanted[expert]), expert))
        weights = scores[chosen[: router.num_chosen]]
        if router.renormalises:
            weights = weights / (weights.sum() + router.added_to_sum)
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(chosen, weights, strict=False):
            total += router.multiplier * weight * _mlp(part.experts[expert], row)
        if part.shared is not None:
            gate = 1.0 if part.shared_gate is None else part.shared_gate(row[None])[0].double().sigmoid()
            total += gate * _mlp(part.shared, row)
        found.append(total)
    return torch.stack(found)


def _mlp(mlp: GatedMlp, row: torch.Tensor) -> torch.Tensor:
    gate_up = mlp.gate_up(row[None])[0].double()
    if mlp.activation == "relu2":
        return mlp.down((gate_up.clamp(min=0) ** 2).float()[None])[0].double()
    gate, up = gate_up.chunk(2)
    if mlp.activation == "clamped_swish":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        gated = gate * torch.sigmoid(1.702 * gate) * up
    else:
        gated = gate * torch.sigmoid(gate) * up
    return mlp.down(gated.float()[None])[0].double()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_both_ways_are_the_definition(variant: dict[str, Any]) -> None:
    run, linears = in_c()
    part, x = experts(linears, variant), rows()
    by_torch = experts(TorchLinears(), variant)
    expected = definition(part, x)
    for found in (part(x, run, None), by_torch(x, Torch(), None)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    residual = rows(2 * ROWS)[ROWS:]
    torch.testing.assert_close(part(x, run, residual), residual + expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["renormalised", "sigmoid with a bias", "shared with a gate"])
def test_a_row_has_its_bits_whatever_is_computed_with_it(variant: str) -> None:
    run, linears = in_c()
    part, x = experts(linears, VARIANTS[variant]), rows()
    kernels = run.kernels.library
    before = kernels.get_num_threads()
    try:
        together = {}
        for threads in (1, 2):
            kernels.set_num_threads(threads)
            together[threads] = part(x, run, x)
        assert torch.equal(together[1], together[2])
        for number in range(1, ROWS + 1):
            assert torch.equal(part(x[:number], run, x[:number]), together[1][:number])
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
        assert torch.equal(part(x[order], run, x[order]), together[1][order])
    finally:
        kernels.set_num_threads(before)


def test_of_equal_experts_the_first_are_chosen() -> None:
    """Rows of zeros make the same number for every expert, and so do rows that are no numbers."""
    run, linears = in_c()
    for part, runs in ((experts(linears, VARIANTS["softmax"]), run), (experts(TorchLinears(), {}), Torch())):
        x = torch.zeros(2, HIDDEN)
        chosen, weights = part.router.choose(x, runs)
        assert chosen.tolist() == [[0, 1], [0, 1]]
        torch.testing.assert_close(weights, torch.full((2, 2), 1 / NUMBER))
    x = rows(3)
    x[1] = torch.nan
    native = experts(linears, VARIANTS["renormalised"])
    found = native(x, run, None)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], native(x[[0, 2]], run, None))


def test_what_is_touched_is_counted() -> None:
    run, linears = in_c()
    for part, runs in ((experts(linears, {}), run), (experts(TorchLinears(), {}), Torch())):
        x = rows(5)
        chosen, _ = part.router.choose(x, runs)
        part(x, runs, None)
        part(x[:1], runs, None)
        assert part.touched() == (len(set(chosen.flatten().tolist())) + 2, 2)


def test_experts_of_other_sizes_are_not_run() -> None:
    _, linears = in_c()
    part = experts(linears, {})
    for wrong in (
        replace(part, experts=part.experts[1:]),
        replace(part, router=replace(part.router, num_chosen=NUMBER + 1)),
        replace(part, experts=(experts(linears, {"shared": True}).shared, *part.experts[1:])),
        replace(part, shared_gate=part.router.linear),
    ):
        with pytest.raises(PointerError):
            NativeExperts(wrong)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_token_has_its_bits_in_every_pass(tmp_path: Path, quantize: str) -> None:
    """Tokens are computed one by one, all at once, together with another text, and call by call of C."""
    model_type, values = FAMILIES["Qwen3-MoE in C, one layer without experts"]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    path = save_random(tmp_path, model_type, {**SHAPE, **values, **sizes})
    model = load_model(path, LoadOptions(quantize=quantize))
    assert isinstance(model, FusedDecoder)
    assert (model.way, model.is_quantised) == ("fused layers in C", quantize != "none")
    ids = [(7 * i * i + 3) % VOCAB_SIZE for i in range(16)]

    def logits(chunks: list[int], *, beside: int = 0, is_whole: bool = True) -> torch.Tensor:
        runner = ModelRunner.build(model, 16, 4)
        if not is_whole:
            runner.fast_pass = None
        tables = BlockTable(), BlockTable()
        tables[0].block_ids, tables[1].block_ids = [5, 2, 7, 1], [3, 4, 6, 8]
        found, begin = [], 0
        for size in chunks:
            spans = [Span(tables[0], ids[begin : begin + size], size)]
            if beside:
                spans.append(Span(tables[1], ids[:beside], beside))
                tables[1].num_computed_tokens = 0
            found.append(runner.forward(spans).logits[:size])
            begin += size
        return torch.cat(found)

    expected = logits([1] * 16)
    for chunks in ([16], [5, 11], [1, 2, 3, 4, 6]):
        assert torch.equal(logits(chunks), expected)
        assert torch.equal(logits(chunks, beside=9), expected)
        assert torch.equal(logits(chunks, is_whole=False), expected)


@pytest.mark.parametrize("native", [True, False])
def test_calibration_counts_the_experts_of_passes(tmp_path: Path, native: bool) -> None:
    model_type, values = FAMILIES["Qwen3-MoE in C, one layer without experts"]
    path = save_random(tmp_path, model_type, {**SHAPE, **values, "num_hidden_layers": 3})
    model = load_model(path, LoadOptions(native_kernels=native))
    runner = ModelRunner.build(model, 16, 4)
    costs = calibrate(runner, BlockPool(16, 4), {}, max_tokens=16, seconds=0.01)
    routing = costs.routing
    assert routing is not None
    assert routing.experts(1) == 2
    assert 2 < routing.experts(2) < routing.experts(1, 4) <= 8
    assert routing.take() is None
    table = BlockTable()
    table.block_ids = [3, 1]
    runner.forward([Span(table, [5], 1)])
    assert (routing.take(), routing.take()) == (2, None)


# --- Planted bugs ------------------------------------------------------------------------------------------


def not_renormalised(part: Experts) -> Experts:
    return replace(part, router=replace(part.router, renormalises=False))


def without_gate(part: Experts) -> Experts:
    return replace(part, shared_gate=None)


def biased_weights(part: Experts) -> Experts:
    return replace(part, router=replace(part.router, choice_bias=None))


def experts_in_another_order(part: Experts) -> Experts:
    return replace(part, experts=part.experts[::-1])


PLANTED: list[tuple[str, Callable[[Experts], Experts]]] = [
    ("renormalised", not_renormalised),
    ("shared with a gate", without_gate),
    ("sigmoid with a bias", biased_weights),
    ("softmax", experts_in_another_order),
]


@pytest.mark.parametrize(("variant", "bug"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_the_definition_notices(variant: str, bug: Callable[[Experts], Experts]) -> None:
    run, linears = in_c()
    part, x = experts(linears, VARIANTS[variant]), rows()
    wrong = bug(part)(x, run, None).double().numpy()
    assert not np.allclose(wrong, definition(part, x).numpy(), rtol=1e-4, atol=1e-4)


def deviate(rows: slice, by: float) -> Callable[..., list[torch.Tensor]]:
    """Returns a way to compute the probe texts' logits that adds ``by`` to some rows of each text."""

    def computed(*args: Any) -> list[torch.Tensor]:
        found = packed_logits(*args)
        for logits in found:
            logits[rows] += by
        return found

    return computed


@pytest.mark.parametrize(
    ("family", "rows", "by", "is_fused"),
    [
        ("Mixtral in C", slice(3, 4), 0.5, True),
        ("OLMo 2 in C", slice(3, 4), 0.5, False),
        ("Mixtral in C", slice(-7, None), 0.5, False),  # what a wrong window changes
        ("Mixtral in C", slice(3, 4), torch.nan, False),
    ],
)
def test_a_token_may_go_to_other_experts(
    family: str, rows: slice, by: float, is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding decides where two experts score alike; of other models no token may deviate."""
    path = save_family(tmp_path, family)
    monkeypatch.setattr(agreement, "packed_logits", deviate(rows, by))
    model = load_model(path, LoadOptions(compact_weights=False))
    assert isinstance(model, FusedDecoder) == is_fused
