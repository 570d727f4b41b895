"""Drafts that are known before a step: what a text or the client's prediction goes on with."""

import torch

from engine.sampling.sampler import Drafts


def known_drafts(draft_ids: list[list[int]], device: torch.device) -> Drafts:
    """``draft_ids`` by row, without probabilities: the rules take them for certain."""
    width = max(map(len, draft_ids), default=0)
    padded = [ids + [0] * (width - len(ids)) for ids in draft_ids]
    token_ids = torch.tensor(padded, dtype=torch.int64, device=device).view(len(draft_ids), width)
    return Drafts(token_ids, None, [len(ids) for ids in draft_ids])
