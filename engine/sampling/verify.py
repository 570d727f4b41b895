"""Has the verification rules: how many drafted tokens are accepted, and which token follows them.

Words: a drafted token is *accepted* or not; in place of the first that is not, a *recovered* token is drawn;
if all are accepted, a *bonus* token follows. Each round thus emits num_accepted + 1 tokens. All functions are
pure and treat their rows alike. Shapes: batch B, drafted positions K, vocabulary V; row b drafted
``num_draft[b]`` <= K tokens, the rest is padding. Position K of the target's rows is the one after the last
drafted token. A deterministic draft has one-hot ``draft_probs``.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from truedraft.engine.rows.drafts import RowVerdict
from truedraft.engine.sampling.ops import PROB_UNIT, inverse_cdf, units


class Verdict(NamedTuple):
    """Holds for each row the number of accepted tokens, and the recovered or bonus token after them. int64
    [B]."""

    num_accepted: torch.Tensor
    next_token: torch.Tensor


def read_verdict(verdict: Verdict, broken: torch.Tensor | None) -> list[RowVerdict]:
    """Returns the verdicts as plain numbers. ``broken`` bool [B, K+1] marks positions whose logits were no
    distribution; None if there are none."""
    return [
        RowVerdict(num_accepted, next_token, any(flags[: num_accepted + 1]))
        for (num_accepted, next_token), flags in _read_rows(torch.stack(verdict, dim=1), broken)
    ]


def verify_equal(
    target_ids: torch.Tensor, broken: torch.Tensor | None, drafted: list[list[int]]
) -> list[RowVerdict]:
    """Accepts drafts while they are the target's own tokens, ``target_ids`` [B, K+1]."""
    verdicts = []
    for (row_ids, flags), draft_ids in zip(_read_rows(target_ids, broken), drafted, strict=True):
        num_accepted, next_token = accept_while_equal(row_ids, draft_ids)
        verdicts.append(RowVerdict(num_accepted, next_token, any(flags[: num_accepted + 1])))
    return verdicts


def _read_rows(numbers: torch.Tensor, broken: torch.Tensor | None) -> Iterator[tuple[list[int], list[int]]]:
    """Reads the rows of ``numbers`` [B, n] and ``broken`` [B, K+1] in one copy from the device."""
    width = numbers.shape[1]
    if broken is not None:
        numbers = torch.cat([numbers, broken.long()], dim=1)
    for row in numbers.tolist():
        yield row[:width], row[width:]


def verify_greedy(logits: torch.Tensor, drafted: list[list[int]]) -> list[RowVerdict]:
    """Verifies at temperature 0: the target's own tokens are its most likely ones (lowest index on ties).

    ``logits`` [sum of (drafted + 1), V] are packed row after row. The rest is plain numbers, as there are
    few.
    """
    if logits.device.type == "cpu":
        # These go one by one: right after a model's pass an array operation costs more than all of them.
        scores = logits.numpy()
        target_ids: list[int] = scores.argmax(-1).tolist()
        # A NaN counts as the highest of its row, here as in torch.
        is_number = [math.isfinite(scores.item(row, token_id)) for row, token_id in enumerate(target_ids)]
    else:
        is_finite = logits.amax(-1).isfinite()
        target_ids, is_number = torch.stack([logits.argmax(-1), is_finite.long()]).tolist()
    verdicts, start = [], 0
    for draft_ids in drafted:
        end = start + len(draft_ids) + 1
        num_accepted, next_token = accept_while_equal(target_ids[start:end], draft_ids)
        failed = not all(is_number[start : start + num_accepted + 1])
        verdicts.append(RowVerdict(num_accepted, next_token, failed))
        start = end
    return verdicts


