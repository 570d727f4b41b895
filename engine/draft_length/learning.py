"""Rounds as they come, kept until they are looked at together: what they say of acceptance and of costs.

Learning from every round on its own took longer than a small model's draft. Times are medians of rounds that
were alike, which a moment of a busy machine does not move.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.draft_length.confidence import PatientDraft
from engine.draft_length.costs import CostModel
from engine.draft_length.plan import draft_sizes, padding
from engine.draft_length.replays import Replayed
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, Outcome, RoundSeconds
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance, Verdicts

# Fewer rounds alike say little about costs once those are known.
ENOUGH_ALIKE = 3


class Round(NamedTuple):
    """``lengths`` were asked for, of ``rows``, whose draft caches missed ``lags``; ``num_stored`` tokens were
    in the target's cache. ``patient``: the drafts, if they could end early. ``is_probe``: these were not the
    planned lengths. Rounds of one choice share their ``rows`` and ``lengths``."""

    rows: Sequence[Candidate]
    lengths: Sequence[int]
    lags: Sequence[int]
    outcomes: Sequence[Outcome]
    seconds: RoundSeconds | None
    num_stored: int
    patient: Sequence[PatientDraft] | None = None
    is_probe: bool = False

    @property
    def num_drafted(self) -> int:
        return sum([outcome.num_draft_tokens for outcome in self.outcomes])

    @property
    def num_emitted(self) -> int:
        return len(self.outcomes) + sum([outcome.num_accepted_tokens for outcome in self.outcomes])

    def asked(self) -> Iterable[tuple[Candidate, int]]:
        """The rows of the outcomes, with what was asked of them; some may have left in between."""
        if len(self.rows) == len(self.outcomes):
            return zip(self.rows, self.lengths, strict=True)
        by_key = {row.key: (row, length) for row, length in zip(self.rows, self.lengths, strict=True)}
        return [by_key[outcome.key] for outcome in self.outcomes]


def learn_acceptance(
    rounds: Sequence[Round],
    sequences: Mapping[Hashable, Mapping[str, SequenceAcceptance]],
    first_round: int,
    last_round: int,
) -> None:
    """``rounds`` are some of those from ``first_round`` to ``last_round``."""
    by_choice: dict[object, list[Round]] = {}
    is_lone = len(rounds[-1].rows) == 1
    verdicts: dict[SequenceAcceptance, Verdicts] = {}
    for one in rounds:
        if one.patient is not None:
            _learn_patient(one, one.patient, sequences, verdicts)
        else:
            choice = id(one.rows), id(one.lengths), len(one.outcomes)
            by_choice.setdefault(choice, []).append(one)
    for some in by_choice.values():
        for i, (row, asked) in enumerate(some[0].asked()):
            sequence = sequences.get(row.key, {}).get(row.label)
            if sequence is not None and asked:
                _learn_row(sequence, asked, some, i, verdicts.setdefault(sequence, Verdicts(is_lone)))
    of_groups: dict[GroupAcceptance, Verdicts] = {}
    for sequence, mine in verdicts.items():
        sequence.learn_all(mine, first_round, last_round)
        of_groups.setdefault(sequence.group, Verdicts(is_lone)).update(mine)
    for group, together in of_groups.items():
        group.learn(together, first_round, last_round)


def _learn_row(
    sequence: SequenceAcceptance, asked: int, rounds: Sequence[Round], row: int, verdicts: Verdicts
) -> None:
    """The outcomes of one row, of which as many tokens were asked for in all these rounds. Those behind the
    end of a text were never judged."""
    counts = Counter(
        [
            (outcome.num_draft_tokens, outcome.num_accepted_tokens, outcome.next_right)
            for outcome in [one.outcomes[row] for one in rounds]
            if not outcome.ended
        ]
    )
    for (num_drafted, num_accepted, next_right), count in counts.items():
        sequence.add_fill(asked * count, num_drafted * count, count)
        verdicts.add(num_drafted, num_accepted, count)
        if next_right is not None:
            verdicts.add_next(num_drafted, float(next_right), count)


def _learn_patient(
    one: Round,
    drafts: Sequence[PatientDraft],
    sequences: Mapping[Hashable, Mapping[str, SequenceAcceptance]],
    verdicts: dict[SequenceAcceptance, Verdicts],
) -> None:
    """A draft that ended early is no sign of a proposer that finds nothing."""
    by_key = {row.key: (row.label, draft) for row, draft in zip(one.rows, drafts, strict=True)}
    is_lone = len(one.rows) == 1
    for outcome in one.outcomes:
        label, draft = by_key[outcome.key]
        sequence = sequences.get(outcome.key, {}).get(label)
        if sequence is None or outcome.ended or not draft.confidences:
            continue
        num_drafted, num_accepted = outcome.num_draft_tokens, outcome.num_accepted_tokens
        of_row = verdicts.setdefault(sequence, Verdicts(is_lone))
        of_row.add(num_drafted, num_accepted)
        rate = draft.refused_rate(num_drafted)
        if rate is not None and num_accepted == num_drafted:
            of_row.add_next(num_drafted, rate)
        elif outcome.next_right is not None:
            of_row.add_next(num_drafted, float(outcome.next_right))
        draft.learn(num_drafted, num_accepted)


def replay(
    rounds: Sequence[Round],
    sequences: Mapping[Hashable, Mapping[str, SequenceAcceptance]],
    first: int,
    most: int,
) -> None:
    """What all ``rounds``, one after the other, say of other lengths: about ``most`` drafts, of the places
    from number ``first`` on."""
    num_places = len(rounds[-1].outcomes)
    texts: dict[GroupAcceptance, list[list[Replayed]]] = {}
    for i in range(first, first + min(num_places, max(1, most // len(rounds)))):
        for sequence, text in _texts(rounds, i % num_places, sequences):
            texts.setdefault(sequence.group, []).append(text)
    for group, some in texts.items():
        group.replay(some)


def _texts(
    rounds: Sequence[Round], place: int, sequences: Mapping[Hashable, Mapping[str, SequenceAcceptance]]
) -> list[tuple[SequenceAcceptance, list[Replayed]]]:
    """What the rows of one place have drafted, one after the other. What somebody drafts after a pause is
    another text: nobody knows of the tokens in between."""
    texts: list[tuple[SequenceAcceptance, list[Replayed]]] = []
    before = None
    for one in rounds:
        outcome = one.outcomes[place] if place < len(one.outcomes) else None
        sequence = sequences.get(outcome.key, {}).get(DRAFT_MODEL) if outcome is not None else None
        replayed = replayed_of(one, place, sequence) if sequence is not None else None
        if sequence is None or replayed is None:
            before = None
            continue
        if sequence is not before:
            before = sequence
            texts.append((sequence, []))
        if not one.outcomes[place].ended:
            texts[-1][1].append(replayed)
    return texts


def replayed_of(one: Round, place: int, sequence: SequenceAcceptance) -> Replayed | None:
    """What became of a row's draft; None if there was none by the draft model."""
    outcome = one.outcomes[place]
    num_drafted, refused = outcome.num_draft_tokens, None
    if one.patient is not None and len(one.patient) == len(one.outcomes):
        refused = one.patient[place].refused_rate(num_drafted)
    if outcome.source != DRAFT_MODEL or not (num_drafted or refused is not None):
        return None
    next_right = 0.0
    if outcome.next_right is not None:
        next_right = float(outcome.next_right)
    elif num_drafted == outcome.num_accepted_tokens:
        next_right = sequence.rate(num_drafted) if refused is None else refused
    return Replayed(num_drafted, outcome.num_accepted_tokens, next_right, one.is_probe)


