"""Carries what rows have drafted, and the verdicts on it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from truedraft.engine.memory.host_to_device import on_device, to_host


@dataclass
class Drafts:
    """Holds a proposer's drafts for the rows: ``lengths[b]`` tokens for row b, padded to K.

    ``probs`` holds the distributions that the tokens were drawn from; None if every draft is
    deterministic or no row asks for them. ``known`` holds each row's ids where the host has chosen them; None
    if they were drawn. ``sent`` waits for a copy of the ids to the host, if one has begun.
    """

    token_ids: torch.Tensor  # int64 [B, K]
    probs: torch.Tensor | None  # float32 [B, K, V]
    lengths: list[int]
    known: list[list[int]] | None = None
    sent: Callable[[], torch.Tensor] | None = None

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Drafts":
        return cls(token_ids=_no_ids(num_rows, device), probs=None, lengths=[0] * num_rows)

    @cached_property
    def ids(self) -> list[list[int]]:
        """Returns each row's drafted ids, without padding, in one copy from the device."""
        if self.known is not None:
            return self.known
        if not any(self.lengths):
            return [[] for _ in self.lengths]
        token_ids = self.token_ids if self.sent is None else self.sent()
        return [ids[:length] for ids, length in zip(token_ids.tolist(), self.lengths, strict=True)]

    def send_early(self) -> None:
        """Starts to copy the ids to the host, before the device gets more to do."""
        self.sent = to_host(self.token_ids)


class DraftDraw(NamedTuple):
    """Holds one drafted token of each row."""

    ids: torch.Tensor  # [B]
    probs: torch.Tensor | None  # [B, V], the distributions that they were drawn from, if a row asks for them


class RowVerdict(NamedTuple):
    """Holds one row's verdict: how many drafts are accepted, and the token after them. ``failed`` says that
    logits were no distribution (NaN, nothing allowed)."""

    num_accepted: int
    next_token: int
    failed: bool


def merge_drafts(
    parts: list[Drafts], num_rows: int, vocab_size: int, device: torch.device, with_probs: bool
) -> Drafts:
    """Merges ``parts``, each of all rows, to one draft for each row: at most one part has drafted for a row,
    and the others hold zeros there. ``with_probs`` says that some row asks for distributions."""
    drafting = [part for part in parts if any(part.lengths)]
    if not drafting:
        return Drafts.empty(num_rows, device)
    if len(drafting) == 1:
        return drafting[0]
    lengths = [sum(row) for row in zip(*(part.lengths for part in drafting), strict=True)]
    width = max(lengths)
    token_ids = torch.stack(
        [F.pad(part.token_ids, (0, width - part.token_ids.shape[1])) for part in drafting]
    ).sum(0)
    if not with_probs:
        return Drafts(token_ids, None, lengths)
    probs = torch.zeros(num_rows, width, vocab_size, device=device)
    for part in drafting:
        drew = on_device([row for row, length in enumerate(part.lengths) if length], device)
        num_drafts = part.token_ids.shape[1]
        if part.probs is None:
            probs[drew[:, None], torch.arange(num_drafts, device=device), part.token_ids[drew]] = 1.0
        else:
            probs[drew, :num_drafts] = part.probs[drew]
    return Drafts(token_ids, probs, lengths)


@lru_cache(maxsize=64)
def _no_ids(num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
