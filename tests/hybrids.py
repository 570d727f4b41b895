"""Hybrid families as tiny random models: layers that keep a running state, and layers of attention."""

from typing import Any

from tests.families import SHAPE

HYBRID = {**SHAPE, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
CONV_FIRST = {"layer_types": ["conv", "full_attention", "conv"]}
DELTA_FIRST = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def delta_net(key_heads: int, heads: int, width: int) -> dict[str, Any]:
    return {
        **HYBRID,
        **DELTA_FIRST,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": width,
    }


MAMBA_FIRST = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}


def granite(**more: Any) -> dict[str, Any]:
    return {
        **HYBRID,
        **MAMBA_FIRST,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.0,
        **more,
    }


def nemotron(*kinds: str, **more: Any) -> dict[str, Any]:
    """Clamps no dt, which transformers would do in prompts only, and its makers do not do at all."""
    values: dict[str, Any] = {key: value for key, value in HYBRID.items() if key != "num_hidden_layers"}
    return {
        **values,
        "layers_block_type": list(kinds),
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 1e-9,
        "chunk_size": 16,
        **more,
    }


def falcon(**more: Any) -> dict[str, Any]:
    return {
        **HYBRID,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.6,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.6,
        "ssm_multipliers": [0.9, 1.2, 0.5, 1.4, 0.7],
        "mlp_multipliers": [0.6, 1.3],
        **more,
    }


MAMBA, FULL = "linear_attention", "full_attention"
# Family -> (transformers' model type, its config).
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LFM2": ("lfm2", {**HYBRID, **CONV_FIRST}),
    "LFM2 with biases": ("lfm2", {**HYBRID, **CONV_FIRST, "conv_bias": True, "conv_L_cache": 4}),
    "LFM2 with experts": (
        "lfm2_moe",
        {**HYBRID, **CONV_FIRST, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "LFM3": (
        "lfm3",
        {
            **HYBRID,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_bias": True,  # gates have none
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 8,
        },
    ),
    "LFM3 without gates and norms after branches": (
        "lfm3",
        {**HYBRID, **CONV_FIRST, "head_dim": 16, "use_attention_gate": False, "use_sandwich_norm": False},
    ),
    "Qwen3.5, a value head for each key head": ("qwen3_5_text", delta_net(3, 3, 4)),
    "Qwen3.5, two value heads for each key head": ("qwen3_5_text", delta_net(2, 4, 3)),
    "Qwen3.5, three value heads for each key head": ("qwen3_5_text", delta_net(2, 6, 7)),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {**delta_net(2, 4, 4), **EXPERTS}),
    "Qwen3-Next": ("qwen3_next", {**delta_net(2, 6, 4), **EXPERTS, "mlp_only_layers": [1]}),
    "Falcon-H1": ("falcon_h1", falcon()),
    "Falcon-H1 with norms in groups, biases and an output layer": (
        "falcon_h1",
        falcon(
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_n_groups=2,
            mamba_d_conv=3,
            mamba_conv_bias=False,
            projectors_bias=True,
            mlp_bias=True,
            time_step_limit=[0.2, 1.0],
            tie_word_embeddings=True,
        ),
    ),
    "Nemotron-H": ("nemotron_h", nemotron(MAMBA, "mlp", FULL, "mlp", "mlp", MAMBA, MAMBA)),
    "Nemotron-H, an MLP first, with biases": (
        "nemotron_h",
        nemotron("mlp", MAMBA, FULL, mlp_bias=True, use_bias=True, conv_kernel=3, n_groups=1),
    ),
    "Nemotron-H with experts": (
        "nemotron_h",
        nemotron(
            *(MAMBA, "moe", FULL, "moe"),
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=2.5,
        ),
    ),
    "Granite 4 H with experts": (
        "granitemoehybrid",
        granite(num_local_experts=4, num_experts_per_tok=2, intermediate_size=24),
    ),
    "Granite 4 H": ("granitemoehybrid", granite()),
    "Granite 4 H in groups, with angles and biases": (
        "granitemoehybrid",
        granite(
            position_embedding_type="rope",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            mamba_n_groups=2,
            mamba_d_conv=3,
            mamba_proj_bias=True,
            attention_bias=True,
            time_step_limit=[0.5, 2.0],
        ),
    ),
}
