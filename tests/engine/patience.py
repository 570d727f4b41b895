"""Patience in simulations: none, and what a draft of known confidences comes to."""

from collections.abc import Sequence

from engine.draft_length.confidence import PatientDraft
from engine.draft_length.patient import Mode, PatienceTrial


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
