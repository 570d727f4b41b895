"""The sequences that draw tokens in one step, as tensors; drafts and verifies them by their own rules.

Each row follows one rule: exact match (temperature 0), coupled, rejection or block. Rows of one rule are
handled together, and all of it is a function of each row's own parameters, seed, history and positions.
Knows nothing of models and schedules: logits come in, token ids go out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.host_to_device import on_device
from engine.messages import SamplingParams
from engine.sampling.adjust import History, adjust_logits
from engine.sampling.draw import argmax
from engine.sampling.draws import Draws, TorchDraws
from engine.sampling.processors import SamplingTensors
from engine.sampling.random import Stream, round_seeds
from engine.sampling.verify import (
    Verdict,
    probs_of_draft,
    verify_block,
    verify_coupled,
    verify_exact_match,
    verify_rejection,
)


class Rule(Enum):
    EXACT_MATCH = "exact_match"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def uses_draft_probs(self) -> bool:
        return self in (Rule.REJECTION, Rule.BLOCK)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence that draws: its next token follows ``history``."""

    rule: Rule
    seed: int
    history: History

    @property
    def params(self) -> SamplingParams:
        return self.history.params

    @property
    def position(self) -> int:
        """Absolute index of the first token that this step draws."""
        return len(self.history.token_ids)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a proposer guessed for the rows: ``lengths[b]`` tokens for row b, padded to K.

    ``probs`` holds the distributions that the tokens were drawn from; None if every draft is
    deterministic or no row asks for them.
    """

    token_ids: torch.Tensor  # int64 [B, K]
    probs: torch.Tensor | None  # float32 [B, K, V]
    lengths: list[int]

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Drafts":
        ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        return cls(token_ids=ids, probs=None, lengths=[0] * num_rows)


class RowVerdict(NamedTuple):
    """One row's part of a judgement, in plain numbers."""

    num_accepted: int
    next_token: int
    failed: bool


class Judgement(NamedTuple):
    """A step's verdict, and which rows met logits that are no distribution (NaN, nothing allowed). [B]"""

    verdict: Verdict
    failed: torch.Tensor

    def tolist(self) -> list[RowVerdict]:
        """By row, in one copy from the device."""
        columns = torch.stack([*self.verdict, self.failed.long()]).tolist()
        return [
            RowVerdict(accepted, token, bool(failed))
            for accepted, token, failed in zip(*columns, strict=True)
        ]


class DraftDraw(NamedTuple):
    """One drafted token of each row.

    ``confidence`` says how peaked the distribution is that it was drawn from, whichever token came out: its
    highest probability; at temperature 0, that of the likeliest token against the second one.
    """

    ids: torch.Tensor  # [B]
    probs: torch.Tensor | None  # [B, V], the distributions drawn from, if a row asks for them
    confidence: torch.Tensor | None  # [B], if it was asked for


