"""Draws drafts one position of all rows after the other, as every proposer with probabilities does."""

from collections.abc import Callable, Sequence

import torch

from truedraft.engine.core.draft_choice import Stop
from truedraft.engine.core.step import StepPlan
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.sampling.sampler import Drafts, Sampler

# Logits [rows, the target's vocabulary] of the rows with these numbers, which have just drafted these ids;
# None before the first position.
NextLogits = Callable[[list[int], torch.Tensor | None], torch.Tensor]


def lengths_of(plan: StepPlan, name: str) -> list[int]:
    """Returns how many tokens each of the plan's rows is to draft with the proposer ``name``."""
    return [part.num_drawn_by(name) for part in plan.rows]


def stops_of(plan: StepPlan) -> list[Stop | None]:
    """Returns what ends the draft of each of the plan's rows early."""
    return [part.draft.stop for part in plan.rows]


def drawn_drafts(
    lengths: list[int], sampler: Sampler, next_logits: NextLogits, stops: Sequence[Stop | None] = ()
) -> Drafts:
    """Draws ``lengths`` tokens of each row with its own parameters; ``next_logits`` runs the proposer.
    ``stops`` may end a row's draft before that: after each pass the host reads how sure the proposer was.

    Elsewhere than on a CPU nothing is stopped: the host launches the next pass without reading anything, as
    it would wait.
    """
    num_positions = max(lengths, default=0)
    if num_positions == 0:
        return Drafts.empty(len(lengths), sampler.device)
    lengths = lengths[:]
    token_ids = torch.zeros(len(lengths), num_positions, dtype=torch.int64, device=sampler.device)
    probs = None
    if sampler.uses_draft_probs:
        probs = torch.zeros(len(lengths), num_positions, sampler.vocab_size, device=sampler.device)
    stopping = _Stopping(lengths, stops) if any(stops) and sampler.device.type == "cpu" else None
    active = [row for row, length in enumerate(lengths) if length > 0]
    members: slice | torch.Tensor
    drawing, members = sampler, slice(None)  # the rows that draft, and where they are among all
    for position in range(num_positions):
        if not active:
            break
        if len(active) < len(drawing.rows):
            drawing, members = sampler.select(active), on_device(active, sampler.device)
        logits = next_logits(active, token_ids[members, position - 1] if position else None)
        draw = drawing.draw_drafts(logits, token_ids[members, :position], stopping is not None)
        token_ids[members, position] = draw.ids
        if probs is not None and draw.probs is not None:
            probs[members, position] = draw.probs
        if stopping is not None and draw.confidences is not None:
            stopping.follow(active, draw.confidences.tolist())
        active = [row for row in active if lengths[row] > position + 1]
    if stopping is None:
        return Drafts(token_ids, probs, lengths)
    longest = max(lengths)
    kept = None if probs is None else probs[:, :longest]
    return Drafts(token_ids[:, :longest], kept, lengths, stopping.confidences)


class _Stopping:
    """Shortens ``lengths`` where another pass would not pay."""

    def __init__(self, lengths: list[int], stops: Sequence[Stop | None]) -> None:
        self.lengths = lengths
        self.stops = stops
        self.chances = [1.0] * len(lengths)
        self.confidences: list[list[float]] = [[] for _ in lengths]

    def follow(self, rows: list[int], confidences: list[float]) -> None:
        """Hears how sure the proposer was of the tokens that these rows have drawn, whatever they are."""
        for row, confidence in zip(rows, confidences, strict=True):
            if (stop := self.stops[row]) is None:
                continue
            self.confidences[row].append(confidence)
            self.chances[row] *= stop.rate(confidence)
            if self.chances[row] < stop.below:
                self.lengths[row] = len(self.confidences[row])
