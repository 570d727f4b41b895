"""Defines a model as the engine sees it: facts, and passes over new tokens of some sequences."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.kv_cache import AttentionCache, CacheSpec, KVCache
from truedraft.engine.memory.recurrent_state import RecurrentCache
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules

logger = logging.getLogger(__name__)


class ForwardOutput(NamedTuple):
    """Holds the results of a pass.

    ``logits`` [sum of num_logits, vocab] are float32, of each span's last tokens, in span order. ``hidden``
    [tokens, taps, hidden size] are the states after the tapped layers, of all tokens; None without taps. The
    states that the last norm gets have the last layer's number; the norm's output has the number of layers.
    A fast pass that a head drafts with returns the states of each span's last token alone.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class FastPass(Protocol):
    """Runs passes over a few tokens of each sequence, for one cache."""

    def __call__(
        self, spans: list[Span], ids_on_device: torch.Tensor | None, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns logits and states as in ``ForwardOutput``; None if there is no such pass for ``spans``. The
        logits may be where the next pass writes its own."""
        ...


class Model(ABC):
    """Holds weights, but no cache. ``start_ids`` and ``rules`` belong to encoder-decoder models."""

    start_ids: Sequence[int] = ()
    rules: GenerationRules = NO_RULES
    is_native = False  # true if layers are kernels in C: they need no padding, and few threads pay
    has_taps = False
    # It counts the experts that passes have read, where there are some (``TouchedExperts``).
    touched: Callable[[], tuple[int, int]] | None = None
    way = "transformers' layers"  # what computes the layers, in words

    def __init__(self, facts: ModelFacts, caches: Sequence[CacheSpec], vocab_size: int | None = None) -> None:
        self.facts = facts
        self.config = facts.config
        self.generation_config = facts.generation_config
        self.num_parameters = facts.num_parameters
        self.dtype = facts.dtype
        self.bf16_linears = facts.bf16_linears
        # The type in which linear layers multiply.
        self.arithmetic = torch.bfloat16 if facts.bf16_linears else facts.dtype
        self.device = facts.device
        self.caches = caches  # what each layer keeps
        text_config = facts.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size) if vocab_size is None else vocab_size
        self.max_position = int(getattr(text_config, "max_position_embeddings", 0)) or None
        self.eos_token_ids = known_ends(facts.generation_config, facts.config, self.vocab_size)

    @property
    def num_layers(self) -> int:
        """Returns the number of layers, however many caches each has. Taps use these numbers."""
        return len(self.caches)

    @property
    def has_encoder(self) -> bool:
        return bool(self.start_ids)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Returns the type of keys and values in the cache."""
        return next((cache.dtype for cache in self.caches if isinstance(cache, AttentionCache)), self.dtype)

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(cache.bytes_per_token for cache in self.caches)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Returns the bytes of the states and records of all recurrent layers; 0 without one."""
        return sum(cache.bytes_per_sequence for cache in self.caches if isinstance(cache, RecurrentCache))

    def forward(
        self,
        spans: list[Span],
        cache: KVCache,
        ids_on_device: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        """Computes the spans and stores their tokens in ``cache``, where blocks are reserved.
        ``ids_on_device``, int64 [tokens], are the ids of all spans' tokens, some of which were drawn on the
        device: the host does not read them."""
        return self.compute(
            ForwardBatch.build(spans, cache.block_size, self.device, ids_on_device), cache, taps
        )

    def make_cache(
        self, num_blocks: int, block_size: int, num_state_slots: int, num_window_blocks: int | None = None
    ) -> KVCache:
        """Returns a new cache for passes."""
        return KVCache(self.caches, num_blocks, block_size, num_state_slots, num_window_blocks)

    @abstractmethod
    def compute(self, batch: ForwardBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """Returns the same as ``forward``, from packed tensors."""

    def fast_pass(self, cache: KVCache) -> FastPass | None:
        return None


def known_ends(generation_config: Any, config: Any, vocab_size: int) -> frozenset[int]:
    """Returns those ends that are tokens of this model. Others often belong to another vocabulary, by a
    default of the config's class."""
    named = eos_token_ids(generation_config, config)
    known = frozenset(token for token in named if 0 <= token < vocab_size)
    if left_out := sorted(named - known):
        logger.warning("eos_token_id %s: the model has no such token, so it ends nothing", left_out)
    return known


def eos_token_ids(generation_config: Any, config: Any) -> frozenset[int]:
    """Returns the generation config's list if it has one, otherwise the model config's, otherwise that of its
    text part."""
    for source in (generation_config, config, config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is None:
            continue
        listed = ids if isinstance(ids, list | tuple | set | frozenset) else [ids]
        if not all(type(each) is int for each in listed):
            raise ModelLoadError(f"eos_token_id is {ids!r}, where a token id or a list of them is needed")
        return frozenset(listed)
    return frozenset()
