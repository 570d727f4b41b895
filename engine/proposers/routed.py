"""Each sequence has its own sources of drafts, one of them in each round; the drafts of a step become one."""

import torch
import torch.nn.functional as F

from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.draft_length.sources import Offer
from engine.host_to_device import on_device
from engine.messages import Source
from engine.proposers.base import LookUp, Proposer
from engine.proposers.draft_model import DraftModelProposer
from engine.proposers.translated.proposer import TranslatedDraftProposer
from engine.sampling.sampler import Drafts, Sampler


class RoutedProposer:
    """Asks every proposer that some sequence of the step may draft from. Prompts are their business too: a
    model's cache follows them."""

    def __init__(self, proposers: list[Proposer]) -> None:
        self.proposers = {proposer.name: proposer for proposer in proposers}
        self._look_ups = {proposer.name: proposer for proposer in proposers if isinstance(proposer, LookUp)}

    @property
    def methods(self) -> frozenset[Source]:
        return frozenset(self.proposers)

    @property
    def draft_model(self) -> DraftModelProposer | None:
        """The one whose model shares the target's tokens."""
        proposer = self.proposers.get("draft_model")
        return proposer if isinstance(proposer, DraftModelProposer) else None

    def offers(self, sequence: Sequence, num_tokens: int) -> list[Offer]:
        """What the sequence's sources could draft now, up to ``num_tokens`` each."""
        offers = []
        for source in sequence.sources:
            found, match_length = num_tokens, 0
            if (look_up := self._look_ups.get(source)) is not None:
                found, match_length = look_up.look_up(sequence, num_tokens)
            if found:
                offers.append(Offer(source, found, match_length))
        return offers

    def trace_source(self, source: str) -> str:
        """What traces call it: a replay must know that a draft model's translated text was not drawn."""
        for proposer in self.proposers.values():
            if isinstance(proposer, TranslatedDraftProposer) and proposer.name == source:
                return proposer.trace_source
        return source

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        sources: set[Source] = set()
        for scheduled_part in scheduled:
            sources.update(scheduled_part.sequence.sources)
        parts = [
            proposer.propose(scheduled, sampler)
            for name, proposer in self.proposers.items()
            if name in sources
        ]
        drafting = [part for part in parts if any(part.lengths)]
        if not drafting:
            return Drafts.empty(len(sampler.rows), sampler.device)
        return drafting[0] if len(drafting) == 1 else _merge(drafting, sampler)


def _merge(parts: list[Drafts], sampler: Sampler) -> Drafts:
    """At most one part has drafted for a row; the others hold zeros there."""
    lengths = [sum(row) for row in zip(*(part.lengths for part in parts), strict=True)]
    width = max(lengths, default=0)
    padded = [F.pad(part.token_ids, (0, width - part.token_ids.shape[1])) for part in parts]
    token_ids = torch.stack(padded).sum(0)
    if not sampler.uses_draft_probs:
        return Drafts(token_ids, None, lengths)
    probs = torch.zeros(len(lengths), width, sampler.vocab_size, device=sampler.device)
    for part in parts:
        drew = on_device([row for row, length in enumerate(part.lengths) if length], sampler.device)
        part_probs = part.probs
        if part_probs is None:
            part_probs = F.one_hot(part.token_ids, sampler.vocab_size).float()
        probs[drew, : part_probs.shape[1]] = part_probs[drew]
    return Drafts(token_ids, probs, lengths)
