"""Measures the effect of rounded weights, inputs, keys and values on a text's log-probabilities, against
float32.

The reference computes in float32: a GGUF file's dequantised weights, or the checkpoint that ``quantize`` or
``dtype: bfloat16`` was given. ``check`` uses this module.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from truedraft.engine.memory.cache_memory import free_memory
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions

# This text was written for the purpose, so that no model has learnt it by heart.
TEXT = """The harbour master kept two logbooks. In the first he wrote what the port authority wanted to \
know: the names of the ships, their draughts and cargoes, the hour at which each had crossed the \
bar, and the state of the tide. In the second, which nobody had asked for, he wrote what he had \
seen from the window of his office. A pilot who had quarrelled with his brother came alongside \
with his engine cut, so that neither would have to speak first. A crate of oranges went overboard \
near the third buoy, and for a week the children of the lower town ate nothing else. On the night \
of the storm he counted eleven lights where the first book allowed for ten, and he did not sleep \
until the eleventh had a name. When he retired, the authority sent a clerk to collect the records. \
The clerk took the first book, signed for it, and asked whether there was anything else. The \
harbour master said that there was not. Years later a student of tides found that the second book \
was the better instrument: the first gave high water to the nearest quarter of an hour, but the \
second said at what moment the cat had left the jetty."""
MAX_TOKENS = 256
# Memory must hold float32 weights, and a quarter as much for computing with them.
BYTES_PER_PARAMETER = 5
# The limit is in nats a token.
MAX_LOSS = 0.1


@dataclass(frozen=True)
class WeightsResult:
    """Holds mean log-probabilities of a token: as served, with float32 caches in place of narrower ones,
    and all in float32, from which the served ones differ by ``distance`` on average. None where caches are in
    float32 anyway, or if memory is too small for the last."""

    num_tokens: int
    served: float
    wide_cache: float | None
    reference: float | None
    distance: float | None
    may_differ: bool = False  # true if the setting ``quantize`` has rounded them

    @property
    def failure(self) -> str:
        """Says what is wrong, if anything is. The rounding of inputs, caches and sums stays far below this
        limit."""
        if self.distance is None or self.may_differ or self.distance < MAX_LOSS:
            return ""
        return f"log-probabilities are {self.distance:.2g} from those of the checkpoint's own weights"

    @property
    def in_words(self) -> str:
        words = f"log-probability {self.served:.4f} a token (perplexity {math.exp(-self.served):.2f})"
        words += f", {self.num_tokens} tokens"
        if self.wide_cache is not None:
            words += f"; with caches in float32 {self.wide_cache:.4f}"
        if self.reference is None or self.distance is None:
            return f"{words}; not compared with float32, which needs more memory than is free"
        words += f"; in float32 {self.reference:.4f} ({math.exp(-self.reference):.2f})"
        return f"{words}, {self.distance:.1g} away in the mean"


def check_weights(
    target: FreshModel, path: str, options: LoadOptions, tokenizer: Any | None
) -> WeightsResult | None:
    """Returns the comparison; None if nothing of ``target`` is rounded."""
    if target.served is None:
        return None
    if tokenizer is None:  # Any ids will do.
        ids = [(7 * i * i + 3 * i) % target.vocab_size for i in range(MAX_TOKENS)]
    else:
        ids = list(tokenizer.encode(TEXT))
    ids = ids[: min(MAX_TOKENS, target.served.max_position or MAX_TOKENS)]
    of_tokens, wide, reference, distance = _log_probs(target, ids), None, None, None
    if (cache_dtype := target.served.cache_dtype) in (torch.float16, torch.int8):
        target.served.keep_cache_in(torch.float32)
        wide = float(_log_probs(target, ids).mean())
        target.served.keep_cache_in(cache_dtype)
    if target.served.num_parameters * BYTES_PER_PARAMETER < free_memory(torch.device("cpu")):
        in_float32 = FreshModel(
            path,
            replace(
                options, dtype=torch.float32, compact_weights=False, quantize="none", cache_dtype="float32"
            ),
        )
        exact = _log_probs(in_float32, ids)
        reference, distance = float(exact.mean()), float((exact - of_tokens).abs().mean())
    served = float(of_tokens.mean())
    return WeightsResult(len(ids) - 1, served, wide, reference, distance, options.quantize != "none")


def _log_probs(model: FreshModel, ids: list[int]) -> torch.Tensor:
    """Returns the log-probabilities of all tokens but the first."""
    log_probs = model.logits(ids, model.vocab_size)[:-1].log_softmax(-1).cpu()
    return log_probs.gather(1, torch.tensor(ids[1:])[:, None])
