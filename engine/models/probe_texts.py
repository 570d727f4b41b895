"""Makes the texts that a model computes when it is loaded, over our cache as in serving: in chunks, side by
side.

Their logits must be those that transformers' layers give each text by itself. Two short texts reveal mistakes
with neighbours, positions or masks. For every boundary that the config names (``positions.boundaries``) one
more text is longer than that: it reveals mistakes with windows, and with everything that depends on the
length. If that would take too long, a short text whose positions begin just before the boundary tests, on a
CPU, at least the positions.
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

# One text has more tokens than the native kernels compute together, one has fewer.
FIRST_LENGTH, SECOND_LENGTH = 48, 9
# A text has this many tokens after its boundary, and before it where the text begins there.
AFTER, BEFORE = 8, 6
# Each text ends with these chunks. Of the longer text only the last token's logits are compared.
LAST_CHUNKS = 2, 3
MAX_LOGITS = 43
BLOCK_SIZE = 12
# Long texts may cost transformers, which pads all texts to the longest, this many multiplications: some
# seconds.
MAX_MULTIPLICATIONS = {"cpu": 6e11, "cuda": 6e13}
# Eager attention of this many tokens fits into memory.
MAX_LENGTH = 1 << 13


@dataclass(frozen=True)
class ProbeText:
    """Is a text whose last tokens' logits are compared."""

    token_ids: list[int]
    first_position: int = 0

    def positions(self, device: torch.device) -> torch.Tensor:
        """Returns the positions of all tokens."""
        return self.first_position + torch.arange(len(self.token_ids), device=device)

    def chunk(self, number: int) -> tuple[list[int], int]:
        """Returns the token ids of a chunk, and the number of its last tokens that need logits."""
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
    """Returns lists of texts, each to be computed together."""
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
        elif facts.device.type == "cpu":  # Our kernels for a GPU find keys by the positions of queries.
            far.append(text(number, length - boundary + BEFORE, boundary - BEFORE))
    return [near, [near[0], *far]] if far else [near]


@torch.inference_mode()
def packed_logits(model: Model, texts: Sequence[Sequence[ProbeText]]) -> list[torch.Tensor]:
    """Computes the compared logits of each text, float32."""
    return [logits for group in texts for logits in _together(model, group)]


def _together(model: Model, texts: Sequence[ProbeText]) -> list[torch.Tensor]:
    """Computes texts in three passes; each text's blocks have an order of their own."""
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
    """Computes spans as in serving, except for a text that begins at a later position, which no cache
    knows."""
    if not any(first_positions):
        return runner.forward(spans).logits
    lengths = [len(span.token_ids) for span in spans]
    batch = ForwardBatch.build(spans, BLOCK_SIZE, runner.device)
    batch.positions += torch.tensor(np.repeat(first_positions, lengths), device=runner.device)
    logits = runner.model.compute(batch, runner.cache).logits
    for span in spans:
        span.table.num_folded_tokens, span.table.num_computed_tokens = span.num_folded_after, span.end
    return logits