def observe_costs(
    rounds: Sequence[Round], costs: CostModel, is_new: bool = False, is_probe: bool = False
) -> None:
    """While all is new single rounds are news too, as a probe's are. Steps with prompts are none."""
    alike: dict[tuple[int, int, bool], list[Round]] = {}
    for one in rounds:
        if one.seconds is not None:
            kind = len(one.outcomes), one.num_drafted, one.patient is None
            alike.setdefault(kind, []).append(one)
    most = min(ENOUGH_ALIKE, max(map(len, alike.values()), default=0))
    for (num_rows, num_drafted, is_planned), some in alike.items():
        if is_new or is_probe or len(some) >= most:
            _observe_alike(some, costs, num_rows, num_drafted, is_planned, is_probe)


def _observe_alike(
    rounds: Sequence[Round],
    costs: CostModel,
    num_rows: int,
    num_drafted: int,
    is_planned: bool,
    is_probe: bool,
) -> None:
    drafted = [
        (row, outcome.num_draft_tokens)
        for (row, _), outcome in zip(rounds[0].asked(), rounds[0].outcomes, strict=True)
    ]
    by_model = [length for row, length in drafted if length and row.method == DRAFT_MODEL]
    num_lookups = sum(
        asked > 0 and row.method != DRAFT_MODEL
        for row, asked in zip(rounds[0].rows, rounds[0].lengths, strict=True)
    )
    lag = 0
    if by_model and is_planned:
        lag = round(sum(lag_of(one.rows, one.lengths, one.lags) for one in rounds) / len(rounds))
    longest = max(length for _, length in drafted)
    seconds = [one.seconds for one in rounds if one.seconds is not None]
    # A pass that caught up with a pause was many times larger than any round's: no news about those. One
    # that may end early is drawn differently.
    is_usual = is_planned and lag <= len(by_model)
    # Not what the next rounds will have: a text may have ended in between.
    costs.look_at(sum(one.num_stored for one in rounds) // len(rounds), num_rows)
    costs.observe_rounds(
        num_rounds=len(rounds),
        is_probe=is_probe,
        draft_sizes=draft_sizes(by_model, lag) if is_usual else [],
        num_lookups=0 if by_model and not is_usual else num_lookups,
        num_rows=num_rows,
        num_score_tokens=num_rows + num_drafted + padding(costs, longest, num_rows, num_drafted),
        draft_seconds=_median([one.draft for one in seconds]),
        score_seconds=_median([one.score for one in seconds]),
        host_seconds=_median([one.host for one in seconds]),
    )


def _median(values: list[float]) -> float:
    """The lower one of two."""
    values.sort()
    return values[(len(values) - 1) // 2]


def lag_of(rows: Sequence[Candidate], lengths: Sequence[int], lags: Sequence[int]) -> int:
    """Tokens that the draft's cache has to catch up with before these lengths."""
    return sum(
        [
            lag
            for row, length, lag in zip(rows, lengths, lags, strict=True)
            if length and row.method == DRAFT_MODEL
        ]
    )
