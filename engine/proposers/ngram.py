"""Drafts from the sequence's own text: the tokens after the longest earlier occurrence of its end. Where
earlier texts have a longer one, it drafts from these.

It needs no model and no memory on the device. The drafts are deterministic; the rules treat them as one-hot
distributions. It is prompt lookup (Saxena 2023) with a suffix automaton instead of a search: the automaton
holds all substrings of the text (Blumer et al. 1985), and a cursor follows the longest suffix that has also
ended somewhere before, in amortised constant time per token.

Answers that call the same tools or fill in the same form repeat each other, but not their prompts. So a pool
keeps the ends of finished texts. Those of a salt are apart from all others, exactly as computed beginnings
are: a request that is fast because another one was answered the same tells what that was. A ring holds the
last tokens of a salt's texts, and tables tell where each run of 2, 4, 8 or 16 tokens has ended last. A table
is an array without keys: two runs may meet in one entry, and the ring overwrites old texts, so what is found
is compared with what was looked for. Memory is fixed, and nothing is kept of running sequences.
"""

from collections import OrderedDict
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np

from truedraft.engine.core.planning import NOTHING, Found
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import NgramChoice, Source

# This many of a text's repeated ends, the longest first, note at each token where they were and which token
# followed: all of them in ordinary text, and constant time in any.
MAX_ENDS = 32

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]

# Lengths of the runs that are looked for, each twice the one before.
RUNS = (2, 4, 8, 16)
LONGEST = RUNS[-1]
# The most salts that have texts; those that were used longest ago are forgotten.
MAX_SALTS = 16
# No token has this id: it stands between two texts.
END = -1
# Odd numbers without a pattern: one to spread ids, one for each length of run, one to spread hashes.
SPREAD = np.uint64(0x9E3779B97F4A7C15)
FACTORS = dict(
    zip(RUNS, accumulate([0xBF58476D1CE4E5B9] * len(RUNS), lambda a, b: a * b % 2**64), strict=True)
)


class NgramProposer:
    """Offers tokens after a match of at least ``min_match`` tokens, at most ``max_tokens`` of them: those
    that followed it last or most often, as ``choice`` says. The planner decides which sequences are read, and
    when: reading a token takes about five microseconds. ``pool`` has the texts of earlier sequences, if these
    are kept."""

    name: Source = "ngram"

    def __init__(
        self,
        min_match: int,
        max_tokens: int = 32,
        choice: NgramChoice = "most_recent",
        pool: "NgramPool | None" = None,
    ) -> None:
        self.min_match = min_match
        self.max_tokens = max_tokens
        self.choice: NgramChoice = choice
        self.pool = pool
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

    def offers(self, sequence: Sequence, limit: int) -> Found:
        """Offers nothing of the own text before it is read to its end. Of equally long matches, that in the
        own text counts."""
        limit = min(limit, self.max_tokens)
        own = self._own(sequence, limit)
        if self.pool is None or own.match_length >= LONGEST:
            return own
        match_length, token_ids = self.pool.find(sequence, limit, self.min_match)
        return own if own.match_length >= match_length else Found(match_length, token_ids, "other texts")

    def _own(self, sequence: Sequence, limit: int) -> Found:
        automaton = self._automata.get(sequence)
        if automaton is None or len(automaton.text) < len(sequence.token_ids):
            return NOTHING
        if automaton.match_length < self.min_match:
            return NOTHING
        return Found(automaton.match_length, automaton.continuation(limit))

    def keep(self, sequence: Sequence) -> None:
        """Keeps a finished text for others, where texts are kept."""
        if self.pool is not None:
            self.pool.keep(sequence)

    def forget_texts(self) -> None:
        """Forgets the texts that were kept."""
        if self.pool is not None:
            self.pool.forget_all()


