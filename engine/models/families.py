"""The families that are computed by layers of our own: how transformers' layer becomes a ``DecoderLayer``.

One table says per model type what its modules are called, which norms there are, and which settings count. A
family of known parts is a row of it. GGUF files go the same way: their tensors have transformers' names by
then (``gguf``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.decoder import Attention, DecoderLayer, Mixer, Mlp, Parallel
from truedraft.engine.layers.mlp import Activation, GatedMlp
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import NoAngles, Rotary, rotary_kinds, turned_pairs
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.kv_cache import NOTHING, AttentionCache
from truedraft.engine.models import gemma4
from truedraft.engine.models.base import ModelFacts
from truedraft.engine.models.experts import EXPERT_FAMILIES, make_experts
from truedraft.engine.models.linear import Make, Rows, Source
from truedraft.engine.models.recurrences import is_recurrence, recurrent_mixer, scales_of_inputs


@dataclass(frozen=True, slots=True)
class Family:
    """Names of a layer's modules, and of settings in the config; the defaults are Llama's. Norms after a
    branch are of what it adds to the hidden states. ``gguf`` names the architecture in GGUF files."""

    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_output: str = "o_proj"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_output: str = "down_proj"
    last_norm: str = "norm"
    rotary: str = "rotary_emb"
    embeddings: str = "embed_tokens"
    mixer_norm: str | None = "input_layernorm"
    mixer_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    # Norms multiply by one more than their weight, in float32 whatever the model's type.
    norms_add_one: bool = False
    # Queries and keys are normed, each head by itself or all together.
    head_norm: Literal["each", "whole"] | None = None
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_after_rotary: bool = False
    # What is attended is multiplied by sigmoids: of numbers that stand with each head's queries, or of one
    # number for each head.
    attention_gate: Literal["queries", "heads"] | None = None
    # Layers without attention have one of these modules (``recurrences``).
    recurrence: Literal["conv", "linear_attn", "mamba", "mixer"] | None = None
    # Rotary angles turn neighbours of a head, not its halves.
    interleaved: bool = False
    # These say of transformers' attention whether it rotates, and how many tokens a query sees; None: all.
    rotates: Callable[[Any], bool] = lambda attention: True
    window: Callable[[Any], int | None] = lambda attention: None
    # The setting that names it, and its values that are known; None: it is silu.
    activation: str | None = "hidden_act"
    activations: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh")
    # Each layer is a mixer or an MLP, with one norm, which is named as a mixer's.
    has_one_branch: bool = False
    # Each layer has attention and a recurrence, side by side.
    mixes_in_parallel: bool = False
    # Settings multiply what goes into mixers and comes out of them, keys, gates and outputs of MLPs.
    has_multipliers: bool = False
    # The embeddings' own module multiplies them, or whoever looks one up, or the decoder, by a setting.
    scales_embeddings: bool = False
    table_multiplier: str | None = None
    embedding_multiplier: str | None = None
    # What a branch adds to the hidden states is multiplied by one setting, logits are divided by another.
    residual_multiplier: str | None = None
    logit_divisor: str | None = None
    logit_multiplier: str | None = None
    # Norms take the mean off, both branches have the same norm, angles stand twice running.
    norms_centre: bool = False
    is_parallel: bool = False
    repeats_angles: bool = False
    # Each angle is given once. A number per head takes its share of the attention, and gives nothing.
    halves_angles: bool = False
    has_sinks: bool = False
    # Layers have heads of their own sizes, norms of values, and may read what others store (``gemma4``).
    own_shapes: bool = False
    score_softcap: str | None = None
    logit_softcap: str | None = None
    # These settings are known with these values only, and together if the config fits.
    known: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    fits: Callable[[Any], bool] = lambda config: True
    gguf: str | None = None


# The window stands with each layer, or in the config for all layers.
WINDOW, CONFIG_WINDOW = attrgetter("sliding_window"), attrgetter("config.sliding_window")
GEMMA = Family(norms_add_one=True, scales_embeddings=True)
GEMMA_2 = replace(
    GEMMA,
    mixer_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    window=WINDOW,
    activation="hidden_activation",
    logit_softcap="final_logit_softcapping",
)
OLMO_2 = Family(
    mixer_norm=None,
    mixer_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    head_norm="whole",
)
GRANITE = Family(
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logit_divisor="logits_scaling",
)
GLM = Family(gate_up=("gate_up_proj",), interleaved=True)
QWEN_3_5 = Family(
    activations=("silu",),
    norms_add_one=True,
    head_norm="each",
    attention_gate="queries",
    recurrence="linear_attn",
    known=(("output_gate_type", (None, "silu", "swish")),),
)
LFM_2 = Family(
    attention_output="out_proj",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    mlp_output="w2",
    last_norm="embedding_norm",
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    head_norm="each",
    head_norm_names=("q_layernorm", "k_layernorm"),
    recurrence="conv",
    activation=None,
)
FAMILIES: dict[str, Family] = {
    "llama": Family(gguf="llama"),
    "qwen2": Family(window=WINDOW, gguf="qwen2"),
    "qwen3": Family(window=WINDOW, head_norm="each", gguf="qwen3"),
    "phi3": Family(qkv=("qkv_proj",), gate_up=("gate_up_proj",), window=CONFIG_WINDOW, gguf="phi3"),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA_2, score_softcap="attn_logit_softcapping", gguf="gemma2"),
    "gemma3_text": replace(GEMMA_2, head_norm="each", gguf="gemma3"),
    "gemma4_text": replace(
        GEMMA_2, norms_add_one=False, head_norm="each", own_shapes=True, fits=gemma4.fits, gguf="gemma4"
    ),
    "mistral": Family(window=CONFIG_WINDOW),
    "seed_oss": Family(),
    "smollm3": Family(window=WINDOW, rotates=attrgetter("use_rope")),
    "olmo2": OLMO_2,
    "olmo3": replace(OLMO_2, window=WINDOW),
    "exaone4": replace(
        OLMO_2,
        head_norm="each",
        rotates=lambda attention: attention.is_sliding or attention.sliding_window is None,
        window=lambda attention: attention.sliding_window if attention.is_sliding else None,
    ),
    "hunyuan_v1_dense": Family(
        head_norm="each", head_norm_names=("query_layernorm", "key_layernorm"), norm_after_rotary=True
    ),
    "ernie4_5": Family(interleaved=True),
    "glm": GLM,
    "glm4": replace(GLM, mixer_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
    "cohere2": Family(
        mlp_norm=None,
        window=WINDOW,
        rotates=lambda attention: attention.sliding_window is not None,
        interleaved=True,
        repeats_angles=True,
        norms_centre=True,
        is_parallel=True,
        logit_multiplier="logit_scale",
    ),
    "granite": replace(GRANITE, gguf="granite"),
    "mixtral": Family(window=CONFIG_WINDOW),
    "qwen2_moe": Family(gguf="qwen2moe"),
    "qwen3_moe": Family(window=WINDOW, head_norm="each", gguf="qwen3moe"),
    "olmoe": Family(head_norm="whole", gguf="olmoe"),
    "glm4_moe": Family(head_norm="each", gguf="glm4moe"),
    "granitemoe": GRANITE,
    "granitemoeshared": replace(GRANITE, gguf="granitemoe"),
    "gpt_oss": Family(window=WINDOW, has_sinks=True, halves_angles=True, gguf="gpt-oss"),
    "granitemoehybrid": replace(
        GRANITE,
        mlp="shared_mlp",
        gate_up=("input_linear",),
        mlp_output="output_linear",
        recurrence="mamba",
        activations=("silu",),
        rotates=lambda attention: attention.config.position_embedding_type == "rope",
        gguf="granitehybrid",
    ),
    "lfm2": replace(LFM_2, gguf="lfm2"),
    "lfm2_moe": replace(LFM_2, rotary="pos_emb", gguf="lfm2moe"),
    "lfm3": replace(
        LFM_2,
        attention_output="o_proj",
        mixer_post_norm="post_operator_norm",
        mlp_post_norm="post_ffn_norm",
        head_norm_names=("q_norm", "k_norm"),
        attention_gate="heads",
        window=WINDOW,
    ),
    "falcon_h1": Family(
        mlp="feed_forward",
        last_norm="final_layernorm",
        mlp_norm="pre_ff_layernorm",
        recurrence="mamba",
        activations=("silu",),
        mixes_in_parallel=True,
        has_multipliers=True,
        table_multiplier="embedding_multiplier",
        logit_multiplier="lm_head_multiplier",
        # Norms come after gates, and biases are not multiplied where inputs are.
        fits=lambda config: (
            not (config.mamba_rms_norm and config.mamba_norm_before_gate)
            and not (config.attention_bias and config.attention_in_multiplier != 1)
            and not (config.mamba_proj_bias and config.ssm_in_multiplier != 1)
        ),
        gguf="falcon-h1",
    ),
    "nemotron_h": Family(
        attention="mixer",
        mlp="mixer",
        gate_up=("up_proj",),
        last_norm="norm_f",
        embeddings="embeddings",
        mixer_norm="norm",
        mlp_norm=None,
        recurrence="mixer",
        rotates=lambda attention: False,
        activation="mlp_hidden_act",
        activations=("relu2",),
        has_one_branch=True,
        known=(("mamba_hidden_act", ("silu",)), ("tie_word_embeddings", (False,))),
        gguf="nemotron_h",
    ),
    "qwen3_5_text": replace(QWEN_3_5, gguf="qwen35"),
    "qwen3_5_moe_text": replace(QWEN_3_5, gguf="qwen35moe"),
    "qwen3_next": replace(QWEN_3_5, gguf="qwen3next"),
}


def has_family(module: Any) -> bool:
    """Tells whether ``module``, with or without weights, has layers as the table says."""
    config = module.config
    return (
        config.model_type in FAMILIES
        and type(module).__module__.startswith("transformers.models.")
        and _activation(config) in FAMILIES[config.model_type].activations
        # Images may look at later tokens, where there are images.
        and getattr(config, "use_bidirectional_attention", None) in (None, False, "vision")
        and FAMILIES[config.model_type].fits(config)
        and (not has_experts(config) or EXPERT_FAMILIES[config.model_type].fits(config))
    )


def has_experts(config: Any) -> bool:
    # Some models of Gemma 4 have them, others do not.
    return config.model_type in EXPERT_FAMILIES and bool(getattr(config, "enable_moe_block", True))


def check_settings(config: Any) -> None:
    """Raises ``ModelLoadError`` for a value of a setting that is not known, though transformers may ignore
    it."""
    for name, values in FAMILIES[config.model_type].known:
        value = getattr(config, name, None)
        if value not in values:
            served = " or ".join(str(each) for each in values if each is not None)
            raise ModelLoadError(
                f"{config.model_type} models with {name} {value!r} cannot be served: only {served} is known"
            )


def decoder_layer(
    layer: Any, index: int, facts: ModelFacts, make: Make, is_tiled: bool = False
) -> DecoderLayer:
    """Describes transformers' ``layer``, whose first mixer has the place ``index`` among all of them.
    ``make`` makes its linear layers, whose value heads are tiled or not (``head_order``)."""
    family = FAMILIES[facts.config.model_type]
    residual = _setting(facts.config, family.residual_multiplier, 1.0)

    def norm(name: str | None) -> Norm | None:
        module = None if name is None else getattr(layer, name)
        # A setting may leave a norm out, and transformers has a module that does nothing in its place.
        return None if module is None or type(module) is nn.Identity else make_norm(facts.config, module)

    if family.has_one_branch:
        own = norm(family.mixer_norm)
        if layer.block_type in ("mlp", "moe"):
            mlp = _mlp(family, layer, facts, make, residual)
            return DecoderLayer(None, mlp, mixer_norm=None, mlp_norm=own)
        mixer = _mixer(family, layer, index, facts, make, residual, is_tiled)
        return DecoderLayer(mixer, None, mixer_norm=own, mlp_norm=None)
    described = DecoderLayer(
        mixer=_mixer(family, layer, index, facts, make, residual, is_tiled),
        mlp=_mlp(family, layer, facts, make, residual),
        mixer_norm=norm(family.mixer_norm),
        mlp_norm=norm(family.mlp_norm),
        mixer_post_norm=norm(family.mixer_post_norm),
        mlp_post_norm=norm(family.mlp_post_norm),
        is_parallel=family.is_parallel,
    )
    if not family.own_shapes:
        return described
    return gemma4.complete(described, layer, _activation(facts.config), make)


def _mlp(family: Family, layer: Any, facts: ModelFacts, make: Make, residual: float) -> Mlp:
    config, activation = facts.config, _activation(facts.config)
    if (experts := make_experts(layer, config, activation, make, residual)) is not None:
        return experts
    mlp, scales = getattr(layer, family.mlp), None
    if family.has_multipliers:
        of_gates, of_output = config.mlp_multipliers
        residual *= of_output
        sizes = [getattr(mlp, name).out_features for name in family.gate_up]
        scales = torch.tensor([of_gates, 1.0], device=facts.device).repeat_interleave(
            torch.tensor(sizes, device=facts.device)
        )
    return GatedMlp(
        activation=activation,
        gate_up=make([getattr(mlp, name) for name in family.gate_up], 1.0),
        down=make([getattr(mlp, family.mlp_output)], residual),
        scales=scales,
    )


def _mixer(
    family: Family, layer: Any, index: int, facts: ModelFacts, make: Make, residual: float, is_tiled: bool
) -> Mixer:
    if family.mixes_in_parallel:
        config, device = facts.config, facts.device
        scales = scales_of_inputs(config, device) * config.ssm_in_multiplier
        out = residual * config.ssm_out_multiplier
        attention = _attention(family, layer, index, facts, make, residual)
        return Parallel(
            (attention, recurrent_mixer(layer.mamba, index + 1, device, make, out, is_tiled, scales))
        )
    recurrence = None if family.recurrence is None else getattr(layer, family.recurrence, None)
    if recurrence is not None and is_recurrence(recurrence):
        return recurrent_mixer(recurrence, index, facts.device, make, residual, is_tiled)
    return _attention(family, layer, index, facts, make, residual)


def _attention(
    family: Family, layer: Any, index: int, facts: ModelFacts, make: Make, residual: float
) -> Attention:
    attention, multiplier = getattr(layer, family.attention), 1.0
    shape = _attention_shape(family, attention, index)
    if family.has_multipliers:
        multiplier = facts.config.attention_in_multiplier
        residual *= facts.config.attention_out_multiplier
    heads = NOTHING if shape.source is not None else (shape.num_kv_heads, shape.head_size)
    return Attention(
        shape=shape,
        qkv=make(_queries_keys_values(family, attention, shape), multiplier),
        output=make([getattr(attention, family.attention_output)], residual),
        cache=AttentionCache(heads, heads, facts.dtype, facts.device),
    )


def _queries_keys_values(family: Family, attention: Any, shape: AttentionShape) -> list[Source]:
    """Returns the linear layers of a token's queries, keys and values, and of the gates, if there are any."""
    names = family.qkv if shape.source is None else family.qkv[:1]
    found: list[Source] = [getattr(attention, name) for name in names]
    if None in found:
        found[-1] = found[-2]  # keys are values, too
    if shape.gated and family.attention_gate == "queries":
        rows = np.arange(2 * shape.num_heads * shape.head_size).reshape(shape.num_heads, 2, -1)
        found[:1], gate = (
            [Rows(attention.q_proj, rows[:, 0].ravel())],
            Rows(attention.q_proj, rows[:, 1].ravel()),
        )
        return [*found, gate]
    if shape.gated:
        return [*found, Rows(attention.g_proj, np.repeat(np.arange(shape.num_heads), shape.head_size))]
    return found


