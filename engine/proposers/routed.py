"""Each sequence drafts by its own method; the drafts of one step become one."""

import torch
import torch.nn.functional as F

from engine.messages import Method
from engine.proposers.base import Proposer
from engine.proposers.translated import TranslatedDraftProposer
from engine.sampling.sampler import Drafts, Sampler
from engine.scheduler import Scheduled


class RoutedProposer:
    """Asks every proposer that a drawing sequence has chosen. Prompts are every proposer's business:
    a model's cache follows them."""

    def __init__(self, proposers: list[Proposer]) -> None:
        self.proposers = {proposer.name: proposer for proposer in proposers}

    @property
    def methods(self) -> frozenset[Method]:
        return frozenset(self.proposers)

    def trace_source(self, method: Method) -> str:
        """What traces call it: a replay must know that a draft model's translated text was not drawn."""
        proposer = self.proposers.get(method)
        return proposer.trace_source if isinstance(proposer, TranslatedDraftProposer) else method

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        methods = {part.sequence.method for part in scheduled}
        drafts = [
            proposer.propose(scheduled, sampler)
            for name, proposer in self.proposers.items()
            if name in methods
        ]
        if not drafts:
            return Drafts.empty(len(sampler.rows), sampler.device)
        return drafts[0] if len(drafts) == 1 else _merge(drafts, sampler)


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
        drew = torch.tensor([length > 0 for length in part.lengths], device=sampler.device)
        part_probs = part.probs
        if part_probs is None:
            part_probs = F.one_hot(part.token_ids, sampler.vocab_size).float()
        probs[drew, : part_probs.shape[1]] = part_probs[drew]
    return Drafts(token_ids, probs, lengths)
