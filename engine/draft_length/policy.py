"""How many tokens every row of a step drafts: as many as raise expected tokens per second, or none.

Exactness: ``choose`` is called before a round draws anything and knows only earlier rounds, the rows and
the clock. A length that depended on a token of its own round would bias the output: tokens that are easy
to accept would be dropped less often than others. Whatever is drafted after ``choose`` must be verified.

A small model's round takes a millisecond, so most rounds only compare their rows with those of the round
before and are put aside. Every few rounds the policy *looks*: it learns from those put aside (``learning``)
and searches anew (``plan``).

Three things are tried out now and then, as far as a small share of the time pays for it (``probes``): a
short draft where drafting is off, a longer one where it is on, and none at all, so that the plain step
that everything is compared with is a measured one.
"""

from collections.abc import Hashable, Sequence
from operator import attrgetter

from engine.draft_length.confidence import PatientDraft
from engine.draft_length.costs import CostModel
from engine.draft_length.in_force import PlanInForce
from engine.draft_length.learning import Round, lag_of, learn_acceptance, observe_costs, replay
from engine.draft_length.outlook import Outlooks
from engine.draft_length.patient_rows import PatientRows
from engine.draft_length.plan import Search, evaluate, search
from engine.draft_length.probes import PROBE_ROUNDS, Probes
from engine.draft_length.report import Report
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, Outcome, RoundSeconds, lags_after
from engine.draft_length.survival import SequenceAcceptance

# The policy looks after so many rounds, after twice as many where it found the same again, as many again
# where it found a neighbouring length for all, and at once when many rows come or go and after a probe. Right
# after a pass a look takes a millisecond: where rounds are short, the longest pause is a time.
LOOK_EVERY, MAX_LOOK_EVERY, MAX_LOOK_SECONDS = 4, 64, 0.4
# It learns from so many verdicts at most, those of rows with patience taking longer, and from the times of so
# many rounds, spread evenly.
LEARN_VERDICTS, LEARN_PATIENT, LEARN_REPLAYED, LEARN_TIMES = 128, 64, 96, 12
# Rows that come and go keep the plan, if they are at most this share of all.
FEW_CHANGED = 1 / 8
# So many rows are looked at one by one, more of them together.
FEW_ROWS = 4
# Uneven lengths in a batch are looked for after so many rounds, and at every look while they are uneven.
UNEVEN_EVERY = 128
# At first single rounds tell something about costs.
NEW_ROUNDS = 256
# Never comes.
NO_ROUND = 1 << 62
# While drafting does not pay, prompts are computed for a draft model that takes less than this share of the
# target's time over so many tokens. A dearer one catches up if it is needed.
CHEAP_DRAFT, TYPICAL_CHUNK = 0.1, 64

# Methods and matches of rows; keys, kinds and limits of those that a search was about.
Kinds = tuple[list[str], list[str]]
Signature = tuple[list[Hashable], Kinds, list[int]]
_key, _method, _match, _limit = map(attrgetter, ("key", "method", "match", "limit"))


