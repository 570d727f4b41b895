"""Runs a head without keeping a cache: a text in, its drafts' distributions out, for replays of traces.

Every token computes the whole text anew, first the target's states and then the head's own.
"""

import torch

from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.named_vocabulary import Ids
from truedraft.engine.models.hf.fresh import from_empty_cache
from truedraft.engine.rows.lone import LoneText


class FreshHead:
    """Runs ``head``, which drafts for ``target``, both as they are loaded for serving. It drafts only
    ``token_ids``; None: all."""

    def __init__(self, target: Model, head: Head, token_ids: Ids | None = None) -> None:
        self.target = target
        self.head = head
        self.token_ids = None if token_ids is None else torch.from_numpy(token_ids)

    @torch.inference_mode()
    def following(self, text: LoneText, drafted: list[int], vocab_size: int) -> torch.Tensor:
        """Computes what ``FreshModel.following`` does; the text has two tokens or more."""
        head, token_ids = self.head, text.token_ids
        hidden = from_empty_cache(self.target, token_ids[:-1], head.taps).hidden
        assert hidden is not None
        states, rows = head.states(hidden), []
        for number in range(len(drafted) + 1):
            given = token_ids[1:] + drafted[:number]
            found = from_empty_cache(head.model, given, (head.output,), states)
            assert found.hidden is not None
            rows.append(head.in_width(found.logits[-1:], vocab_size).float())
            states = torch.cat((states, found.hidden[-1]))
        logits = torch.cat(rows)
        if self.token_ids is None:
            return logits
        ids = self.token_ids.to(logits.device)
        return torch.full_like(logits, -torch.inf).index_copy_(1, ids, logits[:, ids])
