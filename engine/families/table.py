"""Lists the families that our own layers compute: transformers' names for their modules, their norms, and the
settings that count.

A family of known parts is a row here, and nothing anywhere else. GGUF files use the same rows: their tensors
have transformers' names by then (``gguf``).
"""

from dataclasses import replace
from operator import attrgetter
from typing import Any

from truedraft.engine.checkpoints.stacks import StoredExperts
from truedraft.engine.families import deepseek, falcon_h1, gemma4, nemotron_h
from truedraft.engine.families.family import (
    AttentionSpec,
    ExpertSpec,
    Family,
    MlpSpec,
    RecurrenceSpec,
)
from truedraft.engine.layers.mlp import SWISH_LIMIT, SWISH_SLOPE


def always(config: Any) -> bool:
    return True


# The window is a value of each layer, or a setting for all layers.
WINDOW, CONFIG_WINDOW = attrgetter("sliding_window"), attrgetter("config.sliding_window")
WINDOWED, CONFIG_WINDOWED = AttentionSpec(window=WINDOW), AttentionSpec(window=CONFIG_WINDOW)
EACH_NORMED, ALL_NORMED = AttentionSpec(head_norm="each"), AttentionSpec(head_norm="whole")

QWEN_3 = Family(attention=replace(WINDOWED, head_norm="each"))
QWEN_SHARED = ExpertSpec(shared="mlp.shared_expert", shared_gate="shared_expert_gate")
QWEN_3_5 = Family(
    attention=AttentionSpec(head_norm="each", gate="queries"),
    recurrence=RecurrenceSpec("linear_attn"),
    mlp=MlpSpec(activations=("silu",)),
    norms="plus one",
    known=(("output_gate_type", (None, "silu", "swish")),),
)
GEMMA = Family(norms="plus one", scales_embeddings=True)
GEMMA_2 = replace(
    GEMMA,
    attention=WINDOWED,
    mlp=MlpSpec(activation="hidden_activation"),
    mixer_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    logit_softcap="final_logit_softcapping",
)
OLMO_2 = Family(
    attention=ALL_NORMED,
    mixer_norm=None,
    mixer_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
GLM = Family(attention=AttentionSpec(interleaved=True), mlp=MlpSpec(gate_up=("gate_up_proj",)))
GRANITE = Family(
    residual_multiplier="residual_multiplier",
    embedding_multiplier="embedding_multiplier",
    logit_divisor="logits_scaling",
)
GRANITE_EXPERTS = ExpertSpec(
    block="block_sparse_moe",
    router="router",
    renormalises=always,
    stored=StoredExperts(
        renamed=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        )
    ),
)
GRANITE_SHARED = replace(
    GRANITE_EXPERTS, shared="shared_mlp", shared_gate_up=("input_linear",), shared_down="output_linear"
)
DEEPSEEK = Family(attention=AttentionSpec(has_latents=True), fits=deepseek.fits)
SIGMOIDS = ExpertSpec(
    scoring="sigmoid",
    has_wide_router=True,
    choice_bias=attrgetter("gate.e_score_correction_bias"),
    multiplier="routed_scaling_factor",
    shared="mlp.shared_experts",
)
GLM_EXPERTS = replace(SIGMOIDS, fits=lambda config: config.n_group == 1)
LFM_2 = Family(
    attention=AttentionSpec(
        output="out_proj", head_norm="each", head_norm_names=("q_layernorm", "k_layernorm")
    ),
    recurrence=RecurrenceSpec("conv"),
    mlp=MlpSpec(module="feed_forward", gate_up=("w1", "w3"), output="w2", activation=None),
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    last_norm="embedding_norm",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(gguf="llama"),
    "mistral": Family(attention=CONFIG_WINDOWED),
    "seed_oss": Family(gguf="seed_oss"),
    "smollm3": Family(attention=replace(WINDOWED, rotates=attrgetter("use_rope")), gguf="smollm3"),
    "qwen2": Family(attention=WINDOWED, gguf="qwen2"),
    "qwen3": replace(QWEN_3, gguf="qwen3"),
    "phi3": Family(
        attention=replace(CONFIG_WINDOWED, qkv=("qkv_proj",)),
        mlp=MlpSpec(gate_up=("gate_up_proj",)),
        gguf="phi3",
    ),
    "gemma": replace(GEMMA, gguf="gemma"),
    "gemma2": replace(GEMMA_2, attention=replace(WINDOWED, softcap="attn_logit_softcapping"), gguf="gemma2"),
    "gemma3_text": replace(GEMMA_2, attention=replace(WINDOWED, head_norm="each"), gguf="gemma3"),
    "olmo2": replace(OLMO_2, gguf="olmo2"),
    "olmo3": replace(OLMO_2, attention=replace(ALL_NORMED, window=WINDOW)),
    "exaone4": replace(
        OLMO_2,
        attention=AttentionSpec(
            head_norm="each",
            rotates=lambda attention: attention.is_sliding or attention.sliding_window is None,
            window=lambda attention: attention.sliding_window if attention.is_sliding else None,
        ),
        gguf="exaone4",
    ),
    "hunyuan_v1_dense": Family(
        attention=AttentionSpec(
            head_norm="each", head_norm_names=("query_layernorm", "key_layernorm"), norm_after_rotary=True
        ),
        gguf="hunyuan-dense",
    ),
    "ernie4_5": Family(attention=AttentionSpec(interleaved=True), gguf="ernie4_5"),
    "glm": replace(GLM, gguf="chatglm"),
    "glm4": replace(
        GLM,
        mixer_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        gguf="glm4",
    ),
    "cohere2": Family(
        attention=AttentionSpec(
            interleaved=True,
            rotates=lambda attention: attention.sliding_window is not None,
            window=WINDOW,
        ),
        form="parallel",
        norms="centred",
        mlp_norm=None,
        angles="running",
        logit_multiplier="logit_scale",
    ),
    "granite": replace(GRANITE, gguf="granite"),
    # These have experts, in all layers or in some.
    "mixtral": Family(
        attention=CONFIG_WINDOWED,
        experts=ExpertSpec(
            renormalises=always,
            stored=StoredExperts(((".mlp.", ".block_sparse_moe."),), ("w1", "w3"), ("w2",)),
        ),
    ),
    "qwen2_moe": Family(
        # transformers has the window in a mask only.
        experts=replace(QWEN_SHARED, fits=lambda config: not config.use_sliding_window),
        gguf="qwen2moe",
    ),
    "qwen3_moe": replace(QWEN_3, experts=ExpertSpec(), gguf="qwen3moe"),
    "olmoe": Family(
        attention=ALL_NORMED,
        experts=ExpertSpec(fits=lambda config: config.clip_qkv is None),
        gguf="olmoe",
    ),
    "glm4_moe": Family(
        attention=EACH_NORMED,
        experts=GLM_EXPERTS,
        gguf="glm4moe",
    ),
    "glm4_moe_lite": replace(DEEPSEEK, experts=GLM_EXPERTS),
    "youtu": DEEPSEEK,
    "deepseek_v2": replace(
        DEEPSEEK,
        experts=ExpertSpec(
            has_wide_router=True,
            renormalises=lambda config: False,
            multiplier="routed_scaling_factor",
            groups=deepseek.limited_groups,
            shared="mlp.shared_experts",
            fits=lambda config: config.topk_method in ("greedy", "group_limited_greedy"),
        ),
        angles="once",
        # Makers' code looks at these settings; transformers does not.
        known=(
            ("norm_topk_prob", (None, False)),
            ("scoring_func", (None, "softmax")),
            ("moe_layer_freq", (None, 1)),
        ),
    ),
    "deepseek_v3": replace(
        DEEPSEEK,
        experts=replace(SIGMOIDS, added_to_sum=1e-20, groups=deepseek.summed_groups),
        known=(
            ("topk_method", (None, "noaux_tc")),
            ("scoring_func", (None, "sigmoid")),
            ("moe_layer_freq", (None, 1)),
        ),
        gguf="deepseek2",
    ),
    "granitemoe": replace(GRANITE, experts=GRANITE_EXPERTS),
    "granitemoeshared": replace(GRANITE, experts=GRANITE_SHARED, gguf="granitemoe"),
    "gpt_oss": Family(
        attention=replace(WINDOWED, has_sinks=True),
        experts=ExpertSpec(
            router="router",
            renormalises=always,
            activation="clamped_swish",
            reads_pairs=True,
            fits=lambda config: (config.swiglu_alpha, config.swiglu_limit) == (SWISH_SLOPE, SWISH_LIMIT),
            stored=StoredExperts(gate_up=(), down=()),
        ),
        angles="once",
        gguf="gpt-oss",
    ),
    "gemma4_text": replace(
        GEMMA_2,
        attention=replace(WINDOWED, head_norm="each", complete=gemma4.complete_shape),
        # The router's norm, and the factors of its weights, are made together with the layer.
        experts=ExpertSpec(
            block="",
            router="router.proj",
            chosen="top_k_experts",
            renormalises=always,
            stored=StoredExperts(gate_up=(), down=()),
        ),
        norms="float32",
        complete=gemma4.complete_layer,
        angles="turned",
        fits=gemma4.fits,
        gguf="gemma4",
    ),
    # These have a running state, in all layers or in some.
    "lfm2": replace(LFM_2, gguf="lfm2"),
    "lfm2_moe": replace(
        LFM_2,
        experts=ExpertSpec(
            block="feed_forward",
            scoring="sigmoid",
            added_to_sum=1e-6,
            choice_bias=lambda block: getattr(block, "expert_bias", None),
            multiplier="routed_scaling_factor",
            stored=StoredExperts((), ("w1", "w3"), ("w2",)),
        ),
        rotary="pos_emb",
        gguf="lfm2moe",
    ),
    "lfm3": replace(
        LFM_2,
        attention=replace(WINDOWED, head_norm="each", gate="heads"),
        mixer_post_norm="post_operator_norm",
        mlp_post_norm="post_ffn_norm",
    ),
    "qwen3_5_text": replace(QWEN_3_5, gguf="qwen35"),
    "qwen3_5_moe_text": replace(
        QWEN_3_5, experts=replace(QWEN_SHARED, renormalises=always), gguf="qwen35moe"
    ),
    "qwen3_next": replace(QWEN_3_5, experts=QWEN_SHARED, gguf="qwen3next"),
    "granitemoehybrid": replace(
        GRANITE,
        attention=AttentionSpec(rotates=lambda attention: attention.config.position_embedding_type == "rope"),
        recurrence=RecurrenceSpec("mamba"),
        mlp=MlpSpec(
            module="shared_mlp", gate_up=("input_linear",), output="output_linear", activations=("silu",)
        ),
        experts=GRANITE_SHARED,
        gguf="granitehybrid",
    ),
    "falcon_h1": Family(
        attention=AttentionSpec(
            input_multiplier="attention_in_multiplier",
            output_multiplier="attention_out_multiplier",
            key_multiplier="key_multiplier",
        ),
        recurrence=RecurrenceSpec("mamba", falcon_h1.input_scales, "ssm_out_multiplier"),
        mlp=MlpSpec(module="feed_forward", activations=("silu",), multipliers="mlp_multipliers"),
        form="parallel mixers",
        mlp_norm="pre_ff_layernorm",
        table_multiplier="embedding_multiplier",
        last_norm="final_layernorm",
        logit_multiplier="lm_head_multiplier",
        check=falcon_h1.check,
        correct_layer=falcon_h1.restore_scales,
        gguf="falcon-h1",
    ),
    "nemotron_h": Family(
        attention=AttentionSpec(module="mixer", rotates=lambda attention: False),
        recurrence=RecurrenceSpec("mixer"),
        mlp=MlpSpec(
            module="mixer", gate_up=("up_proj",), activation="mlp_hidden_act", activations=("relu2",)
        ),
        experts=ExpertSpec(
            block="mixer",
            scoring="sigmoid",
            has_wide_router=True,
            choice_bias=attrgetter("gate.e_score_correction_bias"),
            multiplier="routed_scaling_factor",
            gate_up="up_proj",
            shared="mixer.shared_experts",
            shared_gate_up=("up_proj",),
            stored=StoredExperts((("model.", "backbone."),), ("up_proj",)),
        ),
        form="one branch",
        mixer_norm="norm",
        mlp_norm=None,
        embeddings="embeddings",
        last_norm="norm_f",
        known=(
            ("mamba_hidden_act", ("silu",)),
            ("tie_word_embeddings", (False,)),
            ("moe_latent_size", (None,)),
            ("n_group", (1,)),
        ),
        correct=nemotron_h.keep_limits,
        gguf="nemotron_h",
    ),
}
