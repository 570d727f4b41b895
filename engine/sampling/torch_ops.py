"""Has the three operations of a round in torch, on any device. C and Triton repeat what they define.

Each row follows one rule: exact match (temperature 0), coupled, rejection or block. Rows of one rule are
handled together, and all of it is a function of each row's own columns, text, drafts and positions.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import DraftDraw, Drafts, RowVerdict
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.adjust import adjust_in_place, replace_broken
from truedraft.engine.sampling.ops import argmax, gumbel_argmax, inverse_cdf
from truedraft.engine.sampling.processors import to_probs
from truedraft.engine.sampling.random import KeptNoise, Stream, round_seeds, uniform
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules
from truedraft.engine.sampling.step_rows import ALL, StepRows, take
from truedraft.engine.sampling.verify import (
    probs_of_draft,
    read_verdict,
    verify_block,
    verify_equal,
    verify_greedy,
    verify_rejection,
)


class RoundOps(Protocol):
    """Is the interface of a round's operations. Logits of several positions are packed, row after row.
    ``reads_drafts``: the host may read what is drawn before the target has scored it."""

    @property
    def reads_drafts(self) -> bool: ...

    def adjust(
        self, step: StepRows, logits: torch.Tensor, drafted: torch.Tensor, offset: int, counts: list[int]
    ) -> torch.Tensor:
        """Returns logits after biases, penalties, minimum lengths, masks and rules, for rows that ask for
        them.

        ``logits`` [sum of counts, V] are of ``counts[b]`` positions of row b: position j predicts the token
        that follows the row's text and ``drafted[b, : offset + j]``.
        """

    def draw(self, step: StepRows, logits: torch.Tensor, offset: int) -> DraftDraw:
        """Draws each row's draft number ``offset`` from adjusted ``logits`` [B, V], which may be changed."""

    def judge(self, step: StepRows, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        """Judges drafts by the target's adjusted ``logits`` [sum of (length + 1), V], which may change."""


class TorchOps:
    """Computes with torch. ``rules`` are the checkpoint's, whatever a request says."""

    reads_drafts = True

    def __init__(self, rules: GenerationRules = NO_RULES) -> None:
        self.rules = rules

    def adjust(
        self, step: StepRows, logits: torch.Tensor, drafted: torch.Tensor, offset: int, counts: list[int]
    ) -> torch.Tensor:
        if not step.adjusted:
            return logits
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        width = max(counts[i] for i in step.adjusted)
        members = on_device(step.adjusted, step.device)
        padded = [[starts[i] + min(j, counts[i] - 1) for j in range(width)] for i in step.adjusted]
        rows = [step.rows[i] for i in step.adjusted]
        own = logits[on_device(padded, step.device)].float()
        penalised = [row for row in rows if row.is_penalised]
        text_counts = self.text_counts(penalised, own.shape[2], own.device) if penalised else None
        read = None if step.read_drafts is None else [step.read_drafts()[i] for i in step.adjusted]
        adjust_in_place(own, rows, take(drafted, members), offset, self.rules, text_counts, read)
        into = [starts[i] + j for i in step.adjusted for j in range(counts[i])]
        taken = [place * width + j for place, i in enumerate(step.adjusted) for j in range(counts[i])]
        taken_from = own.flatten(0, 1)[on_device(taken, step.device)]
        return logits.float().index_copy(0, on_device(into, step.device), taken_from)

    def draw(self, step: StepRows, logits: torch.Tensor, offset: int) -> DraftDraw:
        # A draft model whose logits are broken still drafts: any guess is verified.
        if not all(greedily for _, greedily in step.drafting):
            logits, _ = replace_broken(logits)
        if len(step.drafting) == 1:
            (((rule, greedily), indices),) = step.drafting.items()
            return self._draw(step, rule, greedily, indices, logits, offset)
        ids = torch.empty(len(step.rows), dtype=torch.int64, device=step.device)
        probs = logits.new_zeros(len(step.rows), step.vocab_size) if step.uses_draft_probs else None
        for (rule, greedily), indices in step.drafting.items():
            members = step.index(indices)
            draw = self._draw(step, rule, greedily, indices, logits[members], offset)
            ids[members] = draw.ids
            if probs is not None and draw.probs is not None:
                probs[members] = draw.probs
        return DraftDraw(ids, probs)

    def judge(self, step: StepRows, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        """Verifies the drafts. The host reads ``drafts.ids`` and one tensor per rule; on a GPU top-p takes
        one more read (``processors``)."""
        if step.all_greedy and not step.adjusted:
            return verify_greedy(logits, drafts.ids)
        padded, broken = replace_broken(pad_rows(logits, drafts.lengths, drafts.token_ids.shape[1] + 1))
        found: dict[int, RowVerdict] = {}
        for rule, indices in step.groups.items():
            found |= zip(indices, self._judge(step, rule, indices, padded, broken, drafts), strict=True)
        return [found[i] for i in range(len(step.rows))]

    def probs_of(
        self, step: StepRows, logits: torch.Tensor, drafts: Drafts, verdicts: list[RowVerdict]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns for the trace both models' processed probability of each drafted token, [B, K] each, and
        the target's of the token that follows, [B]; ``logits`` are as in ``judge``."""
        padded, _ = replace_broken(pad_rows(logits, drafts.lengths, drafts.token_ids.shape[1] + 1))
        target_probs = self._probs(step, padded, list(range(len(step.rows))))
        greedy = torch.tensor([row.rule is Rule.EXACT_MATCH for row in step.rows], device=step.device)
        one_hot = F.one_hot(padded.argmax(-1), step.vocab_size).float()
        target_probs = torch.where(greedy[:, None, None], one_hot, target_probs)
        lengths, next_tokens, _ = torch.tensor(verdicts, device=step.device).unbind(1)
        next_probs = target_probs[torch.arange(len(step.rows)), lengths, next_tokens]
        drafted = probs_of_draft(target_probs, drafts.token_ids, self._draft_probs(step, drafts, ALL))
        return *drafted, next_probs

    def text_counts(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> torch.Tensor | None:
        """Returns how often each token stands in the rows' prompts and outputs, [2, rows, V], if known."""
        return None

    def _draw(
        self,
        step: StepRows,
        rule: Rule,
        greedily: bool,
        indices: list[int],
        logits: torch.Tensor,
        offset: int,
    ) -> DraftDraw:
        """Draws for rows of one rule that draft alike; ``logits`` [members, V] are adjusted.

        Any way of drawing is exact, as the verdict knows the distribution: that of a greedy draft is one-hot.
        With the coupled rule a random draft shares the target's noise.
        """
        if greedily:
            ids = argmax(logits)
            return DraftDraw(ids, F.one_hot(ids, step.vocab_size).float() if step.uses_draft_probs else None)
        members = step.index(indices)
        probs = self._probs(step, logits[:, None], indices, is_draft=True)
        if rule is Rule.COUPLED:
            ids, probs = self._gumbel_argmax(step, probs, indices, offset)[:, 0], probs[:, 0]
        else:
            probs = probs[:, 0]
            seeds, positions = self._seeds(step, members), take(step.positions, members) + offset
            ids = inverse_cdf(probs, uniform(seeds, positions, Stream.DRAFT))
        return DraftDraw(ids, probs if step.uses_draft_probs else None)

    def _judge(
        self,
        step: StepRows,
        rule: Rule,
        indices: list[int],
        logits: torch.Tensor,
        broken: torch.Tensor | None,
        drafts: Drafts,
    ) -> list[RowVerdict]:
        """Verifies the rows ``indices``, which follow one rule."""
        members = step.index(indices)
        logits, broken = take(logits, members), None if broken is None else take(broken, members)
        if not rule.uses_draft_probs:
            if rule is Rule.COUPLED:
                target_ids = self._gumbel_argmax(step, self._probs(step, logits, indices), indices, offset=0)
            else:
                target_ids = argmax(logits)
            return verify_equal(target_ids, broken, [drafts.ids[i] for i in indices])
        target_probs = self._probs(step, logits, indices)
        seeds = take(step.seeds, members)[:, None]
        spent_seeds = self._seeds(step, members)[:, None]
        starts = [step.rows[i].position for i in indices]
        positions = on_device([range(start, start + logits.shape[1]) for start in starts], step.device)
        verify = verify_rejection if rule is Rule.REJECTION else verify_block
        verdict = verify(
            target_probs,
            take(drafts.token_ids, members),
            self._draft_probs(step, drafts, members),
            on_device([drafts.lengths[i] for i in indices], step.device),
            accept_uniforms=uniform(spent_seeds, positions[:, :-1], Stream.ACCEPT),
            recover_uniforms=uniform(seeds, positions, Stream.RECOVER),
        )
        return read_verdict(verdict, broken)

    def _gumbel_argmax(
        self, step: StepRows, probs: torch.Tensor, indices: list[int], offset: int
    ) -> torch.Tensor:
        """Returns the tokens that the rows ``indices`` draw from ``probs`` [members, n, V], from position
        ``offset`` on: [members, n]."""
        members = step.index(indices)
        noise = step.noise.setdefault(tuple(indices), KeptNoise())
        seeds, positions = take(step.seeds, members), take(step.positions, members)
        return gumbel_argmax(probs, noise.take(seeds, positions, offset, probs.shape[1], probs.shape[2]))

    def _probs(
        self, step: StepRows, logits: torch.Tensor, indices: list[int], is_draft: bool = False
    ) -> torch.Tensor:
        """Returns the processed distributions of the rows ``indices``, whose logits are [members, positions,
        V]."""
        cuts = step.cuts(indices)
        # A draft model's next pass must not wait for the host.
        if is_draft and step.device.type != "cpu":
            cuts = cuts._replace(may_wait=False)
        return to_probs(logits, cuts)

    def _draft_probs(self, step: StepRows, drafts: Drafts, members: slice | torch.Tensor) -> torch.Tensor:
        """Returns the distributions that the members' drafts were drawn from; one-hot for deterministic
        drafts."""
        if drafts.probs is not None:
            return take(drafts.probs, members)
        return F.one_hot(take(drafts.token_ids, members), step.vocab_size).float()

    def _seeds(self, step: StepRows, members: slice | torch.Tensor) -> torch.Tensor:
        """Returns each round's own seeds for drafting and accepting."""
        return round_seeds(take(step.seeds, members), take(step.positions, members))


def pad_rows(logits: torch.Tensor, lengths: list[int], num_positions: int) -> torch.Tensor:
    """Returns [B, num_positions, V]; rows with shorter drafts repeat their last position."""
    if all(length + 1 == num_positions for length in lengths):
        return logits.view(len(lengths), num_positions, logits.shape[-1])
    index, start = [], 0
    for length in lengths:
        index.append([start + min(j, length) for j in range(num_positions)])
        start += length + 1
    return logits[on_device(index, logits.device)]
