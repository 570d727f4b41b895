"""Bounds the memory that a step of prompts needs on a GPU, next to weights, caches and graphs, by shapes."""

from collections.abc import Iterable

from truedraft.engine.cuda.grouped_experts import GroupedExperts
from truedraft.engine.cuda.quantised import UNPACKED
from truedraft.engine.layers.decoder import Attention
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.memory.recurrent_state import RecurrentCache
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder

# This many numbers of a token are in memory together: hidden states, normed ones, queries, keys and values
# and the attention's output, each up to as many as a hidden state has, and twice; gate, up, their copy where
# parts are joined, and their product.
HIDDEN_STATES, MLP_STATES = 8, 5


def prompt_bytes(models: Iterable[Model], num_tokens: int, num_logits: int) -> int:
    """Returns the bytes for ``num_tokens`` of a step, which the models compute one after the other.
    ``num_logits`` of them get logits, which decoding rows in the same pass need."""
    return max(_bytes(model, num_tokens, num_logits) for model in models)


def _bytes(model: Model, num_tokens: int, num_logits: int) -> int:
    config = model.config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 0))
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    widest = max(mlp) if isinstance(mlp, list | tuple) else int(mlp)
    in_layers = num_tokens * (HIDDEN_STATES * hidden + MLP_STATES * widest) * model.dtype.itemsize
    in_layers += num_tokens * bytes_of_parts(model)
    # Layers have finished by then. Logits exist in the type in which they were computed, and in float32.
    in_head = num_tokens * hidden * model.dtype.itemsize
    in_head += num_logits * model.vocab_size * (model.dtype.itemsize + 4)
    unpacked = UNPACKED if isinstance(model, FusedDecoder) and model.is_quantised else 0
    return max(in_layers, in_head) + unpacked * model.dtype.itemsize


def bytes_of_parts(model: Model) -> int:
    """Returns the bytes that the model's recurrences, experts or latent attention need for each token of a
    pass."""
    needed = [cache.working_bytes_per_token for cache in model.caches if isinstance(cache, RecurrentCache)]
    if isinstance(model, FusedDecoder):
        layers = model.weights.layers
        attention = [each for layer in layers for each in layer.mixers if isinstance(each, Attention)]
        parts = [*(each.qkv for each in attention), *(layer.mlp for layer in layers)]
        kinds = (LatentProjection, GroupedExperts)
        needed += [part.working_bytes_per_token(model.dtype) for part in parts if isinstance(part, kinds)]
    return max(needed, default=0)
