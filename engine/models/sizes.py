"""Refuses sizes in configs that no model has: such a model would be built for ever, or take all memory."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from truedraft.engine.errors import ModelLoadError

# Most sizes are 1 at least; a dense model has no experts, and few models have layers that predict further
# tokens.
LARGEST = {
    "num_hidden_layers": 1 << 12,
    "num_nextn_predict_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "head_dim": 1 << 16,
    "chunk_size": 1 << 13,  # tokens whose states are computed together, each attending to all others
    "mamba_chunk_size": 1 << 13,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 24,
    "shared_expert_intermediate_size": 1 << 24,
    "vocab_size": 1 << 31,
    "max_position_embeddings": 1 << 40,
    "partial_rotary_factor": 1,
}
ZERO_AT_LEAST = ("experts", "nextn", "factor")
MAX_ENTRIES = 1 << 18


def check_largest(path: str, values: Mapping[str, Any]) -> None:
    """Raises ``ModelLoadError`` for a number or list that is too large, in any part of config.json as it was
    read: transformers makes a list of layers of it before it has a config."""
    for name, value in _entries(values):
        if isinstance(value, list) and len(value) > MAX_ENTRIES:
            raise ModelLoadError(
                f"{path} cannot be loaded: {name} in its config.json has {len(value)} entries"
            )
        if isinstance(value, int | float) and value > LARGEST.get(name, value):
            _refuse(path, name, value)


def check_sizes(path: str, config: Any) -> None:
    """Raises ``ModelLoadError`` for a size that no text model has, under whatever name its config.json gave
    it to transformers' ``config``."""
    for name, largest in LARGEST.items():
        value = None
        with suppress(RuntimeError):  # The value is a list where every layer has its own.
            value = getattr(config, name, None)
        least = 0 if any(part in name for part in ZERO_AT_LEAST) else 1
        if isinstance(value, int) and not least <= value <= largest:
            _refuse(path, name, value)


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    waiting = [values]
    while waiting:
        for name, value in waiting.pop().items():
            yield name, value
            if isinstance(value, dict):
                waiting.append(value)


def _refuse(path: str, name: str, value: float) -> None:
    raise ModelLoadError(f"{path} cannot be loaded: its config.json has {name} {value}")
