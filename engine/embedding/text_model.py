"""Computes states of whole texts: all tokens of some texts in one pass, packed without padding.

Nothing is kept from one pass to the next, so all layers store keys and values in the same place, which the
pass's texts share out. A text's states do not depend on the others where the layers are kernels in C.
"""

from collections.abc import Callable, Sequence

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.layers.decoder import Attention, DecoderLayer, DecoderWeights
from truedraft.engine.layers.encoder import InputEmbeddings
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import LayerRun
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.messages import Text

BLOCK_SIZE = 16


class TextModel:
    """Computes the last layer's normed states. ``begin`` starts a pass on a backend, as in ``FusedDecoder``;
    a text may have at most ``max_tokens`` tokens."""

    def __init__(
        self,
        facts: ModelFacts,
        embeddings: InputEmbeddings,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        rotary: Rotary,
        begin: Callable[[ForwardBatch, KVCache, Rotary], LayerRun] = TorchRun,
    ) -> None:
        self.facts = facts
        self.embeddings = embeddings
        self.layers = list(layers)
        self.norm = norm
        self.rotary = rotary
        self.begin = begin
        self._num_blocks = 0
        self._cache: KVCache | None = None

    @classmethod
    def of_decoder(
        cls,
        facts: ModelFacts,
        weights: DecoderWeights,
        begin: Callable[[ForwardBatch, KVCache, Rotary], LayerRun],
    ) -> "TextModel":
        embeddings = InputEmbeddings(weights.embeddings, scale=weights.embedding_scale)
        return cls(facts, embeddings, weights.layers, weights.norm, weights.rotary, begin)

    @property
    def hidden_size(self) -> int:
        return int(self.facts.config.get_text_config().hidden_size)

    @torch.inference_mode()
    def states(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """Returns the states of each text, float32 [tokens, hidden size]."""
        spans, num_blocks = [], 0
        for text in texts:
            table = BlockTable()
            first, num_blocks = num_blocks, num_blocks - (-len(text.token_ids) // BLOCK_SIZE)
            table.block_ids = list(range(first, num_blocks))
            spans.append(Span(table, text.token_ids, 0))
        cache = self._cache_of(num_blocks)
        device, dtype = self.facts.device, self.facts.dtype
        batch = ForwardBatch.build(spans, BLOCK_SIZE, device)
        run = self.begin(batch, cache, self.rotary)
        places = [place for text in texts for place in self.embeddings.places_of(text.token_ids)]
        kinds = [kind for text in texts for kind in kinds_of(text)]
        packed = torch.tensor([places, kinds], device=device)
        hidden = self.embeddings(batch.token_ids[0], packed[0], packed[1], run, dtype)
        for layer in self.layers:
            hidden = layer(hidden, run)
        if self.norm is not None:
            hidden = run.norm(self.norm, hidden)
        return list(torch.split(hidden.float(), [len(text.token_ids) for text in texts]))

    def _cache_of(self, num_blocks: int) -> KVCache:
        """Returns memory for the keys and values of one layer, which all layers use one after the other."""
        if self._cache is None or num_blocks > self._num_blocks:
            self._num_blocks = max(num_blocks, 2 * self._num_blocks)
            self._cache = None
            self._cache = one_pass_cache([_cache(layer) for layer in self.layers], self._num_blocks)
        return self._cache


def kinds_of(text: Text) -> list[int]:
    """Returns 0 for each token of the first text and 1 for each of the second."""
    first = len(text.token_ids) if text.second_from is None else text.second_from
    return [0] * first + [1] * (len(text.token_ids) - first)


def one_pass_cache(specs: Sequence[AttentionCache], num_blocks: int) -> KVCache:
    """Makes a cache in which all layers of the same sizes are kept in the same place."""
    kinds = list(dict.fromkeys(specs))
    cache = KVCache(kinds, num_blocks, BLOCK_SIZE)
    return cache.shared([kinds.index(spec) for spec in specs])


def _cache(layer: DecoderLayer) -> AttentionCache:
    assert isinstance(layer.mixer, Attention)
    return layer.mixer.cache
