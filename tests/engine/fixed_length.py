"""A policy that always says the same: what ``auto`` is compared with."""

from collections.abc import Hashable, Sequence

from engine.draft_length.confidence import PatientDraft
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds


class FixedDraftLength:
    """The same length for every row that allows it."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]:
        return [max(0, min(self.num_draft_tokens, row.limit)) for row in rows]

    @property
    def num_rounds(self) -> int:
        return 1

    @property
    def most_rounds(self) -> int:
        return self.num_rounds

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        pass

    def go_on(self, patient: list[PatientDraft] | None) -> None:
        raise AssertionError("every round is a step here")

    def patient_draft(self, key: Hashable) -> PatientDraft | None:
        return None

    def follows_prompts(self) -> bool:
        return True

    def forget(self, key: Hashable) -> None:
        pass

    def state(self) -> dict[str, object]:
        return {"policy": "fixed", "num_draft_tokens": self.num_draft_tokens}
