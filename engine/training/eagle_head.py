"""Makes new EAGLE-3 heads, and saves them in the layout in parts, which vLLM loads, too."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.training.defaults import EAGLE_RATE, EAGLE_VOCABULARY
from truedraft.engine.training.eagle_module import EagleModule, HeadShape
from truedraft.engine.training.trained_head import TrainedHead, rows_of

LAYER = "layers.0."
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
ROPE_THETA = 10_000.0


def layer_inputs(num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a target whose inputs heads read by default."""
    if num_layers < 2:
        raise ModelLoadError("a head reads states between layers, and the target has a single one")
    return 2, max(2, num_layers // 2), max(2, num_layers - 3)


class EagleHead(TrainedHead):
    """Is a new head for ``target``, which was loaded from ``path``; it is saved in ``dtype``."""

    # Heads of larger vocabularies draft the most frequent tokens only.
    most_drafted = EAGLE_VOCABULARY
    rate = EAGLE_RATE

    def __init__(self, path: str, target: FusedDecoder, dtype: torch.dtype) -> None:
        self.path = path
        self.dtype = dtype
        self.target = target
        self.embeddings = target.weights.embeddings
        self.layer_inputs = layer_inputs(target.num_layers)

    def module(self, token_ids: torch.Tensor | None) -> EagleModule:
        """Makes the head, which begins with the target's last norm and output layer."""
        weights = self.target.weights
        module = EagleModule(self._shape(self.target.vocab_size if token_ids is None else len(token_ids)))
        with torch.no_grad():
            module.lm_head.weight.copy_(rows_of(weights.head, weights.norm.weight, token_ids))
            module.norm.weight.copy_(weights.norm.weight.float())
        return module

    def save(self, folder: Path, module: nn.Module, token_ids: torch.Tensor | None) -> None:
        assert isinstance(module, EagleModule)
        named = self.layer_inputs, self.path, self.target.config, self.dtype
        save_head(folder, module, token_ids, *named)

    def _shape(self, num_drafted: int) -> HeadShape:
        config = self.target.config
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return HeadShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", heads),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            taps=len(self.layer_inputs),
            num_drafted=num_drafted,
            rope_theta=float(rope.get("rope_theta", ROPE_THETA)),
            eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        )


def save_head(
    folder: Path,
    module: EagleModule,
    token_ids: torch.Tensor | None,
    layer_inputs: tuple[int, ...],
    target: str,
    config: Any,
    dtype: torch.dtype,
) -> None:
    """Saves a head. ``config`` is the target's; the head reads the inputs of its layers ``layer_inputs``."""
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
