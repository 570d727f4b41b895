"""Describes a family: the names of its modules and settings, and the parts that its layers have.

The defaults are Llama's. ``table`` has a ``Family`` for each model type; its parts describe attention, MLP,
experts and recurrence for the modules that make these (``attention``, ``mlp``, ...).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.checkpoints.stacks import StoredExperts
from truedraft.engine.families.linear import Make
from truedraft.engine.families.norms import NormKind
from truedraft.engine.layers.decoder import DecoderLayer
from truedraft.engine.layers.mlp import Activation, ExpertGroups, Scoring
from truedraft.engine.layers.run import AttentionShape


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Says how transformers' ``module`` of a layer attends, and how its parts are named."""

    module: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    # Queries and keys are normed, each head by itself or all heads together.
    head_norm: Literal["each", "whole"] | None = None
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_after_rotary: bool = False
    # The output is multiplied by sigmoids: of numbers that are stored with each head's queries, or of one
    # number for each head.
    gate: Literal["queries", "heads"] | None = None
    # Rotary angles turn neighbours of a head, not its halves.
    interleaved: bool = False
    # These attributes of transformers' attention say whether it rotates, and how many tokens a query sees;
    # None: all.
    rotates: Callable[[Any], bool] = lambda attention: True
    window: Callable[[Any], int | None] = lambda attention: None
    # One learnt number per head (a sink) takes its share of the attention, and adds nothing to the output.
    has_sinks: bool = False
    softcap: str | None = None
    # Keys and values are made of a short vector of each token (``latent``); the settings above do not apply
    # then.
    has_latents: bool = False
    # These settings name multipliers of the input, the output and the keys.
    input_multiplier: str | None = None
    output_multiplier: str | None = None
    key_multiplier: str | None = None
    # This function adds to a shape parts that only some families have.
    complete: Callable[[AttentionShape, Any], AttentionShape] = lambda shape, attention: shape


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """Names the module that layers have in place of attention, or next to it."""

    module: str
    # This function gives the multipliers of the input; a setting names that of the output.
    input_scales: Callable[[Any, torch.device], torch.Tensor] | None = None
    output_multiplier: str | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Says how the parts of transformers' ``module`` of a layer are named, and which activation it has."""

    module: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    output: str = "down_proj"
    # This setting names the activation, with the values that are known; None: it is silu.
    activation: str | None = "hidden_act"
    activations: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh")
    # This setting has the multipliers of gates and of outputs.
    multipliers: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Names modules, of a layer or inside its ``block``, and settings; the defaults are Qwen's."""

    block: str = "mlp"
    router: str = "gate"
    chosen: str = "num_experts_per_tok"
    scoring: Scoring = "softmax"
    # The router multiplies in float32 also in models of 16 bits.
    has_wide_router: bool = False
    renormalises: Callable[[Any], bool] = attrgetter("norm_topk_prob")
    added_to_sum: float = 0.0
    # This bias, inside the block, is added to scores where experts are chosen; None if there is none. Single
    # models may lack it.
    choice_bias: Callable[[Any], torch.Tensor | None] = lambda block: None
    multiplier: str | None = None
    # This function returns the groups of experts that a config has.
    groups: Callable[[Any], ExpertGroups | None] = lambda config: None
    # This is the parameter of all experts that makes the gated numbers, or the inputs of the activation.
    gate_up: str = "gate_up_proj"
    shared: str | None = None
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    activation: Activation | None = None
    # Rows of the stored matrices alternate between gate and up, as in ``Matrix``.
    reads_pairs: bool = False
    # This function tells whether a config has such experts.
    fits: Callable[[Any], bool] = lambda config: True
    stored: StoredExperts = field(default_factory=StoredExperts)


@dataclass(frozen=True, slots=True)
class Family:
    """Describes the layers of a model type, and the parts before the first and after the last one. Norms
    after a branch are applied to its output before that is added to the hidden states. ``gguf`` names the
    architecture in GGUF files."""

    attention: AttentionSpec = AttentionSpec()
    recurrence: RecurrenceSpec | None = None
    mlp: MlpSpec = MlpSpec()
    experts: ExpertSpec | None = None
    # The MLP follows the mixer; or both get the same input, with one norm; or attention and a recurrence get
    # the same input, and the MLP follows; or each layer is a mixer or an MLP, whose norm is named as a
    # mixer's.
    form: Literal["sequential", "parallel", "parallel mixers", "one branch"] = "sequential"
    norms: NormKind = "plain"
    mixer_norm: str | None = "input_layernorm"
    mixer_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    # This function adds to a layer parts that only some families have.
    complete: Callable[[DecoderLayer, Any, Activation, Make], DecoderLayer] = lambda described, *_: described
    # This setting names the factor of a branch's output.
    residual_multiplier: str | None = None

    embeddings: str = "embed_tokens"
    # Embeddings are multiplied by their own module, or by the factor that a setting names: in the lookup, or
    # by the decoder.
    scales_embeddings: bool = False
    table_multiplier: str | None = None
    embedding_multiplier: str | None = None
    rotary: str = "rotary_emb"
    # The module gives every angle twice, either all of them and then all again or each one twice in a row, or
    # it gives each angle once, possibly as a complex number; the angles of pairs that are not rotated are
    # left out.
    angles: Literal["twice", "running", "once", "turned"] = "twice"
    last_norm: str = "norm"
    logit_multiplier: str | None = None
    logit_divisor: str | None = None
    logit_softcap: str | None = None

    # These settings are known with these values only. ``check`` raises ``ModelLoadError`` for values that are
    # not known together. transformers' own layers compute a model whose config does not fit.
    known: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    check: Callable[[Any], None] = lambda config: None
    fits: Callable[[Any], bool] = lambda config: True
    # These functions correct transformers' module, and a layer that has received a checkpoint's tensors.
    correct: Callable[[Any], None] = lambda module: None
    correct_layer: Callable[[Any, ModelFacts], None] = lambda layer, facts: None
    gguf: str | None = None


def setting(config: Any, name: str | None, default: float) -> float:
    """Returns a setting's value, or ``default`` where a family has no such setting."""
    return default if name is None else float(getattr(config, name))
