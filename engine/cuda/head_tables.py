"""Makes tables of the linear layers of heads at load, in the way ``expert_tables`` makes those of experts."""

from dataclasses import replace

import torch

from truedraft.engine.cuda.expert_tables import CHECKED_TOKENS, are_right, grouped_linear
from truedraft.engine.cuda.grouped_experts import ExpertKernels
from truedraft.engine.cuda.grouped_heads import GroupedHeads, every_head, run_heads
from truedraft.engine.layers.decoder import Attention, DecoderLayer, DecoderWeights
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.layers.mlp import HeadLinears
from truedraft.engine.layers.torch_run import TorchPointwise


def with_grouped_heads(
    weights: DecoderWeights,
    kernels: ExpertKernels,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
) -> DecoderWeights:
    """Returns the decoder with grouped heads where there are layers of heads, and the kernels are right."""
    layers = [_grouped(layer, dtype) for layer in weights.layers]
    distinct = {
        _shape(heads): heads for layer in layers for heads in _heads(layer) if isinstance(heads, GroupedHeads)
    }
    checks = (_is_right(kernels, heads, dtype, device, tolerance) for heads in distinct.values())
    return replace(weights, layers=layers) if are_right("heads", checks) else weights


def _heads(layer: DecoderLayer) -> tuple[HeadLinears, ...]:
    projections = [mixer.qkv for mixer in layer.mixers if isinstance(mixer, Attention)]
    latents = [each for each in projections if isinstance(each, LatentProjection)]
    return tuple(heads for each in latents for heads in (each.key_up, each.value_up))


def _grouped(layer: DecoderLayer, dtype: torch.dtype) -> DecoderLayer:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or not isinstance(mixer.qkv, LatentProjection):
        return layer
    key_up, value_up = (_with_table(each, dtype) for each in (mixer.qkv.key_up, mixer.qkv.value_up))
    return replace(layer, mixer=replace(mixer, qkv=replace(mixer.qkv, key_up=key_up, value_up=value_up)))


def _with_table(heads: HeadLinears, dtype: torch.dtype) -> HeadLinears:
    table = grouped_linear(heads.linears, dtype)
    return heads if table is None else GroupedHeads(heads.linears, table)


def _shape(heads: GroupedHeads) -> tuple[object, ...]:
    """Returns the sizes for which programs are compiled."""
    has_bias = heads.table.bias is not None
    return (
        len(heads.linears),
        has_bias,
        *((each.rows, each.in_features, each.type) for each in heads.table.parts),
    )


@torch.inference_mode()
def _is_right(
    kernels: ExpertKernels, heads: GroupedHeads, dtype: torch.dtype, device: torch.device, tolerance: float
) -> bool:
    """Tells whether the kernels compute what the layers are by definition."""
    number, size = len(heads.linears), heads.table.parts[0].in_features
    generator = torch.Generator().manual_seed(size)
    for num_tokens in CHECKED_TOKENS:
        x = torch.randn(num_tokens, number, size, generator=generator).to(device, dtype)
        ours = run_heads(kernels, heads, x, every_head(num_tokens, number, device))
        theirs = heads.by_definition(x, TorchPointwise())
        if not ((ours - theirs).abs().max() <= tolerance * theirs.abs().max()).item():
            return False
    return True
