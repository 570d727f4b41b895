"""Has the parts that only DeepSeek needs: groups of experts, and which settings of attention fit together."""

from typing import Any

from truedraft.engine.layers.mlp import ExpertGroups


def limited_groups(config: Any) -> ExpertGroups | None:
    """Returns the groups of V2, of which those with the best single experts are chosen."""
    if config.topk_method == "greedy":
        return None
    return ExpertGroups(config.n_group, config.topk_group, num_summed=1)


def summed_groups(config: Any) -> ExpertGroups | None:
    """Returns the groups of V3, which are chosen by the sum of their two best experts."""
    return None if config.n_group == 1 else ExpertGroups(config.n_group, config.topk_group, num_summed=2)


def fits(config: Any) -> bool:
    """Tells whether ``latent`` can make this attention: every head must have keys of its own, and if keys
    have a bias, queries need one, too."""
    has_all = config.num_key_value_heads == config.num_attention_heads
    return has_all and not (config.attention_bias and config.q_lora_rank is None)
