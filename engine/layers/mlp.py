"""Describes MLPs: one that every token goes through, or many experts, of which each token takes a few."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.norm import Norm

# Activations have transformers' names. gpt-oss clamps gates and gated numbers (``clamped_swish``).
# ``UNGATED`` activations gate nothing: they map each number to another; ``lone_gelu`` is gelu of that kind.
Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swish", "relu2", "gelu", "lone_gelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
UNGATED: tuple[Activation, ...] = ("relu2", "lone_gelu")
# Numbers of ``clamped_swish`` are at most SWISH_LIMIT, and x becomes x sigmoid(SWISH_SLOPE x).
SWISH_LIMIT, SWISH_SLOPE = 7.0, 1.702
# A router's numbers become scores by one of these.
Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)


def scaled(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Multiplies the outputs of a linear layer, each by a factor of its own."""
    return x if scales is None else (x * scales).to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadLinears:
    """Holds linear layers of the same sizes, one for each head."""

    linears: tuple[Linear, ...]

    def by_definition(self, x: torch.Tensor, run: "MlpRun") -> torch.Tensor:
        """Computes ``x`` [tokens, heads, size] head by head."""
        pairs = zip(self.linears, x.unbind(1), strict=True)
        return torch.stack([run.linear(linear, of_head.contiguous()) for linear, of_head in pairs], 1)


class MlpRun(Protocol):
    """Runs the operations that MLPs need in one forward; every tensor is [tokens, ...]."""

    def linear(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the layer's output for ``x``, plus ``residual``, which may be overwritten."""
        ...

    def by_head(self, linears: HeadLinears, x: torch.Tensor) -> torch.Tensor:
        """Returns the layers' outputs for ``x`` [tokens, heads, size], each head's by its own layer."""
        ...

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        """Gates [tokens, 2 * size] to [tokens, size], or applies an ``UNGATED`` activation to each number;
        ``gate_up`` may be overwritten."""
        ...

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises ``x``, and adds ``residual`` if there is one."""
        ...

    def experts(
        self,
        experts: "Experts",
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the experts' output for ``x``, plus ``residual``, which may be overwritten. The router gets
        ``routed``, if that is given, or else ``x``."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gates numbers of each token by as many others, unless the activation is ``UNGATED``. ``scales``,
    float32, multiply the outputs of ``gate_up``."""

    activation: Activation
    gate_up: Linear
    down: Linear
    scales: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def __call__(self, x: torch.Tensor, run: MlpRun, residual: torch.Tensor | None) -> torch.Tensor:
        gate_up = scaled(run.linear(self.gate_up, x), self.scales)
        return run.linear(self.down, run.gate(self.activation, gate_up), residual)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Limits a token to the experts of some groups. There are ``number`` groups of the same size; those
    ``num_chosen`` are taken whose ``num_summed`` highest scores have the highest sum."""

    number: int
    num_chosen: int
    num_summed: int

    def allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """Tells for each of ``scores`` [tokens, experts] whether its expert can be chosen."""
        groups = scores.view(len(scores), self.number, -1)
        sums = groups.topk(self.num_summed, dim=-1).values.sum(-1)
        # A stable sort takes the first of equal groups.
        chosen = sums.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_chosen]
        is_chosen = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, chosen, True)
        return is_chosen[..., None].expand_as(groups).flatten(1)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses for a token the ``num_chosen`` experts with the highest scores, and weights for their outputs.

    ``linear`` makes a number for each expert, and ``scoring`` turns it into a score. ``choice_bias``
    [experts] is added to the scores where experts, and before them ``groups``, are chosen, but not to their
    weights. Weights that are ``renormalised`` are divided by their sum and ``added_to_sum`` before they are
    multiplied; for a softmax this equals one over the chosen experts. Last, ``expert_scales`` [experts]
    multiply the weights.
    """

    linear: Linear
    num_experts: int
    num_chosen: int
    scoring: Scoring
    choice_bias: torch.Tensor | None = None
    renormalises: bool = False
    added_to_sum: float = 0.0
    multiplier: float = 1.0
    expert_scales: torch.Tensor | None = None
    groups: ExpertGroups | None = None

    def choose(self, x: torch.Tensor, run: MlpRun) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the chosen experts of each token, in ascending order, and their weights, float32."""
        return self.choose_by(run.linear(self.linear, x).float())

    def choose_by(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same, given the linear layer's output."""
        scores = numbers.softmax(-1) if self.scoring == "softmax" else numbers.sigmoid()
        wanted = scores if self.choice_bias is None else scores + self.choice_bias
        if self.groups is not None:
            wanted = wanted.where(self.groups.allowed(wanted), -torch.inf)
        # A stable sort takes the first of equal experts.
        order = wanted.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, : self.num_chosen].sort(-1).values
        weights = scores.gather(1, chosen)
        if self.renormalises:
            weights = weights / (weights.sum(-1, keepdim=True) + self.added_to_sum)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[chosen]
        return chosen, weights * self.multiplier