def head_sizes(module: Any) -> set[int]:
    """Returns those of the layers of attention of transformers' ``module``."""
    family = FAMILIES[module.config.model_type]
    found: list[Any] = [getattr(layer, family.attention, None) for layer in module.model.layers]
    return {attention.head_dim for attention in found if hasattr(attention, family.attention_output)}


def last_norm(module: Any) -> tuple[str, nn.Module]:
    """Returns the norm before the output layer, and its name."""
    name = FAMILIES[module.config.model_type].last_norm
    return f"model.{name}", getattr(module.model, name)


def embeddings_of(module: Any) -> tuple[str, Any]:
    """Returns transformers' module of the embeddings, and the name of its weight."""
    name = FAMILIES[module.config.model_type].embeddings
    return f"model.{name}.weight", getattr(module.model, name)


def rotary_name(config: Any) -> str:
    return FAMILIES[config.model_type].rotary


def rotary_module(module: Any) -> nn.Module:
    """Returns transformers' module of the angles, or what stands in for it."""
    found = getattr(module.model, rotary_name(module.config), None)
    return NoAngles() if found is None else found


def make_norm(config: Any, module: Any) -> Norm:
    """Makes ours of a norm of transformers'."""
    family = FAMILIES[config.model_type]
    eps = module.eps if family.norms_add_one or family.own_shapes else module.variance_epsilon
    return norm_of(config, module.weight.detach(), eps)


