"""Writes a trained head in the layout in parts, which vLLM loads, too."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from truedraft.engine.training.eagle_module import EagleModule

LAYER = "layers.0."
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def save_head(
    folder: Path,
    module: EagleModule,
    token_ids: torch.Tensor | None,
    layer_inputs: tuple[int, ...],
    target: str,
    config: Any,
    dtype: torch.dtype,
) -> None:
    """``config`` is the target's, whose layers ``layer_inputs`` have what the head reads as their inputs."""
    tensors = {_name(name): tensor.to("cpu", dtype) for name, tensor in module.state_dict().items()}
    if token_ids is not None:
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[token_ids.cpu()] = True
        tensors |= {"d2t": token_ids.cpu() - torch.arange(len(token_ids)), "t2d": is_drafted}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    described = _config(module, layer_inputs, target, config, dtype)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _name(parameter: str) -> str:
    first = parameter.split(".")[0]
    if first in ATTENTION:
        return f"{LAYER}self_attn.{parameter}"
    if first in MLP:
        return f"{LAYER}mlp.{parameter}"
    return LAYER + parameter if first in NORMS else parameter


def _config(
    module: EagleModule, layer_inputs: tuple[int, ...], target: str, config: Any, dtype: torch.dtype
) -> dict[str, Any]:
    shape = module.shape
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": target, "architectures": list(config.architectures or ())},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.num_drafted,
        "target_hidden_size": shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(layer_inputs),
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
