"""Sequences that are alike: what is known of the drafts for one is taken to be true of all."""

from truedraft.engine.speculation.acceptance import Acceptance


class Group:
    """Keeps what is known of the sequences of a temperature class."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.acceptances: dict[str, Acceptance] = {}  # keys: proposers
        self.lookups: dict[tuple[str, int], Acceptance] = {}  # keys: source, strength of the match
        self.lookup_balance = 0.0  # seconds that look-ups have saved lately

    def acceptance(self, source: str) -> Acceptance:
        """Returns what is known of a proposer's drafts."""
        if source not in self.acceptances:
            self.acceptances[source] = Acceptance()
        return self.acceptances[source]
