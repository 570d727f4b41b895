"""Makes ``DecoderLayer`` of the layers of transformers."""

from typing import Any

from torch import nn

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.families.attention import make_attention
from truedraft.engine.families.experts import make_experts
from truedraft.engine.families.family import Family, setting
from truedraft.engine.families.linear import Make
from truedraft.engine.families.mlp import activation_of, make_mlp
from truedraft.engine.families.norms import make_norm
from truedraft.engine.families.recurrences import is_recurrence, make_recurrence
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.layers.decoder import Attention, DecoderLayer, Mixer, Mlp, Parallel, Recurrent
from truedraft.engine.layers.norm import Norm


def decoder_layer(
    layer: Any, index: int, facts: ModelFacts, make: Make, is_tiled: bool = False
) -> DecoderLayer:
    """Describes transformers' ``layer``, whose first mixer has the number ``index`` among all of them.
    ``make`` makes its linear layers, whose value heads may be tiled (``head_order``)."""
    family = FAMILIES[facts.config.model_type]
    residual = setting(facts.config, family.residual_multiplier, 1.0)

    def norm(name: str | None) -> Norm | None:
        module = None if name is None else getattr(layer, name)
        # A setting may leave a norm out, and transformers has a module that does nothing in its place.
        return None if module is None or type(module) is nn.Identity else make_norm(family.norms, module)

    mixer_norm, mlp_norm = norm(family.mixer_norm), norm(family.mlp_norm)
    if family.form == "one branch" and layer.block_type in ("mlp", "moe"):
        return DecoderLayer(None, _mlp(family, layer, facts, make, residual), None, mixer_norm)
    mixer = _mixer(family, layer, index, facts, make, residual, is_tiled)
    if family.form == "one branch":
        return DecoderLayer(mixer, None, mixer_norm, None)
    described = DecoderLayer(
        mixer=mixer,
        mlp=_mlp(family, layer, facts, make, residual),
        mixer_norm=mixer_norm,
        mlp_norm=mlp_norm,
        mixer_post_norm=norm(family.mixer_post_norm),
        mlp_post_norm=norm(family.mlp_post_norm),
        is_parallel=family.form == "parallel",
    )
    return family.complete(described, layer, activation_of(family.mlp, facts.config), make)


def _mixer(
    family: Family, layer: Any, index: int, facts: ModelFacts, make: Make, residual: float, is_tiled: bool
) -> Mixer:
    """Makes a recurrence where the layer has one, and attention where it has none or has both."""
    spec, found = family.recurrence, list[Attention | Recurrent]()
    module = None if spec is None else getattr(layer, spec.module, None)
    has_recurrence = module is not None and is_recurrence(module)
    if not has_recurrence or family.form == "parallel mixers":
        attention = getattr(layer, family.attention.module)
        found.append(make_attention(family.attention, family.norms, attention, index, facts, make, residual))
    if spec is not None and has_recurrence:
        place = index + len(found)
        found.append(make_recurrence(spec, module, place, facts, make, residual, is_tiled))
    return found[0] if len(found) == 1 else Parallel((found[0], found[1]))


def _mlp(family: Family, layer: Any, facts: ModelFacts, make: Make, residual: float) -> Mlp:
    if family.experts is not None:
        activation = activation_of(family.mlp, facts.config)
        experts = make_experts(family.experts, layer, facts.config, activation, make, residual)
        if experts is not None:
            return experts
    return make_mlp(family.mlp, layer, facts, make, residual)
