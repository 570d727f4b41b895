"""The sequences that draw tokens in one step, as tensors; drafts and verifies them by their own rules.

Each row follows one rule: exact match (temperature 0), coupled or rejection. Rows of one rule are handled
together, and all of it is a function of each row's own parameters, seed and positions. Knows nothing of
models and schedules: logits come in, token ids go out.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from engine.messages import SamplingParams
from engine.sampling.draw import inverse_cdf, race
from engine.sampling.processors import SamplingTensors, to_probs
from engine.sampling.random import Stream, exponential_noise, uniform
from engine.sampling.verify import Verdict, verify_coupled, verify_exact_match, verify_rejection


class Rule(Enum):
    EXACT_MATCH = "exact_match"
    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence that draws: ``position`` is the absolute index of the first token it will draw."""

    params: SamplingParams
    rule: Rule
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a proposer guessed for the rows: ``lengths[b]`` tokens for row b, padded to K.

    ``probs`` holds the distributions that the tokens were drawn from; None if every draft is
    deterministic or no row's rule asks for them.
    """

    token_ids: torch.Tensor  # int64 [B, K]
    probs: torch.Tensor | None  # float32 [B, K, V]
    lengths: list[int]

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Drafts":
        ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        return cls(token_ids=ids, probs=None, lengths=[0] * num_rows)


class Sampler:
    """Rows of one step. ``vocab_size`` is the target's; every distribution has that width."""

    def __init__(self, rows: list[Row], vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = device
        self.seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device)
        self.positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=device)
        members = {rule: [i for i, row in enumerate(rows) if row.rule is rule] for rule in Rule}
        self.groups = {rule: indices for rule, indices in members.items() if indices}

    @property
    def uses_draft_probs(self) -> bool:
        return Rule.REJECTION in self.groups

    def select(self, indices: list[int]) -> "Sampler":
        if len(indices) == len(self.rows):
            return self
        return Sampler([self.rows[i] for i in indices], self.vocab_size, self.device)

    def draw_drafts(self, logits: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw each row's draft ``offset`` tokens after its position, from the draft's ``logits`` [B, V].

        Returns ids [B] and, if a row's rule asks for them, distributions [B, V] (others' rows are zero).
        """
        ids = torch.empty(len(self.rows), dtype=torch.int64, device=self.device)
        probs = logits.new_zeros(logits.shape) if self.uses_draft_probs else None
        for rule, indices in self.groups.items():
            members = self._index(indices)
            if rule is Rule.EXACT_MATCH:
                ids[members] = logits[members].argmax(-1)
                continue
            rule_probs = self._probs(logits[members][:, None], indices)[:, 0]
            seeds, positions = self.seeds[members], self.positions[members] + offset
            if rule is Rule.COUPLED:
                ids[members] = race(rule_probs, exponential_noise(seeds, positions, self.vocab_size))
            else:
                ids[members] = inverse_cdf(rule_probs, uniform(seeds, positions, Stream.DRAFT))
                assert probs is not None
                probs[members] = rule_probs
        return ids, probs

    def verify(self, logits: torch.Tensor, drafts: Drafts) -> Verdict:
        """Judge ``drafts`` by the target's ``logits`` [sum of (length + 1), V], packed row after row."""
        num_positions = drafts.token_ids.shape[1] + 1
        num_draft = torch.tensor(drafts.lengths, dtype=torch.int64, device=self.device)
        padded = _pad_rows(logits, drafts.lengths, num_positions)
        num_accepted = torch.empty_like(num_draft)
        next_token = torch.empty_like(num_draft)
        for rule, indices in self.groups.items():
            members = self._index(indices)
            verdict = self._verify_group(rule, indices, padded[members], drafts, num_draft[members])
            num_accepted[members] = verdict.num_accepted
            next_token[members] = verdict.next_token
        return Verdict(num_accepted, next_token)

    def _verify_group(
        self, rule: Rule, indices: list[int], logits: torch.Tensor, drafts: Drafts, num_draft: torch.Tensor
    ) -> Verdict:
        """One rule's rows; ``logits`` [members, K+1, V]."""
        members = self._index(indices)
        draft_ids = drafts.token_ids[members]
        if rule is Rule.EXACT_MATCH:
            return verify_exact_match(logits, draft_ids, num_draft)
        target_probs = self._probs(logits, indices)
        seeds = self.seeds[members][:, None]
        positions = self.positions[members][:, None] + torch.arange(logits.shape[1], device=self.device)
        if rule is Rule.COUPLED:
            noise = exponential_noise(seeds, positions, self.vocab_size)
            return verify_coupled(target_probs, draft_ids, num_draft, noise)
        return verify_rejection(
            target_probs,
            draft_ids,
            _draft_probs(drafts, members, target_probs),
            num_draft,
            accept_uniforms=uniform(seeds, positions[:, :-1], Stream.ACCEPT),
            recover_uniforms=uniform(seeds, positions, Stream.RECOVER),
        )

    def _probs(self, logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
        """Processed distributions of the rows ``indices``, whose logits are [members, positions, V]."""
        params = [self.rows[i].params for i in indices]
        return to_probs(logits, SamplingTensors.build(params, self.device))

    def _index(self, indices: list[int]) -> slice | torch.Tensor:
        if len(indices) == len(self.rows):
            return slice(None)
        return torch.tensor(indices, device=self.device)


def _draft_probs(drafts: Drafts, members: slice | torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """The distributions the members' drafts were drawn from; one-hot for deterministic drafts."""
    if drafts.probs is not None:
        return drafts.probs[members]
    one_hot = torch.zeros_like(target_probs[:, :-1])
    return one_hot.scatter_(-1, drafts.token_ids[members][..., None], 1.0)


def _pad_rows(logits: torch.Tensor, lengths: list[int], num_positions: int) -> torch.Tensor:
    """[B, num_positions, V]; rows with shorter drafts repeat their last position."""
    if all(length + 1 == num_positions for length in lengths):
        return logits.view(len(lengths), num_positions, logits.shape[-1])
    index, start = [], 0
    for length in lengths:
        index.append([start + min(j, length) for j in range(num_positions)])
        start += length + 1
    return logits[torch.tensor(index, device=logits.device)]
