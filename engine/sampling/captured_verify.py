"""The verdict on all drafts of a round as a graph can hold it, for exact match and coupled rows.

Both rules compare each draft with the target's own token at its position, which for them is a function of
logits, seed and position: all of them are drawn at once. Says what ``Sampler.verify`` says of these logits,
but for rounding where sums over the vocabulary run in another order.
"""

from typing import NamedTuple

import torch

from engine.sampling.captured_draw import DrawKind, DrawTensors, captured_draw


class CapturedVerdict(NamedTuple):
    """Per row: how many drafts stand, the token after them, and whether logits that were needed for it are no
    distribution (NaN, infinity, nothing allowed). int64 [rows] each; ``failed`` is 0 or 1."""

    num_accepted: torch.Tensor
    next_token: torch.Tensor
    failed: torch.Tensor


def captured_verify(
    kind: DrawKind,
    logits: torch.Tensor,
    rows: DrawTensors,
    first_positions: torch.Tensor,
    drafted: torch.Tensor,
    num_draft: torch.Tensor,
    counters: torch.Tensor,
) -> CapturedVerdict:
    """Judge ``drafted`` [rows, k], of which row i's first ``num_draft[i]`` count, by the target's ``logits``
    [rows, k + 1, vocab]. Position j of a row draws the token at ``first_positions[row]`` + j of the text.

    ``kind`` and ``counters`` as in ``captured_draw``. Behind a row's drafts logits may be anything.
    """
    num_rows, num_positions, vocab_size = logits.shape
    offsets = torch.arange(num_positions, device=logits.device)
    positions = (first_positions[:, None] + offsets).view(-1)
    packed = logits.view(-1, vocab_size)
    if kind is not DrawKind.GREEDY:
        rows = rows.repeated(num_positions)
    own = captured_draw(kind, packed, rows, positions, counters)
    own = own.view(num_rows, num_positions)
    stands = (own[:, :-1] == drafted) & (offsets[:-1] < num_draft[:, None])
    num_accepted = stands.long().cumprod(-1).sum(-1)
    # What lies behind the first draft that does not stand was never needed, however broken it is.
    is_needed = offsets <= num_accepted[:, None]
    is_broken = ~logits.amax(-1).isfinite()
    return CapturedVerdict(
        num_accepted,
        own.gather(1, num_accepted[:, None])[:, 0],
        (is_broken & is_needed).any(-1).long(),
    )