def norm_of(config: Any, weight: torch.Tensor, eps: float) -> Norm:
    """Makes one of a weight as the family's checkpoints have it."""
    family = FAMILIES[config.model_type]
    if family.norms_add_one:
        return Norm(1 + weight.float(), eps)
    if family.norms_centre:
        return Norm(weight.float(), eps, centres=True)
    return Norm(weight, eps)


def make_rotary(module: Any, config: Any, like: torch.Tensor) -> Rotary:
    """Makes ours of transformers' module of the angles."""
    family = FAMILIES[config.model_type]
    repeats, halves = family.repeats_angles, family.halves_angles
    return Rotary(module, config, like, repeats=repeats, halves=halves, apart=family.own_shapes)


def table_scale(module: Any, dtype: torch.dtype) -> float:
    """Returns what transformers multiplies embeddings by, unless they are given to it, rounded as there."""
    family = FAMILIES[module.config.model_type]
    if not family.scales_embeddings:
        return _setting(module.config, family.table_multiplier, 1.0)
    return torch.tensor(embeddings_of(module)[1].scalar_embed_scale).to(dtype).item()


def embedding_scale(module: Any, dtype: torch.dtype) -> float:
    """Returns what embeddings are multiplied by before the first layer."""
    name = FAMILIES[module.config.model_type].embedding_multiplier
    return table_scale(module, dtype) * _setting(module.config, name, 1.0)


