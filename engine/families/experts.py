"""Makes ``Experts`` of the modules of transformers."""

from operator import attrgetter
from typing import Any

from truedraft.engine.checkpoints.stacks import Matrix
from truedraft.engine.families.family import ExpertSpec, setting
from truedraft.engine.families.linear import Make
from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import Activation, Experts, GatedMlp, Router
from truedraft.engine.layers.sharding import widened


def make_experts(
    spec: ExpertSpec, layer: Any, config: Any, activation: Activation, make: Make, residual: float
) -> Experts | None:
    """Describes the experts of transformers' ``layer``; None if it has none. Their output is multiplied by
    ``residual`` before it is added to the hidden states."""
    block = getattr(layer, spec.block) if spec.block else layer
    if not hasattr(block, "experts"):
        return None
    own, router = block.experts, attrgetter(spec.router)(block)
    bias = spec.choice_bias(block)

    def linear(name: str, number: int, is_paired: bool, multiplier: float) -> Linear:
        matrix = Matrix(own, name, f"{name}_bias", number, spec.reads_pairs, is_paired)
        return make([matrix], multiplier)

    number, chooses = int(own.num_experts), make([Matrix(router)], 1.0)
    if spec.has_wide_router:
        chooses = widened(chooses)
    return Experts(
        router=Router(
            linear=chooses,
            num_experts=number,
            num_chosen=int(getattr(config, spec.chosen)),
            scoring=spec.scoring,
            choice_bias=None if bias is None else bias.detach().float(),
            renormalises=bool(spec.renormalises(config)),
            added_to_sum=spec.added_to_sum,
            multiplier=setting(config, spec.multiplier, 1.0),
            groups=spec.groups(config),
        ),
        experts=tuple(
            GatedMlp(
                spec.activation or activation,
                linear(spec.gate_up, each, spec.reads_pairs, 1.0),
                linear("down_proj", each, False, residual),
            )
            for each in range(number)
        ),
        shared=_shared(spec, layer, activation, make, residual),
        shared_gate=None if spec.shared_gate is None else make([getattr(block, spec.shared_gate)], 1.0),
    )


def _shared(
    spec: ExpertSpec, layer: Any, activation: Activation, make: Make, residual: float
) -> GatedMlp | None:
    shared = None if spec.shared is None else attrgetter(spec.shared)(layer)
    if shared is None:
        return None
    gate_up = [getattr(shared, name) for name in spec.shared_gate_up]
    return GatedMlp(activation, make(gate_up, 1.0), make([getattr(shared, spec.shared_down)], residual))
