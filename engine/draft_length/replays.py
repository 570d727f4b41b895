"""What drafts of other lengths would have come to in the same texts.

Survival by position is what drafts of the length in force have shown, and says too little of others: where a
round begins depends on the length. A text that repeats itself, and with it where the draft is wrong, falls
into step with the rounds: if the draft is wrong at every fourth token, drafts of three are always accepted,
and every other draft of two fails at its first token.

Given its prefix, whether a token would be drafted right does not depend on where a round began. So verdicts
tell it of almost all tokens of a text: of the accepted ones and the first rejected one. Of the one that
follows a draft accepted to its end they do not, but rounds in C are told by the next one's first pass. Over
these, rounds of any length can be counted.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

# Lengths that are looked at: so many more than were drafted, up to.
FURTHER, MAX_LENGTH = 2, 8
# Decay per round. Verdicts are forgotten sooner: how hard a text is changes faster than what is in step.
DECAY = 0.998
# How many rounds the assumption is worth that no length is in step; the most that is believed, and how much
# is taken for chance.
WEIGHT, MOST, CHANCE = 20.0, 1.5, 0.01


class Replayed(NamedTuple):
    """A round: tokens drafted and accepted, and where all were, how likely the draft would have been right
    about the next one, too. ``is_probe``: of another length than the one in force."""

    num_drafted: int
    num_accepted: int
    next_right: float = 0.0
    is_probe: bool = False


class Replays:
    """Rounds of 1, 2, ... tokens over the texts of a group, and the drafts accepted in them."""

    def __init__(self) -> None:
        self._num_rounds = [0.0] * MAX_LENGTH
        self._num_accepted = [0.0] * MAX_LENGTH
        # Of the rounds that there were, by position.
        self._reached = [0.0] * MAX_LENGTH
        self._right = [0.0] * MAX_LENGTH
        self._num_known = 0  # lengths
        self._usual = 1  # the length in force
        self._rng = random.Random(0)

    def learn(self, texts: Sequence[Sequence[Replayed]]) -> None:
        """The rounds of each text, one after the other. While only probes draft nothing is in step."""
        lengths = [one.num_drafted for text in texts for one in text]
        usual = [one.num_drafted for text in texts for one in text if not one.is_probe]
        if not usual:
            self._num_known = 0
            return
        decay = DECAY ** len(lengths)
        for counts in (self._num_rounds, self._num_accepted, self._reached, self._right):
            counts[:] = [decay * count for count in counts]
        self._num_known = min(MAX_LENGTH, max(lengths) + FURTHER)
        self._usual = min(MAX_LENGTH, max(1, round(sum(usual) / len(usual))))
        for text in texts:
            self._count(text)
            runs = _runs(text, self._rng)
            for i in range(self._num_known):
                num_rounds, num_accepted = _replay(runs, i + 1)
                self._num_rounds[i] += num_rounds
                self._num_accepted[i] += num_accepted

    def _count(self, text: Sequence[Replayed]) -> None:
        """What survival by position comes from."""
        for one in text:
            num_accepted = one.num_accepted
            for i in range(num_accepted):
                self._reached[i] += 1
                self._right[i] += 1
            if num_accepted < MAX_LENGTH:
                self._reached[num_accepted] += 1
                if num_accepted == one.num_drafted:
                    self._right[num_accepted] += one.next_right

    def factors(self) -> list[float]:
        """By length, how many times the accepted tokens come that acceptance rates by position say. Those
        are right about the length in force. That is in step, and shorter ones would not be; or it is not, and
        a longer one would be."""
        if not self._num_known:
            return []
        chance = expected = 1.0
        factors = []
        for i in range(self._num_known):
            chance *= self._right[i] / self._reached[i] if self._reached[i] else 1.0
            expected = chance + (expected if i else 0.0)
            mean = (self._num_accepted[i] + WEIGHT * expected) / (self._num_rounds[i] + WEIGHT)
            factors.append(mean / max(expected, 1e-9))
        usual = min(self._usual, self._num_known)
        level = max(factors[usual - 1], 1e-9)
        worse = [min(1.0, max(1 / MOST, factor / level + CHANCE)) for factor in factors[:usual]]
        return worse + [max(1.0, min(MOST, factor / level - CHANCE)) for factor in factors[usual:]]


def rounds_of(text: Sequence[Replayed], length: int, rng: random.Random) -> float:
    """Rounds of drafts of ``length`` tokens that a text takes, the last one as far as it goes."""
    num_tokens = sum([one.num_accepted + 1 for one in text])
    num_rounds, num_accepted = _replay(_runs(text, rng), length)
    return num_tokens * num_rounds / (num_rounds + num_accepted) if num_rounds else num_tokens / (length + 1)


def _runs(text: Sequence[Replayed], rng: random.Random) -> list[tuple[int, bool]]:
    """Of every round its right tokens, and whether the draft would have been right about the token that it
    ended with. If nobody knows, by chance: an even mix would be a pattern of its own."""
    return [
        (one.num_accepted, one.num_accepted == one.num_drafted and rng.random() < one.next_right)
        for one in text
    ]


def _replay(runs: Sequence[tuple[int, bool]], length: int) -> tuple[int, int]:
    """Rounds of drafts of ``length`` tokens, and tokens accepted in them. A text consists of ``runs``: some
    right tokens, and one more that is right or not."""
    num_rounds = num_accepted = so_far = 0
    for num_right, is_right in runs:
        # Every round takes its drafts of a run, and one more that follows them.
        whole, so_far = divmod(so_far + num_right, length + 1)
        num_rounds += whole
        num_accepted += whole * length
        if so_far < length and is_right:
            so_far += 1
        else:
            num_rounds += 1
            num_accepted += so_far
            so_far = 0
    return num_rounds, num_accepted