class DraftLengthPolicy:
    """``auto``. Deterministic: the same past gives the same lengths."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.probes = Probes()
        self.report = Report()
        self._outlooks = Outlooks()
        self.patient = PatientRows(costs, self._outlooks)
        self._round = 0
        self._rounds: list[Round] = []  # not learned from yet
        self._in_force = PlanInForce(costs)
        self._look_every = LOOK_EVERY
        self._next_look = self._next_uneven = 0
        self._probe_ends = NO_ROUND  # the first round that is as planned again
        self._is_probing = False
        self._left_in = NO_ROUND  # the round in which some rows were gone, and nobody had come for them
        self._searched: Signature | None = None
        # Of the rows of the last look: what says that they are the same, and what they are given.
        self._keys: list[Hashable] = []
        self._kinds: Kinds = ([], [])
        self._lengths: list[int] = []
        self._planned: list[int] = []
        self._longest = 0
        self._looks_up = False
        # Of the last round.
        self._rows: Sequence[Candidate] = ()
        self._lags: Sequence[int] = ()
        self._num_stored = 0  # tokens in the target's cache
        self._asked: list[int] = []

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]:
        """Tokens to draft, by row."""
        if not rows:
            return []
        self._round += 1
        keys = list(map(_key, rows))
        kinds = list(map(_method, rows)), list(map(_match, rows))
        looks_anyway = self._looks_up or self._left_in < NO_ROUND
        if self._round >= self._next_look or looks_anyway or keys != self._keys or kinds != self._kinds:
            self._look(rows, keys, kinds, num_prompt_tokens)
        elif self._round >= self._probe_ends:
            self._give(rows, self._planned)
        self._rows = rows
        self._lags = [row.lag for row in rows]
        self._num_stored = sum([row.num_stored for row in rows])
        lengths = self._lengths
        if min(map(_limit, rows)) < self._longest:
            lengths = [max(0, min(length, row.limit)) for length, row in zip(lengths, rows, strict=True)]
        assert self._in_force.search is not None
        best = self._in_force.search.best
        lengths = self.patient.choose(rows, self._planned, best, self._round) or lengths
        if self.patient.is_open:
            # What that shows is wanted for the rounds that follow.
            self._next_look = min(self._next_look, self.patient.until(self._round) or NO_ROUND)
        self._asked = lengths
        return list(lengths)

    def patient_draft(self, key: Hashable) -> PatientDraft | None:
        """A row's draft that may end before the length that ``choose`` has just named."""
        return self.patient.drafts.get(key)

    @property
    def num_rounds(self) -> int:
        """For how many rounds, the last one included, what ``choose`` has said stands if the rows do."""
        return min(self.most_rounds, max(1, self._next_look - self._round))

    @property
    def most_rounds(self) -> int:
        """The same, if a look may wait for the end of a step."""
        next_choice = min(self._probe_ends, self._left_in + 1)
        if (until := self.patient.until(self._round)) is not None:
            next_choice = min(next_choice, until)
        return max(1, next_choice - self._round)

    def go_on(self, patient: list[PatientDraft] | None) -> None:
        """Another round of the same, as ``choose`` has said."""
        self._round += 1
        last = self._rounds[-1]
        self._lags = lags_after(last.outcomes, last.patient)
        self._num_stored += last.num_emitted
        self.patient.go_on(patient)

    def follows_prompts(self) -> bool:
        """Whether drafts are to be expected soon, or computing prompts for them costs next to nothing."""
        found = self._in_force.search
        if found is None or any(found.best.lengths):
            return True
        return self.costs.draft(TYPICAL_CHUNK) < CHEAP_DRAFT * self.costs.score(TYPICAL_CHUNK)

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        """The verdict on what ``choose`` asked for; fewer may have been drafted."""
        found = self._in_force.search
        if found is None or not outcomes:
            return
        self._rounds.append(
            Round(
                self._rows,
                self._asked,
                self._lags,
                outcomes,
                seconds,
                self._num_stored,
                list(self.patient.drafts.values()) or None,
                self._is_probing,
            )
        )

    def forget(self, key: Hashable) -> None:
        """A sequence has ended."""
        self._outlooks.end(key)

    def state(self) -> dict[str, object]:
        """For people: builtins only."""
        return {
            "policy": "auto",
            **self.report.state(self._in_force.search, self._asked),
            "survival": self._outlooks.state(),
            "patience": self.patient.state(),
            "costs": self.costs.state(),
            "probes": self.probes.state(),
        }

    def _look(self, rows: Sequence[Candidate], keys: list[Hashable], kinds: Kinds, num_prompts: int) -> None:
        """Rows have changed, or it is time to learn and to search."""
        self._keys, self._kinds = keys, kinds
        limits = [row.limit for row in rows]
        is_due = self._round >= self._next_look
        if not is_due and not self._must_search(rows, (keys, kinds, limits), num_prompts):
            for row in rows:
                if row.key not in self._outlooks.sequences:
                    self._outlooks.sequence(row, self._round)
            self._planned = self._in_force.lengths(keys)
            self._give(rows, self._planned)
        else:
            if is_due or self.probes.is_running:
                self._learn(self._round - 1)
            sequences = [self._outlooks.sequence(row, self._round) for row in rows]
            found = self._search(rows, sequences, num_prompts)
            self._searched, self._left_in = (keys, kinds, limits), NO_ROUND
            self._planned = found.best.lengths
            probe, num_rounds = None, 0
            if num_prompts == 0 and self._round >= self.probes.next_round(found):
                probe, num_rounds = self._probe(rows, sequences, found)
            self._give(rows, probe or self._planned, num_rounds)
            next_probe = max(self.probes.next_round(found), self._round + 1)
            self._next_look = min(self._round + self._look_every, next_probe)
            if probe:
                # One that succeeds while drafting is off is repeated at once.
                wait = self.probes.interval(found) if any(self._planned) else num_rounds
                self._next_look = self._round + max(num_rounds, min(self._look_every, wait))
        self._looks_up = any(row.method != DRAFT_MODEL and row.limit > 0 for row in rows)

    def _give(self, rows: Sequence[Candidate], lengths: list[int], num_probe_rounds: int = 0) -> None:
        """From this round on, or for so many that are a probe."""
        self._lengths, self._longest = lengths, max(lengths)
        self._is_probing = num_probe_rounds > 0
        self._probe_ends = self._round + num_probe_rounds if num_probe_rounds else NO_ROUND
        self.patient.set_rows(rows, lengths, self._is_probing)

    def _must_search(self, rows: Sequence[Candidate], signature: Signature, num_prompts: int) -> bool:
        """Whether the plan in force says little about these rows."""
        if self._in_force.search is None:
            return True
        if self._looks_up or any(row.method != DRAFT_MODEL and row.limit > 0 for row in rows):
            return signature != self._searched
        # Rows that have ended are often followed by others, first by their prompts: what pays is the same.
        before = len(self._in_force.search.best.lengths)
        has_changed = not num_prompts and abs(len(rows) - before) > FEW_CHANGED * max(len(rows), before)
        if not has_changed:
            self._left_in = NO_ROUND
        elif len(rows) < before and self._left_in == NO_ROUND:
            self._left_in = self._round
        else:
            return True
        return False

    def _search(
        self, rows: Sequence[Candidate], sequences: list[SequenceAcceptance], num_prompts: int
    ) -> Search:
        """The plan from now on."""
        self.costs.look_at(sum(row.num_stored for row in rows), len(rows))
        in_force = self._in_force
        before = in_force.even_length, in_force.own_lengths
        may_be_uneven = in_force.is_uneven or self._round >= self._next_uneven
        if may_be_uneven:
            self._next_uneven = self._round + UNEVEN_EVERY
        outlooks = self._outlooks.of(rows, sequences, may_be_uneven or len(rows) <= FEW_ROWS)
        found = search(outlooks, self.costs, num_prompts, may_be_uneven, in_force.uneven_gain)
        found = in_force.follow(found, rows, outlooks, num_prompts)
        self._set_pace(found, *before)
        return found

    def _set_pace(self, found: Search, even_before: int, own_before: dict[Hashable, int]) -> None:
        """How soon to look again."""
        even, own = self._in_force.even_length, self._in_force.own_lengths
        if even == even_before and own == own_before:
            most = max(MAX_LOOK_EVERY, int(MAX_LOOK_SECONDS / found.best.seconds))
            self._look_every = min(2 * self._look_every, most)
        elif own_before or own or not even or abs(even - even_before) > 1:
            self._look_every = LOOK_EVERY

    def _probe(
        self, rows: Sequence[Candidate], sequences: list[SequenceAcceptance], found: Search
    ) -> tuple[list[int] | None, int]:
        """Other lengths, and for how many rounds, if some are due and can be afforded."""
        outlooks = self._outlooks.of(rows, sequences, self._in_force.is_uneven or len(rows) <= FEW_ROWS)
        ages = [sequence.age(self._round) for sequence in sequences]
        limits, lags = [max(0, row.limit) for row in rows], [row.lag for row in rows]
        for lengths in self.probes.candidates(found, limits, ages, lags):
            lag = lag_of(rows, lengths, lags)
            plan = evaluate(outlooks, lengths, self.costs, 0, lag)
            again = evaluate(outlooks, lengths, self.costs, 0) if lag else plan
            sharing = self.costs.sharing(max(again.seconds, found.best.seconds))
            num_rounds = self.probes.num_rounds(again, found.best, int(sharing))
            if self.probes.can_afford(plan, again, found.best, num_rounds):
                self.probes.begin(plan, again.seconds, self._round)
                return lengths, num_rounds
            if num_rounds > PROBE_ROUNDS:
                break  # It is worth saving for, and others would spend it.
        self.probes.postpone(self._round, found)
        return None, 0

    def _learn(self, last_round: int) -> None:
        """From the rounds that were put aside."""
        rounds, self._rounds = self._rounds, []
        found = self._in_force.search
        if not rounds or found is None:
            return
        self.probes.save(found, len(rounds))
        self.patient.learn(rounds, self._in_force, self._round)
        first_round = last_round - len(rounds) + 1
        usual, probed = ([one for one in rounds if one.is_probe == is_probe] for is_probe in (False, True))
        most = LEARN_PATIENT if rounds[-1].patient is not None else LEARN_VERDICTS
        some = usual[:: -(-len(usual) * len(rounds[-1].rows) // most) or 1] + probed
        learn_acceptance(some, self._outlooks.sequences, first_round, last_round)
        replay(rounds, self._outlooks.sequences, last_round, LEARN_REPLAYED)
        timed = [one for one in usual if one.seconds is not None]
        some = timed[:: -(-len(timed) // LEARN_TIMES) or 1]
        observe_costs(some, self.costs, self._round < NEW_ROUNDS)
        self.report.count(found, some)
        self._outlooks.forget_ended()
        if self.probes.is_running:
            self._settle_probe(probed, found)

    def _settle_probe(self, rounds: Sequence[Round], found: Search) -> None:
        """What the rounds of a probe have shown."""
        if not rounds:
            self.probes.stop()
            return
        observe_costs(rounds, self.costs, is_probe=True)
        self.report.count(found, rounds)
        self.probes.settle(self._round - 1, found, rounds, self.costs.host(len(rounds[-1].outcomes)))
