"""Runs a decoder-only model by its transformers module, whose attention goes over the paged cache."""

from collections.abc import Sequence
from typing import Any

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.layers.attention import AttentionContext, PagedAttention
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.models.base import ForwardOutput, Model
from truedraft.engine.models.hf.layer_probe import LayerProbe, probe_layers
from truedraft.engine.models.positions import refuse_places


class DecoderModel(Model):
    def __init__(self, module: Any, facts: ModelFacts) -> None:
        self.module = module
        self.is_quantised = hasattr(module, "hf_quantizer")
        self.is_spread = len(set(getattr(module, "hf_device_map", {}).values())) > 1
        refuse_places(module)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=facts.device)

        @torch.inference_mode()
        def probe(context: LayerProbe) -> None:
            self._call(zero, zero, zero[0], context)

        super().__init__(facts, probe_layers(module, facts.dtype, probe))

    def compute(self, batch: ForwardBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        context = PagedAttention(batch, cache)
        logits = self._call(batch.token_ids, batch.positions, batch.logits_index, context)
        return ForwardOutput(logits.float())

    def _call(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        output = self.module(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            # Logits come from the last layer's device; an index on the CPU is good for any.
            logits_to_keep=logits_index.cpu() if self.is_spread else logits_index,
            attention_context=context,
        )
        logits: torch.Tensor = output.logits[0]
        # Some wrappers of multimodal models know no ``logits_to_keep``.
        if len(logits) == token_ids.shape[1] != len(logits_index):
            logits = logits[logits_index]
        return logits
