"""Latent attention in GGUF files for tests: DeepSeek's metadata, and what makes keys and values in two."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")


def add_metadata(writer: GGUFWriter, config: Any, is_split: bool) -> None:
    """Writes sizes as llama.cpp's converter does, or as it did before it split the tensors."""
    turned, rank, rope = config.qk_rope_head_dim, config.kv_lora_rank, config.rope_parameters
    key_size = turned + config.qk_nope_head_dim
    writer.add_head_count_kv(1 if is_split else config.num_attention_heads)
    writer.add_key_length(rank + turned if is_split else key_size)
    writer.add_value_length(rank if is_split else config.v_head_dim)
    if is_split:
        writer.add_key_length_mla(key_size)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(turned)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if rope["rope_type"] == "yarn":
        assert rope["mscale"] == rope["mscale_all_dim"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    is_dense = config.model_type == "youtu"
    writer.add_leading_dense_block_count(config.num_hidden_layers if is_dense else 1)
    if is_dense:
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(bool(getattr(config, "norm_topk_prob", False)))
    is_softmax = config.model_type == "deepseek_v2"
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SOFTMAX if is_softmax else gguf.ExpertGatingFuncType.SIGMOID
    )


def split(name: str, parameter: torch.Tensor, config: Any) -> Iterator[tuple[str, np.ndarray, torch.Tensor]]:
    """Yields what a file has of ``parameter``: a name, the numbers, and a view of the parameter of the same
    shape, to take back what the file stands for."""
    layer, others = f"blk.{name.split('.')[2]}", config.qk_nope_head_dim
    heads = parameter.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads[:, :others].transpose(1, 2), heads[:, others:]
    for part, view in (("k", keys), ("v", values)):
        yield f"{layer}.attn_{part}_b.weight", np.ascontiguousarray(view.numpy()), view
