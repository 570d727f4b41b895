"""Drafts from the sequence's own text: what followed the longest earlier occurrence of its end.

No model and no memory on the device. The drafts are deterministic; the rules treat them as one-hot
distributions. Prompt lookup (Saxena 2023) with a suffix automaton instead of a search.
"""

from weakref import WeakKeyDictionary

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import NgramChoice, Source
from truedraft.engine.proposers.suffix_automaton import SuffixAutomaton


class NgramProposer:
    """Offers only after a match of at least ``min_match`` tokens, at most ``max_tokens``; what followed it
    last or most often, as ``choice`` says. The planner decides which sequences are read, and when: reading a
    token takes about five microseconds."""

    name: Source = "ngram"

    def __init__(self, min_match: int, max_tokens: int = 32, choice: NgramChoice = "most_recent") -> None:
        self.min_match = min_match
        self.max_tokens = max_tokens
        self.choice: NgramChoice = choice
        self._automata: WeakKeyDictionary[Sequence, SuffixAutomaton] = WeakKeyDictionary()

    def num_unread(self, sequence: Sequence) -> int:
        automaton = self._automata.get(sequence)
        return len(sequence.token_ids) - (0 if automaton is None else len(automaton.text))

    def read(self, sequence: Sequence, max_tokens: int) -> int:
        """Tokens read now; a sequence's text only ever grows, also when it is preempted."""
        automaton = self._automata.get(sequence)
        if automaton is None:
            automaton = self._automata[sequence] = SuffixAutomaton(self.choice)
        first = len(automaton.text)
        token_ids = sequence.token_ids[first : first + max_tokens]
        automaton.extend(token_ids)
        return len(token_ids)

    def offers(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """Nothing before the text is read to its end."""
        automaton = self._automata.get(sequence)
        if automaton is None or len(automaton.text) < len(sequence.token_ids):
            return 0, []
        if automaton.match_length < self.min_match:
            return 0, []
        return automaton.match_length, automaton.continuation(min(limit, self.max_tokens))
