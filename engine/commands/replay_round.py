"""Runs one traced round again, from fresh logits and the seed, by the operations of every round.

Fresh logits differ from the engine's by floating-point noise. So a draw or a verdict that differs from the
trace is repeated with distributions that lean towards the trace, by no more than the tolerance: if that gives
the trace's result, it was a near tie. ``replay`` uses this module.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from truedraft.engine.commands.trace_file import TracedRound
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel, processed
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts, RowVerdict
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import TorchOps
from truedraft.engine.sampling.verify import block_stand_probs, residual

CPU = torch.device("cpu")


class Outcome(Enum):
    CONFIRMED = "confirmed"
    NEAR_TIE = "near tie"
    WRONG = "wrong"


class Finding(NamedTuple):
    """Describes a difference from the trace."""

    outcome: Outcome
    message: str


class Fresh(Protocol):
    """Is a model or a head that is computed anew for every round."""

    def following(self, text: LoneText, drafted: list[int], vocab_size: int) -> torch.Tensor:
        """Returns logits [drafted tokens + 1, vocab_size]: row j predicts what follows ``drafted[:j]``."""
        ...


class RoundCheck:
    """Runs one round of ``text`` again. ``draft`` is None where the drafted tokens are taken as they are, as
    those of a deterministic source."""

    def __init__(
        self,
        target: FreshModel,
        draft: Fresh | None,
        tolerance: float,
        round_: TracedRound,
        text: LoneText,
        seed: int,
    ) -> None:
        self.round, self.tolerance, self.vocab_size = round_, tolerance, target.vocab_size
        self.rule, self.ids = Rule(round_.rule), round_.draft_ids
        method = text.params.draft_sample_method
        self.drafts_greedily = self.rule is Rule.EXACT_MATCH if method is None else method == "greedy"
        self.text = replace(text, rule=self.rule, seed=seed, drafts_greedily=self.drafts_greedily)
        # This distribution has been processed already, and is drawn from as it is.
        uncut = SamplingParams(max_tokens=1, temperature=1.0)
        self.leaning = replace(self.text, params=uncut, matcher=None, has_rules=False)
        self.ops = TorchOps(target.rules)
        self.token_ids = torch.tensor([self.ids], dtype=torch.int64)
        self.target_logits = self._logits(target)
        self.draft_logits = None if draft is None else self._logits(draft)
        # A deterministic draft is certain. It is compared with the draft's own guess where that can be
        # computed again.
        self.draft_probs = F.one_hot(self.token_ids[0], self.vocab_size).float()
        if self.draft_logits is not None and not self.drafts_greedily:
            self.draft_probs = processed(self.draft_logits[:-1], text.params)

    def findings(self) -> Iterator[Finding]:
        if self.draft_logits is not None:
            for number, token_id in enumerate(self.ids):
                yield from self._check_draft(number, self.draft_logits[number], token_id)
        yield from self._check_probs()
        yield from self._check_verdict()

    def _logits(self, model: Fresh) -> torch.Tensor:
        logits = model.following(self.text, self.ids, self.vocab_size).cpu()
        return self.ops.adjust(self._step(self.text), logits, self.token_ids, 0, [len(self.ids) + 1])

    def _step(self, text: LoneText, num_rows: int = 1) -> StepRows:
        """Returns the rows of a step, one for each text. The texts are kept, and a row ends with its text."""
        self._kept = [replace(text) for _ in range(num_rows)]
        return StepRows(RowTable().rows_of(self._kept), self.vocab_size, CPU)

    def _check_draft(self, number: int, logits: torch.Tensor, token_id: int) -> Iterator[Finding]:
        """Checks that this token is the draft's most likely one, or the one that the seed draws."""

        def drawn(text: LoneText, logits: torch.Tensor) -> list[int]:
            ids: list[int] = self.ops.draw(self._step(text, len(logits)), logits, number).ids.tolist()
            return ids

        (found,) = drawn(self.text, logits[None])
        if found != token_id:
            if self.drafts_greedily:
                again = drawn(self.text, self._favoured(logits, token_id)[None])
            else:
                leaning = self._leaning(self.draft_probs[number], token_id, self.draft_probs[number])
                again = drawn(self.leaning, torch.stack(leaning).log())
            message = f"drafted token {number + 1} is {token_id}, but must be {found}"
            yield self._finding(token_id in again, message)

    def _check_probs(self) -> Iterator[Finding]:
        """Compares the probabilities of the drafted tokens, which at temperature 0 are 1 or 0."""
        traced = RowVerdict(self.round.num_accepted, self.round.next_token, failed=False)
        step = self._step(self.text)
        of_target, of_draft, _ = self.ops.probs_of(step, self.target_logits, self._drafts(1), [traced])
        for whose, found, logits in (
            ("target", of_target, self.target_logits),
            ("draft", of_draft, self.draft_logits),
        ):
            for number, (computed, token) in enumerate(
                zip(found[0].tolist(), self.round.drafted, strict=True)
            ):
                told: float = getattr(token, f"{whose}_prob")
                if abs(computed - told) > self.tolerance:
                    is_tie = self.rule is Rule.EXACT_MATCH and told in (0, 1) and logits is not None
                    yield self._finding(
                        is_tie and logits is not None and self._is_tie(logits[number]),
                        f"the {whose}'s probability of drafted token {number + 1} is {computed:.6f}, "
                        f"not {told:.6f}",
                    )

    def _check_verdict(self) -> Iterator[Finding]:
        """Checks the number of accepted drafts, and the token that follows them."""
        accepted, next_token = traced = self.round.num_accepted, self.round.next_token
        (found,) = self.ops.judge(self._step(self.text), self.target_logits, self._drafts(1))
        if found[:2] == traced:
            return
        least = min(accepted, found.num_accepted)
        said = f"drafted token {least + 1} was {_verdict(accepted > least)}, but must be "
        message = said + _verdict(accepted <= least)
        if accepted == found.num_accepted:
            what = "bonus" if accepted == len(self.ids) else "recovered"
            message = f"the {what} token is {next_token}, but must be {found.next_token}"
        yield self._finding(traced in self._leaning_verdicts(), message)

    def _leaning_verdicts(self) -> list[tuple[int, int]]:
        """Returns the verdicts that noise might have given: the number of accepted drafts and the next token
        of each."""
        accepted, next_token = self.round.num_accepted, self.round.next_token
        if self.rule is Rule.EXACT_MATCH:
            expected = [*self.ids[:accepted], next_token]
            logits = [self.target_logits.clone()]
            for number, token_id in enumerate(expected):
                logits[0][number] = self._favoured(logits[0][number], token_id)
        else:
            logits = [probs.log() for probs in self._leaning_targets(accepted, next_token)]
        drafts, step = self._drafts(len(logits)), self._step(self.leaning, len(logits))
        return [verdict[:2] for verdict in self.ops.judge(step, torch.cat(logits), drafts)]

    def _leaning_targets(self, accepted: int, next_token: int) -> list[torch.Tensor]:
        """Returns the target's distributions [drafts + 1, V] as noise may have made them."""
        probs = processed(self.target_logits, self.text.params)
        by_equality = not self.rule.uses_draft_probs
        found = []
        for leans in (0.0, self.tolerance):
            changed = probs.clone()
            for number, token_id in enumerate(self.ids[: accepted + (not by_equality)]):
                lean = leans if number < accepted else -leans
                changed[number] = _with_mass(changed[number], token_id, lean)
            row = changed[accepted]
            drawn_from = row if by_equality else self._drawn_from(changed, accepted)
            for leaning in (row, *self._leaning(row, next_token, drawn_from)):
                changed = changed.clone()
                changed[accepted] = leaning
                found.append(changed)
        return found

    def _drawn_from(self, probs: torch.Tensor, accepted: int) -> torch.Tensor:
        """Returns the masses from which the recovered or bonus token is drawn, in terms of the target's."""
        if accepted == len(self.ids):
            return probs[accepted]
        weight = torch.ones((), dtype=torch.float64)
        if self.rule is Rule.BLOCK:
            given = probs[None], self.token_ids, self.draft_probs[None], torch.tensor([len(self.ids)])
            weight = block_stand_probs(*given)[0][0, accepted]
        left = residual(probs[accepted], self.draft_probs[accepted], weight)
        return (left / weight.clamp(min=self.tolerance)).float()

    def _leaning(self, probs: torch.Tensor, token_id: int, drawn_from: torch.Tensor) -> list[torch.Tensor]:
        """Returns ``probs`` [V] changed so that drawing the token is more likely. With the coupled rule the
        token gains a share; otherwise mass moves to it from the tokens before or after it, in proportion to
        ``drawn_from`` [V]."""
        if self.rule is Rule.COUPLED:
            gained = probs.clone()
            gained[token_id] *= 1 + self.tolerance
            return [gained]
        found = []
        for part in (slice(0, token_id), slice(token_id + 1, None)):
            moved = probs.clone()
            mass = float(drawn_from[part].sum())
            moved[part] -= drawn_from[part] * min(1.0, self.tolerance / max(mass, self.tolerance))
            moved.clamp_(min=0)
            # Tokens that were cut off stay at zero.
            moved[token_id] += (probs - moved).sum() * (probs[token_id] > 0)
            found.append(moved)
        return found

    def _favoured(self, logits: torch.Tensor, token_id: int) -> torch.Tensor:
        return logits.index_add(0, torch.tensor([token_id]), torch.tensor([self.tolerance]))

    def _drafts(self, num_rows: int) -> Drafts:
        every = (num_rows, -1, -1)
        ids, probs = self.token_ids.expand(num_rows, -1), self.draft_probs[None].expand(every)
        return Drafts(ids, probs, [len(self.ids)] * num_rows)

    def _is_tie(self, scores: torch.Tensor) -> bool:
        best, second = scores.topk(2).values.tolist()
        return bool(best - second <= self.tolerance)

    def _finding(self, is_tie: bool, message: str) -> Finding:
        return Finding(Outcome.NEAR_TIE if is_tie else Outcome.WRONG, message)


def _with_mass(probs: torch.Tensor, token_id: int, more: float) -> torch.Tensor:
    """Returns ``probs`` [V] in which this token has that much more mass, and the others less in
    proportion."""
    before = float(probs[token_id])
    after = min(1.0, max(0.0, before + more))
    if before in (0.0, 1.0) or after == before:
        return probs
    changed = probs * ((1 - after) / (1 - before))
    changed[token_id] = after
    return changed


def _verdict(accepted: bool) -> str:
    return "accepted" if accepted else "rejected"
