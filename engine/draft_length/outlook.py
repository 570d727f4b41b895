"""What is known of every sequence's acceptance, and what that says of the rows of a step."""

from collections.abc import Hashable, Sequence

from engine.draft_length.plan import SURVIVAL_FLOOR, RowOutlook
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, temperature_bucket
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance

HOPELESS = RowOutlook([], 1.0, True)


class Outlooks:
    """``groups`` by label and temperature, ``sequences`` by key and label."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], GroupAcceptance] = {}
        self.sequences: dict[Hashable, dict[str, SequenceAcceptance]] = {}
        self._ended: list[Hashable] = []
        self._longest = 0

    def sequence(self, row: Candidate, current_round: int) -> SequenceAcceptance:
        """What is known of a row's sequence; a new one starts from its group."""
        by_label = self.sequences.setdefault(row.key, {})
        sequence = by_label.get(row.label)
        if sequence is None:
            name = row.label, temperature_bucket(row.temperature)
            group = self.groups.setdefault(name, GroupAcceptance())
            sequence = by_label[row.label] = SequenceAcceptance(group, current_round)
        return sequence

    def of(
        self, rows: Sequence[Candidate], sequences: Sequence[SequenceAcceptance], by_row: bool
    ) -> list[RowOutlook]:
        """Of every row its own, or ``by_row`` False that of its group, which rows share.

        A model's draft is looked at as far as any may go: what is left of a row's text shortens that row's
        draft and says nothing about the others.
        """
        by_model = [row.limit for row in rows if row.method == DRAFT_MODEL]
        self._longest = max(self._longest, *by_model) if by_model else self._longest
        shared: dict[GroupAcceptance, RowOutlook] = {}
        outlooks = []
        for row, sequence in zip(rows, sequences, strict=True):
            is_model = row.method == DRAFT_MODEL
            group = sequence.group
            if row.limit <= 0:
                outlook = HOPELESS
            elif by_row or not is_model:
                longest = self._longest if is_model else row.limit
                survival = sequence.survival(longest, SURVIVAL_FLOOR)
                outlook = RowOutlook(survival, sequence.fill, is_model, group.factors)
            elif group in shared:
                outlook = shared[group]
            else:
                survival = group.survival(self._longest, SURVIVAL_FLOOR)
                outlook = shared[group] = RowOutlook(survival, group.fill, is_model, group.factors)
            outlooks.append(outlook)
        return outlooks

    def end(self, key: Hashable) -> None:
        """Nothing more will be heard of it but what has not been learned yet."""
        self._ended.append(key)

    def forget_ended(self) -> None:
        for key in self._ended:
            self.sequences.pop(key, None)
        self._ended.clear()

    def state(self) -> dict[str, object]:
        """For people."""
        return {
            f"{method}, {bucket}": group.state()
            for (method, bucket), group in self.groups.items()
            if group.counts.reached
        }
