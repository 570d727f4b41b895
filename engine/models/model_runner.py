"""Runs a model over its cache, with at most one fast pass: spans of token ids in, logits out."""

from collections.abc import Sequence

import torch

from truedraft.engine.core.window_blocks import WindowBlocks
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.models.base import FastPass, ForwardOutput, Model


class ModelRunner:
    """Runs target and draft alike. ``num_fast`` counts the fast passes."""

    def __init__(self, model: Model, cache: KVCache, fast_pass: FastPass | None = None) -> None:
        self.model = model
        self.cache = cache
        self.fast_pass = fast_pass
        self.num_fast = 0
        self.vocab_size = model.vocab_size
        self.device = model.device

    @classmethod
    def build(
        cls,
        model: Model,
        num_blocks: int,
        block_size: int,
        num_state_slots: int = 0,
        windows: WindowBlocks | None = None,
    ) -> "ModelRunner":
        """Makes a runner over a new cache, with the fast pass that the model provides. ``windows`` are the
        blocks of layers with a window, if these have their own."""
        num_own = None if windows is None else windows.num_blocks + 1  # the last one is nobody's
        cache = model.make_cache(num_blocks, block_size, num_state_slots, num_own)
        return cls(model, cache, model.fast_pass(cache))

    def forward(
        self,
        spans: list[Span],
        ids_on_device: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        """Runs the spans. Their tokens are stored in the cache and counted as computed, and states are folded
        as far as that is certain; blocks must be reserved. ``ids_on_device`` and ``taps`` are as in
        ``Model.forward``."""
        if not torch.is_inference_mode_enabled():  # To enter this mode again takes 10 microseconds.
            with torch.inference_mode():
                return self.forward(spans, ids_on_device, taps)
        ends = [span.end for span in spans]
        folded = [span.num_folded_after for span in spans] if self.cache.states else None
        fast = None if self.fast_pass is None else self.fast_pass(spans, ids_on_device, taps)
        if fast is None:
            output = self.model.forward(spans, self.cache, ids_on_device, taps)
        else:
            output = ForwardOutput(*fast)
            self.num_fast += 1
        for span, end in zip(spans, ends, strict=True):
            span.table.num_computed_tokens = end
        for span, num_folded in zip(spans, folded or (), strict=folded is not None):
            span.table.num_folded_tokens = num_folded
        return output
