"""Experts in Triton's interpreter, as ``triton_cases``."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine import torch_block_kernels
from tests.engine.test_experts import HIDDEN, NUMBER, VARIANTS, experts
from tests.engine.triton_bugs import planted_in
from tests.engine.triton_cases import products_of_bfloat16 as products_of_bfloat16
from tests.gguf_blocks import random_blocks
from truedraft.engine.cuda import expert_kernels, expert_tables, kernels, launch_experts
from truedraft.engine.cuda.blocks import pack
from truedraft.engine.cuda.expert_tables import _group, _is_right
from truedraft.engine.cuda.grouped_experts import GroupedExperts, run_grouped
from truedraft.engine.cuda.quantised import PackedLinear
from truedraft.engine.layers.linear import Linear, TorchLinear, TorchLinears
from truedraft.engine.layers.mlp import ExpertGroups, Experts, GatedMlp, TouchedExperts
from truedraft.engine.layers.torch_run import TorchPointwise

assert os.environ["TRITON_INTERPRET"] == "1"

CPU = torch.device("cpu")
SERVED = [
    "renormalised",
    "sigmoid with a bias",
    "shared with a gate",
    "biases and a clamped gate",
    "squares without a gate",
    "groups by their best",
    "groups by their two best, with a bias",
]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 has one size of program, of which these are one and two."""
    monkeypatch.setattr(expert_tables, "CHECKED_TOKENS", (1, 20))


