"""Handles positions in a model's config: one set of rotary factors for a server, and where they change.

transformers' longrope (Phi-3, Phi-MoE) has two sets of factors and takes the one for long texts as soon as
any text of the batch is longer than the original context: a token would depend on its neighbours, and keys in
the cache, rotated by the other set, would no longer fit. Like llama.cpp we choose once, by the context that
the server serves, and angles are a function of the position alone.
"""

import logging
from collections.abc import Iterator
from typing import Any

from truedraft.engine.errors import ModelLoadError

# A setting whose name has one of the first parts is a position from which on a model behaves differently;
# names with one of the second parts only sound like it.
BOUNDARY_NAMES = ("window", "chunk_size", "original_max_position", "floor_scale", "index_topk")
OTHER_NAMES = ("pattern", "layers", "blocks")

logger = logging.getLogger(__name__)


def choose_rotary_factors(config: Any, max_model_len: int | None) -> None:
    """Makes both of longrope's sets in ``config`` the one for ``max_model_len``; None: for all of the model's
    context. Models that are made from it then rotate each position in one way."""
    if config.is_encoder_decoder:  # No served model of this kind rotates anything.
        return
    text = config.get_text_config()
    served = max_model_len or getattr(text, "max_position_embeddings", None)
    for rope in _rotary_settings(text):
        # Phi-MoE's module takes the short factors for every text; the scale is what changes.
        kind = "mscale" if "short_mscale" in rope else "factor"
        original = rope.get("original_max_position_embeddings")
        if f"long_{kind}" not in rope or original is None or served is None:
            continue
        sets = {length: rope[f"{length}_{kind}"] for length in ("short", "long")}
        chosen = "long" if served > original else "short"
        if chosen == "long" and sets["short"] != sets["long"]:
            logger.warning(
                "%s has rotary factors for short texts and for long ones. All texts get those for long ones, "
                "as up to %d tokens are served; set max_model_len to %d or less to use those for short ones",
                *(text.model_type, served, original),
            )
        rope[f"short_{kind}"] = rope[f"long_{kind}"] = sets[chosen]


def refuse_places(module: Any) -> None:
    """Raises ``ModelLoadError`` for a model that uses a token's index in its batch as its position: no
    argument of its forward can change that."""
    for layer in module.modules():
        if getattr(layer, "attn_temperature_tuning", False) and not getattr(layer, "use_rope", True):
            raise ModelLoadError(
                f"{module.config.get_text_config().model_type} models with attn_temperature_tuning cannot be "
                "served: the temperature follows a token's place in the batch instead of its position"
            )


def boundaries(config: Any) -> list[int]:
    """Returns the positions, within the context, from which on a model behaves differently: windows, chunks,
    original contexts, scales of temperatures."""
    if config.is_encoder_decoder:
        return []
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or 0
    settings = [text.to_dict(), *_rotary_settings(text)]
    found = {
        value
        for each in settings
        for name, value in each.items()
        if isinstance(value, int)
        and any(part in name for part in BOUNDARY_NAMES)
        and not any(part in name for part in OTHER_NAMES)
    }
    return sorted(value for value in found if 1 < value < context)


def _rotary_settings(text: Any) -> Iterator[dict[str, Any]]:
    """Yields the rotary settings of all layers, or of each type of layers."""
    settings = getattr(text, "rope_parameters", None)
    if isinstance(settings, dict):
        yield settings
        yield from (each for each in settings.values() if isinstance(each, dict))
