"""Verification rules: which drafted tokens stand, and the token that follows them.

Words: a drafted token is *accepted* or not; after the first that is not, a *recovered* token is drawn in
its place; if all are accepted, a *bonus* token follows. Each round thus emits num_accepted + 1 tokens.
All functions are pure and treat their rows alike. Shapes: batch B, drafted positions K, vocabulary V;
row b drafted ``num_draft[b]`` <= K tokens, what lies beyond is padding. Position K of the target's
rows is the one after the last drafted token.
"""

from typing import NamedTuple

import torch

from engine.sampling.draw import inverse_cdf, race


class Verdict(NamedTuple):
    """Per row: how many drafted tokens stand, and the recovered or bonus token after them. int64 [B]."""

    num_accepted: torch.Tensor
    next_token: torch.Tensor


def verify_exact_match(
    target_logits: torch.Tensor, draft_ids: torch.Tensor, num_draft: torch.Tensor
) -> Verdict:
    """Temperature 0: accept while the draft equals the target's argmax (lowest index on ties).

    ``target_logits`` [B, K+1, V], ``draft_ids`` [B, K], ``num_draft`` [B].
    """
    return _accept_while_equal(target_logits.argmax(-1), draft_ids, num_draft)


def verify_coupled(
    target_probs: torch.Tensor, draft_ids: torch.Tensor, num_draft: torch.Tensor, noise: torch.Tensor
) -> Verdict:
    """Accept while the draft equals the target's own draw; always emit the target's draw.

    The draft drew with the same ``noise`` [B, K+1, V], which makes agreement likely but is never needed
    for exactness: the output is a function of target and noise alone (Daliri, Musco and Suresh 2024).
    """
    return _accept_while_equal(race(target_probs, noise), draft_ids, num_draft)


def verify_rejection(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    num_draft: torch.Tensor,
    accept_uniforms: torch.Tensor,
    recover_uniforms: torch.Tensor,
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, alg. 2).

    ``target_probs`` [B, K+1, V]; ``draft_ids`` [B, K] were drawn from ``draft_probs`` [B, K, V] (one-hot
    rows for a deterministic draft); ``accept_uniforms`` [B, K] and ``recover_uniforms`` [B, K+1], both
    float64. One number per position, whichever of them turns out to be needed.
    """
    # Step 1: accept x if u * draft(x) < target(x). No division, so draft(x) = 0 is no special case.
    target_of_draft = target_probs[:, :-1].gather(-1, draft_ids[..., None]).squeeze(-1)
    draft_of_draft = draft_probs.gather(-1, draft_ids[..., None]).squeeze(-1)
    accepted = accept_uniforms * draft_of_draft < target_of_draft
    num_accepted = _leading(accepted, num_draft)

    # Step 2: the row after the accepted ones, less the draft's there unless all were accepted.
    rows = torch.arange(len(draft_ids), device=draft_ids.device)
    target_row = target_probs[rows, num_accepted]
    if draft_ids.shape[1] == 0:
        residual = target_row
    else:
        draft_row = draft_probs[rows, num_accepted.clamp(max=draft_ids.shape[1] - 1)]
        rejected = num_accepted < num_draft
        residual = torch.where(rejected[:, None], (target_row - draft_row).clamp(min=0), target_row)
        # Equal rows leave rounding dust at most; a rejection there has probability zero in exact
        # arithmetic, and the target's own row is the limit of what to draw from.
        no_mass = residual.sum(-1, keepdim=True) <= 0
        residual = torch.where(no_mass, target_row, residual)

    # Step 3: draw the recovered or bonus token.
    return Verdict(num_accepted, inverse_cdf(residual, recover_uniforms[rows, num_accepted]))


def _accept_while_equal(
    target_ids: torch.Tensor, draft_ids: torch.Tensor, num_draft: torch.Tensor
) -> Verdict:
    num_accepted = _leading(target_ids[:, :-1] == draft_ids, num_draft)
    return Verdict(num_accepted, target_ids.gather(1, num_accepted[:, None]).squeeze(1))


def _leading(accepted: torch.Tensor, num_draft: torch.Tensor) -> torch.Tensor:
    """How many of the first ``num_draft`` flags [B, K] are true before the first false one."""
    within = torch.arange(accepted.shape[1], device=accepted.device) < num_draft[:, None]
    return (accepted & within).long().cumprod(-1).sum(-1)
