"""Tests whether a text stays the same among others, beyond every boundary that the target's config names.

A short text, and for each boundary (a window, an original context, ...) a text that crosses it while it goes
on, are decoded together with drafts; then each by itself, without. The log-probabilities of all their tokens
are compared with those of transformers' layers, too, which are computed before the engine is loaded.
``check`` uses this module.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from truedraft.engine.commands.check_exactness import (
    GreedyResult,
    Resolution,
    compared,
    in_words,
    is_wide,
    run,
)
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.cache_memory import free_memory
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.positions import boundaries

SHORT_LENGTH, NEIGHBOUR_LENGTH = 12, 150
# A prompt ends this many tokens before a boundary, and this many tokens are decoded then.
BEFORE, NUM_TOKENS = 4, 16
# This many log-probabilities are compared for each token that follows a prompt.
NUM_TOP = 5
# A text is computed this often: by the reference, and in each of three runs.
NUM_RUNS = 4


@dataclass(frozen=True)
class LongTexts:
    """Holds the texts and what is expected of them. ``prompts`` begin with the shortest; ``expected`` are the
    reference's log-probabilities of all tokens of a prompt but the first, and of all that could follow it.
    ``crossed`` and ``skipped`` are boundaries."""

    prompts: list[list[int]]
    expected: list[tuple[list[float], torch.Tensor]]
    crossed: list[int]
    skipped: list[int]


@dataclass(frozen=True)
class PositionsResult:
    """Holds the differences. ``reference`` names the code that computed ``num_scored`` log-probabilities,
    which are within ``largest_gap``."""

    greedy: GreedyResult
    crossed: list[int]
    skipped: list[int]
    reference: str = ""
    num_scored: int = 0
    largest_gap: float = 0.0

    @property
    def failure(self) -> str:
        return self.greedy.failure

    @property
    def in_words(self) -> str:
        words = f"{self.greedy.in_words}; {self.num_scored} more are {in_words(self.largest_gap)} those of "
        words += self.reference
        if self.crossed:
            words += f"; beyond {', '.join(f'{boundary:,}' for boundary in self.crossed)} tokens"
        if self.skipped:
            words += (
                f"; not beyond {', '.join(f'{boundary:,}' for boundary in self.skipped)}: see --long-seconds"
            )
        return words


def long_texts(target: FreshModel, max_model_len: int | None, seconds: float) -> LongTexts:
    """Returns as many texts as take about ``seconds``, shorter ones first."""
    config = target.model.config
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    served = max_model_len or context or NEIGHBOUR_LENGTH
    texts = LongTexts([], [], [], [])
    # Settings limit the texts that an encoder reads; they come with the engine.
    longer = 3 * SHORT_LENGTH if config.is_encoder_decoder else NEIGHBOUR_LENGTH
    for length in (SHORT_LENGTH, longer):
        _add(texts, target, min(length, served - NUM_TOKENS))
    start = time.perf_counter()
    _reference(target, texts.prompts[-1])  # The pass runs once more, as the first one is slow.
    seconds_per_token = (time.perf_counter() - start) / len(texts.prompts[-1])
    for boundary in boundaries(config):
        length = boundary - BEFORE
        seconds -= NUM_RUNS * length * seconds_per_token
        fits = SHORT_LENGTH < length + NUM_TOKENS <= served
        if fits and seconds > 0 and _score_bytes(config, length) < free_memory(target.device) / 2:
            _add(texts, target, max(1, length))
            texts.crossed.append(boundary)
        elif boundary < served:
            texts.skipped.append(boundary)
    return texts


def _add(texts: LongTexts, target: FreshModel, length: int) -> None:
    number = len(texts.prompts)
    texts.prompts.append(
        [(7 * i * i + 3 * i + 11 * number) % target.vocab_size for i in range(max(1, length))]
    )
    texts.expected.append(_reference(target, texts.prompts[-1]))


def _reference(target: FreshModel, prompt: list[int]) -> tuple[list[float], torch.Tensor]:
    text = target.text(SamplingParams(max_tokens=1), prompt, [], frozenset())
    logits = target.logits(text.token_ids, target.vocab_size, text.num_encoder_tokens)
    log_probs = logits.log_softmax(-1).cpu()
    of_prompt = [] if target.has_encoder else log_probs[range(len(prompt) - 1), prompt[1:]].tolist()
    return of_prompt, log_probs[-1]


def _score_bytes(config: Any, length: int) -> int:
    """Returns the memory of eager attention in one layer: scores, their mask, their softmax."""
    return 12 * int(getattr(config.get_text_config(), "num_attention_heads", 1)) * length * length


def check_positions(
    core: EngineCore, texts: LongTexts, num_drafted: int, resolution: Resolution, reference: str, far: float
) -> PositionsResult:
    """Compares as ``check_greedy`` does. ``reference`` names the source of the expected log-probabilities,
    and the engine's may be as ``far`` from them."""
    params = SamplingParams(
        max_tokens=min(NUM_TOKENS, core.admission.room(max(map(len, texts.prompts)))),
        temperature=0,
        ignore_eos=True,
        logprobs=NUM_TOP,
        num_speculative_tokens=num_drafted,
    )
    together = run(core, texts.prompts, params)
    plain = msgspec.structs.replace(params, num_speculative_tokens=0)
    alone = [run(core, [prompt], plain)[0] for prompt in texts.prompts]
    cached = run(core, texts.prompts, params)
    result = GreedyResult(name="a text beside others")
    result = compared(result, alone, together, resolution, "beside the others")
    result = compared(result, alone, cached, resolution, "beside the others again")
    gaps: list[float] = []
    scoring = msgspec.structs.replace(plain, prompt_logprobs=0 if texts.expected[0][0] else None)
    for (of_prompt, last), completion in zip(texts.expected, run(core, texts.prompts, scoring), strict=True):
        told = [one.logprob for one in completion.prompt_logprobs or () if one is not None]
        gaps += [abs(one - other) for one, other in zip(of_prompt, told, strict=True)]
        gaps += [abs(logprob - float(last[token])) for token, logprob in completion.logprobs[0].top]
    if is_wide(gaps, far):
        result.differences.append(f"log-probabilities are {max(gaps):.2g} from those of {reference}")
    return PositionsResult(result, texts.crossed, texts.skipped, reference, len(gaps), max(gaps))
