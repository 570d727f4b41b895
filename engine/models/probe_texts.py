"""Texts that a model computes when it is loaded, over our cache as in serving: in chunks, side by side.

Their logits must be those that transformers' layers give each text by itself. Two short texts show what mixes
up neighbours, positions or masks. For every boundary that the config names (``positions.boundaries``) one
more text is longer than that: it shows windows, and what changes with the length. If that would take too
long, a short text whose positions begin just before the boundary shows, on a CPU, at least what positions do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.base import Model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.positions import boundaries

# More tokens than the native kernels look at together, and fewer.
FIRST_LENGTH, SECOND_LENGTH = 48, 9
# Tokens of a text from its boundary on, and before it where the text begins there.
AFTER, BEFORE = 8, 6
# The last chunks of each text. Of the longer one only the last token's logits are asked for.
LAST_CHUNKS = 2, 3
MAX_LOGITS = 43
BLOCK_SIZE = 12
# Multiplications that long texts may cost transformers, which pads all texts to the longest: some seconds.
MAX_MULTIPLICATIONS = {"cpu": 6e11, "cuda": 6e13}
# Tokens of a text whose eager attention can be held.
MAX_LENGTH = 1 << 13


@dataclass(frozen=True)
class ProbeText:
    """Its last tokens' logits are compared."""

    token_ids: list[int]
    first_position: int = 0

    def positions(self, device: torch.device) -> torch.Tensor:
        """Returns those of all tokens."""
        return self.first_position + torch.arange(len(self.token_ids), device=device)

    def chunk(self, number: int) -> tuple[list[int], int]:
        """Returns the token ids of a chunk, and for how many of its last ones logits are asked."""
        ids = self.token_ids
        first, second = len(ids) - sum(LAST_CHUNKS), len(ids) - LAST_CHUNKS[1]
        return [
            (ids[:first], min(first, MAX_LOGITS)),
            (ids[first:second], 1),
            (ids[second:], LAST_CHUNKS[1]),
        ][number]

    def compared(self, per_token: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ``per_token`` [tokens, ...] that belong to those logits."""
        first, size = len(self.token_ids) - sum(LAST_CHUNKS), len(self.token_ids)
        kept = [*range(max(0, first - MAX_LOGITS), first), *range(first + LAST_CHUNKS[0] - 1, size)]
        return per_token[kept]


def probe_texts(facts: ModelFacts) -> list[list[ProbeText]]:
    """Returns lists of texts that are to be computed together."""
    text_config = facts.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or FIRST_LENGTH
    changes = boundaries(facts.config)
    affordable = MAX_MULTIPLICATIONS.get(facts.device.type, MAX_MULTIPLICATIONS["cpu"]) / (
        max(1, facts.num_parameters) * (2 + len(changes))
    )

    def text(number: int, length: int, first_position: int = 0) -> ProbeText:
        ids = [(7 * i * i + 3 * i + 1 + 11 * number) % text_config.vocab_size for i in range(length)]
        return ProbeText(ids, first_position)

    near = [text(number, min(length, context)) for number, length in enumerate((FIRST_LENGTH, SECOND_LENGTH))]
    far = []
    for number, boundary in enumerate(changes, start=len(near)):
        length = min(boundary + AFTER, context)
        if length <= min(affordable, MAX_LENGTH):
            near.append(text(number, length))
        elif facts.device.type == "cpu":  # our kernels for a GPU find keys by the positions of queries
            far.append(text(number, length - boundary + BEFORE, boundary - BEFORE))
    return [near, [near[0], *far]] if far else [near]


@torch.inference_mode()
def packed_logits(model: Model, texts: Sequence[Sequence[ProbeText]]) -> list[torch.Tensor]:
    """Computes the compared logits of each text, float32."""
    return [logits for group in texts for logits in _together(model, group)]


def _together(model: Model, texts: Sequence[ProbeText]) -> list[torch.Tensor]:
    """Computes texts in three passes; the blocks of each have an order of their own."""
    num_blocks = -(-max(len(text.token_ids) for text in texts) // BLOCK_SIZE)
    runner = ModelRunner.build(model, num_blocks * len(texts), BLOCK_SIZE, num_state_slots=len(texts))
    tables = [BlockTable() for _ in texts]
    for number, table in enumerate(tables):
        table.block_ids = [num_blocks * (number + 1) - 1 - i for i in range(num_blocks)]
        table.state_slot = number
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for number in range(1 + len(LAST_CHUNKS)):
        spans = [Span(table, *text.chunk(number)) for table, text in zip(tables, texts, strict=True)]
        logits = _forward(runner, spans, [text.first_position for text in texts])
        for rows, part in zip(found, torch.split(logits, [span.num_logits for span in spans]), strict=True):
            rows.append(part)
    return [torch.cat(rows) for rows in found]


def _forward(runner: ModelRunner, spans: list[Span], first_positions: list[int]) -> torch.Tensor:
    """Computes spans as in serving, unless a text begins elsewhere, which no cache knows of."""
    if not any(first_positions):
        return runner.forward(spans).logits
    lengths = [len(span.token_ids) for span in spans]
    batch = ForwardBatch.build(spans, BLOCK_SIZE, runner.device)
    batch.positions += torch.tensor(np.repeat(first_positions, lengths), device=runner.device)
    logits = runner.model.compute(batch, runner.cache).logits
    for span in spans:
        span.table.num_folded_tokens, span.table.num_computed_tokens = span.num_folded_after, span.end
    return logits
