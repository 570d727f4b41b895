"""GGUF files of hybrid models, written from transformers' modules as llama.cpp's converter does it.

What it changes is written out here: norms of Qwen3.5 have one added, decay rates stand where transformers has
the logarithms of their negatives, value heads are tiled, Granite's queries and keys turn neighbours, and
what transformers joins is apart.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM

from tests.gguf_models import finish
from truedraft.engine.checkpoints.stacks import stored_tensors

ARCHITECTURES = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
}
QWEN, TILED = ("qwen35", "qwen35moe", "qwen3next"), ("qwen35", "qwen35moe")
ROOT = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
}
# Names below a layer; those of one part by default end as transformers' do.
LAYER = {
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "shared_mlp.output_linear": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "norm": "attn_norm",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    **{
        f"{module}.{theirs}": f"ssm_{ours}"
        for module in ("mamba", "mixer")
        for theirs, ours in {"in_proj": "in", "conv1d": "conv1d", "norm": "norm", "out_proj": "out"}.items()
    },
}


def save_hybrid_gguf(path: Path, folder: str, kind: str = "F32", **more: Any) -> Any:
    """Returns transformers' module with the weights that the file stands for. ``kind``: of matrices whose
    inputs are whole blocks; the others, and all that is no linear layer, are F32. ``more``: types of single
    tensors, by the ends of their names in the file; ``head`` has tensors of a layer that predicts further
    tokens, by transformers' names below it; ``alone``: with the embeddings it is all that the file has."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = module.config
    architecture = ARCHITECTURES[config.model_type]
    if architecture == "falcon-h1":
        _multiply(module)
    if architecture == "nemotron_h" and "moe" in config.layer_types:
        architecture = "nemotron_h_moe"
    writer = GGUFWriter(path, architecture)
    head, is_alone = more.pop("head", {}), more.pop("alone", False)
    _add_metadata(writer, architecture, module, 1 if head else 0)
    parameters = stored_tensors(module)
    if is_alone:
        parameters = {name: each for name, each in parameters.items() if "layers" not in name}
    if head:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
        parameters |= {f"model.layers.{config.num_hidden_layers}.{name}": each for name, each in head.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            stored = parameter.numpy()
            if "linear_attn." in name and architecture in TILED:
                stored = _tiled(name, stored, config)
            for theirs, tensor in _converted(name, stored, architecture, config):
                own = next((kind for end, kind in more.items() if theirs.endswith(end)), kind)
                block, _ = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[own]]
                is_linear = parameter.ndim == 2 and tensor.shape[-1] % block == 0
                number = GGMLQuantizationType[own if is_linear else "F32"]
                data = gguf.quantize(np.ascontiguousarray(tensor, dtype=np.float32), number)
                writer.add_tensor(theirs, data, raw_dtype=number)
                if is_linear:
                    _take_back(name, parameter, theirs, gguf.dequantize(data, number), architecture, config)
    finish(writer)
    return module


