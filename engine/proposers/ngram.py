"""Drafts from the sequence's own text: what followed the longest earlier occurrence of its end.

No model and no memory on the device. The drafts are deterministic; the rules treat them as one-hot
distributions. Prompt lookup (Saxena 2023) with a suffix automaton instead of a search.
"""

from weakref import WeakKeyDictionary

import torch

from engine.messages import Method
from engine.proposers.suffix_automaton import SuffixAutomaton
from engine.sampling.sampler import Drafts, Sampler
from engine.scheduler import Scheduled
from engine.sequence import Sequence


class NgramProposer:
    """Drafts only after a match of at least ``min_match`` tokens."""

    name: Method = "ngram"

    def __init__(self, min_match: int) -> None:
        self.min_match = min_match
        self._automata: WeakKeyDictionary[Sequence, SuffixAutomaton] = WeakKeyDictionary()

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        drafted = [self._draft(part) for part in scheduled if part.completes]
        width = max(map(len, drafted), default=0)
        token_ids = torch.tensor(
            [ids + [0] * (width - len(ids)) for ids in drafted], dtype=torch.int64, device=sampler.device
        ).view(len(drafted), width)
        return Drafts(token_ids, None, [len(ids) for ids in drafted])

    def _draft(self, part: Scheduled) -> list[int]:
        sequence = part.sequence
        if sequence.method != self.name or part.num_draft_tokens == 0:
            return []
        automaton = self._automata.setdefault(sequence, SuffixAutomaton())
        automaton.extend(sequence.token_ids[len(automaton.text) :])
        if automaton.match_length < self.min_match:
            return []
        return automaton.continuation(part.num_draft_tokens)
