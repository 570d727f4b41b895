"""Drafts that a grammar forces: tokens which are the only ones allowed where they stand.

The target's distribution there is one-hot, so they are accepted with certainty, whatever the rule.
"""

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import Source

# The strength of an offer, as that of a long match: it never fails.
CERTAIN = 16


class GrammarProposer:
    """Offers what the grammar forces next, if it forces anything."""

    name: Source = "grammar"
    reads = False

    def num_unread(self, sequence: Sequence) -> int:
        return 0

    def read(self, sequence: Sequence, max_tokens: int) -> int:
        return 0

    def offers(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        assert sequence.matcher is not None
        return CERTAIN, sequence.matcher.forced(limit)