def grouped(experts: Experts, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    group = _group(experts, dtype)
    assert group is not None
    return group


@pytest.mark.parametrize("name", SERVED)
def test_experts_are_what_they_are_by_definition(name: str) -> None:
    assert _is_right(kernels, grouped(experts(TorchLinears(), VARIANTS[name])), torch.float32, CPU, 1e-5)


def test_in_bfloat16() -> None:
    def narrow(linear: Linear) -> Linear:
        assert isinstance(linear, TorchLinear)
        return TorchLinear(linear.weight.bfloat16(), None, 0.5)

    whole = experts(TorchLinears(), {})
    mlps = tuple(replace(mlp, gate_up=narrow(mlp.gate_up), down=narrow(mlp.down)) for mlp in whole.experts)
    narrowed = replace(whole, router=replace(whole.router, linear=narrow(whole.router.linear)), experts=mlps)
    assert _is_right(kernels, grouped(narrowed, torch.bfloat16), torch.bfloat16, CPU, 2e-2)


def quantised(names: list[str], down: str, size: int) -> GroupedExperts:
    """Makes experts of blocks, of other types for gate, up and what comes after these."""

    def linear(kinds: list[str], rows: int, columns: int, seed: int) -> Linear:
        parts = [
            pack(random_blocks(kind, rows, columns, seed + place * NUMBER), CPU)
            for place, kind in enumerate(kinds)
        ]
        return PackedLinear(torch_block_kernels, parts, None)

    plain = experts(TorchLinears(), {})
    router = replace(plain.router, linear=TorchLinear(torch.randn(NUMBER, size), None))
    mlps = (
        GatedMlp("silu", linear(names, 96, size, number), linear([down], size, 96, number))
        for number in range(NUMBER)
    )
    return grouped(Experts(router, tuple(mlps)))


@pytest.mark.parametrize(
    ("names", "size"), [(["Q2_K", "Q6_K"], 256), (["Q5_1", "IQ4_NL"], 64), (["Q4_0", "Q4_0"], 160)]
)
def test_quantised_experts(names: list[str], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(expert_tables, "CHECKED_TOKENS", (5,))
    assert _is_right(kernels, quantised(names, "Q8_0", size), torch.float32, CPU, 1e-4)


class Given(TorchLinear):
    """Gives a router the same numbers however many rows there are, which torch's products do not."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


def test_a_row_has_its_bits_whatever_is_computed_with_it() -> None:
    """Rows that are not there are nobody's, and touch no expert."""
    part = grouped(experts(TorchLinears(), VARIANTS["renormalised"]))
    generator = torch.Generator().manual_seed(3)
    x, numbers = (torch.randn(19, size, generator=generator) for size in (HIDDEN, part.router.num_experts))
    is_there, touched = torch.arange(19) % 9 == 7, TouchedExperts()

    def run(rows: list[int], is_there: torch.Tensor | None = None) -> torch.Tensor:
        own = replace(part, router=replace(part.router, linear=Given(numbers[rows], None)), touched=touched)
        return run_grouped(kernels, own, TorchPointwise(), x[rows], None, is_there)

    alone = torch.cat([run([7]), run([16])])
    before = touched()
    assert torch.equal(run([*range(19)], is_there)[[7, 16]], alone)
    assert torch.equal(run([*range(19)])[[7, 16]], alone)
    chosen, _ = part.router.choose_by(numbers[is_there])
    assert before == (2 * part.router.num_chosen, 2)
    assert touched() == (before[0] + len(chosen.unique()) + part.router.num_experts, 4)


def test_of_equal_groups_the_first_is_chosen() -> None:
    """The best of a group that is not chosen stands beyond all of the others."""
    groups = ExpertGroups(4, 2, num_summed=2)
    router = replace(experts(TorchLinears(), {}).router, num_chosen=3, groups=groups)
    numbers = torch.tensor([[1.0, 0, 1, 1, 1, 0, 9, -9, -9, 0, 1, 1], [0.0] * NUMBER])
    chosen, _ = kernels.choose_experts(router, numbers, None)
    assert torch.equal(chosen, router.choose_by(numbers)[0].int())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_of_equal_experts_the_first_are_chosen() -> None:
    router = replace(experts(TorchLinears(), {}).router, num_chosen=3)
    last = [0.0] * (NUMBER - 6)
    numbers = torch.tensor([[0.0, 1, 0, 1, 1, 1, *last], [2.0, 0, 0, 0, 0, 0, *last], [torch.nan] * NUMBER])
    chosen, _ = kernels.choose_experts(router, numbers, None)
    assert chosen.tolist() == [[1, 3, 4], [0, 1, 2], [0, 1, 2]]


BUGS = {
    "biases are part of the weights": ("wanted = scores\n", "scores += 0.1\n    wanted = scores\n"),
    "all scores are renormalised": ("tl.where(is_chosen, scores, 0.0)", "scores"),
    "tiles begin with the first token": ("place = first + tl.arange(0, ROWS)", "place = tl.arange(0, ROWS)"),
    "every expert has the first one's weights": ("* EXPERTS + expert\n", "* EXPERTS\n"),
    "an output that ends a tile is left out": (
        "mask=(out < num_outputs)[:, None] & is_row",
        "mask=(out < num_outputs - 1)[:, None] & is_row",
    ),
    "gates are what they gate": ("addresses + part * TENSORS", "addresses + 0 * TENSORS"),
    "a group counts its best expert twice": ("rest = tl.where(number == first", "rest = tl.where(number < 0"),
    "experts of all groups are chosen": ("tl.where(is_allowed, wanted", "tl.where(is_expert, wanted"),
    "every expert has the first one's bias": ("bias + expert * out_features", "bias"),
    "the residual is weighted": ("total += tl.load(residual", "total *= tl.load(residual"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_at_load_catches(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    monkeypatch.setattr(launch_experts, "expert_kernels", planted_in(expert_kernels, *BUGS[bug], tmp_path))
    names = {"group": "groups by their two best, with a bias", "one's bias": "biases and a clamped gate"}
    name = next((name for part, name in names.items() if part in bug), "renormalised")
    # Dense gates and what they gate are one matrix.
    is_dense = "gates" not in bug
    part = (
        grouped(experts(TorchLinears(), VARIANTS[name])) if is_dense else quantised(["Q4_0"] * 2, "Q8_0", 64)
    )
    assert not _is_right(kernels, part, torch.float32, CPU, 1e-3)
