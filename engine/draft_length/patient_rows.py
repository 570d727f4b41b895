"""Which drafts of a round may end early, and by which rules."""

import random
from collections.abc import Hashable, Sequence

from engine.draft_length.confidence import Patience, PatientDraft
from engine.draft_length.costs import CostModel
from engine.draft_length.in_force import PlanInForce
from engine.draft_length.learning import Round
from engine.draft_length.outlook import Outlooks
from engine.draft_length.patient import FURTHER, OPEN_FURTHER, PatienceTrial, compare, rules
from engine.draft_length.plan import Plan
from engine.draft_length.rounds import DRAFT_MODEL, Candidate


class PatientRows:
    """``drafts`` are those of the round at hand, by key: none where its rows have no patience. ``trials`` are
    by the number of rows."""

    def __init__(self, costs: CostModel, outlooks: Outlooks) -> None:
        self.costs = costs
        self.trials: dict[int, PatienceTrial] = {}
        self.drafts: dict[Hashable, PatientDraft] = {}
        self._outlooks = outlooks
        self._rng = random.Random(0)  # for what nobody knows of texts
        self._trial: PatienceTrial | None = None  # of these rows; None: they cannot have patience
        self._rules: list[Patience] = []  # of these rows, in the mode of the last round
        self.is_open = False  # the round at hand refuses no token

    def set_rows(self, rows: Sequence[Candidate], lengths: Sequence[int], is_probing: bool) -> None:
        """From this round on these rows draft these lengths, or with patience about as much."""
        self._trial = None
        if min(lengths) > 0 and not is_probing and all(row.method == DRAFT_MODEL for row in rows):
            self._trial = self.trials.setdefault(len(rows), PatienceTrial())
            self._rules = []

    def choose(
        self, rows: Sequence[Candidate], planned: Sequence[int], best: Plan, current_round: int
    ) -> list[int] | None:
        """The most that rows may draft in this round, if they have patience in it. ``planned`` are their
        lengths in the plan ``best``."""
        self.drafts, self.is_open = {}, False
        if self._trial is None:
            return None
        limits = [row.limit for row in rows]
        if min(limits) <= 0:
            return None
        mode = self._trial.mode(current_round)
        if mode == "planned":
            return None
        self.is_open = mode == "open"
        if not self._rules or self._rules[0].is_open != self.is_open:
            sequences = [self._outlooks.sequence(row, current_round) for row in rows]
            if self.is_open:
                self._rules = [Patience(sequence.group.confidence) for sequence in sequences]
            else:
                self._rules = rules(best, max(best.lengths), sequences, self.costs)
        self.drafts = {row.key: PatientDraft(rule) for row, rule in zip(rows, self._rules, strict=True)}
        further = OPEN_FURTHER if self.is_open else FURTHER
        return [min(length + further, limit) for length, limit in zip(planned, limits, strict=True)]

    def go_on(self, drafts: Sequence[PatientDraft] | None) -> None:
        """Another round of the same: with these drafts, or with new ones."""
        if self.drafts:
            new = drafts or [PatientDraft(rule) for rule in self._rules]
            self.drafts = dict(zip(self.drafts, new, strict=True))

    def until(self, current_round: int) -> int | None:
        """The round from which on ``choose`` says something else of the same rows, if it will."""
        return self._trial.until(current_round) if self._trial is not None else None

    def learn(self, rounds: Sequence[Round], in_force: PlanInForce, current_round: int) -> None:
        """Compares rounds that had patience with what the plan in force would have made of them."""
        patient = [one for one in rounds if one.patient is not None]
        if not patient:
            return
        rows = patient[-1].rows
        keys = [row.key for row in rows]
        same = [one for one in patient if one.rows is rows or [row.key for row in one.rows] == keys]
        sequences = [self._outlooks.sequence(row, current_round) for row in rows]
        trial = self.trials[len(rows)]
        lengths = in_force.lengths(keys)
        trial.learn(compare(same, lengths, sequences, self.costs, self._rng, trial.num_needed))

    def state(self) -> dict[str, dict[str, float]]:
        """For people."""
        return {str(num_rows): trial.state() for num_rows, trial in sorted(self.trials.items())}
