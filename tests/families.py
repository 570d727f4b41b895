"""Decoder families as tiny random models: each architecture once, with what sets it apart switched on.

Sizes are as small as the architecture allows; windows are shorter than the tests' texts; weights are large
enough that softcaps, windows and routing change the text.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE, CONTEXT = 48, 256
STD = 0.25

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": STD,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": STD,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
INTERLEAVED = ["sliding_attention", "full_attention"]
SLIDING = {"sliding_window": 8}
# Random embeddings as large as Gemma's would repeat the last token for ever if they were the head too.
UNTIED = {"tie_word_embeddings": False}

GEMMA2: dict[str, Any] = {
    **UNTIED,
    **SLIDING,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "layer_types": INTERLEAVED,
}
GEMMA3: dict[str, Any] = {
    **UNTIED,
    **SLIDING,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": INTERLEAVED,
}
# Texts of the tests are longer than this, and shorter.
ORIGINAL = 64
# Heads of 16 numbers, which the kernels in C take.
IN_C = {"num_attention_heads": 2}


def rotary(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **values}}


def long_rotary(angles: int, **values: Any) -> dict[str, Any]:
    """Factors differ for texts beyond the original context. Phi-3 has that as a field of its own."""
    original = {"original_max_position_embeddings": ORIGINAL}
    factors = {
        "short_factor": [1.0 + i / 16 for i in range(angles)],
        "long_factor": [1.5 + i for i in range(angles)],
    }
    return {**original, **rotary("longrope", **original, **factors, **values)}


LLAMA_3 = rotary(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
YARN = rotary("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)
PARTLY_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

GRANITE_MOE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    **IN_C,
}
GPT_OSS: dict[str, Any] = {
    **SLIDING,
    **YARN,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": INTERLEAVED,
}

# Layers of both types have heads of their own size; the last ones may read what others store.
GEMMA4: dict[str, Any] = {
    **UNTIED,
    **SLIDING,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
    "layer_types": INTERLEAVED,
}
GEMMA4_E: dict[str, Any] = {
    **GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": INTERLEAVED * 2,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 5.0,
}
GEMMA4_MOE: dict[str, Any] = {
    **GEMMA4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "use_bidirectional_attention": "vision",
}

# Values are shorter than keys, whose last numbers are turned.
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
LATENT_YARN = rotary(
    "yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=0.707, mscale_all_dim=1.2
)

# Family -> (transformers' model type, what its config says beyond the common shape). Kernels in C take
# heads of 16 numbers and more.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama with scaled rotary positions": ("llama", LLAMA_3),
    "Llama with scaled rotary positions in C": ("llama", {**LLAMA_3, **IN_C}),
    "Llama, YaRN in C": ("llama", {**YARN, **IN_C}),
    "Llama, dynamic rotary positions in C": ("llama", {**rotary("dynamic", factor=2.0), **IN_C}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Mistral, sliding window": ("mistral", SLIDING),
    "Gemma": ("gemma", {**UNTIED, "head_dim": 8}),
    "Gemma 2": ("gemma2", GEMMA2),
    "Gemma 2 in C": ("gemma2", {**GEMMA2, "head_dim": 16}),
    "Gemma 3": ("gemma3_text", GEMMA3),
    "Gemma 3 in C": ("gemma3_text", {**GEMMA3, "head_dim": 16}),
    "Gemma 4 E in C": ("gemma4_text", GEMMA4_E),
    "Gemma 4 with experts in C": ("gemma4_text", GEMMA4_MOE),
    "Phi-3": ("phi3", SLIDING),
    "Phi-3 in C, part of each head rotated": (
        "phi3",
        {**SLIDING, "num_attention_heads": 2, "rope_parameters": PARTLY_ROTATED},
    ),
    "Phi-3, longrope": ("phi3", long_rotary(4)),
    "Phi-3, longrope in C": ("phi3", {**long_rotary(8), **IN_C}),
    "Phi-MoE, longrope": (
        "phimoe",
        {
            **long_rotary(4, short_mscale=1.1, long_mscale=1.3),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "MiniCPM3, longrope": (
        "minicpm3",
        {
            **long_rotary(4),
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "Ministral 3, attention temperature": (
        "ministral3",
        {
            "head_dim": 8,
            **rotary("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5),
        },
    ),
    "Phi": ("phi", {"partial_rotary_factor": 0.5}),
    "GPT-2": ("gpt2", GPT2_SHAPE),
    "GPT-BigCode": ("gpt_bigcode", GPT2_SHAPE),
    "GPT-NeoX": ("gpt_neox", {"rotary_pct": 0.5}),
    "GPT-NeoX, sequential residual": ("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": False}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "OLMo": ("olmo", {"clip_qkv": 1.0}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 2 in C": ("olmo2", IN_C),
    "OLMo 3": ("olmo3", {**SLIDING, "layer_types": INTERLEAVED}),
    "OLMo 3 in C": ("olmo3", {**SLIDING, "layer_types": INTERLEAVED, **IN_C}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "SmolLM3 in C": ("smollm3", {"no_rope_layers": [1, 0], **IN_C}),
    "StarCoder2": ("starcoder2", SLIDING),
    "Cohere": ("cohere", {"logit_scale": 0.25}),
    "Cohere 2": ("cohere2", {**SLIDING, "layer_types": INTERLEAVED}),
    "Cohere 2 in C": ("cohere2", {**SLIDING, "layer_types": INTERLEAVED, "logit_scale": 0.25, **IN_C}),
    "Granite": ("granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.5}),
    "Granite in C": (
        "granite",
        {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0, **IN_C},
    ),
    "GLM-4": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "GLM-4 in C": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "GLM in C": ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "Ernie 4.5 in C": ("ernie4_5", {**UNTIED, "head_dim": 16, "use_bias": True}),
    "Hunyuan in C": ("hunyuan_v1_dense", {"head_dim": 16}),
    "EXAONE 4": ("exaone4", {**SLIDING, "layer_types": INTERLEAVED}),
    "EXAONE 4 in C": ("exaone4", {**SLIDING, "layer_types": INTERLEAVED, **IN_C}),
    "Seed-OSS": ("seed_oss", {"head_dim": 8}),
    "Mixtral in C": ("mixtral", {**SLIDING, **IN_C, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE in C": (
        "qwen2_moe",
        {**EXPERTS, **IN_C, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "Qwen3-MoE": ("qwen3_moe", {**EXPERTS, "num_experts": 8, "head_dim": 8}),
    "Qwen3-MoE in C, one layer without experts": (
        "qwen3_moe",
        {**EXPERTS, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "OLMoE in C": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, **IN_C}),
    "GLM-4.5 in C": (
        "glm4_moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 4,
            "routed_scaling_factor": 1.5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "Granite MoE with a shared expert in C": (
        "granitemoeshared",
        {**GRANITE_MOE, "shared_intermediate_size": 24},
    ),
    "Granite MoE in C": ("granitemoe", GRANITE_MOE),
    "GPT-OSS, attention sinks": ("gpt_oss", {**GPT_OSS, "head_dim": 8}),
    "GPT-OSS in C": ("gpt_oss", {**GPT_OSS, "head_dim": 16}),
    "DeepSeek-V2 in C": ("deepseek_v2", {**LATENT, **LATENT_YARN, "topk_method": "greedy"}),
    "DeepSeek-V2 in C, groups of experts": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": 16, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "DeepSeek-V3 in C": (
        "deepseek_v3",
        {**LATENT, **LATENT_YARN, "q_lora_rank": 16, "n_group": 2, "topk_group": 1, "attention_bias": True},
    ),
    "GLM-4.7-Flash in C": (
        "glm4_moe_lite",
        {**LATENT, "q_lora_rank": 16, "v_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
    ),
}


def save_family(folder: Path, family: str, seed: int = 1) -> str:
    """A tiny random model of ``family``, saved in float32; returns the folder."""
    model_type, differences = FAMILIES[family]
    shape = {} if model_type in ("gpt2", "gpt_bigcode") else SHAPE
    return save_random(folder, model_type, {**shape, **differences}, seed)


def save_random(folder: Path, model_type: str, values: dict[str, Any], seed: int = 1) -> str:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms, biases and sinks start as constants; trained ones are not.
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * STD)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * STD)
    model.save_pretrained(folder)
    return str(folder)
