"""Finds what every layer of a model stores, and whether we can compute its attention: once, at load.

A one-token forward runs under another attention name, for which transformers also builds masks. Our mask
describes each layer's pattern in one number, so that a window or a chunk that only the mask knows of is
noticed.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.attention import ATTENTION_NAME, AttentionCall, attention_forward
from truedraft.engine.memory.kv_cache import AttentionCache

PROBE_NAME = "truedraft-probe"

# Patterns are examined over the model's context: a window that is longer is none.
DEFAULT_CONTEXT, LONGEST_CONTEXT = 1 << 13, 1 << 18
NOT_CAUSAL, NOT_A_WINDOW = -1, -2

STATEFUL = (
    "{0} models cannot be served: {1} keep a running state instead of keys and values, and drafts that are "
    "rejected can be taken out of a state only where the layers are Truedraft's own"
)


NOT_REPLACEABLE = (
    "{} models cannot be served: their layers have no attention that transformers lets us replace "
    "(AttentionInterface)"
)


class LayerProbe:
    """Records what every layer stores, and on which device; attends to nothing. The cache has the type
    ``dtype``."""

    def __init__(self, context: int, dtype: torch.dtype) -> None:
        self.context = context
        self.dtype = dtype
        self.layers: dict[int, AttentionCache] = {}

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.layers[call.layer] = AttentionCache(
            key=(key.shape[1], key.shape[2]),
            value=(value.shape[1], value.shape[2]),
            dtype=self.dtype,
            device=key.device,
            window=call.sliding_window,
        )
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    def check_pattern(self, pattern: int, sliding_window: int | None) -> None:
        """Compares the mask that a layer got with the window that its attention function got."""
        if pattern == NOT_CAUSAL:
            raise ModelLoadError("its attention looks at later tokens too")
        if pattern == NOT_A_WINDOW:
            raise ModelLoadError("its attention is neither causal nor a sliding window (chunks, perhaps)")
        if pattern != min(sliding_window or self.context, self.context):
            raise ModelLoadError(
                f"its mask shows {pattern} tokens, but its attention gets "
                f"{'no window' if sliding_window is None else f'a window of {sliding_window}'}"
            )


def probe_layers(
    model: Any, dtype: torch.dtype, forward: Callable[[LayerProbe], Any]
) -> list[AttentionCache]:
    """Returns the layers' shapes in order, from one ``forward`` with the probe as its attention context.

    Raises ``ModelLoadError`` if the model cannot be served: a state that cannot be rolled back, or attention
    that is not causal, not replaceable or not understood.
    """
    model_type = model.config.model_type
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(STATEFUL.format(model_type, "their recurrent layers"))
    probe = LayerProbe(_context(model.config.get_text_config()), dtype)
    try:
        model.set_attn_implementation(PROBE_NAME)
        forward(probe)
    except ModelLoadError as error:
        raise ModelLoadError(f"{model_type} models of this kind cannot be served: {error}") from error
    except Exception as error:  # An unknown architecture may do anything.
        raise ModelLoadError(
            f"{model_type} models cannot be served: they do not work with attention over our cache "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if not probe.layers:
        raise ModelLoadError(NOT_REPLACEABLE.format(model_type))
    # Models that run their layers several times count every time.
    num_layers = max(num_layers, len(probe.layers))
    if sorted(probe.layers) != list(range(num_layers)):
        others = f"{num_layers - len(probe.layers)} of their {num_layers} layers"
        raise ModelLoadError(STATEFUL.format(model_type, others))
    return [probe.layers[i] for i in range(num_layers)]


def probe_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_context: LayerProbe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Does what ``attention_forward`` does, and examines the mask."""
    if attention_context is None:
        raise ModelLoadError("its attention is handed no keyword arguments, so our cache cannot reach it")
    if attention_mask is not None and attention_mask.numel() != 1:
        raise ModelLoadError("its attention gets a mask of its own")
    if attention_mask is not None:
        attention_context.check_pattern(int(attention_mask), others.get("sliding_window"))
    return attention_forward(
        module, query, key, value, attention_mask, attention_context=attention_context, **others
    )


def mask_pattern(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> torch.Tensor:
    """Returns, in place of a mask, how many tokens the context's last one sees, itself included, or one of
    the constants above: an integer in four dimensions, as masks have.
    """
    context = _context(config)
    keys = torch.arange(context + 1)
    visible = {
        query: mask_function(0, 0, torch.tensor(query), keys).expand(len(keys))
        for query in (0, context - 2, context - 1)
    }
    if any(bool(seen[query + 1 :].any()) for query, seen in visible.items()):
        pattern = NOT_CAUSAL
    else:
        pattern = int(visible[context - 1].sum())
        for query, seen in visible.items():
            if not torch.equal(seen, (keys <= query) & (keys > query - pattern)):
                pattern = NOT_A_WINDOW
                break
    return torch.tensor(pattern).view(1, 1, 1, 1)


def _context(config: Any) -> int:
    length = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    return max(4, min(length, LONGEST_CONTEXT))


AttentionInterface.register(PROBE_NAME, probe_forward)
AttentionMaskInterface.register(PROBE_NAME, mask_pattern)
