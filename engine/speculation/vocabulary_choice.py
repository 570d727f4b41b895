"""Decides while texts are served which output layer a head drafts with, as often as the draft's length is
decided, but not so quickly: another one has to be made first.

What a layer promises is the planner's tokens per second with its passes and its acceptance. That is the
measured acceptance, times the share of late outputs that it can draft over the share of those that are
drafted now: a draft that is accepted and can be drafted by fewer tokens is accepted with these, too. What
four bits lose beyond that is learned when they draft.

A layer must promise more in two reviews, and after each try the next one has to wait for twice as many
tokens: there are no more changes than the logarithm of what was served.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Outputs between reviews.
REVIEW_OUTPUTS = 2048
# Factor of tokens per second that a change must promise.
LEAST_GAIN = 1.03
# What is left of the acceptance with weights in four bits, until it is known.
LEFT_BY_FOUR_BITS = 0.97
# Drafts after which a layer's acceptance is compared with that in other bits, and how many of the latest
# count as much as all before them.
JUDGED_DRAFTS, DRAFTS_HALF_LIFE = 400, 1000
# The least that is believed of what four bits leave, and of what can be drafted.
LEAST_LEFT, LEAST_SHARE = 0.3, 0.01


class Layer(NamedTuple):
    """Is a kind of output layer: of how many tokens, and in four bits or as the target's."""

    num_tokens: int
    in_four_bits: bool


class Found(NamedTuple):
    """Holds the layer that promises most, and how many times the tokens per second of the one in use."""

    layer: Layer
    gain: float


# A rate is the tokens per second with a layer whose drafts are accepted a factor as often; None if unknown.
Rate = Callable[[Layer, float], float | None]


class VocabularyChoice:
    """Chooses among ``layers``; ``current`` is in use."""

    def __init__(self, layers: Sequence[Layer], current: Layer) -> None:
        self.layers = list(layers)
        self.current = current
        self.num_tries = 0
        self.found: Found | None = None
        self._left_by_four_bits = LEFT_BY_FOUR_BITS
        self._reviewed = self._changed = 0
        self._named: Layer | None = None
        # Decayed sums are of drafts with the layer in use, and of those whose first token was accepted.
        self._num_judged = self._num_accepted = 0.0
        self._num_drafts = 0
        # The acceptance in the other bits, of each token that could be drafted.
        self._before: float | None = None

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Learns from drafts of the layer in use: of how many the first token was accepted."""
        kept = 0.5 ** (num_drafts / DRAFTS_HALF_LIFE)
        self._num_judged = kept * self._num_judged + num_drafts
        self._num_accepted = kept * self._num_accepted + num_accepted
        self._num_drafts += num_drafts

    def accepted(self, layer: Layer, shares: Mapping[Layer, float], drafted: float) -> float:
        """Returns how many times as many drafts are expected to be accepted with a layer: ``shares`` are what
        layers can draft of late outputs, ``drafted`` is what the one in use can."""
        left = self._left(layer) / self._left(self.current)
        return left * shares[layer] / max(drafted, LEAST_SHARE)

    def review(
        self, num_outputs: int, shares: Mapping[Layer, float], drafted: float, rate: Rate
    ) -> Layer | None:
        """Returns the layer to change to, if it is time. It may be of the kind in use, with other tokens."""
        if num_outputs < self._reviewed + REVIEW_OUTPUTS or (now := rate(self.current, 1.0)) is None:
            return None
        self._reviewed = num_outputs
        self._judge(drafted)
        promised = {layer: rate(layer, self.accepted(layer, shares, drafted)) for layer in self.layers}
        rates = {layer: found for layer, found in promised.items() if found is not None}
        best = max(rates, key=rates.__getitem__)
        self.found = Found(best, rates[best] / now)
        named, self._named = self._named, best if self.found.gain >= LEAST_GAIN else None
        if num_outputs < self._changed + (REVIEW_OUTPUTS << self.num_tries):
            return None
        return named if named == self._named else None

    def change(self, layer: Layer, num_outputs: int, drafted: float) -> None:
        """Notes that a layer is in use from now on; that in use can draft the share ``drafted``."""
        if layer.in_four_bits != self.current.in_four_bits:
            self._before = self._acceptance(drafted)
        self.current = layer
        self._num_judged = self._num_accepted = 0.0
        self._num_drafts = 0
        self.wait(num_outputs)

    def wait(self, num_outputs: int) -> None:
        """Lets the next change wait for twice as many tokens, whatever came of this one."""
        self.num_tries += 1
        self._changed, self._named = num_outputs, None

    def _left(self, layer: Layer) -> float:
        return self._left_by_four_bits if layer.in_four_bits else 1.0

    def _acceptance(self, drafted: float) -> float | None:
        """Returns how many drafts are accepted of each token that can be drafted; None if few are known."""
        if self._num_drafts < JUDGED_DRAFTS:
            return None
        return self._num_accepted / self._num_judged / max(drafted, LEAST_SHARE)

    def _judge(self, drafted: float) -> None:
        """Compares the acceptance with that in the other bits, once, when enough drafts are known."""
        if self._before is None or (now := self._acceptance(drafted)) is None:
            return
        four, whole = (now, self._before) if self.current.in_four_bits else (self._before, now)
        self._before = None
        if whole > 0:
            self._left_by_four_bits = min(max(four / whole, LEAST_LEFT), 1.0)