class NgramPool:
    """Holds up to ``num_tokens`` tokens of texts for each salt."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._rings: OrderedDict[str, TextRing] = OrderedDict()

    def keep(self, sequence: Sequence) -> None:
        """Keeps a finished sequence's output, with a little of its prompt to recognise the beginning by."""
        if not sequence.cache_prompt:
            return
        salt = sequence.prefix_salt
        ring = self._rings.get(salt)
        if ring is None:
            ring = self._rings[salt] = TextRing(self.num_tokens)
            if len(self._rings) > MAX_SALTS:
                self._rings.popitem(last=False)
        self._rings.move_to_end(salt)
        ring.add(sequence.token_ids[max(0, sequence.num_prompt_tokens - LONGEST) :])

    def find(self, sequence: Sequence, limit: int, min_match: int) -> tuple[int, list[int]]:
        """Returns the length of the longest run at the sequence's end that has occurred in the texts of its
        salt, as far as lengths of runs tell, and up to ``limit`` tokens that have followed it last."""
        ring = self._rings.get(sequence.prefix_salt)
        if ring is None or not sequence.cache_prompt or _may_have_drawn(sequence):
            return 0, []
        return ring.find(sequence.token_ids[-LONGEST:], limit, min_match)

    def forget_all(self) -> None:
        """Forgets the texts of all salts."""
        self._rings.clear()


def _may_have_drawn(sequence: Sequence) -> bool:
    """Tells whether the numbers that judge a sequence's drafts may have drawn a text that is kept: an earlier
    request may have named the same seed. Judged by numbers that it depends on, a draft would change the law
    of what is emitted. The coupled rule judges by the target's token alone."""
    return sequence.params.seed is not None and not sequence.greedy and sequence.verification != "coupled"


class TextRing:
    """Holds the last ``size`` tokens of texts, each followed by an ``END``."""

    def __init__(self, size: int) -> None:
        self._ids: Ids = np.full(size, END, np.int64)
        self._next = 0  # the place of the next token
        num_bits = (2 * size - 1).bit_length()
        self._shift = np.uint64(64 - num_bits)
        # Each table has for each run the place of the token after it.
        self._tables = {run: np.zeros(1 << num_bits, np.int32) for run in RUNS}

    def add(self, token_ids: list[int]) -> None:
        """Appends a text, or its end where it is longer than the ring."""
        size = len(self._ids)
        text: Ids = np.array(token_ids[max(0, len(token_ids) - size + 1) :], np.int64)
        places = (self._next + np.arange(len(text) + 1)) % size
        self._ids[places[:-1]] = text
        self._ids[places[-1]] = END
        self._next = int(places[-1] + 1) % size
        for run, hashes in self._hashes(text).items():
            # Nothing follows the last run. Of equal ones the last assignment counts.
            self._tables[run][hashes[:-1]] = places[run:-1]

    def find(self, end: list[int], limit: int, min_match: int) -> tuple[int, list[int]]:
        """Returns the length of the longest run that ``end`` ends with and that is found here, and up to
        ``limit`` tokens that follow it."""
        wanted: Ids = np.array(end, np.int64)
        for run, hashes in reversed(self._hashes(wanted).items()):
            if run < min_match:
                break
            first = int(self._tables[run][hashes[-1]]) - run
            found = self._ids[np.arange(first, first + run + limit) % len(self._ids)]
            if not np.array_equal(found[:run], wanted[-run:]):
                continue
            following: list[int] = found[run:].tolist()
            if END in following:
                del following[following.index(END) :]
            if following:
                return run, following
        return 0, []

    def _hashes(self, text: Ids) -> dict[int, Hashes]:
        """Returns for each length of run the entries of its table, one for each place where a run begins."""
        hashes: Hashes = (text.astype(np.uint64) + np.uint64(1)) * SPREAD
        entries: dict[int, Hashes] = {}
        for run in RUNS:
            if len(text) < run:
                break
            half = run // 2
            hashes = hashes[:-half] * np.uint64(FACTORS[run]) + hashes[half:]
            entries[run] = hashes * SPREAD >> self._shift
        return entries


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