def accept_while_equal(target_ids: list[int], draft_ids: list[int]) -> tuple[int, int]:
    """Accepts while the draft equals the target's own token; the token after that is always the target's.

    Returns how many of one row's ``draft_ids`` are accepted, and the token after them. ``target_ids`` are one
    more, or padded. Under the coupled rule they are the target's own draws: the draft drew with the same
    noise, which makes agreement likely but is never needed for exactness: the output is a function of target
    and noise alone (Daliri, Musco and Suresh 2024).
    """
    for num_accepted, draft_id in enumerate(draft_ids):
        if draft_id != target_ids[num_accepted]:
            return num_accepted, target_ids[num_accepted]
    return len(draft_ids), target_ids[len(draft_ids)]


class Accepted(NamedTuple):
    """Holds what a rule has accepted of each row, and all from which the token after it is drawn."""

    target_probs: torch.Tensor  # float32 [B, K+1, V]
    draft_probs: torch.Tensor  # float32 [B, K, V]
    num_draft: torch.Tensor  # int64 [B]
    num_accepted: torch.Tensor  # int64 [B]
    weights: torch.Tensor  # float64 [B], 1 except under block verification
    recover_uniforms: torch.Tensor  # float64 [B, K+1]


def draw_next(accepted: Accepted) -> torch.Tensor:
    """Draws the recovered token, or the bonus token of rows whose drafts are all accepted: int64 [B]."""
    target_probs, draft_probs, num_draft, num_accepted, weights, recover_uniforms = accepted
    rows = torch.arange(len(num_draft), device=num_draft.device)
    row = target_probs[rows, num_accepted].double()
    num_positions = draft_probs.shape[1]
    if num_positions:
        draft_row = draft_probs[rows, num_accepted.clamp(max=num_positions - 1)]
        rejected = num_accepted < num_draft
        row = torch.where(rejected[:, None], residual(row, draft_row, weights), row)
    return inverse_cdf(row, recover_uniforms[rows, num_accepted])


def verify_rejection(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    num_draft: torch.Tensor,
    accept_uniforms: torch.Tensor,
    recover_uniforms: torch.Tensor,
) -> Verdict:
    """Verifies by speculative sampling (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318,
    alg. 2).

    ``target_probs`` [B, K+1, V]; ``draft_ids`` [B, K] were drawn from ``draft_probs`` [B, K, V];
    ``accept_uniforms`` [B, K] and ``recover_uniforms`` [B, K+1], both float64 in (0, 1). There is one number
    per position, whichever of them turns out to be needed.
    """
    # Step 1: accept x if u * draft(x) < target(x). No division, so draft(x) = 0 is no special case.
    target_of_draft, draft_of_draft = probs_of_draft(target_probs, draft_ids, draft_probs)
    num_accepted = _leading(accept_uniforms * draft_of_draft < target_of_draft, num_draft)
    # Steps 2 and 3: draw from the residual, or from the target after the last draft.
    weights = torch.ones_like(num_accepted, dtype=torch.float64)
    accepted = Accepted(target_probs, draft_probs, num_draft, num_accepted, weights, recover_uniforms)
    return Verdict(num_accepted, draw_next(accepted))


def verify_block(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    num_draft: torch.Tensor,
    accept_uniforms: torch.Tensor,
    recover_uniforms: torch.Tensor,
) -> Verdict:
    """Verifies by blocks (Sun et al. 2403.10444): the same distribution, never fewer tokens expected.

    Arguments are as in ``verify_rejection``. All lengths are tried independently and the longest one kept.
    """
    num_accepted, weights = longest_block(target_probs, draft_ids, draft_probs, num_draft, accept_uniforms)
    accepted = Accepted(target_probs, draft_probs, num_draft, num_accepted, weights, recover_uniforms)
    return Verdict(num_accepted, draw_next(accepted))


