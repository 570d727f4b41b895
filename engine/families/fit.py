"""Decides which models the table of families describes, and prepares transformers' modules for it."""

from typing import Any

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.checkpoints.stacks import StackedCheckpoint
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.family import ExpertSpec
from truedraft.engine.families.mlp import activation_of
from truedraft.engine.families.table import FAMILIES

# Configs give layers that are no mixers these names.
MLPS = {"mlp", "moe"}


def has_family(module: Any) -> bool:
    """Tells whether the layers of ``module``, with or without weights, are as the table says."""
    config = module.config
    family = FAMILIES.get(config.model_type)
    return (
        family is not None
        and type(module).__module__.startswith("transformers.models.")
        and activation_of(family.mlp, config) in family.mlp.activations
        # Tokens of images may attend to later tokens, but there are no images here.
        and getattr(config, "use_bidirectional_attention", None) in (None, False, "vision")
        and family.fits(config)
        and (family.experts is None or not has_experts(config) or family.experts.fits(config))
    )


def check_settings(config: Any) -> None:
    """Raises ``ModelLoadError`` for a setting whose value is not known, even if transformers ignores it.
    Models with a running state are served by our layers alone, which must know all settings."""
    family = FAMILIES[config.model_type]
    known = family.known
    if family.recurrence is not None:
        known += ((family.mlp.activation, family.mlp.activations),) if family.mlp.activation else ()
    for name, values in known:
        value = getattr(config, name, None)
        if value not in values:
            served = " or ".join(str(each) for each in values if each is not None) or "None"
            raise ModelLoadError(
                f"{config.model_type} models with {name} {value!r} cannot be served: only {served} is known"
            )
    family.check(config)
    if MLPS.issuperset(getattr(config, "layer_types", None) or ["attention"]):
        raise ModelLoadError(f"{config.model_type} models without a mixer of tokens cannot be served")


def experts_of(config: Any) -> ExpertSpec | None:
    """Returns the description of a family's experts, or None for a model that has none."""
    family = FAMILIES.get(config.model_type)
    return None if family is None else family.experts


def has_experts(config: Any) -> bool:
    # Some models of Gemma 4 have experts, others do not.
    return experts_of(config) is not None and bool(getattr(config, "enable_moe_block", True))


def can_be_quantised(config: Any) -> bool:
    """Tells whether the rows of the experts' stored matrices are the rows of ours, so that blocks can be
    kept."""
    experts = experts_of(config)
    return experts is None or not experts.reads_pairs


def reads_columns(config: Any) -> bool:
    """Tells whether some of our layers are columns of transformers', which its own modules cannot provide."""
    return FAMILIES[config.model_type].attention.has_latents


def with_stacks(checkpoint: Checkpoint, module: Any) -> Checkpoint:
    """Returns a checkpoint that has the tensors of transformers' ``module`` under its names."""
    experts = experts_of(module.config)
    return checkpoint if experts is None else StackedCheckpoint(checkpoint, module, experts.stored)


def corrected(module: Any) -> Any:
    """Changes transformers' ``module`` so that it computes what its makers' code does, and returns it."""
    family = FAMILIES.get(module.config.model_type)
    if family is not None:
        family.correct(module)
    return module


def correct_layer(layer: Any, facts: ModelFacts) -> None:
    """Sets the remaining values of a layer whose tensors were loaded onto the meta device."""
    FAMILIES[facts.config.model_type].correct_layer(layer, facts)
