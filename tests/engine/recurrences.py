"""Small recurrences with random weights, and what they compute by definition, token by token in float64."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.recurrent_state import RecurrentCache

CPU = torch.device("cpu")


def short_conv(width: int, layer: int = 0) -> ShortConv:
    return ShortConv(layer, Convolution(torch.randn(12, width)))


def delta_rule(
    shared: int, width: int, *, tiled: bool = False, layer: int = 0, key_heads: int = 4
) -> DeltaRule:
    """Makes one with ``shared`` heads for each key head."""
    key_size, value_size = 8, 16
    heads = shared * key_heads
    channels = 2 * key_heads * key_size + heads * value_size
    return DeltaRule(
        layer=layer,
        convolution=Convolution(torch.randn(channels, width), silu=True),
        key_heads=key_heads,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        decay_rate=-torch.rand(heads),
        dt_bias=torch.randn(heads),
        norm=Norm(torch.rand(value_size), 1e-6),
        tiled=tiled,
    )


def mamba2(groups: int, norm_groups: int | None, width: int = 4, layer: int = 0, heads: int = 8) -> Mamba2:
    head_size, state_size = 8, 16
    inner = heads * head_size
    channels = inner + 2 * groups * state_size
    return Mamba2(
        layer=layer,
        convolution=Convolution(torch.randn(channels, width), torch.randn(channels), silu=True),
        heads=heads,
        head_size=head_size,
        groups=groups,
        state_size=state_size,
        decay_rate=-torch.rand(heads),
        skip=torch.randn(heads),
        dt_bias=torch.randn(heads),
        dt_limits=(0.1, 0.8),
        norm=None if norm_groups is None else Norm(torch.rand(inner), 1e-5),
        norm_groups=norm_groups or 1,
    )


MAKERS: dict[str, Callable[[], Recurrence]] = {
    "short convolution of 3": lambda: short_conv(3),
    "short convolution of 7": lambda: short_conv(7),
    "delta rule, 1 head a key": lambda: delta_rule(1, 4),
    "delta rule, 2 heads a key": lambda: delta_rule(2, 4),
    "delta rule, 3 tiled heads a key": lambda: delta_rule(3, 4, tiled=True),
    "Mamba 2": lambda: mamba2(1, 1),
    "Mamba 2 in groups": lambda: mamba2(2, 2, width=3),
    "Mamba 2 without a norm": lambda: mamba2(4, None),
}


def state_cache(rule: Recurrence, num_slots: int) -> KVCache:
    """Returns a cache whose slots are full of what must not be read."""
    channels, width = rule.convolution.weight.shape
    cache = KVCache([RecurrentCache(channels, width, rule.state, CPU)], 1, 1, num_slots)
    for tensor in cache.states[0].tensors:
        tensor.fill_(torch.nan)
    return cache


def table_in(slot: int) -> BlockTable:
    table = BlockTable()
    table.state_slot = slot
    return table


def by_definition(rule: Recurrence, x: torch.Tensor) -> torch.Tensor:
    """Computes a whole text [tokens, inputs] in float64."""
    x = x.double()
    match rule:
        case ShortConv():
            before, after, inner = x.chunk(3, dim=1)
            return after * _convolved(rule.convolution, before * inner)
        case DeltaRule():
            return _delta_rule(rule, x)
        case Mamba2():
            return _mamba2(rule, x)


def _convolved(convolution: Convolution, x: torch.Tensor) -> torch.Tensor:
    weight = convolution.weight.double()
    padded = F.pad(x.T[None], (weight.shape[1] - 1, 0))
    bias = None if convolution.bias is None else convolution.bias.double()
    summed = F.conv1d(padded, weight[:, None], bias, groups=len(weight))[0].T
    return F.silu(summed) if convolution.silu else summed


def _delta_rule(rule: DeltaRule, x: torch.Tensor) -> torch.Tensor:
    keys, values = rule.key_heads * rule.key_size, rule.heads * rule.value_size
    mixed, z, b, a = x.split_with_sizes((2 * keys + values, values, rule.heads, rule.heads), 1)
    query, key, value = _convolved(rule.convolution, mixed).split_with_sizes((keys, keys, values), 1)
    decays = torch.exp(rule.decay_rate * F.softplus(a + rule.dt_bias))
    states = torch.zeros(rule.heads, rule.key_size, rule.value_size, dtype=torch.float64)
    rows = []
    for token in range(len(x)):
        for head in range(rule.heads):
            shared = rule.heads // rule.key_heads
            which = head % rule.key_heads if rule.tiled else head // shared
            k, q = (each[token].view(rule.key_heads, -1)[which] for each in (key, query))
            k, q = (each / (each.square().sum() + 1e-6).sqrt() for each in (k, q))
            state = decays[token, head] * states[head]
            v = value[token].view(rule.heads, -1)[head]
            states[head] = state + torch.outer(k, b[token, head].sigmoid() * (v - k @ state))
            output = (q * rule.key_size**-0.5) @ states[head]
            normed = output * (output.square().mean() + rule.norm.eps).rsqrt() * rule.norm.weight
            rows.append(normed * F.silu(z[token].view(rule.heads, -1)[head]))
    return torch.stack(rows).view(len(x), -1)


def _mamba2(rule: Mamba2, x: torch.Tensor) -> torch.Tensor:
    inner, of_groups = rule.heads * rule.head_size, rule.groups * rule.state_size
    z, mixed, dt = x.split_with_sizes((inner, inner + 2 * of_groups, rule.heads), 1)
    parts = _convolved(rule.convolution, mixed).split_with_sizes((inner, of_groups, of_groups), 1)
    dt = F.softplus(dt + rule.dt_bias).clamp(*rule.dt_limits)
    states = torch.zeros(rule.heads, rule.head_size, rule.state_size, dtype=torch.float64)
    rows = []
    for token in range(len(x)):
        outputs = []
        for head in range(rule.heads):
            group = head // (rule.heads // rule.groups)
            value = parts[0][token].view(rule.heads, -1)[head]
            b, c = (each[token].view(rule.groups, -1)[group] for each in parts[1:])
            decay = torch.exp(dt[token, head] * rule.decay_rate[head])
            states[head] = decay * states[head] + torch.outer(dt[token, head] * value, b)
            outputs.append(states[head] @ c + rule.skip[head] * value)
        rows.append(torch.cat(outputs))
    output = torch.stack(rows) * F.silu(z)
    if rule.norm is None:
        return output
    grouped = output.view(len(x), rule.norm_groups, -1)
    normed = grouped * (grouped.square().mean(-1, keepdim=True) + rule.norm.eps).rsqrt()
    return normed.flatten(1) * rule.norm.weight
