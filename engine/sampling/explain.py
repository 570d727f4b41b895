"""Gives the verification rules as probabilities instead of draws: what a round could have emitted, and how
often.

It is made of the same pieces as ``verify``. Tests that enumerate, the trace and ``truedraft check`` use it.
Shapes are those of ``verify``.
"""

from typing import NamedTuple

import torch

from truedraft.engine.sampling.verify import block_stand_probs, probs_of_draft, residual


class Explanation(NamedTuple):
    """Says of given drafts which length is kept with which probability, and which token follows. All are
    float64.

    ``accept_probs[b, j]``: rejection's chance of draft j once reached, block's chance that length j + 1
    stands. ``length_probs[b, i]``: the chance that exactly i drafted tokens are kept. ``next_probs[b, i]``:
    the distribution of the token after them.
    """

    accept_probs: torch.Tensor  # [B, K]
    length_probs: torch.Tensor  # [B, K+1]
    next_probs: torch.Tensor  # [B, K+1, V]


def explain_rejection(
    target_probs: torch.Tensor, draft_ids: torch.Tensor, draft_probs: torch.Tensor, num_draft: torch.Tensor
) -> Explanation:
    """Explains rejection: ``length_probs[i]`` = the first i accepted, then a rejection (or the end of the
    draft)."""
    target_of_draft, draft_of_draft = probs_of_draft(target_probs, draft_ids, draft_probs)
    ratio = target_of_draft.double() / draft_of_draft.double()
    accept_probs = torch.where(target_of_draft == 0, 0.0, ratio.clamp(max=1))
    reach = accept_probs.cumprod(-1)
    one = torch.ones_like(target_probs[:, :1, 0], dtype=torch.float64)
    reached = torch.cat([one, reach], dim=1)
    refused = torch.cat([1 - accept_probs, one], dim=1)
    refused = torch.where(_lengths(draft_ids) == num_draft[:, None], 1.0, refused)
    length_probs = torch.where(_lengths(draft_ids) <= num_draft[:, None], reached * refused, 0.0)
    weights = torch.ones_like(reached)
    return Explanation(accept_probs, length_probs, _next_probs(target_probs, draft_probs, num_draft, weights))


def explain_block(
    target_probs: torch.Tensor, draft_ids: torch.Tensor, draft_probs: torch.Tensor, num_draft: torch.Tensor
) -> Explanation:
    """Explains block verification: ``length_probs[i]`` = length i stands and no longer one does."""
    weights, stand_probs = block_stand_probs(target_probs, draft_ids, draft_probs, num_draft)
    stand_probs = torch.where(_lengths(draft_ids) <= num_draft[:, None], stand_probs, 0.0)
    falls = 1 - stand_probs
    longer_fall = torch.cat([falls.flip(1).cumprod(1).flip(1)[:, 1:], torch.ones_like(falls[:, :1])], dim=1)
    # Length 0 needs no condition: it has the chance that no other length stands.
    stand_probs = torch.cat([torch.ones_like(falls[:, :1]), stand_probs[:, 1:]], dim=1)
    return Explanation(
        stand_probs[:, 1:],
        stand_probs * longer_fall,
        _next_probs(target_probs, draft_probs, num_draft, weights),
    )


def _lengths(draft_ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)


def _next_probs(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, num_draft: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the residual before the end of a draft, and the target's own distribution at it: [B, K+1, V],
    normalised."""
    rows = target_probs.double()
    left = residual(rows[:, :-1], draft_probs, weights[:, :-1])
    within = torch.arange(draft_probs.shape[1], device=num_draft.device) < num_draft[:, None]
    rows = torch.cat([torch.where(within[..., None], left, rows[:, :-1]), rows[:, -1:]], dim=1)
    return rows / rows.sum(-1, keepdim=True)
