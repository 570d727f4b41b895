"""Describes transformers' modules that keep a running state as our recurrences."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.families.family import RecurrenceSpec, setting
from truedraft.engine.families.head_order import to_tiled
from truedraft.engine.families.linear import Make, Rows, Source
from truedraft.engine.layers.decoder import Recurrent
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.recurrent_state import RecurrentCache


def make_recurrence(
    spec: RecurrenceSpec,
    module: Any,
    index: int,
    facts: ModelFacts,
    make: Make,
    residual: float,
    is_tiled: bool,
) -> Recurrent:
    """Describes ``module``, the mixer number ``index``; its output is multiplied by ``residual`` before it is
    added to the hidden states. ``is_tiled`` says that the value heads of the linear layers are tiled."""
    rule, inputs = _describe(module, index, is_tiled)
    config, device = facts.config, facts.device
    channels, width = rule.convolution.weight.shape
    return Recurrent(
        recurrence=rule,
        inputs=make(inputs, 1.0),
        output=make([module.out_proj], residual * setting(config, spec.output_multiplier, 1.0)),
        cache=RecurrentCache(channels, width, rule.state, device),
        scales=None if spec.input_scales is None else spec.input_scales(config, device),
    )


def is_recurrence(module: nn.Module) -> bool:
    """Tells whether a mixer keeps a running state, which it does if it has a convolution."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def _describe(module: Any, index: int, is_tiled: bool) -> tuple[Recurrence, list[Source]]:
    """Returns the recurrence, and the linear layers that make its inputs."""
    if not hasattr(module, "A_log"):
        return ShortConv(index, _convolution(module.conv)), [module.in_proj]
    return _mamba2(module, index) if hasattr(module, "D") else _delta_rule(module, index, is_tiled)


def _delta_rule(module: Any, index: int, is_tiled: bool) -> tuple[Recurrence, list[Source]]:
    def ordered(values: torch.Tensor) -> torch.Tensor:
        return to_tiled(values, module.num_k_heads, module.num_v_heads) if is_tiled else values

    keys, convolution = 2 * module.key_dim, _convolution(module.conv1d, silu=True)
    weight = torch.cat([convolution.weight[:keys], ordered(convolution.weight[keys:])])
    rule = DeltaRule(
        layer=index,
        convolution=replace(convolution, weight=weight),
        key_heads=module.num_k_heads,
        heads=module.num_v_heads,
        key_size=module.head_k_dim,
        value_size=module.head_v_dim,
        decay_rate=ordered(-module.A_log.detach().float().exp()),
        dt_bias=ordered(module.dt_bias.detach().float()),
        tiled=is_tiled,
        norm=Norm(module.norm.weight.detach().float(), module.norm.variance_epsilon),
    )
    if hasattr(module, "in_proj_qkv"):
        return rule, [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
    return rule, _by_key_head(module)


def _by_key_head(module: Any) -> list[Source]:
    """Reorders linear layers that compute all inputs of the first key head, then all of the second
    (Qwen3-Next)."""
    keys, shared = module.head_k_dim, module.num_v_heads // module.num_k_heads
    values = shared * module.head_v_dim

    def ordered(linear: nn.Linear, *ends: int) -> Rows:
        rows = np.arange(linear.out_features).reshape(module.num_k_heads, -1)
        return Rows(linear, np.concatenate([part.ravel() for part in np.split(rows, ends, axis=1)]))

    return [
        ordered(module.in_proj_qkvz, keys, 2 * keys, 2 * keys + values),
        ordered(module.in_proj_ba, shared),
    ]


def _mamba2(module: Any, index: int) -> tuple[Recurrence, list[Source]]:
    norm = None
    if type(module.norm) is not nn.Identity:
        norm = Norm(module.norm.weight.detach().float(), module.norm.variance_epsilon)
    rule = Mamba2(
        layer=index,
        convolution=_convolution(module.conv1d, silu=True),
        heads=module.num_heads,
        head_size=module.head_dim,
        groups=module.n_groups,
        state_size=module.ssm_state_size,
        decay_rate=-module.A_log.detach().float().exp(),
        skip=module.D.detach().float(),
        dt_bias=module.dt_bias.detach().float(),
        dt_limits=module.time_step_limit,
        norm=norm,
        norm_groups=module.n_groups,
    )
    return rule, [module.in_proj]


def _convolution(module: Any, *, silu: bool = False) -> Convolution:
    bias = None if module.bias is None else module.bias.detach().float()
    return Convolution(module.weight.detach().float().squeeze(1).contiguous(), bias, silu)
