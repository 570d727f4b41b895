"""Makes ``GatedMlp`` of the modules of transformers."""

from typing import Any

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.families.family import MlpSpec
from truedraft.engine.families.linear import Make
from truedraft.engine.layers.mlp import Activation, GatedMlp


def activation_of(spec: MlpSpec, config: Any) -> Activation:
    name: Activation = "silu" if spec.activation is None else getattr(config, spec.activation)
    return name


def make_mlp(spec: MlpSpec, layer: Any, facts: ModelFacts, make: Make, residual: float) -> GatedMlp:
    """Describes the MLP of transformers' ``layer``. Its output is multiplied by ``residual`` before it is
    added to the hidden states."""
    mlp, scales = getattr(layer, spec.module), None
    gate_up = [getattr(mlp, name) for name in spec.gate_up]
    if spec.multipliers is not None:
        of_gates, of_output = getattr(facts.config, spec.multipliers)
        residual *= of_output
        sizes = torch.tensor([linear.out_features for linear in gate_up], device=facts.device)
        scales = torch.tensor([of_gates, 1.0], device=facts.device).repeat_interleave(sizes)
    return GatedMlp(
        activation=activation_of(spec, facts.config),
        gate_up=make(gate_up, 1.0),
        down=make([getattr(mlp, spec.output)], residual),
        scales=scales,
    )