class Sampler:
    """Rows of one step. ``vocab_size`` is the target's; every distribution has that width."""

    def __init__(
        self,
        rows: list[Row],
        vocab_size: int,
        device: torch.device,
        make_draws: Callable[[], Draws] = TorchDraws,
    ) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = device
        self.groups: dict[Rule, list[int]] = {}
        for i, row in enumerate(rows):
            self.groups.setdefault(row.rule, []).append(i)
        self.all_greedy = self.groups.keys() == {Rule.EXACT_MATCH}
        self.traced = any(row.params.trace for row in rows)
        self.uses_draft_probs = self.traced or any(rule.uses_draft_probs for rule in self.groups)
        self._adjusted = [i for i, row in enumerate(rows) if row.history.needs_adjustment]
        self.make_draws = make_draws
        self._draws = make_draws()

    @cached_property
    def seeds(self) -> torch.Tensor:
        return on_device([row.seed for row in self.rows], self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return on_device([row.position for row in self.rows], self.device)

    def select(self, indices: list[int]) -> "Sampler":
        if len(indices) == len(self.rows):
            return self
        return Sampler([self.rows[i] for i in indices], self.vocab_size, self.device, self.make_draws)

    def draw_drafts(
        self, logits: torch.Tensor, drafted: torch.Tensor, with_confidence: bool = False
    ) -> DraftDraw:
        """Draw each row's next draft from the draft's ``logits`` [B, V], after ``drafted`` [B, so far]."""
        offset = drafted.shape[1]
        if self._adjusted:
            logits = self._adjust(logits[:, None], drafted, offset)[:, 0]
        # A draft model that has lost its mind may still be asked: any guess is a guess.
        if self.all_greedy:
            ids, confidence = self._draws.likeliest(logits) if with_confidence else (argmax(logits), None)
            one_hot = F.one_hot(ids, self.vocab_size).float() if self.uses_draft_probs else None
            return DraftDraw(ids, one_hot, confidence)
        logits, _ = _replace_broken(logits)
        ids = torch.empty(len(self.rows), dtype=torch.int64, device=self.device)
        confidence = logits.new_empty(len(self.rows)) if with_confidence else None
        probs = logits.new_zeros(len(self.rows), self.vocab_size) if self.uses_draft_probs else None
        for rule, indices in self.groups.items():
            members = self._index(indices)
            rule_probs = None
            if rule is Rule.EXACT_MATCH:
                ids[members] = argmax(logits[members])
            else:
                rule_probs = self._probs(logits[members][:, None], indices)
                if rule is Rule.COUPLED:
                    ids[members] = self._race(rule_probs, members, offset)[:, 0]
                rule_probs = rule_probs[:, 0]
                if rule is not Rule.COUPLED:
                    seeds, positions = self._seeds(rule, members), self.positions[members] + offset
                    uniforms = self._draws.uniform(seeds, positions, Stream.DRAFT)
                    ids[members] = self._draws.inverse_cdf(rule_probs, uniforms)
            if confidence is not None:
                likeliest = self._draws.likeliest
                confidence[members] = (
                    likeliest(logits[members])[1] if rule_probs is None else rule_probs.amax(-1)
                )
            if probs is not None:
                if rule_probs is None:
                    rule_probs = F.one_hot(ids[members], self.vocab_size).float()
                probs[members] = rule_probs
        return DraftDraw(ids, probs, confidence)

    def verify(self, logits: torch.Tensor, drafts: Drafts) -> Judgement:
        """Judge ``drafts`` by the target's ``logits`` [sum of (length + 1), V], packed row after row."""
        padded, broken = self._target_logits(logits, drafts)
        num_draft = on_device(drafts.lengths, self.device)
        if len(self.groups) == 1:
            ((rule, indices),) = self.groups.items()
            verdict = self._judge(rule, indices, padded, drafts, num_draft)
        else:
            verdict = Verdict(torch.empty_like(num_draft), torch.empty_like(num_draft))
            for rule, indices in self.groups.items():
                members = self._index(indices)
                part = self._judge(rule, indices, padded[members], drafts, num_draft[members])
                verdict.num_accepted[members] = part.num_accepted
                verdict.next_token[members] = part.next_token
        if broken is None:
            return Judgement(verdict, torch.zeros(len(self.rows), dtype=torch.bool))
        reached = torch.arange(padded.shape[1], device=self.device) <= verdict.num_accepted[:, None]
        return Judgement(verdict, (broken & reached).any(-1))

    def drafted_probs(self, logits: torch.Tensor, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
        """For the trace: target's and draft's processed probability of each drafted token, [B, K] each."""
        padded, _ = self._target_logits(logits, drafts)
        target_probs = self._probs(padded, list(range(len(self.rows))))
        greedy = torch.tensor([row.rule is Rule.EXACT_MATCH for row in self.rows], device=self.device)
        one_hot = F.one_hot(padded.argmax(-1), self.vocab_size).float()
        target_probs = torch.where(greedy[:, None, None], one_hot, target_probs)
        return probs_of_draft(target_probs, drafts.token_ids, self._draft_probs(drafts, slice(None)))

    def _judge(
        self, rule: Rule, indices: list[int], logits: torch.Tensor, drafts: Drafts, num_draft: torch.Tensor
    ) -> Verdict:
        """One rule's rows; ``logits`` [members, K+1, V]."""
        members = self._index(indices)
        draft_ids = drafts.token_ids[members]
        if rule is Rule.EXACT_MATCH:
            return verify_exact_match(logits, draft_ids, num_draft)
        target_probs = self._probs(logits, indices)
        if rule is Rule.COUPLED:
            return verify_coupled(self._race(target_probs, members, offset=0), draft_ids, num_draft)
        seeds = self.seeds[members][:, None]
        spent_seeds = self._seeds(rule, members)[:, None]
        positions = self.positions[members][:, None] + torch.arange(logits.shape[1], device=self.device)
        verify = verify_rejection if rule is Rule.REJECTION else verify_block
        return verify(
            target_probs,
            draft_ids,
            self._draft_probs(drafts, members),
            num_draft,
            accept_uniforms=self._draws.uniform(spent_seeds, positions[:, :-1], Stream.ACCEPT),
            recover_uniforms=self._draws.uniform(seeds, positions, Stream.RECOVER),
            draw=self._draws.draw_next,
        )

    def _race(self, probs: torch.Tensor, members: slice | torch.Tensor, offset: int) -> torch.Tensor:
        """What the rows ``members`` draw from ``probs`` [members, n, V], from ``offset`` on: [members, n]."""
        return self._draws.race(probs, self.seeds[members], self.positions[members], offset)

    def _target_logits(
        self, logits: torch.Tensor, drafts: Drafts
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adjusted logits [B, K+1, V], and where they were broken [B, K+1]; None if nowhere."""
        padded = _pad_rows(logits, drafts.lengths, drafts.token_ids.shape[1] + 1)
        return _replace_broken(self._adjust(padded, drafts.token_ids, offset=0))

    def _adjust(self, logits: torch.Tensor, drafted: torch.Tensor, offset: int) -> torch.Tensor:
        """Bias, penalties and minimum length where a row asks for them. ``logits`` [B, positions, V]."""
        if not self._adjusted:
            return logits
        members = self._index(self._adjusted)
        histories = [self.rows[i].history for i in self._adjusted]
        adjusted = logits.clone()
        adjusted[members] = adjust_logits(logits[members], histories, drafted[members], offset)
        return adjusted

    def _probs(self, logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
        """Processed distributions of the rows ``indices``, whose logits are [members, positions, V]."""
        params = [self.rows[i].params for i in indices]
        return self._draws.probs(logits, SamplingTensors.build(params, self.device))

    def _draft_probs(self, drafts: Drafts, members: slice | torch.Tensor) -> torch.Tensor:
        """The distributions the members' drafts were drawn from; one-hot for deterministic drafts."""
        if drafts.probs is not None:
            return drafts.probs[members]
        return F.one_hot(drafts.token_ids[members], self.vocab_size).float()

    def _seeds(self, rule: Rule, members: slice | torch.Tensor) -> torch.Tensor:
        """Seeds for drafting and accepting; each sequence's own, except under the block rule."""
        seeds = self.seeds[members]
        return round_seeds(seeds, self.positions[members]) if rule is Rule.BLOCK else seeds

    def _index(self, indices: list[int]) -> slice | torch.Tensor:
        if len(indices) == len(self.rows):
            return slice(None)
        return on_device(indices, self.device)


def _replace_broken(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [..., V] with NaN, infinity or nothing allowed become flat, and are named: [...]; None if there
    are none."""
    # Elsewhere the question would cost a wait.
    if logits.device.type == "cpu" and all(map(math.isfinite, logits.amax(-1).flatten().tolist())):
        return logits, None
    broken = ~logits.amax(-1).isfinite()
    return torch.where(broken[..., None], 0.0, logits), broken


def _pad_rows(logits: torch.Tensor, lengths: list[int], num_positions: int) -> torch.Tensor:
    """[B, num_positions, V]; rows with shorter drafts repeat their last position."""
    if all(length + 1 == num_positions for length in lengths):
        return logits.view(len(lengths), num_positions, logits.shape[-1])
    index, start = [], 0
    for length in lengths:
        index.append([start + min(j, length) for j in range(num_positions)])
        start += length + 1
    return logits[on_device(index, logits.device)]
