"""What can be said of a family: the names of its modules and settings, and which parts its layers have.

The defaults are Llama's. ``table`` has a ``Family`` for each model type; its parts say of attention, MLP,
experts and recurrence what the modules that make these (``attention``, ``mlp``, ...) go by.
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
    """Says how transformers' ``module`` of a layer attends, and what it calls its parts."""

    module: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    # Queries and keys are normed, each head by itself or all together.
    head_norm: Literal["each", "whole"] | None = None
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_after_rotary: bool = False
    # What is attended is multiplied by sigmoids: of numbers that stand with each head's queries, or of one
    # number for each head.
    gate: Literal["queries", "heads"] | None = None
    # Rotary angles turn neighbours of a head, not its halves.
    interleaved: bool = False
    # These say of transformers' attention whether it rotates, and how many tokens a query sees; None: all.
    rotates: Callable[[Any], bool] = lambda attention: True
    window: Callable[[Any], int | None] = lambda attention: None
    # A number per head takes its share of the attention, and gives nothing.
    has_sinks: bool = False
    softcap: str | None = None
    # Keys and values are made of a short vector of each token (``latent``), and all else is left out.
    has_latents: bool = False
    # Settings multiply what goes in, what comes out, and keys.
    input_multiplier: str | None = None
    output_multiplier: str | None = None
    key_multiplier: str | None = None
    # This adds to a shape what only some families have.
    complete: Callable[[AttentionShape, Any], AttentionShape] = lambda shape, attention: shape


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """Names the module that layers have in the place of attention, or next to it."""

    module: str
    # This gives the multipliers of what goes in, a setting multiplies what comes out.
    input_scales: Callable[[Any, torch.device], torch.Tensor] | None = None
    output_multiplier: str | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Says what transformers' ``module`` of a layer calls its parts, and what its activation is."""

    module: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    output: str = "down_proj"
    # The setting that names it, and its values that are known; None: it is silu.
    activation: str | None = "hidden_act"
    activations: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh")
    # A setting has the multipliers of gates and of outputs.
    multipliers: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Names modules, of a layer's or below its ``block``, and settings; the defaults are Qwen's."""

    block: str = "mlp"
    router: str = "gate"
    chosen: str = "num_experts_per_tok"
    scoring: Scoring = "softmax"
    # The router multiplies in float32 in models of 16 bits, too.
    has_wide_router: bool = False
    renormalises: Callable[[Any], bool] = attrgetter("norm_topk_prob")
    added_to_sum: float = 0.0
    # This is added to scores where experts are chosen, below the block; None, and a model may lack it.
    choice_bias: Callable[[Any], torch.Tensor | None] = lambda block: None
    multiplier: str | None = None
    # This returns the groups of experts that a config has.
    groups: Callable[[Any], ExpertGroups | None] = lambda config: None
    # The parameter of all experts that makes what is gated, or what the activation is of.
    gate_up: str = "gate_up_proj"
    shared: str | None = None
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    activation: Activation | None = None
    # Rows of the stored matrices alternate between gate and up, as in ``Matrix``.
    reads_pairs: bool = False
    # This says of a config whether its experts are like this.
    fits: Callable[[Any], bool] = lambda config: True
    stored: StoredExperts = field(default_factory=StoredExperts)


@dataclass(frozen=True, slots=True)
class Family:
    """Says of what a model type's layers are made, and what comes before the first and after the last.
    Norms after a branch are of what it adds to the hidden states. ``gguf`` names the architecture in GGUF
    files."""

    attention: AttentionSpec = AttentionSpec()
    recurrence: RecurrenceSpec | None = None
    mlp: MlpSpec = MlpSpec()
    experts: ExpertSpec | None = None
    # The MLP follows the mixer, or both get the same, with one norm; or attention and a recurrence get the
    # same, and the MLP follows; or each layer is a mixer or an MLP, whose norm is named as a mixer's.
    form: Literal["sequential", "parallel", "parallel mixers", "one branch"] = "sequential"
    norms: NormKind = "plain"
    mixer_norm: str | None = "input_layernorm"
    mixer_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    # This adds to a layer what only some families have.
    complete: Callable[[DecoderLayer, Any, Activation, Make], DecoderLayer] = lambda described, *_: described
    # What a branch adds to the hidden states is multiplied by this setting.
    residual_multiplier: str | None = None

    embeddings: str = "embed_tokens"
    # Embeddings are multiplied by their own module, or by a setting: in the lookup, or by the decoder.
    scales_embeddings: bool = False
    table_multiplier: str | None = None
    embedding_multiplier: str | None = None
    rotary: str = "rotary_emb"
    # The module gives all angles twice, or each twice running, or each once, maybe as a complex number; those
    # of pairs that are not turned are left out.
    angles: Literal["twice", "running", "once", "turned"] = "twice"
    last_norm: str = "norm"
    logit_multiplier: str | None = None
    logit_divisor: str | None = None
    logit_softcap: str | None = None

    # These settings are known with these values only; ``check`` raises ``ModelLoadError`` for others that are
    # not known together, and layers of transformers' own compute a model whose config does not fit.
    known: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    check: Callable[[Any], None] = lambda config: None
    fits: Callable[[Any], bool] = lambda config: True
    # These correct transformers' module, and a layer that has got a checkpoint's tensors.
    correct: Callable[[Any], None] = lambda module: None
    correct_layer: Callable[[Any, ModelFacts], None] = lambda layer, facts: None
    gguf: str | None = None


def setting(config: Any, name: str | None, default: float) -> float:
    """Returns a setting's value; ``default`` where a family has none."""
    return default if name is None else float(getattr(config, name))