def logit_multiplier(config: Any) -> float:
    family = FAMILIES[config.model_type]
    return _setting(config, family.logit_multiplier, 1.0) / _setting(config, family.logit_divisor, 1.0)


def logit_softcap(config: Any) -> float | None:
    name = FAMILIES[config.model_type].logit_softcap
    softcap: float | None = None if name is None else getattr(config, name)
    return softcap


def _setting(config: Any, name: str | None, default: float) -> float:
    return default if name is None else float(getattr(config, name))


def _activation(config: Any) -> Activation:
    setting = FAMILIES[config.model_type].activation
    name: Activation = "silu" if setting is None else getattr(config, setting)
    return name


def _attention_shape(family: Family, attention: Any, index: int) -> AttentionShape:
    config = attention.config
    return AttentionShape(
        layer=index,
        num_heads=config.num_attention_heads,
        num_kv_heads=_num_kv_heads(config, attention),
        head_size=attention.head_dim,
        scaling=attention.scaling * (config.key_multiplier if family.has_multipliers else 1.0),
        sliding_window=family.window(attention),
        norm=_head_norm(config, attention) if _norms_each(family, attention) else None,
        whole_norms=_norms(config, attention) if family.head_norm == "whole" else None,
        rotary=_rotary(family, attention),
        norm_after_rotary=family.norm_after_rotary,
        interleaved=family.interleaved,
        gated=family.attention_gate == "queries" or getattr(attention, "g_proj", None) is not None,
        softcap=None if family.score_softcap is None else getattr(config, family.score_softcap),
        sinks=attention.sinks.detach().float() if family.has_sinks else None,
        **(_own_shape(attention) if family.own_shapes else {}),
    )


