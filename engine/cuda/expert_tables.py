"""Makes tables of experts' weights at load, where experts are alike: no weight is copied.

What the kernels compute with them is compared with what the experts are by definition. Experts without tables
are run one by one by the host.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch

from truedraft.engine.cuda.blocks import PackedBlocks
from truedraft.engine.cuda.grouped_experts import (
    ExpertKernels,
    ExpertMatrices,
    GroupedExperts,
    GroupedLinear,
    run_grouped,
)
from truedraft.engine.cuda.quantised import PackedLinear
from truedraft.engine.layers.decoder import DecoderWeights
from truedraft.engine.layers.linear import Linear, TorchLinear
from truedraft.engine.layers.mlp import Experts, TouchedExperts
from truedraft.engine.layers.torch_run import TorchPointwise
from truedraft.engine.memory.pointers import device_address

# The comparison at load has these numbers of tokens: one for every size of program, and more than one
# program.
CHECKED_TOKENS = (1, 17, 33, 80)
# Addresses are multiples of this, so that many numbers are loaded at once.
ALIGNMENT = 16

logger = logging.getLogger(__name__)


def grouped(
    weights: DecoderWeights,
    kernels: ExpertKernels,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
) -> DecoderWeights:
    """Returns the decoder with grouped experts, if all of them can be, and the kernels are right."""
    plain = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, Experts)]
    groups = [group for experts in plain if (group := _group(experts, dtype)) is not None]
    if not plain or len(groups) < len(plain):
        return weights
    distinct = {_shape(group): group for group in groups}.values()
    if not are_right("experts", (_is_right(kernels, group, dtype, device, tolerance) for group in distinct)):
        return weights
    rest = iter(groups)
    layers = [
        replace(layer, mlp=next(rest)) if isinstance(layer.mlp, Experts) else layer
        for layer in weights.layers
    ]
    return replace(weights, layers=layers)


def are_right(name: str, checks: Iterator[bool]) -> bool:
    """Tells whether the kernels named ``what`` pass these checks; a warning says why not."""
    try:
        if all(checks):
            return True
        logger.warning("The kernels for %s differ from torch's and are not used", name)
    except Exception as error:  # compilers and drivers fail in many ways; torch's operations need none of it
        logger.warning("The kernels for %s cannot be used: %s", name, error, exc_info=True)
    return False


def _group(experts: Experts, dtype: torch.dtype) -> GroupedExperts | None:
    """Makes the tables of experts; returns None if the kernels do not serve them, as with scales."""
    gate_up = grouped_linear([mlp.gate_up for mlp in experts.experts], dtype)
    down = grouped_linear([mlp.down for mlp in experts.experts], dtype)
    is_plain = all(mlp.scales is None for mlp in experts.experts)
    if (
        gate_up is None
        or down is None
        or not is_plain
        or experts.router.expert_scales is not None
        or len({mlp.activation for mlp in experts.experts}) > 1
    ):
        return None
    own = {each.name: getattr(experts, each.name) for each in fields(Experts)}
    return GroupedExperts(**own, gate_up=gate_up, down=down)


def grouped_linear(linears: Sequence[Linear], dtype: torch.dtype) -> GroupedLinear | None:
    """Returns the table of linear layers; None if they are not alike."""
    columns: list[list[_Matrix]] = []
    for linear in linears:
        if isinstance(linear, TorchLinear) and linear.weight.dtype == dtype:
            rows, in_features = linear.weight.shape
            columns.append([_Matrix(rows, in_features, None, (linear.weight,))])
        elif isinstance(linear, PackedLinear):
            columns.append([_Matrix.of(part) for part in linear.parts])
        else:
            return None
    served = [linear for linear in linears if isinstance(linear, TorchLinear | PackedLinear)]
    multipliers = {linear.multiplier for linear in served}
    biases = [linear.bias for linear in served if linear.bias is not None]
    parts = [_part(matrices) for matrices in zip(*columns, strict=False)]
    wanted = [part for part in parts if part is not None]
    if len({len(column) for column in columns}) > 1 or len(multipliers) > 1 or len(wanted) < len(parts):
        return None
    if len(biases) not in (0, len(linears)):
        return None
    out_features = sum(part.rows for part in wanted)
    bias = torch.stack(biases) if biases else None
    return GroupedLinear(_alike(wanted), tuple(linears), out_features, multipliers.pop(), bias)


def _alike(parts: Sequence[ExpertMatrices]) -> tuple[ExpertMatrices, ...]:
    """Joins neighbouring parts of the same kind, such as gates and the matrices that they gate, so that one
    launch multiplies with all of them."""
    kinds = groupby(parts, key=lambda part: (part.rows, part.in_features, part.type))
    joined = [(kind, torch.cat([part.addresses for part in some])) for kind, some in kinds]
    return tuple(ExpertMatrices(*kind, addresses) for kind, addresses in joined)


@dataclass(frozen=True, slots=True)
class _Matrix:
    rows: int
    in_features: int
    type: int | None
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, packed: PackedBlocks) -> "_Matrix":
        tensors = packed.low, packed.high, packed.scales, packed.supers
        return cls(packed.rows, packed.in_features, packed.type, tensors)


def _part(matrices: Sequence[_Matrix]) -> ExpertMatrices | None:
    """Makes one part's table; returns None for matrices of different kinds, or whose addresses kernels cannot
    read."""
    first = matrices[0]
    kinds = {(matrix.rows, matrix.in_features, matrix.type) for matrix in matrices}
    if len(kinds) > 1 or not all(each.is_contiguous() for matrix in matrices for each in matrix.tensors):
        return None
    addresses = [[*map(device_address, each)] for each in zip(*(m.tensors for m in matrices), strict=True)]
    if any(address % ALIGNMENT for each in addresses for address in each):
        return None
    table = torch.tensor([addresses], dtype=torch.int64).to(first.tensors[0].device)
    return ExpertMatrices(first.rows, first.in_features, first.type, table)


def _shape(experts: GroupedExperts) -> tuple[Any, ...]:
    """Returns the sizes for which programs are compiled."""
    router, linears = experts.router, (experts.gate_up, experts.down)
    parts = [(part.rows, part.in_features, part.type) for linear in linears for part in linear.parts]
    kind = router.scoring, router.renormalises, router.choice_bias is None, router.groups
    has_bias = tuple(linear.bias is not None for linear in linears)
    return experts.activation, router.num_experts, router.num_chosen, *kind, *has_bias, *parts


@torch.inference_mode()
def _is_right(
    kernels: ExpertKernels,
    experts: GroupedExperts,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
) -> bool:
    """Tells whether the kernels compute these experts as they are by definition."""
    run, size = TorchPointwise(), experts.gate_up.parts[0].in_features
    counted = replace(experts, touched=TouchedExperts(device))
    generator = torch.Generator().manual_seed(size)
    for num_tokens in CHECKED_TOKENS:
        x, residual = (torch.randn(num_tokens, size, generator=generator) for _ in range(2))
        # Tokens that are a little alike have experts in common, some of which have more than a tile.
        x = (x / 2 + torch.randn(size, generator=generator)).to(device, dtype)
        residual = residual.to(device, dtype)
        is_there = torch.ones(num_tokens, dtype=torch.bool, device=device)
        ours = run_grouped(kernels, counted, run, x, residual.clone(), is_there)
        theirs = experts.by_definition(x, run, residual)
        if not ((ours - theirs).abs().max() <= tolerance * theirs.abs().max()).item():
            return False
    return True
