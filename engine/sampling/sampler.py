"""The sequences that draw tokens in one step, as tensors; drafts and verifies them by their own rules.

Each row follows one rule: exact match (temperature 0), coupled, rejection or block. Rows of one rule are
handled together, and all of it is a function of each row's own parameters, seed, history and positions.
Knows nothing of models and schedules: logits come in, token ids go out.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.messages import SamplingParams
from truedraft.engine.sampling.adjust import History, adjust_logits, replace_broken
from truedraft.engine.sampling.backend import SamplingBackend, TorchBackend
from truedraft.engine.sampling.ops import argmax
from truedraft.engine.sampling.processors import SamplingTensors
from truedraft.engine.sampling.random import KeptNoise, Stream, round_seeds
from truedraft.engine.sampling.verify import (
    RowVerdict,
    probs_of_draft,
    read_verdict,
    verify_block,
    verify_equal,
    verify_greedy,
    verify_rejection,
)

# All of a tensor's rows; see ``_take``.
ALL = slice(None)
UNCUT = SamplingParams(max_tokens=1, temperature=0)
TORCH = TorchBackend()


class Rule(Enum):
    EXACT_MATCH = "exact_match"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"

    # Rules are looked up in every step, and an enumeration's own hash is written in Python.
    __hash__ = object.__hash__

    @property
    def uses_draft_probs(self) -> bool:
        return self in (Rule.REJECTION, Rule.BLOCK)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence that draws: its next token follows ``history``. Made once, serves in every step.

    ``drafts_greedily``: a draft model drafts its most likely token, whatever the target does; None: as the
    target does. ``is_plain``: it is never traced, and its logits are never adjusted.
    """

    rule: Rule
    seed: int
    history: History
    drafts_greedily: bool | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.drafts_greedily is None:
            object.__setattr__(self, "drafts_greedily", self.rule is Rule.EXACT_MATCH)
        object.__setattr__(self, "is_plain", not (self.params.trace or self.history.may_need_adjustment))

    @property
    def params(self) -> SamplingParams:
        return self.history.params

    @property
    def position(self) -> int:
        """Absolute index of the first token that this step draws."""
        return len(self.history.token_ids)


@dataclass(frozen=True)
class Drafts:
    """What a proposer guessed for the rows: ``lengths[b]`` tokens for row b, padded to K.

    ``probs`` holds the distributions that the tokens were drawn from; None if every draft is
    deterministic or no row asks for them. ``confidences`` are their largest probabilities, of the rows whose
    drafts may be stopped; None if none may.
    """

    token_ids: torch.Tensor  # int64 [B, K]
    probs: torch.Tensor | None  # float32 [B, K, V]
    lengths: list[int]
    confidences: list[list[float]] | None = None

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Drafts":
        return cls(token_ids=_no_ids(num_rows, device), probs=None, lengths=[0] * num_rows)

    @cached_property
    def ids(self) -> list[list[int]]:
        """Each row's drafted ids, without padding, in one copy from the device."""
        return [ids[:length] for ids, length in zip(self.token_ids.tolist(), self.lengths, strict=True)]


def merge_drafts(parts: list[Drafts], sampler: "Sampler") -> Drafts:
    """Merges ``parts``, which are of all rows, to one draft for each row: at most one of them has drafted for
    it, and the others hold zeros there."""
    drafting = [part for part in parts if any(part.lengths)]
    if not drafting:
        return Drafts.empty(len(sampler.rows), sampler.device)
    if len(drafting) == 1:
        return drafting[0]
    lengths = [sum(row) for row in zip(*(part.lengths for part in drafting), strict=True)]
    width = max(lengths)
    token_ids = torch.stack(
        [F.pad(part.token_ids, (0, width - part.token_ids.shape[1])) for part in drafting]
    ).sum(0)
    confidences = None
    if any(part.confidences is not None for part in drafting):
        none: list[list[float]] = [[]] * len(lengths)
        rows = zip(
            *(none if part.confidences is None else part.confidences for part in drafting), strict=True
        )
        confidences = [[one for each in row for one in each] for row in rows]
    if not sampler.uses_draft_probs:
        return Drafts(token_ids, None, lengths, confidences)
    probs = torch.zeros(len(lengths), width, sampler.vocab_size, device=sampler.device)
    for part in drafting:
        drew = on_device([row for row, length in enumerate(part.lengths) if length], sampler.device)
        part_probs = part.probs
        if part_probs is None:
            part_probs = F.one_hot(part.token_ids, sampler.vocab_size).float()
        probs[drew, : part_probs.shape[1]] = part_probs[drew]
    return Drafts(token_ids, probs, lengths, confidences)


