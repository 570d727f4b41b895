"""Carries drafts that are known before a step: continuations from the text or the client's prediction."""

import torch

from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.rows.drafts import Drafts


def known_tokens(draft_ids: list[int], vocab_size: int) -> list[int]:
    """Returns drafts up to the first token that is not in the target's vocabulary."""
    unknown = (place for place, token_id in enumerate(draft_ids) if not 0 <= token_id < vocab_size)
    return draft_ids[: next(unknown, len(draft_ids))]


def known_drafts(draft_ids: list[list[int]], device: torch.device) -> Drafts:
    """Returns each row's ``draft_ids`` without probabilities: verification takes them as certain."""
    width = max(map(len, draft_ids), default=0)
    if width == 0:
        return Drafts.empty(len(draft_ids), device)
    token_ids = on_device([ids + [0] * (width - len(ids)) for ids in draft_ids], device)
    return Drafts(token_ids, None, [len(ids) for ids in draft_ids], draft_ids)
