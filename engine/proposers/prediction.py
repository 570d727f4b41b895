"""Drafts what the client expects the output to be; deterministic, so exact at any temperature."""

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import Source


class PredictionProposer:
    """Offers what the prediction goes on with; the engine moves the cursors over what is emitted."""

    name: Source = "prediction"

    def offers(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """After a run of agreeing tokens; a run of none is a guess that one token was replaced."""
        assert sequence.prediction is not None
        return sequence.prediction.run, sequence.prediction.expected(limit)
