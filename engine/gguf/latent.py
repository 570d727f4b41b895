"""Reads latent attention in GGUF files: DeepSeek's V2 and V3, and similar models.

Newer files have two tensors for the layer that makes keys and values of a latent vector. The one for keys is
transposed: llama.cpp multiplies queries by it, as our layers do.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truedraft.engine.formats.gguf_file import GgufError
from truedraft.engine.gguf.experts import LAYER
from truedraft.engine.gguf.keys import GgufKeys
from truedraft.engine.gguf.settings import without_further_layers

WHOLE = "self_attn.kv_b_proj.weight"
# Files have a tenth of the factor of YaRN's logarithm.
LOG_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """Names a file's tensors ``keys`` [heads, rank, size] and ``values`` [heads, size, rank]."""

    keys: str
    values: str

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Makes transformers' parameter of both."""
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def whole(self, keys: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
        """Returns the parameter's shape, given the shapes of the tensors."""
        heads, rank, size = keys
        return heads * (size + values[1]), rank

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors."""
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        return {
            self.keys: (heads, rank, config.qk_nope_head_dim),
            self.values: (heads, config.v_head_dim, rank),
        }


def split_heads(name: str, tensors: Collection[str]) -> SplitHeads | None:
    """Returns the tensors of which transformers' ``name`` is made; None if a file has it as one."""
    found = LAYER.fullmatch(name)
    if not found or found[2] != WHOLE:
        return None
    layer = f"blk.{found[1]}."
    if f"{layer}attn_kv_b.weight" in tensors or f"{layer}attn_k_b.weight" not in tensors:
        return None
    return SplitHeads(f"{layer}attn_k_b.weight", f"{layer}attn_v_b.weight")


def latent_settings(keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of transformers' config that describe attention and layers."""
    turned, rank = keys.needed("rope.dimension_count", int), keys.needed("attention.kv_lora_rank", int)
    key_size, value_size = (
        keys.needed("attention.key_length", int),
        keys.needed("attention.value_length", int),
    )
    size = keys.number("attention.key_length_mla", int)
    if size is not None:
        # The other keys hold the sizes of attention to latent vectors.
        if (key_size, value_size) != (rank + turned, rank):
            raise GgufError(
                f"{keys.path} has keys of {key_size} numbers and values of {value_size}, which are no latent "
                f"vectors of {rank} and {turned} numbers that are turned"
            )
        key_size, value_size = size, keys.needed("attention.value_length_mla", int)
    if not 0 < turned < key_size or turned % 2:
        raise GgufError(f"{keys.path} turns {turned} numbers of a head of {key_size}, which is not supported")
    if not keys.says("expert_count"):
        for key in ("leading_dense_block_count", "expert_feed_forward_length"):
            keys.says(key)  # Files without experts call all layers dense, and have the size of these.
    return without_further_layers(keys, found) | {
        "num_key_value_heads": found["num_attention_heads"],
        "head_dim": turned,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.number("attention.q_lora_rank", int),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key_size - turned,
        "v_head_dim": value_size,
        "rope_parameters": _rope(keys, found["rope_parameters"]),
    }


def model_type(settings: dict[str, Any]) -> str:
    """Returns transformers' type for the model of a file: one with experts, or one without."""
    if "n_routed_experts" not in settings:
        return "youtu"
    return "deepseek_v2" if settings["scoring_func"] == "softmax" else "deepseek_v3"


def _rope(keys: GgufKeys, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of angles and of scores; YaRN stretches scores with the logarithm of its
    factor."""
    if rope["rope_type"] != "yarn":
        return rope
    scale = keys.number("rope.scaling.yarn_log_multiplier", float)
    if scale is None:
        raise GgufError(
            f"{keys.path} scales its positions by yarn without {keys.prefix}rope.scaling.yarn_log_multiplier"
        )
    if keys.says("rope.scaling.attn_factor", 1.0) != 1:
        raise GgufError(
            f"{keys.path} has another {keys.prefix}rope.scaling.attn_factor than 1, which is not served"
        )
    # Angles and all other numbers are scaled alike in these models, so that the angles stay as they are.
    stretched = {name: value for name, value in rope.items() if name != "attention_factor"}
    return stretched | {"mscale": scale / LOG_SHARE, "mscale_all_dim": scale / LOG_SHARE}
