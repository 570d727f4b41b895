"""Token ids that were looked up, as the drafts of a step of the previous engine; goes with it."""

from collections.abc import Callable

import torch

from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.messages import NgramChoice, Source
from engine.proposers import ngram, prediction
from engine.sampling.sampler import Drafts, Sampler


def look_up_drafts(
    name: Source,
    scheduled: list[Scheduled],
    sampler: Sampler,
    find: Callable[[Sequence, int], list[int]],
) -> Drafts:
    """``find`` gives up to so many tokens for a sequence; asked only where source ``name`` drafts."""
    drafted = [
        find(part.sequence, part.num_draft_tokens) if part.source == name and part.num_draft_tokens else []
        for part in scheduled
        if part.completes
    ]
    width = max(map(len, drafted), default=0)
    token_ids = torch.tensor(
        [ids + [0] * (width - len(ids)) for ids in drafted], dtype=torch.int64, device=sampler.device
    ).view(len(drafted), width)
    return Drafts(token_ids, None, [len(ids) for ids in drafted])


# About ten milliseconds of one core.
MAX_TOKENS_PER_STEP = 2048


class NgramProposer(ngram.NgramProposer):
    """Reads when it is asked, as far as a step's budget goes."""

    def __init__(self, min_match: int, max_tokens: int = 32, choice: NgramChoice = "most_recent") -> None:
        super().__init__(min_match, max_tokens, choice)
        self._budget = MAX_TOKENS_PER_STEP

    def look_up(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        self._budget -= self.read(sequence, max(0, self._budget))
        match_length, token_ids = self.offers(sequence, num_tokens)
        return len(token_ids), match_length

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        for part in scheduled:
            if self.name in part.sequence.sources and part.num_tokens > 1:
                self._budget -= self.read(part.sequence, max(0, self._budget))
        self._budget = MAX_TOKENS_PER_STEP
        return look_up_drafts(self.name, scheduled, sampler, lambda *asked: self.offers(*asked)[1])


class PredictionProposer(prediction.PredictionProposer):
    """Asked by the router."""

    def look_up(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        run, token_ids = self.offers(sequence, num_tokens)
        return len(token_ids), run

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        return look_up_drafts(self.name, scheduled, sampler, lambda *asked: self.offers(*asked)[1])