def _own_shape(attention: Any) -> dict[str, Any]:
    turned = turned_pairs(attention.config, attention.layer_type, attention.head_dim)
    return {
        "turned": turned,
        "value_norm": gemma4.value_norm(attention),
        "source": gemma4.source_of(attention),
    }


def _num_kv_heads(config: Any, attention: Any) -> int:
    if FAMILIES[config.model_type].own_shapes:
        return int(config.num_attention_heads // attention.num_key_value_groups)
    return int(config.num_key_value_heads)


def _rotary(family: Family, attention: Any) -> int | None:
    if not family.rotates(attention):
        return None
    kinds = rotary_kinds(attention.config)
    return 0 if kinds == [None] else kinds.index(attention.config.layer_types[attention.layer_idx])


def _norms_each(family: Family, attention: Any) -> bool:
    """Tells whether heads are normed, which GLM's config decides."""
    return family.head_norm == "each" and hasattr(attention, family.head_norm_names[0])


def _norms(config: Any, attention: Any) -> tuple[Norm, Norm]:
    query, key = FAMILIES[config.model_type].head_norm_names
    return make_norm(config, getattr(attention, query)), make_norm(config, getattr(attention, key))


def _head_norm(config: Any, attention: Any) -> Norm:
    if FAMILIES[config.model_type].own_shapes and attention.is_kv_shared_layer:
        query = make_norm(config, attention.q_norm)
        return Norm(query.weight.expand(config.num_attention_heads, -1).contiguous(), query.eps)
    query, key = _norms(config, attention)
    counts = config.num_attention_heads, _num_kv_heads(config, attention)
    weights = [each.weight.expand(count, -1) for each, count in zip((query, key), counts, strict=True)]
    return Norm(torch.cat(weights), query.eps)