class DraftDraw(NamedTuple):
    """One drafted token of each row."""

    ids: torch.Tensor  # [B]
    probs: torch.Tensor | None  # [B, V], the distributions drawn from, if a row asks for them
    confidences: torch.Tensor | None = None  # [B], the largest probabilities, if they are asked for


class Sampler:
    """Rows of one step. ``vocab_size`` is the target's; every distribution has that width."""

    def __init__(
        self,
        rows: list[Row],
        vocab_size: int,
        device: torch.device,
        backend: SamplingBackend = TORCH,
    ) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = device
        self.groups: dict[Rule, list[int]] = {}
        self._drafting: dict[tuple[Rule, bool], list[int]] = {}  # rows that draw their drafts alike
        for i, row in enumerate(rows):
            self.groups.setdefault(row.rule, []).append(i)
            self._drafting.setdefault((row.rule, bool(row.drafts_greedily)), []).append(i)
        self.all_greedy = self.groups.keys() == {Rule.EXACT_MATCH}
        special = [i for i, row in enumerate(rows) if not row.is_plain]
        self.traced = any(rows[i].params.trace for i in special)
        self.uses_draft_probs = self.traced or any(rule.uses_draft_probs for rule in self.groups)
        self._adjusted = [i for i in special if rows[i].history.needs_adjustment]
        self.backend = backend
        self._noise: dict[tuple[int, ...], KeptNoise] = {}  # keys are rows
        self._sampling: dict[tuple[int, ...], SamplingTensors] = {}  # keys are rows

    @property
    def needs_adjustment(self) -> bool:
        return bool(self._adjusted)

    @cached_property
    def seeds(self) -> torch.Tensor:
        return on_device([row.seed for row in self.rows], self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return on_device([row.position for row in self.rows], self.device)

    def select(self, indices: list[int]) -> "Sampler":
        if len(indices) == len(self.rows):
            return self
        return Sampler([self.rows[i] for i in indices], self.vocab_size, self.device, self.backend)

    def draw_drafts(
        self, logits: torch.Tensor, drafted: torch.Tensor, with_confidences: bool = False
    ) -> DraftDraw:
        """Draw each row's next draft from the draft's ``logits`` [B, V], after ``drafted`` [B, so far]."""
        offset = drafted.shape[1]
        if self._adjusted:
            logits = self._adjust(logits[:, None], drafted, offset)[:, 0]
        # A draft model whose logits are broken still drafts: any guess is verified.
        if not all(greedily for _, greedily in self._drafting):
            logits, _ = replace_broken(logits)
        if len(self._drafting) == 1:
            (((rule, greedily), indices),) = self._drafting.items()
            return self._draw(rule, greedily, indices, logits, offset, with_confidences)
        ids = torch.empty(len(self.rows), dtype=torch.int64, device=self.device)
        probs = logits.new_zeros(len(self.rows), self.vocab_size) if self.uses_draft_probs else None
        confidences = logits.new_zeros(len(self.rows)) if with_confidences else None
        for (rule, greedily), indices in self._drafting.items():
            members = self._index(indices)
            draw = self._draw(rule, greedily, indices, logits[members], offset, with_confidences)
            ids[members] = draw.ids
            if probs is not None and draw.probs is not None:
                probs[members] = draw.probs
            if confidences is not None and draw.confidences is not None:
                confidences[members] = draw.confidences
        return DraftDraw(ids, probs, confidences)

    def verify(self, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        """Judge ``drafts`` by the target's ``logits`` [sum of (length + 1), V], packed row after row. The
        host reads ``drafts.ids`` and one tensor per rule; on a GPU top-p takes one more (``processors``)."""
        if self.all_greedy and not self._adjusted:
            return verify_greedy(logits, drafts.ids)
        padded, broken = self._target_logits(logits, drafts)
        found: dict[int, RowVerdict] = {}
        for rule, indices in self.groups.items():
            found |= zip(indices, self._judge(rule, indices, padded, broken, drafts), strict=True)
        return [found[i] for i in range(len(self.rows))]

    def traced_probs(
        self, logits: torch.Tensor, drafts: Drafts, verdicts: list[RowVerdict]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns for the trace both models' processed probability of each drafted token, [B, K] each, and
        the target's of the token that follows, [B]."""
        padded, _ = self._target_logits(logits, drafts)
        target_probs = self._probs(padded, list(range(len(self.rows))))
        greedy = torch.tensor([row.rule is Rule.EXACT_MATCH for row in self.rows], device=self.device)
        one_hot = F.one_hot(padded.argmax(-1), self.vocab_size).float()
        target_probs = torch.where(greedy[:, None, None], one_hot, target_probs)
        lengths, next_tokens, _ = torch.tensor(verdicts, device=self.device).unbind(1)
        next_probs = target_probs[torch.arange(len(self.rows)), lengths, next_tokens]
        drafted = probs_of_draft(target_probs, drafts.token_ids, self._draft_probs(drafts, slice(None)))
        return *drafted, next_probs

    def _draw(
        self,
        rule: Rule,
        greedily: bool,
        indices: list[int],
        logits: torch.Tensor,
        offset: int,
        with_confidences: bool,
    ) -> DraftDraw:
        """Draws for rows of one rule that draft alike; ``logits`` [members, V], adjusted.

        Any way is exact, as the verdict knows the distribution: of a greedy draft it is one-hot. With the
        coupled rule a random draft shares the target's noise. How sure the model is of a greedy draft is what
        its logits say at temperature 1.
        """
        if greedily:
            ids = argmax(logits)
            one_hot = F.one_hot(ids, self.vocab_size).float() if self.uses_draft_probs else None
            confidences = None
            if with_confidences:
                uncut = SamplingTensors.build([UNCUT] * len(indices), self.device)
                confidences = self.backend.probs(logits[:, None], uncut)[:, 0].amax(-1)
            return DraftDraw(ids, one_hot, confidences)
        members = self._index(indices)
        probs = self._probs(logits[:, None], indices, is_draft=True)
        if rule is Rule.COUPLED:
            ids, probs = self._gumbel_argmax(probs, indices, offset)[:, 0], probs[:, 0]
        else:
            probs = probs[:, 0]
            seeds, positions = self._seeds(members), _take(self.positions, members) + offset
            ids = self.backend.inverse_cdf(probs, self.backend.uniform(seeds, positions, Stream.DRAFT))
        confidences = probs.amax(-1) if with_confidences else None
        return DraftDraw(ids, probs if self.uses_draft_probs else None, confidences)

    def _judge(
        self,
        rule: Rule,
        indices: list[int],
        logits: torch.Tensor,
        broken: torch.Tensor | None,
        drafts: Drafts,
    ) -> list[RowVerdict]:
        """One rule's rows, ``indices``, of ``_target_logits``."""
        members = self._index(indices)
        logits, broken = _take(logits, members), None if broken is None else _take(broken, members)
        if not rule.uses_draft_probs:
            if rule is Rule.COUPLED:
                target_ids = self._gumbel_argmax(self._probs(logits, indices), indices, offset=0)
            else:
                target_ids = argmax(logits)
            return verify_equal(target_ids, broken, [drafts.ids[i] for i in indices])
        target_probs = self._probs(logits, indices)
        seeds = _take(self.seeds, members)[:, None]
        spent_seeds = self._seeds(members)[:, None]
        starts = [self.rows[i].position for i in indices]
        positions = on_device([range(start, start + logits.shape[1]) for start in starts], self.device)
        verify = verify_rejection if rule is Rule.REJECTION else verify_block
        verdict = verify(
            target_probs,
            _take(drafts.token_ids, members),
            self._draft_probs(drafts, members),
            on_device([drafts.lengths[i] for i in indices], self.device),
            accept_uniforms=self.backend.uniform(spent_seeds, positions[:, :-1], Stream.ACCEPT),
            recover_uniforms=self.backend.uniform(seeds, positions, Stream.RECOVER),
            draw=self.backend.draw_next,
        )
        return read_verdict(verdict, broken)

    def _gumbel_argmax(self, probs: torch.Tensor, indices: list[int], offset: int) -> torch.Tensor:
        """Returns what the rows ``indices`` draw from ``probs`` [members, n, V] from ``offset`` on:
        [members, n]."""
        members = self._index(indices)
        noise = self._noise.setdefault(tuple(indices), KeptNoise())
        return self.backend.gumbel_argmax(
            probs, _take(self.seeds, members), _take(self.positions, members), offset, noise
        )

    def _target_logits(
        self, logits: torch.Tensor, drafts: Drafts
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adjusted logits [B, K+1, V], and where they were broken [B, K+1]; None if nowhere."""
        padded = _pad_rows(logits, drafts.lengths, drafts.token_ids.shape[1] + 1)
        return replace_broken(self._adjust(padded, drafts.token_ids, offset=0))

    def _adjust(self, logits: torch.Tensor, drafted: torch.Tensor, offset: int) -> torch.Tensor:
        """Bias, penalties and minimum length where a row asks for them. ``logits`` [B, positions, V]."""
        if not self._adjusted:
            return logits
        members = self._index(self._adjusted)
        histories = [self.rows[i].history for i in self._adjusted]
        adjusted = logits.clone()
        adjusted[members] = adjust_logits(logits[members], histories, drafted[members], offset)
        return adjusted

    def _probs(self, logits: torch.Tensor, indices: list[int], is_draft: bool = False) -> torch.Tensor:
        """Processed distributions of the rows ``indices``, whose logits are [members, positions, V]."""
        key = tuple(indices)
        sampling = self._sampling.get(key)
        if sampling is None:
            params = [self.rows[i].params for i in indices]
            sampling = self._sampling[key] = SamplingTensors.build(params, self.device)
        # A draft model's next pass must not wait for the host.
        if is_draft and self.device.type != "cpu":
            sampling = sampling._replace(may_wait=False)
        return self.backend.probs(logits, sampling)

    def _draft_probs(self, drafts: Drafts, members: slice | torch.Tensor) -> torch.Tensor:
        """The distributions the members' drafts were drawn from; one-hot for deterministic drafts."""
        if drafts.probs is not None:
            return _take(drafts.probs, members)
        return F.one_hot(_take(drafts.token_ids, members), self.vocab_size).float()

    def _seeds(self, members: slice | torch.Tensor) -> torch.Tensor:
        """Returns seeds for drafting and accepting, which are each round's own."""
        return round_seeds(_take(self.seeds, members), _take(self.positions, members))

    def _index(self, indices: list[int]) -> slice | torch.Tensor:
        if len(indices) == len(self.rows):
            return ALL
        return on_device(indices, self.device)


def _take(tensor: torch.Tensor, members: slice | torch.Tensor) -> torch.Tensor:
    """``tensor[members]``, at no cost where that is all of it."""
    return tensor if members is ALL else tensor[members]


@lru_cache(maxsize=64)
def _no_ids(num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_rows, 0, dtype=torch.int64, device=device)


def _pad_rows(logits: torch.Tensor, lengths: list[int], num_positions: int) -> torch.Tensor:
    """[B, num_positions, V]; rows with shorter drafts repeat their last position."""
    if all(length + 1 == num_positions for length in lengths):
        return logits.view(len(lengths), num_positions, logits.shape[-1])
    index, start = [], 0
    for length in lengths:
        index.append([start + min(j, length) for j in range(num_positions)])
        start += length + 1
    return logits[on_device(index, logits.device)]
