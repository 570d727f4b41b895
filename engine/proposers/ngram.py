"""Drafts from the sequence's own text: the tokens after the longest earlier occurrence of its end.

It needs no model and no memory on the device. The drafts are deterministic; the rules treat them as one-hot
distributions. It is prompt lookup (Saxena 2023) with a suffix automaton instead of a search: the automaton
holds all substrings of the text (Blumer et al. 1985), and a cursor follows the longest suffix that has also
ended somewhere before, in amortised constant time per token.
"""

from weakref import WeakKeyDictionary

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import NgramChoice, Source

# This many of a text's repeated ends, the longest first, note at each token where they were and which token
# followed: all of them in ordinary text, and constant time in any.
MAX_ENDS = 32


class NgramProposer:
    """Offers tokens after a match of at least ``min_match`` tokens, at most ``max_tokens`` of them: those
    that followed it last or most often, as ``choice`` says. The planner decides which sequences are read, and
    when: reading a token takes about five microseconds."""

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
        """Reads further tokens of a text, and returns their number; a sequence's text only ever grows, also
        when it is preempted."""
        automaton = self._automata.get(sequence)
        if automaton is None:
            automaton = self._automata[sequence] = SuffixAutomaton(self.choice)
        first = len(automaton.text)
        token_ids = sequence.token_ids[first : first + max_tokens]
        automaton.extend(token_ids)
        return len(token_ids)

    def offers(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """Offers nothing before the text is read to its end."""
        automaton = self._automata.get(sequence)
        if automaton is None or len(automaton.text) < len(sequence.token_ids):
            return 0, []
        if automaton.match_length < self.min_match:
            return 0, []
        return automaton.match_length, automaton.continuation(min(limit, self.max_tokens))


class SuffixAutomaton:
    """Holds all substrings of a text. A state is a set of substrings that end at the same places; state 0 is
    the empty substring.

    ``match_length`` tokens at the end of the text also end at ``match_end`` (an index, exclusive), the latest
    such place.

    With ``most_frequent`` every state also counts the tokens that have followed it; ties go to the latest.
    """

    def __init__(self, choice: NgramChoice = "most_recent") -> None:
        self.text: list[int] = []
        self.match_length = 0
        self.match_end = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0
        self._matched = 0
        # Each state counts how often each token followed, and knows the one that did most often.
        self._counts: list[dict[int, int]] | None = [{}] if choice == "most_frequent" else None
        self._favourite = [-1]

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self._advance_match(token_id)
            self._append(token_id)
            self._settle_match()

    def continuation(self, num_tokens: int) -> list[int]:
        """Returns the tokens after the earlier occurrence; where they run into the end, the occurrence
        repeats."""
        if self._counts is not None:
            return self._favourites(num_tokens)
        drafted: list[int] = []
        for i in range(self.match_end, self.match_end + num_tokens):
            drafted.append(self.text[i] if i < len(self.text) else drafted[i - len(self.text)])
        return drafted

    def _favourites(self, num_tokens: int) -> list[int]:
        """Returns the token that most often followed the match, then the one that most often followed that,
        and so on."""
        drafted: list[int] = []
        state = self._matched
        while len(drafted) < num_tokens:
            while state and self._favourite[state] < 0:
                # This end has only occurred at the very end; a shorter end occurs elsewhere.
                state = self._link[state]
            if self._favourite[state] < 0:
                break
            drafted.append(self._favourite[state])
            state = self._next[state][drafted[-1]]
        return drafted

    def _advance_match(self, token_id: int) -> None:
        """Moves the cursor over ``token_id``, among substrings that ended before it."""
        state, length = self._matched, self.match_length
        while state and token_id not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token_id in self._next[state]:
            state, length = self._next[state][token_id], length + 1
        self._matched, self.match_length = state, length

    def _append(self, token_id: int) -> None:
        """Appends a token by the textbook online construction."""
        self.text.append(token_id)
        if self._counts is not None:
            self._count(token_id)
        new = self._new_state({}, self._length[self._last] + 1, len(self.text))
        state = self._last
        while state != -1 and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._link[state]
        self._link[new] = 0 if state == -1 else self._state_of_length(state, token_id)
        self._last = new

    def _count(self, token_id: int) -> None:
        """Counts ``token_id`` for every end of the text that it follows."""
        assert self._counts is not None
        state = self._last
        for _ in range(MAX_ENDS):
            counts = self._counts[state]
            counts[token_id] = counts.get(token_id, 0) + 1
            favourite = self._favourite[state]
            if favourite < 0 or counts[token_id] >= counts[favourite]:
                self._favourite[state] = token_id
            state = self._link[state]
            if state < 0:
                break

    def _state_of_length(self, state: int, token_id: int) -> int:
        """Returns the successor of ``state`` that is exactly one token longer, split off if necessary."""
        successor = self._next[state][token_id]
        if self._length[successor] == self._length[state] + 1:
            return successor
        clone = self._new_state(dict(self._next[successor]), self._length[state] + 1, self._end[successor])
        if self._counts is not None:
            self._counts[clone] = dict(self._counts[successor])
            self._favourite[clone] = self._favourite[successor]
        self._link[clone] = self._link[successor]
        self._link[successor] = clone
        while state != -1 and self._next[state].get(token_id) == successor:
            self._next[state][token_id] = clone
            state = self._link[state]
        return clone

    def _settle_match(self) -> None:
        """Moves the match to the clone if a split has moved its substring there, then notes where it ends
        now."""
        while self._matched and self.match_length <= self._length[self._link[self._matched]]:
            self._matched = self._link[self._matched]
        if self._matched:
            self.match_end = self._end[self._matched]
        state, ends = self._matched, self._end
        for _ in range(MAX_ENDS):
            if state <= 0:
                break
            ends[state] = len(self.text)
            state = self._link[state]

    def _new_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        if self._counts is not None:
            self._counts.append({})
            self._favourite.append(-1)
        return len(self._next) - 1
