"""Drafts from the sequence's own text: what followed the longest earlier occurrence of its end.

No model and no memory on the device. The drafts are deterministic; the rules treat them as one-hot
distributions. Prompt lookup (Saxena 2023) with a suffix automaton instead of a search.

Prompts are taken in while they are computed, and no step takes in more than ``MAX_TOKENS_PER_STEP``: a prompt
that the cache has already may be long, and the streams must not wait for it. Until then there is no draft.
"""

from weakref import WeakKeyDictionary

from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.messages import NgramChoice, Source
from engine.proposers.look_up import look_up_drafts
from engine.proposers.suffix_automaton import SuffixAutomaton
from engine.sampling.sampler import Drafts, Sampler

# About ten milliseconds of one core.
MAX_TOKENS_PER_STEP = 2048


class NgramProposer:
    """Drafts only after a match of at least ``min_match`` tokens, at most ``max_tokens``; what followed it
    last or most often, as ``choice`` says."""

    name: Source = "ngram"

    def __init__(self, min_match: int, max_tokens: int = 32, choice: NgramChoice = "most_recent") -> None:
        self.min_match = min_match
        self.max_tokens = max_tokens
        self.choice: NgramChoice = choice
        self._automata: WeakKeyDictionary[Sequence, SuffixAutomaton] = WeakKeyDictionary()
        self._budget = MAX_TOKENS_PER_STEP

    def look_up(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        automaton = self._take_in(sequence)
        if len(automaton) < len(sequence) or automaton.match_length < self.min_match:
            return 0, 0
        return min(num_tokens, self.max_tokens), automaton.match_length

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        for part in scheduled:
            if self.name in part.sequence.sources and part.num_tokens > 1:
                self._take_in(part.sequence)
        self._budget = MAX_TOKENS_PER_STEP
        return look_up_drafts(self.name, scheduled, sampler, self._continuation)

    def _take_in(self, sequence: Sequence) -> SuffixAutomaton:
        automaton = self._automata.get(sequence)
        if automaton is None:
            automaton = self._automata[sequence] = SuffixAutomaton(self.choice)
        num_tokens = min(len(sequence) - len(automaton), self._budget)
        if num_tokens > 0:
            self._budget -= num_tokens
            automaton.extend(sequence.token_ids[len(automaton) : len(automaton) + num_tokens])
        return automaton

    def _continuation(self, sequence: Sequence, num_tokens: int) -> list[int]:
        # The look-up has been made when the step was scheduled.
        automaton = self._automata[sequence]
        return automaton.continuation(min(num_tokens, self.max_tokens))
