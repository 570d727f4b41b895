"""What is DeepSeek's alone: how experts are grouped, and which settings of attention fit together."""

from typing import Any

from truedraft.engine.layers.mlp import ExpertGroups


def limited_groups(config: Any) -> ExpertGroups | None:
    """Returns V2's groups: those with the best experts are chosen."""
    if config.topk_method == "greedy":
        return None
    return ExpertGroups(config.n_group, config.topk_group, num_summed=1)


def summed_groups(config: Any) -> ExpertGroups | None:
    """Returns V3's groups, which are chosen by their two best experts."""
    return None if config.n_group == 1 else ExpertGroups(config.n_group, config.topk_group, num_summed=2)


def fits(config: Any) -> bool:
    """Tells whether attention is as ``latent`` makes it: every head has keys of its own, and where keys have
    a bias, queries have one."""
    has_all = config.num_key_value_heads == config.num_attention_heads
    return has_all and not (config.attention_bias and config.q_lora_rank is None)
