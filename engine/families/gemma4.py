"""Makes the parts that only Gemma 4 has: layers that read other layers' keys, norms of values, a table of
numbers for each token and layer, experts next to an MLP, and a last factor.
"""

from dataclasses import replace
from typing import Any

import torch

from truedraft.engine.families.linear import Make
from truedraft.engine.families.norms import make_norm
from truedraft.engine.layers.decoder import DecoderLayer, LayerInputs, TokenBranch
from truedraft.engine.layers.linear import Embeddings
from truedraft.engine.layers.mlp import Activation, DenseAndExperts, Experts, GatedMlp
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import turned_pairs
from truedraft.engine.layers.run import AttentionShape

# A checkpoint has the table of ``LayerInputs`` under this name, and its module has these further parts at the
# top.
TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION, PROJECTION_NORM = "per_layer_model_projection", "per_layer_projection_norm"


def fits(config: Any) -> bool:
    """Tells whether layers and the table are as expected here. transformers' own forward fails where layers
    read others' keys but the model has no table."""
    has_inputs = bool(config.hidden_size_per_layer_input)
    has_rows = not has_inputs or config.vocab_size_per_layer_input >= config.vocab_size
    return has_rows and (has_inputs or not config.num_kv_shared_layers)


def complete_shape(shape: AttentionShape, attention: Any) -> AttentionShape:
    return replace(
        shape,
        turned=turned_pairs(attention.config, attention.layer_type, attention.head_dim),
        value_norm=_value_norm(attention),
        source=_source_of(attention),
    )


def _source_of(attention: Any) -> int | None:
    """Returns the layer whose keys and values ``attention`` reads: the last one of its type that stores some;
    None if it stores its own."""
    if not attention.is_kv_shared_layer:
        return None
    config = attention.config
    storing = range(config.num_hidden_layers - config.num_kv_shared_layers)
    return max(layer for layer in storing if config.layer_types[layer] == attention.layer_type)


def _value_norm(attention: Any) -> Norm:
    weight = attention.q_norm.weight.detach()
    return Norm(torch.ones_like(weight, dtype=torch.float32), attention.q_norm.eps)


def complete_layer(described: DecoderLayer, layer: Any, activation: Activation, make: Make) -> DecoderLayer:
    """Adds the parts to a layer that other families do not have; a layer's MLP is built with the experts if
    there are some."""
    more: dict[str, Any] = {"scale": float(layer.layer_scalar)}
    if isinstance(described.mlp, Experts):
        more |= {"mlp": _dense_and_experts(described.mlp, layer, activation, make), "mlp_norm": None}
    if layer.hidden_size_per_layer_input:
        more["token_branch"] = TokenBranch(
            activation,
            make([layer.per_layer_input_gate], 1.0),
            make([layer.per_layer_projection], 1.0),
            _norm(layer.post_per_layer_input_norm),
        )
    return replace(described, **more)


def _norm(module: Any) -> Norm:
    return make_norm("float32", module)


def _dense_and_experts(experts: Experts, layer: Any, activation: Activation, make: Make) -> DenseAndExperts:
    mlp, router = layer.mlp, layer.router
    dense = GatedMlp(activation, make([mlp.gate_proj, mlp.up_proj], 1.0), make([mlp.down_proj], 1.0))
    scales = router.per_expert_scale.detach().float()
    return DenseAndExperts(
        dense=dense,
        experts=replace(experts, router=replace(experts.router, expert_scales=scales)),
        dense_norm=_norm(layer.pre_feedforward_layernorm),
        experts_norm=_norm(layer.pre_feedforward_layernorm_2),
        router_norm=Norm(router.scale.detach().float() * router.scalar_root_size, router.eps),
        dense_post_norm=_norm(layer.post_feedforward_layernorm_1),
        experts_post_norm=_norm(layer.post_feedforward_layernorm_2),
    )


def has_layer_inputs(module: Any) -> bool:
    return bool(getattr(module.config, "hidden_size_per_layer_input", 0))


def layer_table_scale(module: Any, dtype: torch.dtype) -> float:
    """Returns the factor by which transformers multiplies rows of the table, rounded as it rounds it."""
    return torch.tensor(module.model.embed_tokens_per_layer.scalar_embed_scale).to(dtype).item()


def layer_inputs(module: Any, table: Embeddings, make: Make, dtype: torch.dtype) -> LayerInputs:
    """Describes the table's numbers for each layer; the factor of their sum is applied to both summands."""
    model = module.model
    norm, factor = getattr(model, PROJECTION_NORM), model.per_layer_input_scale
    return LayerInputs(
        table,
        make([getattr(model, PROJECTION)], model.per_layer_model_projection_scale),
        Norm(norm.weight.detach().float() * factor, norm.eps),
        layer_table_scale(module, dtype) * factor,
    )