def longest_block(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    num_draft: torch.Tensor,
    accept_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the longest length that stands, int64 [B], and its prefix weight, float64 [B]. It uses
    operations on tensors alone."""
    prefix_weights, stand_probs = block_stand_probs(target_probs, draft_ids, draft_probs, num_draft)
    num_positions = draft_ids.shape[1]
    lengths = torch.arange(1, num_positions + 1, device=draft_ids.device)
    stands = (accept_uniforms < stand_probs[:, 1:]) & (lengths <= num_draft[:, None])
    longest = (stands * lengths).amax(-1) if num_positions else torch.zeros_like(num_draft)
    return longest, prefix_weights.gather(1, longest[:, None]).squeeze(1)


def block_stand_probs(
    target_probs: torch.Tensor, draft_ids: torch.Tensor, draft_probs: torch.Tensor, num_draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for lengths 0..K, prefix weights w and the chance h that a length stands. float64 [B, K+1].

    w_0 = 1, w_i = min(1, w_{i-1} * target(x_i) / draft(x_i)). With R_i the mass of
    max(w_i * target - draft, 0) at the next position: h_i = R_i / (R_i + 1 - w_i), and h = w for the
    full length, where there is no next draft.
    """
    target_of_draft, draft_of_draft = probs_of_draft(target_probs, draft_ids, draft_probs)
    weight = torch.ones(len(draft_ids), dtype=torch.float64, device=draft_ids.device)
    weights = [weight]
    for i in range(draft_ids.shape[1]):
        scaled = weight * target_of_draft[:, i]
        weight = torch.where(scaled >= draft_of_draft[:, i], 1.0, scaled / draft_of_draft[:, i])
        weight = torch.where(scaled == 0, 0.0, weight)
        weights.append(weight)
    prefix_weights = torch.stack(weights, dim=1)
    scaled_target = prefix_weights[:, :-1, None] * target_probs[:, :-1]
    left = units((scaled_target - draft_probs).clamp(min=0), PROB_UNIT)
    mass = left.sum(-1).double() * PROB_UNIT
    slack = mass + 1 - prefix_weights[:, :-1]
    stand = torch.where(slack > 0, mass / slack, 1.0)
    stand = torch.cat([stand, prefix_weights[:, -1:]], dim=1)
    full_length = torch.arange(stand.shape[1], device=stand.device) == num_draft[:, None]
    return prefix_weights, torch.where(full_length, prefix_weights, stand)


def residual(target_row: torch.Tensor, draft_row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns what the draft leaves of the target, max(weight * target - draft, 0), not normalised: [..., V].

    ``weight`` [...] is 1 except under block verification. Equal rows leave rounding dust at most; a rejection
    there has probability zero in exact arithmetic, and the target's row is the limit.
    """
    left = (weight[..., None] * target_row - draft_row).clamp(min=0)
    mass = units(left, PROB_UNIT).sum(-1, keepdim=True)
    return torch.where(mass > 0, left, target_row.double())


def probs_of_draft(
    target_probs: torch.Tensor, draft_ids: torch.Tensor, draft_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both models' probability of each drafted token: [B, K] each."""
    ids = draft_ids[..., None]
    return target_probs[:, :-1].gather(-1, ids).squeeze(-1), draft_probs.gather(-1, ids).squeeze(-1)


def _leading(accepted: torch.Tensor, num_draft: torch.Tensor) -> torch.Tensor:
    """Returns the same as ``leading_on_device``, on a CPU in a faster way."""
    if accepted.device.type == "cpu":  # A handful of flags is faster one by one than by five operations.
        limits = zip(accepted.tolist(), num_draft.tolist(), strict=True)
        lengths = [[*flags[:limit], False].index(False) for flags, limit in limits]
        return torch.tensor(lengths, dtype=torch.int64)
    return leading_on_device(accepted, num_draft)


def leading_on_device(accepted: torch.Tensor, num_draft: torch.Tensor) -> torch.Tensor:
    """Counts how many of the first ``num_draft`` [B] flags [B, K] are true before the first false one: [B].

    Operations on tensors alone do it, on any device.
    """
    within = torch.arange(accepted.shape[1], device=accepted.device) < num_draft[:, None]
    return (accepted & within).long().cumprod(-1).sum(-1)
