"""Handles what only Falcon-H1 has: multipliers for each part of its recurrence's inputs."""

from typing import Any

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.errors import ModelLoadError


def check(config: Any) -> None:
    """Raises ``ModelLoadError`` for norms before gates, and for biases of layers whose inputs are multiplied,
    as the multiplier would reach the bias."""
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise ModelLoadError(
            "falcon_h1 models with mamba_rms_norm and mamba_norm_before_gate cannot be served: only norms "
            "after gates are known"
        )
    for bias, multiplier in (
        ("attention_bias", "attention_in_multiplier"),
        ("mamba_proj_bias", "ssm_in_multiplier"),
    ):
        if getattr(config, bias) and getattr(config, multiplier) != 1:
            raise ModelLoadError(
                f"falcon_h1 models with {bias} and {multiplier} {getattr(config, multiplier)} cannot be "
                "served: only 1.0 is known with a bias"
            )


def input_scales(config: Any, device: torch.device) -> torch.Tensor:
    """Returns the multipliers of [z | x | B | C | dt]."""
    return _scales_of_parts(config, device).mul_(config.ssm_in_multiplier)


def restore_scales(layer: Any, facts: ModelFacts) -> None:
    """Gives transformers' layer the buffers that checkpoints do not have and the meta device loses."""
    layer.mamba.mup_vector = _scales_of_parts(facts.config, facts.device).to(facts.dtype)


def _scales_of_parts(config: Any, device: torch.device) -> torch.Tensor:
    inner = config.mamba_n_heads * config.mamba_d_head
    of_groups = config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, of_groups, of_groups, config.mamba_n_heads], device=device)
    return torch.tensor(config.ssm_multipliers, device=device).repeat_interleave(sizes)