def _add_metadata(writer: GGUFWriter, architecture: str, module: Any, num_further: int) -> None:
    config = module.config
    writer.add_block_count(config.num_hidden_layers + num_further)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if architecture.startswith("nemotron_h"):
        _add_nemotron(writer, architecture, config)
        return
    if number := getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        writer.add_expert_count(number)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("qwen35moe", "qwen3next", "lfm2moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("qwen35moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "granitehybrid" and number:
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size if number else _mlp_size(module))
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    rope = config.rope_parameters or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    heads = config.num_key_value_heads
    if architecture in QWEN:
        values = config.linear_num_value_heads
        writer.add_head_count_kv(heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
        if architecture in TILED:
            writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(config.linear_value_head_dim * values)
        interval = config.layer_types.index("full_attention") + 1
        writer.add_uint32(f"{architecture}.full_attention_interval", interval)
        return
    if architecture == "falcon-h1":
        writer.add_head_count_kv(heads)
        writer.add_key_length(config.hidden_size // config.num_attention_heads)
        writer.add_value_length(config.hidden_size // config.num_attention_heads)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_d_ssm)
        return
    has_heads = [kind == "full_attention" for kind in config.layer_types]
    writer.add_array(f"{architecture}.attention.head_count_kv", [heads * each for each in has_heads])
    if architecture.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        return
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _multiply(module: Any) -> None:
    """Multiplies weights of Falcon-H1 by its settings, which become ones."""
    config, model = module.config, module.model
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "self_attn.q_proj": config.attention_in_multiplier,
        "self_attn.k_proj": config.attention_in_multiplier * config.key_multiplier,
        "self_attn.v_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "mamba.in_proj": model.layers[0].mamba.mup_vector[0].T * config.ssm_in_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "feed_forward.down_proj": config.mlp_multipliers[1],
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            base = name.rpartition(".")[0]
            parameter *= next((factor for end, factor in factors.items() if base.endswith(end)), 1.0)
    model.embedding_multiplier = model.lm_head_multiplier = 1.0
    for layer in model.layers:
        layer.attention_in_multiplier = layer.attn_out_multiplier = layer.ssm_out_multiplier = 1.0
        layer.self_attn.key_multiplier = layer.mamba.ssm_in_multiplier = 1.0
        layer.feed_forward.gate_multiplier = layer.feed_forward.down_multiplier = 1.0
        layer.mamba.mup_vector.fill_(1.0)


def _add_nemotron(writer: GGUFWriter, architecture: str, config: Any) -> None:
    has_experts = architecture == "nemotron_h_moe"
    kinds, size = (
        config.layer_types,
        config.moe_intermediate_size if has_experts else config.intermediate_size,
    )
    writer.add_feed_forward_length([size if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    if has_experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _mlp_size(module: Any) -> int:
    """Returns that of the weights, which a setting of LFM2 may make another than its config says."""
    names = [name for name in module.state_dict() if name.endswith(("w2.weight", "down_proj.weight"))]
    names += [name for name in module.state_dict() if name.endswith("shared_mlp.output_linear.weight")]
    return int(module.get_parameter(names[0]).shape[1])


def _converted(name: str, stored: Any, architecture: str, config: Any) -> list[tuple[str, Any]]:
    """Returns the file's tensors of transformers' ``name``."""
    base, _, end = name.rpartition(".")
    if base in ROOT:
        shifted = stored + 1 if architecture in QWEN and stored.ndim == 1 else stored
        return [(f"{ROOT[base]}.{end}", shifted)]
    number, inner = name.removeprefix("model.layers.").split(".", 1)
    prefix, part = f"blk.{number}", inner.rpartition(".")[0]
    of_mamba = part in ("mamba", "mixer")
    if part == "pre_ff_layernorm":
        return [(f"{prefix}.ffn_norm", stored)]
    if end == "A_log":
        rates = -np.exp(stored)
        return [(f"{prefix}.ssm_a", rates[:, None] if of_mamba else rates)]
    if end == "D":
        return [(f"{prefix}.ssm_d", stored[:, None])]
    if end in ("expert_bias", "e_score_correction_bias"):
        return [(f"{prefix}.exp_probs_b.bias", stored)]
    if end == "dt_bias":
        return [(f"{prefix}.ssm_dt.bias", stored)]
    if part == "shared_mlp.input_linear":
        gate, up = np.split(stored, 2)
        end = "_shexp" if config.num_local_experts else ""
        return [(f"{prefix}.ffn_gate{end}.weight", gate), (f"{prefix}.ffn_up{end}.weight", up)]
    if part == "shared_mlp.output_linear" and config.num_local_experts:
        return [(f"{prefix}.ffn_down_shexp.weight", stored)]
    if part == "linear_attn.in_proj_qkvz":
        return _by_kind(prefix, stored, config)
    if end == "gate_up_proj":
        gate, up = np.split(stored, 2, axis=1)
        return [(f"{prefix}.ffn_gate_exps.weight", gate), (f"{prefix}.ffn_up_exps.weight", up)]
    if end == "up_proj":
        return [(f"{prefix}.ffn_up_exps.weight", stored)]
    if end == "down_proj":
        return [(f"{prefix}.ffn_down_exps.weight", stored)]
    if part == "mlp.shared_expert_gate":
        stored = stored[0]
    theirs = LAYER[part]
    if theirs == "post_attention_norm" and architecture == "granitehybrid":
        theirs = "ffn_norm"
    if stored.ndim == 3:
        stored = stored[:, 0]
    if part in ("mamba.norm", "mixer.norm"):
        groups = config.n_groups if part == "mixer.norm" else config.mamba_n_groups
        stored = stored.reshape(groups, -1)
    if architecture in QWEN and part.endswith("norm") and part != "linear_attn.norm":
        stored = stored + 1
    if architecture == "granitehybrid" and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
        stored = stored.reshape(heads, 2, -1, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
    return [(f"{prefix}.{theirs}.{end}", stored)]


def _by_kind(prefix: str, stored: Any, config: Any) -> list[tuple[str, Any]]:
    """Orders what lies key head by key head: all queries first, then all keys, values and gates."""
    key_size, heads = config.linear_key_head_dim, config.linear_num_key_heads
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    by_head = stored.reshape(heads, -1, stored.shape[-1])
    parts = np.split(by_head, np.cumsum([key_size, key_size, values]), axis=1)
    parts = [part.reshape(-1, stored.shape[-1]) for part in parts]
    mixed, gates = np.concatenate(parts[:3]), parts[3]
    return [(f"{prefix}.attn_qkv.weight", mixed), (f"{prefix}.attn_gate.weight", gates)]


def _tiled(name: str, stored: Any, config: Any) -> Any:
    """Moves value heads: what was [key head, one of those that share it] becomes [one of those, key head]."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads

    def moved(values: Any, size: int) -> Any:
        return values.reshape(keys, heads // keys, size, -1).swapaxes(0, 1).reshape(values.shape)

    size, of_keys = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([stored[:of_keys], moved(stored[of_keys:], size)])
    if "in_proj_z" in name:
        return moved(stored, size)
    if "out_proj" in name:
        return moved(stored.T, size).T
    return stored if name.endswith("norm.weight") else moved(stored, 1)


def _take_back(name: str, parameter: Any, theirs: str, dense: Any, architecture: str, config: Any) -> None:
    """Gives the module the rounded weights: whatever was moved is found again by converting numbers."""
    numbers = np.arange(parameter.numel()).reshape(parameter.shape)
    if "linear_attn." in name and architecture in TILED:
        numbers = _tiled(name, numbers, config)
    for part, moved in _converted(name, numbers, architecture, config):
        if part == theirs:
            parameter.view(-1)[torch.from_numpy(np.ascontiguousarray(moved)).flatten()] = torch.from_numpy(
                np.ascontiguousarray(dense)
            ).flatten()
