"""Compares the drafts that a target could have here: models, heads, its own weights, the text so far."""

import math
import statistics
from dataclasses import dataclass

from truedraft.engine.commands.check_speed import PAYS_FROM, Speed
from truedraft.engine.config import SELF_DRAFTS, EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import MTP
from truedraft.engine.models.heads.loader import load_head
from truedraft.engine.models.identity import weight_bytes
from truedraft.engine.models.options import load_options
from truedraft.engine.proposers.ngram import NgramProposer

# Cache memory is reported for a text of this length, in tokens.
NUM_CACHED_TOKENS = 1000
NGRAM = NgramProposer.name


@dataclass(frozen=True)
class DraftResult:
    """Holds the measurements of one draft. ``memory`` is the size of its weights, and of its cache for 1,000
    tokens; ``reason`` says why it was not measured."""

    draft: str  # the value of the setting for it, or n-grams
    speeds: list[Speed]
    memory: int = 0
    reason: str = ""

    @property
    def best(self) -> list[Speed]:
        """Returns the speeds of the length with the highest gain over all temperatures."""
        lengths = self.by_length
        best = max(lengths, key=lambda length: lengths[length])
        return [speed for speed in self.speeds if speed.num_speculative_tokens == best]

    @property
    def by_length(self) -> dict[int, float]:
        """Returns the speed-up of each draft length, as the geometric mean over the temperatures."""
        ratios: dict[int, list[float]] = {}
        for speed in self.speeds:
            ratios.setdefault(speed.num_speculative_tokens, []).append(speed.speedup)
        return {length: math.prod(each) ** (1 / len(each)) for length, each in sorted(ratios.items())}

    @property
    def speedup(self) -> float:
        """Returns the speed-up of the best length."""
        return max(self.by_length.values())

    @property
    def length(self) -> int:
        """Returns the best length."""
        return self.best[0].num_speculative_tokens

    @property
    def acceptance_rate(self) -> float:
        """Returns the mean over the temperatures, at the best length."""
        return statistics.fmean(speed.acceptance_rate for speed in self.best)

    @property
    def acceptance_length(self) -> float:
        """Returns the mean over the temperatures, at the best length."""
        return statistics.fmean(speed.acceptance_length for speed in self.best)


def memory_of(core: EngineCore) -> int:
    """Returns the bytes that drafting takes in the engine: weights, and the caches of one text."""
    models = [runner.model for proposer in core.scheduler.proposers for runner in proposer.runners]
    return sum(weight_bytes(model) + NUM_CACHED_TOKENS * model.cache_bytes_per_token for model in models)


def others_to_try(config: EngineConfig, core: EngineCore, named: list[str]) -> list[str]:
    """Returns the drafts to compare with that of ``config``: those that a user has ``named``, the head of the
    target's own checkpoint if there is one, and the target's own weights in fewer bits."""
    drafts = [*named, *([MTP] if _has_head(config, core) else []), *SELF_DRAFTS]
    return [draft for draft in dict.fromkeys(drafts) if draft != config.draft]


def _has_head(config: EngineConfig, core: EngineCore) -> bool:
    assert config.target is not None  # EngineConfig filled it in.
    try:
        return load_head(MTP, core.target.model, config.target, load_options(config)) is not None
    except ModelLoadError:
        return False


def advice(results: list[DraftResult], given: str) -> str:
    """Says in words which draft to use. The draft ``given`` by the user stays unless another is clearly
    faster; among others that are about equally fast the one with the least memory is advised."""
    measured = [result for result in results if result.speeds]
    if not measured:
        return ""
    best = max(measured, key=lambda result: result.speedup)
    if best.speedup < PAYS_FROM:
        return f"nothing that was tried pays ({best.draft}: {_how_fast(best)}): use --draft none"
    close = [result for result in measured if best.speedup < PAYS_FROM * result.speedup]
    own = next((result for result in close if result.draft == given), None)
    if own is not None:
        return f"nothing that was tried is clearly faster than --draft {_setting(own)}: use that"
    chosen = min(close, key=lambda result: result.memory)
    return f"use --draft {_setting(chosen)}: {_how_fast(chosen)}; leave the length to auto"


def _how_fast(result: DraftResult) -> str:
    return f"{result.speedup:.2f} times as fast at {result.length} tokens"


def _setting(result: DraftResult) -> str:
    return "none (n-grams)" if result.draft == NGRAM else result.draft
