"""Drafts the output that the client expects; deterministic, so exact at any temperature."""

from truedraft.engine.core.planning import Found
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import Source


class PredictionProposer:
    """Offers the continuation of the prediction; the engine moves the cursors over emitted tokens."""

    name: Source = "prediction"

    def offers(self, sequence: Sequence, limit: int) -> Found:
        """Offers tokens after a run of agreeing ones; a run of none is a guess that one token was
        replaced."""
        assert sequence.prediction is not None
        return Found(sequence.prediction.run, sequence.prediction.expected(limit))
