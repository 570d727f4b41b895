"""Multiplies the tokens of each expert together, by a table of the weights' addresses on the device.

``expert_tables`` makes the table. Only the device knows which tokens an expert has.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import Activation, Experts, Router
from truedraft.engine.layers.torch_run import TorchPointwise


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Holds matrices [rows, in features] of each expert, one or several of the same shape and type."""

    rows: int
    in_features: int
    type: int | None
    addresses: torch.Tensor  # int64 [matrices, tensors, experts]


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Is a linear layer of each expert, whose ``parts`` give outputs one after the other. ``linears`` keep
    the weights alive. ``bias`` is [experts, out features]; None: there is none."""

    parts: tuple[ExpertMatrices, ...]
    linears: tuple[Linear, ...]
    out_features: int
    multiplier: float
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupedExperts(Experts):
    """Holds experts that the kernels serve."""

    gate_up: GroupedLinear = field(kw_only=True)
    down: GroupedLinear = field(kw_only=True)

    @property
    def activation(self) -> Activation:
        return self.experts[0].activation

    def working_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that a pass needs for one token: gates and the numbers that they gate, their
        products, the experts' outputs, and the token's places in the experts' lists."""
        numbers = self.gate_up.out_features * 3 // 2 + self.down.out_features
        places = self.router.num_experts + 2 * self.router.num_chosen
        return self.router.num_chosen * numbers * dtype.itemsize + places * torch.int32.itemsize


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """Lists the tokens of each expert: the first ``counts`` int32 [experts] of ``pairs`` int32 [experts,
    tokens], which are indices into the flattened ``chosen`` [tokens, experts of a token]."""

    pairs: torch.Tensor
    counts: torch.Tensor
    chosen: torch.Tensor


class ExpertKernels(Protocol):
    """Is the interface of the module ``launch_experts``, which tests replace."""

    def choose_experts(
        self, router: Router, numbers: torch.Tensor, is_there: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def group_tokens(self, chosen: torch.Tensor, num_experts: int, touched: torch.Tensor) -> TokenGroups: ...

    def multiply_experts(
        self, x: torch.Tensor, linear: GroupedLinear, groups: TokenGroups, pairs_of_row: int
    ) -> torch.Tensor: ...

    def join_experts(
        self,
        said: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor: ...


def run_grouped(
    kernels: ExpertKernels,
    experts: GroupedExperts,
    run: TorchPointwise,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    is_there: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``experts``. Padding tokens are routed to none; their outputs are undefined."""
    router = experts.router
    chosen, weights = kernels.choose_experts(router, run.linear(router.linear, x), is_there)
    groups = kernels.group_tokens(chosen, router.num_experts, experts.touched.counts)
    gate_up = kernels.multiply_experts(x, experts.gate_up, groups, router.num_chosen)
    said = kernels.multiply_experts(run.gate(experts.activation, gate_up), experts.down, groups, 1)
    return kernels.join_experts(said, chosen, weights, experts.shared_output(x, run), residual)
