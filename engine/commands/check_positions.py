"""Tells whether a text stays the same among others, beyond every boundary that the target's config names.

A short text, and for each boundary (a window, an original context, ...) a text that crosses it while it goes
on, are decoded together with drafts; then each by itself, without. What follows each prompt is compared with
transformers' layers, too, before the engine comes. Used by ``check``.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from truedraft.engine.commands.check_exactness import GreedyResult, compared, run
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.cache_memory import free_memory
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.positions import boundaries

SHORT_LENGTH, NEIGHBOUR_LENGTH = 12, 150
# Tokens before a boundary at the end of the prompt, and tokens that are decoded then.
BEFORE, NUM_TOKENS = 4, 16
# A text is computed this often, in prompts' time: by the reference, and in each of three runs.
NUM_RUNS = 4


@dataclass(frozen=True)
class LongTexts:
    """``prompts`` begin with the shortest; ``expected`` are the reference's logits after each, [vocab];
    ``crossed`` and ``skipped`` are boundaries."""

    prompts: list[list[int]]
    expected: list[torch.Tensor]
    crossed: list[int]
    skipped: list[int]


@dataclass(frozen=True)
class PositionsResult:
    greedy: GreedyResult
    crossed: list[int]
    skipped: list[int]

    @property
    def in_words(self) -> str:
        words = ""
        if self.crossed:
            words += f"; beyond {', '.join(f'{boundary:,}' for boundary in self.crossed)} tokens"
        if self.skipped:
            words += (
                f"; not beyond {', '.join(f'{boundary:,}' for boundary in self.skipped)}: see --long-seconds"
            )
        return words


def long_texts(target: FreshModel, max_model_len: int | None, seconds: float) -> LongTexts:
    """Returns as many as take about ``seconds``, shorter ones first."""
    config = target.model.config
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    served = max_model_len or context or NEIGHBOUR_LENGTH
    texts = LongTexts([], [], [], [])
    # What an encoder reads is limited by settings, which come with the engine.
    longer = 3 * SHORT_LENGTH if config.is_encoder_decoder else NEIGHBOUR_LENGTH
    for length in (SHORT_LENGTH, longer):
        _add(texts, target, min(length, served - NUM_TOKENS))
    start = time.perf_counter()
    _reference(target, texts.prompts[-1])  # once more, as the first one is slow
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


def _reference(target: FreshModel, prompt: list[int]) -> torch.Tensor:
    history = target.history(SamplingParams(max_tokens=1), prompt, [], frozenset())
    logits = target.logits(history.token_ids, target.vocab_size, history.num_encoder_tokens)
    return logits[-1].cpu()


def _score_bytes(config: Any, length: int) -> int:
    """Counts what eager attention holds of one layer: scores, their mask, their softmax."""
    return 12 * int(getattr(config.get_text_config(), "num_attention_heads", 1)) * length * length


def check_positions(
    core: EngineCore, texts: LongTexts, num_drafted: int, resolution: float
) -> PositionsResult:
    """Compares as ``check_greedy`` does."""
    params = SamplingParams(
        max_tokens=min(NUM_TOKENS, core.admission.room(max(map(len, texts.prompts)))),
        temperature=0,
        ignore_eos=True,
        logprobs=2 if resolution else None,
        num_speculative_tokens=num_drafted,
    )
    together = run(core, texts.prompts, params)
    plain = msgspec.structs.replace(params, num_speculative_tokens=0)
    alone = [run(core, [prompt], plain)[0] for prompt in texts.prompts]
    cached = run(core, texts.prompts, params)
    result = compared(GreedyResult(0, 0, []), alone, together, resolution, "beside the others")
    result = compared(result, alone, cached, resolution, "beside the others again")
    for number, (logits, completion) in enumerate(zip(texts.expected, alone, strict=True)):
        if float(logits.max() - logits[completion.token_ids[0]]) > resolution:
            result.differences.append(f"prompt {number}: the first token is not the reference's")
    return PositionsResult(result, texts.crossed, texts.skipped)
