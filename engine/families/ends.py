"""Finds the parts of a decoder before its first layer and after its last one: embeddings, angles, last norm
and logits.
"""

from typing import Any

import torch
from torch import nn

from truedraft.engine.families.family import setting
from truedraft.engine.families.norms import make_norm
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import NoAngles, Rotary


def embeddings_of(module: Any) -> tuple[str, Any]:
    """Returns transformers' module of the embeddings, and the name of its weight."""
    name = FAMILIES[module.config.model_type].embeddings
    return f"model.{name}.weight", getattr(module.model, name)


def table_scale(module: Any, dtype: torch.dtype) -> float:
    """Returns the factor by which transformers multiplies embeddings that it looks up itself, rounded as it
    rounds it."""
    family = FAMILIES[module.config.model_type]
    if not family.scales_embeddings:
        return setting(module.config, family.table_multiplier, 1.0)
    return torch.tensor(embeddings_of(module)[1].scalar_embed_scale).to(dtype).item()


def embedding_scale(module: Any, dtype: torch.dtype) -> float:
    """Returns the factor by which embeddings are multiplied before the first layer."""
    name = FAMILIES[module.config.model_type].embedding_multiplier
    return table_scale(module, dtype) * setting(module.config, name, 1.0)


def rotary_name(config: Any) -> str:
    return FAMILIES[config.model_type].rotary


def rotary_module(module: Any) -> nn.Module:
    """Returns transformers' module of the angles, or a stand-in where no layer attends."""
    found = getattr(module.model, rotary_name(module.config), None)
    return found if found is not None and head_sizes(module) else NoAngles()


def make_rotary(module: Any, config: Any, like: torch.Tensor) -> Rotary:
    """Makes our ``Rotary`` of transformers' module of the angles."""
    angles = FAMILIES[config.model_type].angles
    repeats, halves, apart = (angles == each for each in ("running", "once", "turned"))
    return Rotary(module, config, like, repeats=repeats, halves=halves, apart=apart)


def head_sizes(module: Any) -> set[int]:
    """Returns the head sizes of the attention layers in transformers' ``module``."""
    config = module.config
    spec = FAMILIES[config.model_type].attention
    if spec.has_latents:
        return {config.qk_rope_head_dim + config.kv_lora_rank}
    found: list[Any] = [getattr(layer, spec.module, None) for layer in module.model.layers]
    return {attention.head_dim for attention in found if hasattr(attention, spec.output)}


def last_norm(module: Any) -> tuple[str, nn.Module]:
    """Returns the norm before the output layer, and its name."""
    name = FAMILIES[module.config.model_type].last_norm
    return f"model.{name}", getattr(module.model, name)


def make_last_norm(config: Any, module: Any) -> Norm:
    return make_norm(FAMILIES[config.model_type].norms, module)


def logit_multiplier(config: Any) -> float:
    family = FAMILIES[config.model_type]
    return setting(config, family.logit_multiplier, 1.0) / setting(config, family.logit_divisor, 1.0)


def logit_softcap(config: Any) -> float | None:
    name = FAMILIES[config.model_type].logit_softcap
    softcap: float | None = None if name is None else getattr(config, name)
    return softcap