class TouchedExperts:
    """Counts the experts that passes read, and the layers in which they read some."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        is_far = self.counts.device.type == "cuda"
        self._read = torch.zeros(2, dtype=torch.int64, pin_memory=True) if is_far else self.counts

    def add(self, number: int) -> None:
        """Counts the experts of one layer in one pass."""
        self.counts += torch.tensor((number, 1)).to(self.counts.device)

    def send(self) -> None:
        """Copies the counts to the host after a pass, without waiting: they are there after the next wait."""
        if self._read is not self.counts:
            self._read.copy_(self.counts, non_blocking=True)

    def __call__(self) -> tuple[int, int]:
        """Returns the sum of experts over layers and passes, and how many of these there were."""
        experts, layers = self._read.tolist()
        return experts, layers


@dataclass(frozen=True, slots=True)
class Experts:
    """Applies to each token the MLPs that the router chooses, and the ``shared`` one, if there is one. The
    shared output is multiplied by the sigmoid of the one number of ``shared_gate``. Outputs are added in the
    order of the experts, whatever other tokens are computed together with a token."""

    router: Router
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp | None = None
    shared_gate: Linear | None = None
    touched: TouchedExperts = field(default_factory=TouchedExperts)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(self._linears())

    def _linears(self) -> Iterator[Linear]:
        yield self.router.linear
        for mlp in (*self.experts, *([] if self.shared is None else [self.shared])):
            yield from mlp.linears
        if self.shared_gate is not None:
            yield self.shared_gate

    def __call__(
        self,
        x: torch.Tensor,
        run: MlpRun,
        residual: torch.Tensor | None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return run.experts(self, x, residual, routed)

    def by_definition(
        self,
        x: torch.Tensor,
        run: MlpRun,
        residual: torch.Tensor | None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes expert by expert, each for the tokens that have it."""
        chosen, weights = self.router.choose(x if routed is None else routed, run)
        found = torch.zeros_like(x)
        numbers = sorted(set(chosen.flatten().tolist()))
        self.touched.add(len(numbers))
        for number in numbers:
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            output = self.experts[number](x[tokens], run, None)
            found[tokens] += (output * weights[tokens, place, None]).to(x.dtype)
        if (shared := self.shared_output(x, run)) is not None:
            found += shared
        return found if residual is None else residual + found

    def shared_output(self, x: torch.Tensor, run: MlpRun) -> torch.Tensor | None:
        """Returns the shared expert's output; None without one."""
        if self.shared is None:
            return None
        shared = self.shared(x, run, None)
        return shared if self.shared_gate is None else shared * run.linear(self.shared_gate, x).sigmoid()


@dataclass(frozen=True, slots=True)
class DenseAndExperts:
    """Adds the outputs of an MLP for all tokens and of ``experts``. Both, and the router, norm the same input
    by themselves, and both outputs are normed."""

    dense: GatedMlp
    experts: Experts
    dense_norm: Norm
    experts_norm: Norm
    router_norm: Norm
    dense_post_norm: Norm
    experts_post_norm: Norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.dense.linears, *self.experts.linears

    @property
    def norms(self) -> dict[str, Norm]:
        """Returns the norms by their names."""
        names = ("dense_norm", "experts_norm", "router_norm", "dense_post_norm", "experts_post_norm")
        return {name: getattr(self, name) for name in names}

    def __call__(self, x: torch.Tensor, run: MlpRun, residual: torch.Tensor | None) -> torch.Tensor:
        dense = self.dense(run.norm(self.dense_norm, x), run, None)
        routed = run.norm(self.router_norm, x)
        chosen = self.experts(run.norm(self.experts_norm, x), run, None, routed)
        found = run.norm(self.experts_post_norm, chosen, run.norm(self.dense_post_norm, dense))
        return found if residual is None else residual + found
