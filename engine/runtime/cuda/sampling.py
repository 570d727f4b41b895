"""Draws and verdicts as a graph can hold them: of all rows alike, without a look at any number.

The rules are those of ``engine.sampling``, of whose parts these are made. A row gets what its own rule says;
what other rules would have said of it is computed and dropped. ``Draws`` says which rules are computed.
"""

from enum import IntEnum

import torch
import torch.nn.functional as F

from truedraft.engine.runtime.cuda.rows import DeviceRows, Field, RuleCode
from truedraft.engine.sampling.ops import inverse_cdf
from truedraft.engine.sampling.processors import TOP_P_CANDIDATES, to_probs
from truedraft.engine.sampling.random import Stream, noise_on_device, round_seeds_on_device, uniform_on_device
from truedraft.engine.sampling.verify import (
    Accepted,
    draw_next,
    leading_on_device,
    longest_block,
    probs_of_draft,
)


class Draws(IntEnum):
    """Kinds of rows by what is computed for them; each kind serves the rows of those before it."""

    GREEDY = 0
    PLAIN = 1  # the rejection rule at any temperature, without cuts
    COUPLED = 2  # adds the coupled rule, as with a seed
    ANY = 3  # every rule; top-k, top-p, min-p

    @property
    def cuts(self) -> bool:
        return self is Draws.ANY


def draw_draft(
    draws: Draws, logits: torch.Tensor, rows: DeviceRows, pass_number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The next draft of each row from ``logits`` float32 [rows, V], and the distribution drawn from [rows, V]
    if another rule than exact match may ask for it. ``pass_number`` [1] counts from 0."""
    most_likely = logits.argmax(-1)
    if draws is Draws.GREEDY:
        return most_likely, None
    num_rows, vocab_size = logits.shape
    probs = _probs(_replace_broken(logits)[0][:, None], draws, rows, is_draft=True)[:, 0]
    rule, seeds = rows.field(num_rows, Field.RULE), rows.field(num_rows, Field.SEED)
    first = rows.field(num_rows, Field.NUM_STORED) + 1
    positions = first + pass_number
    spent = seeds
    if draws is Draws.ANY:
        spent = torch.where(rule == RuleCode.BLOCK, round_seeds_on_device(seeds, first), seeds)
    ids = inverse_cdf(probs, uniform_on_device(spent, positions, Stream.DRAFT))
    if draws >= Draws.COUPLED:
        noise = noise_on_device(seeds, positions, vocab_size)
        ids = torch.where(rule == RuleCode.COUPLED, (probs / noise).argmax(-1), ids)
    return torch.where(rule == RuleCode.EXACT_MATCH, most_likely, ids), probs


def verdict(
    draws: Draws, logits: torch.Tensor, draft_ids: torch.Tensor, draft_probs: torch.Tensor, rows: DeviceRows
) -> torch.Tensor:
    """int64 [rows, 3]: how many drafts stand, the token after them, and whether one of their logits were no
    distribution.

    ``logits`` float32 [rows, K+1, V], ``draft_ids`` [rows, K], ``draft_probs`` [rows, at most K, V] for those
    that the draft model has drawn; others are certain.
    """
    num_rows, num_positions, vocab_size = logits.shape
    num_drafts = rows.field(num_rows, Field.NUM_DRAFTS)
    target_ids = logits.argmax(-1)
    logits, broken = _replace_broken(logits)
    rule = rows.field(num_rows, Field.RULE)
    if draws is not Draws.GREEDY:
        probs = _probs(logits, draws, rows)
        seeds = rows.field(num_rows, Field.SEED)
        first = rows.field(num_rows, Field.NUM_STORED) + 1
        positions = first[:, None] + torch.arange(num_positions, device=logits.device)
        if draws >= Draws.COUPLED:
            coupled = (probs / noise_on_device(seeds[:, None], positions, vocab_size)).argmax(-1)
            target_ids = torch.where((rule == RuleCode.COUPLED)[:, None], coupled, target_ids)
    num_accepted = leading_on_device(target_ids[:, :-1] == draft_ids, num_drafts)
    next_token = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
    if draws is not Draws.GREEDY:
        drawn = F.pad(draft_probs, (0, 0, 0, num_positions - 1 - draft_probs.shape[1]))
        is_drawn = rows.field(num_rows, Field.NUM_DRAWN) > 0
        certain = torch.zeros_like(drawn).scatter_(2, draft_ids[..., None], 1.0)
        drawn = torch.where(is_drawn[:, None, None], drawn, certain)
        recover = uniform_on_device(seeds[:, None], positions, Stream.RECOVER)
        accept = uniform_on_device(seeds[:, None], positions[:, :-1], Stream.ACCEPT)
        of_target, of_draft = probs_of_draft(probs, draft_ids, drawn)
        stand = leading_on_device(accept * of_draft < of_target, num_drafts)
        weights = torch.ones_like(stand, dtype=torch.float64)
        if draws is Draws.ANY and num_positions > 1:
            is_block = rule == RuleCode.BLOCK
            spent = round_seeds_on_device(seeds, first)
            spent_accept = uniform_on_device(spent[:, None], positions[:, :-1], Stream.ACCEPT)
            longest, prefix_weights = longest_block(probs, draft_ids, drawn, num_drafts, spent_accept)
            stand = torch.where(is_block, longest, stand)
            weights = torch.where(is_block, prefix_weights, weights)
        recovered = draw_next(Accepted(probs, drawn, num_drafts, stand, weights, recover))
        by_probs = (rule == RuleCode.REJECTION) | (rule == RuleCode.BLOCK)
        num_accepted = torch.where(by_probs, stand, num_accepted)
        next_token = torch.where(by_probs, recovered, next_token)
    reached = torch.arange(num_positions, device=logits.device) <= num_accepted[:, None]
    return torch.stack([num_accepted, next_token, (broken & reached).any(1).long()], dim=1)


def _probs(logits: torch.Tensor, draws: Draws, rows: DeviceRows, is_draft: bool = False) -> torch.Tensor:
    # A draft may be cut in any way, as the verdict knows what it was drawn from: it need not sort everything.
    num_sorted = min(TOP_P_CANDIDATES, logits.shape[-1]) if is_draft else logits.shape[-1]
    return to_probs(logits, rows.sampling(logits.shape[0], draws.cuts, num_sorted))


def _replace_broken(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what ``adjust.replace_broken`` does, without a look at any number."""
    broken = ~logits.amax(-1).isfinite()
    return torch.where(broken[..., None], 0.0, logits), broken
