"""Runs an encoder-decoder transformers model with its paged cache: T5, BART, Marian and their kin.

A sequence is one row of token ids: first the encoder's (the prompt), then the decoder's. The cache's slots of
the encoder's tokens hold the keys and values for the decoder's cross-attention, computed once in the first
pass; all later slots are the decoder's own. So the engine schedules, drafts, truncates and preempts these
sequences as any others. Decoders run batched; each prompt has a pass of its own through the encoder.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import ForwardBatch, Span, table_slots
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.models.base import ForwardOutput, Model
from truedraft.engine.models.hf.cross_attention import (
    AttentionContext,
    CrossProbe,
    CrossWriter,
    DecoderAttention,
    EncoderAttention,
    StoredElsewhere,
)
from truedraft.engine.models.hf.generation_rules import decoder_start_ids, generation_rules
from truedraft.engine.sampling.rules import GenerationRules

# Decoders of these types have been compared with ``generate``.
SERVED = ("t5", "mt5", "bart", "mbart", "marian", "pegasus")


def check_served(config: Any) -> None:
    """Raises ``ModelLoadError`` if the encoder-decoder models of this config are not served."""
    if config.model_type not in SERVED:
        raise ModelLoadError(
            f"{config.model_type} is an encoder-decoder model that is not served; "
            f"these are: {', '.join(SERVED)}"
        )


class EncoderDecoderModel(Model):
    """Is a model with an encoder. ``start_ids`` precede the decoder's first own token; ``rules`` bind it
    whatever a request asks.

    ``max_position`` bounds prompt and output, each; None for relative positions (T5), where ``usual_length``
    is the length that the checkpoint was made for, if it names one.
    """

    def __init__(self, module: Any, facts: ModelFacts) -> None:
        config = facts.config
        check_served(config)
        if len(set(getattr(module, "hf_device_map", {}).values())) > 1:
            raise ModelLoadError("encoder-decoder models are not served over several devices (device_map)")
        self.module = module
        self.start_ids = decoder_start_ids(module)
        self.usual_length: int | None = getattr(config, "n_positions", None)
        self._positions = _pack_positions(module.get_decoder())
        self._no_encoder = BaseModelOutput(
            last_hidden_state=torch.zeros(1, 1, config.d_model, dtype=facts.dtype, device=facts.device)
        )
        caches, vocab_size = self._probe_layers(facts)
        super().__init__(facts, caches, vocab_size)
        self._stored_elsewhere = StoredElsewhere(caches)

    @cached_property
    def rules(self) -> GenerationRules:  # type: ignore[override]
        """Returns the rules of a target; a draft's are not used. Raises ``ModelLoadError`` if they are not
        served."""
        return generation_rules(self.module)

    def forward(
        self,
        spans: list[Span],
        cache: KVCache,
        ids_on_device: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        """Computes the spans. A sequence's first span brings the whole prompt and at least one of the
        decoder's tokens; logits are of the decoder's tokens only."""
        return super().forward([self._encoded(span, cache) for span in spans], cache, ids_on_device, taps)

    def compute(self, batch: ForwardBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        attention = DecoderAttention(batch, cache)
        logits = self._decode(batch.token_ids, batch.positions, self._no_encoder, attention)
        return ForwardOutput(logits[batch.logits_index].float())

    def _encoded(self, span: Span, cache: KVCache) -> Span:
        """Runs the encoder if that has not been done; returns the spans that are left for the decoder."""
        table = span.table
        if table.num_computed_tokens > 0:
            return span
        num_tokens = table.num_encoder_tokens
        prompt = torch.tensor([span.token_ids[:num_tokens]], device=self.device)
        encoded = self.module.get_encoder()(input_ids=prompt, attention_context=EncoderAttention())
        slots = torch.from_numpy(table_slots(table, num_tokens, cache.block_size)).to(self.device)
        start = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._positions.positions = start[0]
        # The decoder computes the keys and values of its cross-attentions; one token makes it do so.
        self.module.get_decoder()(
            input_ids=start,
            encoder_hidden_states=encoded.last_hidden_state,
            use_cache=False,
            attention_context=CrossWriter(slots, cache),
        )
        table.num_computed_tokens = num_tokens
        return replace(span, token_ids=span.token_ids[num_tokens:])

    def _decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        encoded: BaseModelOutput,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Returns logits [tokens, vocab] of the packed ``token_ids`` [1, tokens]."""
        self._positions.positions = positions[0]
        output = self.module(
            encoder_outputs=encoded,
            decoder_input_ids=token_ids,
            past_key_values=None if isinstance(context, CrossProbe) else self._stored_elsewhere,
            use_cache=False,
            attention_context=context,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _probe_layers(self, facts: ModelFacts) -> tuple[list[AttentionCache], int]:
        """Finds by a one-token forward what each layer stores, and the size of the vocabulary."""
        probe = CrossProbe(facts.dtype)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=facts.device)
        vocab_size = self._decode(zero, zero, self._no_encoder, probe).shape[-1]
        num_layers = len(probe.own)
        if not num_layers or probe.own != probe.cross or sorted(probe.own) != list(range(num_layers)):
            raise ModelLoadError(
                f"{self.module.config.model_type} models cannot be served: their layers do not have one "
                "attention to the past and one, of the same shape, to the encoder"
            )
        return [probe.own[layer] for layer in range(num_layers)], vocab_size


class PackedPositions(torch.nn.Module):
    """Replaces a decoder's embedding of positions by one that is told the packed tokens' positions."""

    def __init__(self, embedding: torch.nn.Module | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions: torch.Tensor | None = None

    def forward(self, shape: Any, *_: Any, **__: Any) -> torch.Tensor:
        assert self.embedding is not None
        embedded: torch.Tensor = self.embedding(shape, 0, position_ids=self.positions)
        return embedded


def _pack_positions(decoder: Any) -> PackedPositions:
    """Replaces the embedding of positions; T5 has none, as its positions are in the attention."""
    packed = PackedPositions(getattr(decoder, "embed_positions", None))
    if packed.embedding is not None:
        decoder.embed_positions = packed
    return packed
