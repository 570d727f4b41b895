"""Reads experts in GGUF files: their keys, and the stacks of which transformers' parameters are made."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.gguf.keys import GgufKeys

# Files of the first architectures have experts, those of the second may have some: a llama with experts is
# transformers' mixtral.
WITH_EXPERTS = (
    "qwen2moe",
    "qwen3moe",
    "qwen35moe",
    "olmoe",
    "gpt-oss",
    "glm4moe",
    "granitemoe",
    "lfm2moe",
    "qwen3next",
    "nemotron_h_moe",
)
MAY_HAVE_EXPERTS = ("llama", "granitehybrid", "gemma4", "deepseek2")
# The output layer of these is never the embeddings.
NEVER_TIED = ("qwen2moe", "olmo2", "olmoe", "gpt-oss")
# llama.cpp numbers the ways to score experts, and knows each architecture's default; 0 means the default.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
SCORINGS = {
    "gpt-oss": (0, SOFTMAX_OF_CHOSEN),
    "glm4moe": (0, SIGMOID),
    "deepseek2": (0, SOFTMAX, SIGMOID),
    "lfm2moe": (SIGMOID,),
    "nemotron_h_moe": (0, SIGMOID),
}
# These facts identify GLM-4.7-Flash: its number of layers, with and without the one that predicts further
# tokens, and of tokens.
GLM_LAYERS, GLM_TOKENS = (47, 48), 154880
# The package's table has these tensors under other architectures' names, or not at all.
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OTHERS = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
# These are the parameters of stacks, inside a layer's module.
STACKS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.up_proj": ("ffn_up_exps.weight",),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
}
# Files may have gates and the matrices that they gate in one tensor, in the order of most of transformers'
# parameters.
JOINED = {"experts.gate_up_proj": "ffn_gate_up_exps.weight"}


@dataclass(frozen=True, slots=True)
class GgufStack:
    """Names the tensors of which transformers' parameter is made: their outputs lie one after the other.
    ``is_turned`` says that the outputs alternate there, and that the parameter has in features before out
    features."""

    parts: tuple[str, ...]
    is_turned: bool

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of each part of a parameter of the shape ``whole``."""
        number, *matrix = whole
        rows, *columns = matrix[::-1] if self.is_turned else matrix
        return number, rows // len(self.parts), *columns

    def whole(self, parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the shape of the parameter that has parts of these shapes."""
        number, _, *columns = parts[0]
        matrix = [sum(shape[1] for shape in parts), *columns]
        return number, *(matrix[::-1] if self.is_turned else matrix)

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Makes the parameter of its parts."""
        if not self.is_turned:
            return torch.cat([*tensors], dim=1)
        joined = torch.stack([*tensors], dim=2).flatten(1, 2)
        return joined.transpose(1, 2).contiguous() if joined.dim() == 3 else joined


def tensor_of(name: str) -> str | None:
    """Returns a file's name for transformers' ``name``, if that is no weight or bias of a module."""
    found = LAYER.fullmatch(name)
    return f"blk.{found[1]}.{OTHERS[found[2]]}" if found and found[2] in OTHERS else None


def stack_of(name: str, file: GgufFile) -> GgufStack | None:
    """Returns the tensors of transformers' ``name``; None if it is not a parameter of all experts."""
    found = LAYER.fullmatch(name)
    if not found:
        return None
    # Layers of Gemma 4 have their experts without a block around them.
    own = found[2] if found[2] in STACKS else found[2].partition(".")[2]
    if own not in STACKS:
        return None
    layer, is_turned = f"blk.{found[1]}.", file.architecture == "gpt-oss"
    if (joined := f"{layer}{JOINED.get(own)}") in file.tensors and not is_turned:
        return GgufStack((joined,), is_turned)
    return GgufStack(tuple(f"{layer}{part}" for part in STACKS[own]), is_turned)


def has_experts(keys: GgufKeys, architecture: str) -> bool:
    return architecture in WITH_EXPERTS or (
        architecture in MAY_HAVE_EXPERTS and bool(keys.says("expert_count", 0))
    )


def _grouped(keys: GgufKeys, scoring: int, found: dict[str, Any]) -> dict[str, Any]:
    """Returns how DeepSeek's experts are scored, and their groups. Files that do not name a way of scoring
    mean softmax, except GLM-4.7-Flash."""
    layers = found["num_hidden_layers"] + found["num_further_layers"]
    is_glm = layers in GLM_LAYERS and found["vocab_size"] == GLM_TOKENS
    groups = keys.says("expert_group_count") or 1
    settings = {"n_group": groups, "topk_group": keys.says("expert_group_used_count") or 1}
    if scoring == SIGMOID or (scoring == 0 and is_glm):
        return settings | {"scoring_func": "sigmoid"}
    if keys.says("expert_weights_norm", False):
        raise GgufError(
            f"{keys.path} renormalises weights of experts that softmax scores, which is not served"
        )
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return settings | {"scoring_func": "softmax", "topk_method": method}


def expert_settings(keys: GgufKeys, architecture: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns settings of transformers' config; raises ``GgufError`` for settings that are not served."""
    number, chosen = keys.needed("expert_count", int), keys.needed("expert_used_count", int)
    if chosen > number:
        raise GgufError(f"{keys.path} is damaged: tokens cannot take {chosen} of {number} experts")
    scoring, own = keys.says("expert_gating_func", 0), SCORINGS.get(architecture, (0, SOFTMAX))
    if scoring not in own:
        served = " or ".join(map(str, own))
        raise GgufError(f"{keys.path} has {keys.prefix}expert_gating_func {scoring}; only {served} is served")
    settings: dict[str, Any] = {"num_experts_per_tok": chosen}
    if architecture in ("llama", "olmoe", "granitemoe"):
        keys.expect("expert_feed_forward_length", found["intermediate_size"])
        if architecture == "granitemoe":
            settings["shared_intermediate_size"] = keys.says("expert_shared_feed_forward_length", 0)
        return settings | {"num_experts" if architecture == "olmoe" else "num_local_experts": number}
    if architecture == "gemma4":
        return {
            "enable_moe_block": True,
            "num_experts": number,
            "top_k_experts": chosen,
            "moe_intermediate_size": keys.needed("expert_feed_forward_length", int),
        }
    if architecture == "granitehybrid":
        shared = keys.needed("expert_shared_feed_forward_length", int)
        return settings | {"num_local_experts": number, "shared_intermediate_size": shared}
    if architecture in ("glm4moe", "deepseek2"):
        settings |= {
            "n_routed_experts": number,
            "moe_intermediate_size": keys.needed("expert_feed_forward_length", int),
            "n_shared_experts": keys.needed("expert_shared_count", int),
            "first_k_dense_replace": keys.says("leading_dense_block_count", 0),
            "routed_scaling_factor": keys.says("expert_weights_scale") or 1.0,
            "norm_topk_prob": keys.says("expert_weights_norm", False),
        }
        return settings | (_grouped(keys, scoring, found) if architecture == "deepseek2" else {})
    size = keys.number("expert_feed_forward_length", int)
    if architecture == "gpt-oss":
        if size is None:
            raise GgufError(f"{keys.path} does not say its model's {architecture}.expert_feed_forward_length")
        return settings | {"num_local_experts": number, "intermediate_size": size}
    if architecture == "nemotron_h_moe":
        keys.says("expert_shared_count")  # Shared experts are one MLP of this size.
        return settings | {
            "n_routed_experts": number,
            "moe_intermediate_size": size or found["intermediate_size"] // chosen,
            "moe_shared_expert_intermediate_size": keys.needed("expert_shared_feed_forward_length", int),
            "norm_topk_prob": keys.says("expert_weights_norm", False),
            "routed_scaling_factor": keys.says("expert_weights_scale") or 1.0,
        }
    # Files of Qwen3.5 without dense layers may leave out the size of these.
    dense = found.get("intermediate_size", 0)
    size = size or dense // chosen
    if not size:
        raise GgufError(f"{keys.path} does not say its model's {architecture}.expert_feed_forward_length")
    settings |= {"num_experts": number, "moe_intermediate_size": size}
    if architecture == "lfm2moe":
        return settings | {"num_dense_layers": keys.says("leading_dense_block_count", 0)}
    if architecture == "qwen3moe":
        return settings | {"norm_topk_prob": True}
    shared = keys.number("expert_shared_feed_forward_length", int, dense)
    # llama.cpp renormalises the weights of Qwen3-Next whatever a file says, but not those of Qwen2-MoE.
    settings |= {"norm_topk_prob": True} if architecture == "qwen3next" else {}
    return settings | {"shared_expert_intermediate_size": shared}
