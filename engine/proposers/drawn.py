"""Draws drafts one position of all rows after the other, as every proposer with probabilities does."""

from collections.abc import Callable

import torch

from truedraft.engine.core.step import StepPlan
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

# A function of this type returns logits [rows, the target's vocabulary] of the rows with these numbers, which
# have just drafted these ids; None before the first position.
NextLogits = Callable[[list[int], torch.Tensor | None], torch.Tensor]


def lengths_of(plan: StepPlan, name: str) -> list[int]:
    """Returns for each of the plan's rows the number of tokens that the proposer ``name`` is to draft."""
    return [part.num_drawn_by(name) for part in plan.rows]


def drawn_drafts(lengths: list[int], sampler: Sampler, next_logits: NextLogits) -> Drafts:
    """Draws ``lengths`` tokens of each row with its own parameters; ``next_logits`` runs the proposer. The
    host launches the next pass without reading the drawn tokens."""
    num_positions = max(lengths, default=0)
    if num_positions == 0:
        return Drafts.empty(len(lengths), sampler.device)
    token_ids = torch.zeros(len(lengths), num_positions, dtype=torch.int64, device=sampler.device)
    probs = None
    if sampler.uses_draft_probs:
        probs = torch.zeros(len(lengths), num_positions, sampler.vocab_size, device=sampler.device)
    active = [row for row, length in enumerate(lengths) if length > 0]
    members: slice | torch.Tensor
    drawing, members = sampler, slice(None)  # These are the rows that draft, and their places among all rows.
    for position in range(num_positions):
        if len(active) < len(drawing.rows):
            drawing, members = sampler.select(active), on_device(active, sampler.device)
        logits = next_logits(active, token_ids[members, position - 1] if position else None)
        draw = drawing.draw_drafts(logits, token_ids[members, :position])
        token_ids[members, position] = draw.ids
        if probs is not None and draw.probs is not None:
            probs[members, position] = draw.probs
        active = [row for row in active if lengths[row] > position + 1]
    return Drafts(token_ids, probs, lengths)
