"""One traced round, decided again from fresh logits and the seed.

Decisions are made with scalars and their distance from the threshold, not by the code that made them in
the engine: a wrong one within floating-point noise of its threshold is a near tie. Used by ``replay``.
"""

import math
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from truedraft.engine.commands.trace_file import TracedRound
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel, adjusted, processed
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.sampling.random import Stream, exponential_noise, round_seeds, uniform
from truedraft.engine.sampling.verify import block_stand_probs, residual


class Outcome(Enum):
    CONFIRMED = "confirmed"
    NEAR_TIE = "near tie"
    WRONG = "wrong"


class Finding(NamedTuple):
    """Something that is not exactly as the trace has it."""

    outcome: Outcome
    message: str


class Fresh(Protocol):
    """Is a model or a head, computed anew for every round."""

    def following(self, text: LoneText, drafted: list[int], vocab_size: int) -> torch.Tensor:
        """Returns logits [drafted tokens + 1, vocab_size]: row j predicts what follows ``drafted[:j]``."""
        ...


class RoundCheck:
    """One round decided again. Rows are positions: K drafted ones and the one after them.

    ``draft`` None: the drafted tokens are taken as they are, as those of a deterministic source.
    """

    def __init__(
        self,
        target: FreshModel,
        draft: Fresh | None,
        tolerance: float,
        round_: TracedRound,
        text: LoneText,
        seed: int,
    ) -> None:
        self.round = round_
        self.rule = Rule(round_.rule)
        self.ids = round_.draft_ids
        self.tolerance = tolerance
        self.vocab_size = target.vocab_size
        self.rules = target.rules
        self.seed = torch.tensor(seed)
        self.position = torch.tensor(round_.position)
        self.target_logits = self._logits(target, text)
        self.draft_logits = None if draft is None else self._logits(draft, text)
        self.target_probs = self._probs(self.target_logits, text.params)
        method = text.params.draft_sample_method
        self.drafts_greedily = self.rule is Rule.EXACT_MATCH if method is None else method == "greedy"
        if self.draft_logits is None or self.drafts_greedily:
            # A deterministic draft is one-hot at what it guessed; whether it is the draft's own guess is
            # looked at where that can be computed again.
            self.draft_probs = _one_hot(torch.tensor(self.ids, dtype=torch.int64), self.vocab_size)
        else:
            self.draft_probs = processed(self.draft_logits[:-1], text.params)

    def findings(self) -> Iterator[Finding]:
        for number in range(len(self.ids)):
            yield from self._check_draft(number)
            yield from self._check_probs(number)
        yield from self._check_verdict()
        yield from self._check_next()

    def _logits(self, model: Fresh, text: LoneText) -> torch.Tensor:
        return adjusted(model.following(text, self.ids, self.vocab_size), text, self.ids, self.rules).cpu()

    def _probs(self, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        if self.rule is Rule.EXACT_MATCH:
            return _one_hot(logits.argmax(-1), self.vocab_size)
        return processed(logits, params)

    def _check_draft(self, number: int) -> Iterator[Finding]:
        """Checks that this token is the draft's most likely one, or is what the seed draws from it."""
        if self.draft_logits is None:
            return
        what, token_id = f"drafted token {number + 1}", self.ids[number]
        if self.drafts_greedily:
            yield from self._check_highest(what, self.draft_logits[number], token_id)
        elif self.rule is Rule.COUPLED:
            scores = self._scores(self.draft_logits[number], self.draft_probs[number], number)
            yield from self._check_highest(what, scores, token_id)
        else:
            number_drawn = float(uniform(self._spent_seed(), self.position + number, Stream.DRAFT))
            yield from self._check_inverse_cdf(what, self.draft_probs[number], number_drawn, token_id)

    def _check_probs(self, number: int) -> Iterator[Finding]:
        token = self.round.drafted[number]
        for whose, traced, probs, logits in (
            ("target", token.target_prob, self.target_probs, self.target_logits),
            ("draft", token.draft_prob, self.draft_probs, self.draft_logits),
        ):
            computed = float(probs[number, token.id])
            if abs(computed - traced) <= self.tolerance:
                continue
            tie = self.rule is Rule.EXACT_MATCH and logits is not None and self._is_tie(logits[number])
            yield Finding(
                Outcome.NEAR_TIE if tie and traced in (0, 1) else Outcome.WRONG,
                f"the {whose}'s probability of drafted token {number + 1} is {computed:.6f}, "
                f"not {traced:.6f}",
            )

    def _check_verdict(self) -> Iterator[Finding]:
        num_accepted, num_drafted = self.round.num_accepted, len(self.ids)
        if self.rule is Rule.REJECTION:
            for number in range(min(num_accepted + 1, num_drafted)):
                drawn = float(uniform(self._spent_seed(), self.position + number, Stream.ACCEPT))
                token_id = self.ids[number]
                goal = drawn * float(self.draft_probs[number, token_id])
                yield from self._check_decision(
                    number, number < num_accepted, float(self.target_probs[number, token_id]) - goal
                )
        elif self.rule is Rule.BLOCK and num_drafted:
            _, stand_probs = self._block()
            # All lengths are tried; the longest that stands is kept, so shorter ones do not matter.
            for number in range(max(num_accepted - 1, 0), num_drafted):
                drawn = float(uniform(self._spent_seed(), self.position + number, Stream.ACCEPT))
                yield from self._check_decision(
                    number, number < num_accepted, float(stand_probs[number + 1]) - drawn
                )
        else:
            for number in range(min(num_accepted + 1, num_drafted)):
                yield from self._check_equality(number, number < num_accepted)

    def _check_decision(self, number: int, accepted: bool, margin: float) -> Iterator[Finding]:
        """``margin`` > 0 accepts."""
        if accepted != (margin > 0):
            yield Finding(
                Outcome.NEAR_TIE if abs(margin) <= self.tolerance else Outcome.WRONG,
                f"drafted token {number + 1} was {_verdict(accepted)}, but must be {_verdict(not accepted)} "
                f"(by {abs(margin):.2e})",
            )

    def _check_equality(self, number: int, accepted: bool) -> Iterator[Finding]:
        scores = self._scores(self.target_logits[number], self.target_probs[number], number)
        got = int(scores.argmax())
        equal = got == self.ids[number]
        if equal == accepted:
            return
        is_tie = self._is_tie(scores) if equal else _gap(scores, self.ids[number]) <= self.tolerance
        yield Finding(
            Outcome.NEAR_TIE if is_tie else Outcome.WRONG,
            f"drafted token {number + 1} was {_verdict(accepted)}, but the target says {got}",
        )

    def _check_next(self) -> Iterator[Finding]:
        row, token_id = self.round.num_accepted, self.round.next_token
        what = "the bonus token" if row == len(self.ids) else "the recovered token"
        if self.rule in (Rule.REJECTION, Rule.BLOCK):
            weights = self.target_probs[row].double()
            if row < len(self.ids):
                weight = torch.ones((), dtype=torch.float64)
                if self.rule is Rule.BLOCK:
                    weight = self._block()[0][row]
                weights = residual(weights, self.draft_probs[row], weight)
            drawn = float(uniform(self.seed, self.position + row, Stream.RECOVER))
            yield from self._check_inverse_cdf(what, weights, drawn, token_id)
        else:
            scores = self._scores(self.target_logits[row], self.target_probs[row], row)
            yield from self._check_highest(what, scores, token_id)

    def _check_inverse_cdf(
        self, what: str, weights: torch.Tensor, drawn: float, token_id: int
    ) -> Iterator[Finding]:
        """Token x is drawn if the number, as a share of all weight, lies in x's part of the sum."""
        cumulative = weights.double().cumsum(-1)
        goal = drawn * float(cumulative[-1])
        start = float(cumulative[token_id - 1]) if token_id else 0.0
        outside = max(start - goal, goal - float(cumulative[token_id]), 0.0)
        # A token of no weight has an empty part, which touches the goal only by accident.
        if outside > 0 or (weights[token_id] == 0 and outside == 0):
            right = int(torch.searchsorted(cumulative, goal, right=True).clamp(max=len(weights) - 1))
            yield Finding(
                Outcome.NEAR_TIE if outside <= self.tolerance else Outcome.WRONG,
                f"{what} is {token_id}, but the seed draws {right}",
            )

    def _check_highest(self, what: str, scores: torch.Tensor, token_id: int) -> Iterator[Finding]:
        if int(scores.argmax()) != token_id:
            yield Finding(
                Outcome.NEAR_TIE if _gap(scores, token_id) <= self.tolerance else Outcome.WRONG,
                f"{what} is {token_id}, but must be {int(scores.argmax())}",
            )

    def _scores(self, logits: torch.Tensor, probs: torch.Tensor, row: int) -> torch.Tensor:
        """Returns what the target's token is the highest of: logits, or log-probabilities with the coupled
        rule's noise, of which a random draft is the highest, too."""
        if self.rule is Rule.EXACT_MATCH:
            return logits
        noise = exponential_noise(self.seed, self.position + row, self.vocab_size)
        return probs.double().log() - noise.log()

    def _is_tie(self, scores: torch.Tensor) -> bool:
        best, second = scores.topk(2).values.tolist()
        return bool(best - second <= self.tolerance)

    def _block(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefix weights and the probability that each length stands, 0..K."""
        weights, stand_probs = block_stand_probs(
            self.target_probs[None],
            torch.tensor([self.ids]),
            self.draft_probs[None],
            torch.tensor([len(self.ids)]),
        )
        return weights[0], stand_probs[0]

    def _spent_seed(self) -> torch.Tensor:
        """Returns the seed of drafting and accepting, which each round has for itself."""
        return round_seeds(self.seed, self.position)


def _one_hot(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids, vocab_size).float()


def _gap(scores: torch.Tensor, token_id: int) -> float:
    gap = float(scores.max() - scores[token_id])
    return math.inf if math.isnan(gap) else gap


def _verdict(accepted: bool) -> str:
    return "accepted" if accepted else "rejected"
