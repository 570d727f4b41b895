"""Patience in simulations: none, and what a draft of known confidences comes to."""

from collections.abc import Sequence

from engine.draft_length.confidence import ConfidenceTable, PatientDraft
from engine.draft_length.patient import Mode, PatienceTrial


def known(rates: Sequence[float] = (0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)) -> ConfidenceTable:
    """A table of which every bin has seen enough."""
    table = ConfidenceTable()
    table._reached = [50.0] * len(rates)
    table._accepted = [50.0 * rate for rate in rates]
    return table


class NoPatience(PatienceTrial):
    def mode(self, current_round: int) -> Mode:
        return "planned"


def spend(draft: PatientDraft, confidences: Sequence[float]) -> tuple[int, int]:
    """Tokens kept and passes made of at most as many as there are confidences."""
    for position, confidence in enumerate(confidences):
        if not draft.keeps(confidence):
            return position, position + 1
        if not draft.goes_on():
            return position + 1, position + 1
    return len(confidences), len(confidences)
