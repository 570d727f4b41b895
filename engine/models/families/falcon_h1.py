"""Says what only Falcon-H1 has: multipliers of each part of what its recurrence gets."""

from typing import Any

import torch

from truedraft.engine.models.base import ModelFacts


def fits(config: Any) -> bool:
    """Tells whether norms come after gates, and there are no biases where inputs are multiplied: those are
    not."""
    return not (
        (config.mamba_rms_norm and config.mamba_norm_before_gate)
        or (config.attention_bias and config.attention_in_multiplier != 1)
        or (config.mamba_proj_bias and config.ssm_in_multiplier != 1)
    )


def input_scales(config: Any, device: torch.device) -> torch.Tensor:
    """Returns the multipliers of [z | x | B | C | dt]."""
    return _scales_of_parts(config, device).mul_(config.ssm_in_multiplier)


def restore_scales(layer: Any, facts: ModelFacts) -> None:
    """Gives transformers' layer what checkpoints do not have, and the meta device does not."""
    layer.mamba.mup_vector = _scales_of_parts(facts.config, facts.device).to(facts.dtype)


def _scales_of_parts(config: Any, device: torch.device) -> torch.Tensor:
    inner = config.mamba_n_heads * config.mamba_d_head
    of_groups = config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, of_groups, of_groups, config.mamba_n_heads], device=device)
    return torch.tensor(config.ssm_multipliers, device=device).repeat_interleave(sizes)
