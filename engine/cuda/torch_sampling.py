"""Draws and verifies rows with torch's operations, without reading a number on the host.

``sampling_kernels`` must do the same bit for bit; a CUDA graph captures these operations where the kernels
cannot be used. The rules are those of ``engine.sampling``, of whose parts these are made. All rules are
computed for all rows; each row keeps the result of its own.
"""

import torch
import torch.nn.functional as F

from truedraft.engine.rows.columns import DRAFTS_AT, Field, Rule
from truedraft.engine.sampling.ops import in_width, inverse_cdf
from truedraft.engine.sampling.processors import SamplingTensors, to_probs
from truedraft.engine.sampling.random import Stream, noise_on_device, round_seeds_on_device, uniform_on_device
from truedraft.engine.sampling.verify import (
    Accepted,
    draw_next,
    leading_on_device,
    longest_block,
    probs_of_draft,
)


def draw_drafts(
    logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, place: torch.Tensor
) -> None:
    """Does as ``sampling_kernels.draw_drafts``, and keeps greedy rows' distributions, too."""
    vocab_size = probs.shape[1]
    logits, _ = _replace_broken(in_width(logits, vocab_size))
    drawn_from = to_probs(logits[:, None], SamplingTensors.on_device(numbers))[:, 0]
    rule, seeds = numbers[:, Field.RULE], numbers[:, Field.SEED]
    first = numbers[:, Field.NUM_STORED] + 1
    positions = first + place
    spent = round_seeds_on_device(seeds, first)
    ids = inverse_cdf(drawn_from, uniform_on_device(spent, positions, Stream.DRAFT))
    coupled = (drawn_from / noise_on_device(seeds, positions, vocab_size)).argmax(-1)
    ids = torch.where(rule == Rule.COUPLED.code, coupled, ids)
    ids = torch.where(rule == Rule.EXACT_MATCH.code, logits.argmax(-1), ids)
    drafts = numbers[:, DRAFTS_AT:]
    before = drafts.index_select(1, place).squeeze(1)
    draws = place < numbers[:, Field.NUM_DRAWN]
    drafts.index_copy_(1, place, torch.where(draws, ids, before)[:, None])
    probs.copy_(torch.where(draws[:, None], drawn_from, probs))


def judge(
    logits: torch.Tensor, draft_probs: torch.Tensor, numbers: torch.Tensor, verdicts: torch.Tensor
) -> None:
    """Computes what ``sampling_kernels.judge`` does."""
    vocab_size, num_positions = logits.shape[2], logits.shape[1]
    num_drafts = numbers[:, Field.NUM_DRAFTS]
    is_draft = torch.arange(num_positions - 1, device=logits.device) < num_drafts[:, None]
    draft_ids = torch.where(is_draft, numbers[:, DRAFTS_AT : DRAFTS_AT + num_positions - 1], 0)
    logits, broken = _replace_broken(logits)
    probs = to_probs(logits, SamplingTensors.on_device(numbers))
    rule, seeds = numbers[:, Field.RULE], numbers[:, Field.SEED]
    first = numbers[:, Field.NUM_STORED] + 1
    positions = first[:, None] + torch.arange(num_positions, device=logits.device)
    coupled = (probs / noise_on_device(seeds[:, None], positions, vocab_size)).argmax(-1)
    target_ids = torch.where((rule == Rule.COUPLED.code)[:, None], coupled, logits.argmax(-1))
    num_equal = leading_on_device(target_ids[:, :-1] == draft_ids, num_drafts)

    drawn = F.pad(draft_probs, (0, 0, 0, max(0, num_positions - 1 - draft_probs.shape[1])))
    drawn = drawn[:, : num_positions - 1]
    certain = torch.zeros_like(drawn).scatter_(2, draft_ids[..., None], 1.0)
    drawn = torch.where((numbers[:, Field.NUM_DRAWN] > 0)[:, None, None], drawn, certain)
    is_block = rule == Rule.BLOCK.code
    spent = round_seeds_on_device(seeds, first)
    accept = uniform_on_device(spent[:, None], positions[:, :-1], Stream.ACCEPT)
    of_target, of_draft = probs_of_draft(probs, draft_ids, drawn)
    leading = leading_on_device(accept * of_draft < of_target, num_drafts)
    longest, weights = longest_block(probs, draft_ids, drawn, num_drafts, accept)
    stand = torch.where(is_block, longest, leading)
    weights = torch.where(is_block, weights, 1.0)
    recover = uniform_on_device(seeds[:, None], positions, Stream.RECOVER)
    drawn_next = draw_next(Accepted(probs, drawn, num_drafts, stand, weights, recover))

    by_probs = (rule == Rule.REJECTION.code) | is_block
    num_accepted = torch.where(by_probs, stand, num_equal)
    next_token = torch.where(by_probs, drawn_next, target_ids.gather(1, num_equal[:, None]).squeeze(1))
    reached = torch.arange(num_positions, device=logits.device) <= num_accepted[:, None]
    failed = (broken & reached).any(1).long()
    verdicts[:, :3] = torch.stack([num_accepted, next_token, failed], dim=1)
    verdicts[:, 3 : 2 + num_positions] = draft_ids


def _replace_broken(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what ``adjust.replace_broken`` does, without a look at any number."""
    broken = ~logits.amax(-1).isfinite()
    return torch.where(broken[..., None], 0.0, logits), broken
