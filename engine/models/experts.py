"""Makes ``Experts`` of transformers' modules: what a family calls them, and which settings count."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import (
    SWISH_LIMIT,
    SWISH_SLOPE,
    Activation,
    Experts,
    GatedMlp,
    Router,
    Scoring,
)
from truedraft.engine.models.checkpoint import Checkpoint
from truedraft.engine.models.linear import Make
from truedraft.engine.models.stacks import Matrix, StackedCheckpoint, StoredExperts


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """Names of modules, of a layer's or below its ``block``, and of settings; the defaults are Qwen's.
    ``fits``: says of a config whether its experts are like this. ``reads_pairs``: as ``Matrix`` has it."""

    block: str = "mlp"
    router: str = "gate"
    chosen: str = "num_experts_per_tok"
    scoring: Scoring = "softmax"
    renormalises: Callable[[Any], bool] = attrgetter("norm_topk_prob")
    added_to_sum: float = 0.0
    # This is added to scores where experts are chosen, below the block; None, and a model may lack it.
    choice_bias: Callable[[Any], torch.Tensor | None] = lambda block: None
    multiplier: str | None = None
    # The parameter of all experts that makes what is gated, or what the activation is of.
    gate_up: str = "gate_up_proj"
    shared: str | None = None
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    activation: Activation | None = None
    reads_pairs: bool = False
    fits: Callable[[Any], bool] = lambda config: True
    stored: StoredExperts = field(default_factory=StoredExperts)


def with_stacks(checkpoint: Checkpoint, module: Any) -> Checkpoint:
    """Returns a checkpoint with the tensors of transformers' ``module`` under its names."""
    family = EXPERT_FAMILIES.get(module.config.model_type)
    return checkpoint if family is None else StackedCheckpoint(checkpoint, module, family.stored)


def can_be_quantised(config: Any) -> bool:
    """Tells whether rows of the experts' stored matrices are rows of ours."""
    family = EXPERT_FAMILIES.get(config.model_type)
    return family is None or not family.reads_pairs


def _always(config: Any) -> bool:
    return True


QWEN = ExpertFamily()
GRANITE = ExpertFamily(
    block="block_sparse_moe",
    router="router",
    renormalises=_always,
    stored=StoredExperts(
        renamed=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        )
    ),
)
GRANITE_SHARED = replace(
    GRANITE, shared="shared_mlp", shared_gate_up=("input_linear",), shared_down="output_linear"
)
QWEN_SHARED = ExpertFamily(shared="mlp.shared_expert", shared_gate="shared_expert_gate")
EXPERT_FAMILIES: dict[str, ExpertFamily] = {
    "mixtral": ExpertFamily(
        renormalises=_always,
        stored=StoredExperts(((".mlp.", ".block_sparse_moe."),), ("w1", "w3"), ("w2",)),
    ),
    "qwen2_moe": replace(
        QWEN_SHARED,
        fits=lambda config: not config.use_sliding_window,  # transformers has it in a mask only
    ),
    "qwen3_moe": QWEN,
    "olmoe": ExpertFamily(fits=lambda config: config.clip_qkv is None),
    "glm4_moe": ExpertFamily(
        scoring="sigmoid",
        choice_bias=attrgetter("gate.e_score_correction_bias"),
        multiplier="routed_scaling_factor",
        shared="mlp.shared_experts",
        fits=lambda config: config.n_group == 1,
    ),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE_SHARED,
    "granitemoehybrid": GRANITE_SHARED,
    "lfm2_moe": ExpertFamily(
        block="feed_forward",
        scoring="sigmoid",
        added_to_sum=1e-6,
        choice_bias=lambda block: getattr(block, "expert_bias", None),
        multiplier="routed_scaling_factor",
        stored=StoredExperts((), ("w1", "w3"), ("w2",)),
    ),
    "nemotron_h": ExpertFamily(
        block="mixer",
        scoring="sigmoid",
        choice_bias=attrgetter("gate.e_score_correction_bias"),
        multiplier="routed_scaling_factor",
        gate_up="up_proj",
        shared="mixer.shared_experts",
        shared_gate_up=("up_proj",),
        fits=lambda config: (
            "moe" not in config.layer_types or (config.moe_latent_size is None and config.n_group == 1)
        ),
        stored=StoredExperts((("model.", "backbone."),), ("up_proj",)),
    ),
    "qwen3_5_moe_text": replace(QWEN_SHARED, renormalises=_always),
    "qwen3_next": QWEN_SHARED,
    # The router's norm, and the factors of its weights, are made with the layer (``gemma4``).
    "gemma4_text": ExpertFamily(
        block="",
        router="router.proj",
        chosen="top_k_experts",
        renormalises=_always,
        stored=StoredExperts(gate_up=(), down=()),
    ),
    "gpt_oss": ExpertFamily(
        router="router",
        renormalises=_always,
        activation="clamped_swish",
        reads_pairs=True,
        fits=lambda config: (config.swiglu_alpha, config.swiglu_limit) == (SWISH_SLOPE, SWISH_LIMIT),
        stored=StoredExperts(gate_up=(), down=()),
    ),
}


def make_experts(
    layer: Any, config: Any, activation: Activation, make: Make, residual: float
) -> Experts | None:
    """Describes the experts of transformers' ``layer``; None if it has none. What they add to the hidden
    states is multiplied by ``residual``."""
    family = EXPERT_FAMILIES.get(config.model_type)
    if family is None:
        return None
    block = getattr(layer, family.block) if family.block else layer
    if not hasattr(block, "experts"):
        return None
    own, router = block.experts, attrgetter(family.router)(block)
    bias = family.choice_bias(block)

    def linear(name: str, number: int, is_paired: bool, multiplier: float) -> Linear:
        matrix = Matrix(own, name, f"{name}_bias", number, family.reads_pairs, is_paired)
        return make([matrix], multiplier)

    number = int(own.num_experts)
    return Experts(
        router=Router(
            linear=make([Matrix(router)], 1.0),
            num_experts=number,
            num_chosen=int(getattr(config, family.chosen)),
            scoring=family.scoring,
            choice_bias=None if bias is None else bias.detach().float(),
            renormalises=bool(family.renormalises(config)),
            added_to_sum=family.added_to_sum,
            multiplier=1.0 if family.multiplier is None else float(getattr(config, family.multiplier)),
        ),
        experts=tuple(
            GatedMlp(
                family.activation or activation,
                linear(family.gate_up, each, family.reads_pairs, 1.0),
                linear("down_proj", each, False, residual),
            )
            for each in range(number)
        ),
        shared=_shared(layer, family, activation, make, residual),
        shared_gate=None if family.shared_gate is None else make([getattr(block, family.shared_gate)], 1.0),
    )


def _shared(
    layer: Any, family: ExpertFamily, activation: Activation, make: Make, residual: float
) -> GatedMlp | None:
    shared = None if family.shared is None else attrgetter(family.shared)(layer)
    if shared is None:
        return None
    gate_up = [getattr(shared, name) for name in family.shared_gate_up]
    return GatedMlp(activation, make(gate_up, 1.0), make([getattr(shared, family.shared_down)], residual))
