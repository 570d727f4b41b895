"""A decoder-only transformers model with its paged cache: spans of token ids in, logits out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.batch import ForwardBatch, Span
from engine.kv_cache import KVCache, LayerShape
from engine.models.attention import AttentionContext, PagedAttention
from engine.models.layer_probe import LayerProbe, probe_layers
from engine.sampling.rules import NO_RULES

# Logits [len(logits_index), vocab] of a batch; its keys and values go into the cache.
Forward = Callable[[ForwardBatch, KVCache], torch.Tensor]
# The same for spans as they are, float32; None if it has no pass for them.
WholePass = Callable[[list[Span]], torch.Tensor | None]
# The same with ``ids_on_device`` as in ``DecoderModel.forward``.
CapturedPass = Callable[[list[Span], torch.Tensor | None], torch.Tensor | None]


class DecoderModel:
    """Target and draft alike. ``allocate_cache`` must be called before the first ``forward``.

    ``start_ids`` and ``rules`` are an encoder-decoder model's; here there are none.
    """

    start_ids: Sequence[int] = ()
    rules = NO_RULES
    vocab_size: int

    def __init__(self, model: Any, num_parameters: int, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        text_config = model.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        self.max_position = int(getattr(text_config, "max_position_embeddings", 0)) or None
        self.eos_token_ids = eos_token_ids(model)
        self.generation_config = model.generation_config
        self.num_parameters = num_parameters
        self.short_forward: Forward | None = None  # in place of the module's own
        self.is_native = False  # whether that runs the kernels in C: they need no padding, few threads pay
        self.make_whole_pass: Callable[[KVCache, int], WholePass | None] | None = None
        self.whole_pass: WholePass | None = None  # one call of C, for the cache as it is
        self.graphs: CapturedPass | None = None  # its counterpart on a GPU
        self.is_spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        self.layers = self._probe_layers()
        self.cache: KVCache | None = None
        self.block_size = 0

    @property
    def has_encoder(self) -> bool:
        return bool(self.start_ids)

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(layer.num_elements for layer in self.layers) * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = KVCache(self.layers, num_blocks * block_size, self.dtype)
        self.graphs = None  # that of another cache
        self.whole_pass = (
            None if self.make_whole_pass is None else self.make_whole_pass(self.cache, block_size)
        )

    def forward(self, spans: list[Span], ids_on_device: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [sum of num_logits, vocab], float32, of each span's last tokens, in span order.

        The spans' tokens are stored in the cache and counted as computed; room must be reserved.
        ``ids_on_device``, int64 [spans], are the ids of spans of one token each, drawn on the device: they
        are not read by the host.
        """
        if not torch.is_inference_mode_enabled():  # entering it again takes 10 microseconds
            with torch.inference_mode():
                return self.forward(spans, ids_on_device)
        assert self.cache is not None
        logits = None
        if self.whole_pass is not None:
            if ids_on_device is not None:
                # C reads ids from the spans, and here the host is the device.
                for span, token_id in zip(spans, ids_on_device.tolist(), strict=True):
                    span.token_ids = [token_id]
            logits = self.whole_pass(spans)
        elif self.graphs is not None:
            logits = self.graphs(spans, ids_on_device)
        if logits is None:
            batch = ForwardBatch.build(spans, self.block_size, self.device, ids_on_device)
            logits = (self.short_forward or self._module_forward)(batch, self.cache)
        for span in spans:
            span.table.num_computed_tokens += len(span.token_ids)
        return logits.float()

    def _module_forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        context = PagedAttention(batch, cache)
        return self._call(batch.token_ids, batch.positions, batch.logits_index, context)

    def _call(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            # Logits come from the last layer's device; an index on the CPU is good for any.
            logits_to_keep=logits_index.cpu() if self.is_spread else logits_index,
            attention_context=context,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def _probe_layers(self) -> list[LayerShape]:
        return probe_layers(self.model, self._probe)

    @torch.inference_mode()
    def _probe(self, probe: LayerProbe) -> None:
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._call(zero, zero, zero[0], probe)


def eos_token_ids(model: Any) -> frozenset[int]:
    """The generation config's list if it has one, else the model config's."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
