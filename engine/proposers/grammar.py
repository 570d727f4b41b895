"""Drafts tokens that a grammar forces: those that are the only ones allowed at their place.

The target's distribution there is one-hot, so they are accepted with certainty, whatever the rule.
"""

from dataclasses import dataclass

from truedraft.engine.core.planning import Found
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import InRound
from truedraft.engine.messages import Source
from truedraft.engine.sampling.grammar import Matcher
from truedraft.engine.sampling.thinking import ThinkingBudget

# This offer has the strength of a long match, as it never fails.
CERTAIN = 16


@dataclass(slots=True)
class ForcedTokens:
    """Asks a sequence's grammar anew before every round: the matcher follows the emitted tokens."""

    matcher: Matcher | ThinkingBudget
    limit: int
    source: Source = "grammar"

    def drafts(self) -> list[int]:
        return self.matcher.forced(self.limit)


class GrammarProposer:
    """Offers the tokens that the grammar forces next, if it forces any."""

    name: Source = "grammar"

    def offers(self, sequence: Sequence, limit: int) -> Found:
        assert sequence.matcher is not None
        return Found(CERTAIN, sequence.matcher.forced(limit))

    def in_round(self, sequence: Sequence, limit: int) -> InRound:
        assert sequence.matcher is not None
        return ForcedTokens(sequence.matcher, limit)
