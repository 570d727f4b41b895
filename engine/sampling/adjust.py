"""Adjusts raw logits before temperature: bias, penalties, the minimum length.

The order is: logit_bias, repetition penalty, frequency and presence penalties, then stop tokens are forbidden
below ``min_tokens``, a mask forbids all that it does not allow, and the checkpoint's own rules have the last
word. Frequency and presence penalties count the output alone; the repetition penalty asks whether a token
stands in prompt or output. Every position sees the output as it would be there: with the drafted tokens
before it, each counted once.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from truedraft.engine.memory.host_to_device import on_device, send
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules

# Rows are penalised in at most this many slices: the temporary memory of a slice is a small share of the
# logits.
MOST_SLICES = 16


def adjust_logits(
    logits: torch.Tensor,
    rows: Sequence[Row],
    drafted: torch.Tensor,
    offset: int,
    rules: GenerationRules = NO_RULES,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns adjusted float32 logits, of the shape of ``logits`` [rows, positions, V], which stay unchanged.
    The arguments are those of ``adjust_in_place``."""
    adjusted = logits.to(torch.float32, copy=True)
    adjust_in_place(adjusted, rows, drafted, offset, rules, counts)
    return adjusted


def adjust_in_place(
    logits: torch.Tensor,
    rows: Sequence[Row],
    drafted: torch.Tensor,
    offset: int,
    rules: GenerationRules = NO_RULES,
    counts: torch.Tensor | None = None,
    draft_ids: list[list[int]] | None = None,
) -> None:
    """Adjusts float32 ``logits`` [rows, positions, V].

    Position j of a row predicts the token that follows its text and ``drafted[row, : offset + j]``;
    ``drafted`` is [rows, at least offset + positions - 1]. ``counts`` [2, penalised rows, V]: how often
    each token stands in their prompts and in their outputs, where that is known already. ``draft_ids`` are
    the rows' drafts where the host has them already.
    """
    for place, row in enumerate(rows):
        if bias := row.params.logit_bias:
            ids = on_device(list(bias), logits.device)
            logits[place, :, ids] += on_device(list(bias.values()), logits.device, torch.float32)
    penalised = [place for place, row in enumerate(rows) if row.is_penalised]
    if penalised:
        members = [rows[place] for place in penalised]
        of_text = _text_counts(members, logits.shape[2], logits.device) if counts is None else counts
        step = -(-len(members) // MOST_SLICES)
        for first in range(0, len(members), step):
            some, last = penalised[first : first + step], first + step
            index = on_device(some, logits.device)
            in_prompt, in_output = of_text[:, first:last]
            by_position = _counts(in_output, drafted[index], offset, logits.shape[1])
            logits[index] = _penalise(logits[index], members[first:last], in_prompt, by_position)
    # The host reads all drafts at once.
    if draft_ids is None:
        draft_ids = drafted.tolist() if reads_drafts(rows, rules) else []
    for place, row in enumerate(rows):
        _forbid_stop_tokens(logits[place], row, offset)
        if row.matcher is not None:
            masks = row.matcher.masks(draft_ids[place][: offset + logits.shape[1] - 1], offset)
            if masks is not None:
                _forbid_masked(logits[place], masks)
        if rules:
            _apply_rules(logits[place], row, rules, draft_ids[place], offset)


def reads_drafts(rows: Sequence[Row], rules: GenerationRules) -> bool:
    """Tells whether the host must know what has been drafted to adjust the logits of rows."""
    return bool(rules) or any(row.matcher is not None for row in rows)


def _forbid_stop_tokens(logits: torch.Tensor, row: Row, offset: int) -> None:
    """Changes ``logits`` [positions, V] of one row in place, as far as its text is too short to end."""
    num_missing = row.min_num_tokens - len(row.token_ids) - offset
    num_forbidden = max(0, min(num_missing, logits.shape[0]))
    if num_forbidden and row.stop_token_ids:
        ids = on_device(row.stop_token_ids, logits.device)
        logits[:num_forbidden].index_fill_(-1, ids, -torch.inf)


def replace_broken(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Makes rows [..., V] with NaN, infinity or nothing allowed flat, and returns which they are: [...]; None
    if there are none."""
    # On other devices the question would cost a wait.
    if logits.device.type == "cpu" and all(map(math.isfinite, logits.amax(-1).flatten().tolist())):
        return logits, None
    broken = ~logits.amax(-1).isfinite()
    return torch.where(broken[..., None], 0.0, logits), broken


def _forbid_masked(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Changes ``logits`` [positions, V] of one row in place; ``mask`` may have fewer positions."""
    # The words are sent to the device as they are, with 32 tokens in each.
    mask = send(mask, logits.device)
    bits = mask[..., None] >> torch.arange(32, device=mask.device) & 1
    allowed = bits.bool().flatten(1)[:, : logits.shape[1]]
    allowed = F.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
    logits[: len(allowed)].masked_fill_(~allowed, -torch.inf)


def _apply_rules(
    logits: torch.Tensor, row: Row, rules: GenerationRules, drafted: list[int], offset: int
) -> None:
    """Changes ``logits`` [positions, V] of one row in place."""
    ends = not row.params.ignore_eos  # Without ``max_tokens`` there is no end to force.
    last = row.num_prompt_tokens + row.params.max_tokens - 1 - len(row.token_ids)
    for position, each in enumerate(logits, start=offset):
        rules.apply(each, row.text + drafted[:position], ends and position == last)


def _text_counts(rows: Sequence[Row], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Returns how often each token stands in the prompts, and how often in the outputs: float32 [2, rows, V].
    Of an encoder-decoder's prompt only the beginning of the output counts."""
    texts = [row.prompt for row in rows] + [row.output for row in rows]
    counts = [torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size) for ids in texts]
    return send(torch.stack(counts).float().view(2, len(rows), vocab_size), device)


def _counts(base: torch.Tensor, drafted: torch.Tensor, offset: int, num_positions: int) -> torch.Tensor:
    """Returns how often each token is output before each position, float32 [rows, positions, V], given the
    counts in the outputs so far, ``base`` [rows, V]."""
    counts = base[:, None].repeat(1, num_positions, 1)
    number = torch.arange(offset + num_positions - 1, device=base.device)
    position = torch.arange(offset, offset + num_positions, device=base.device)
    is_before = (number < position[:, None]).float().expand(len(base), -1, -1)
    ids = drafted[:, None, : len(number)].expand_as(is_before)
    return counts.scatter_add_(2, ids, is_before)


def _penalise(
    logits: torch.Tensor, rows: Sequence[Row], in_prompt: torch.Tensor, in_output: torch.Tensor
) -> torch.Tensor:
    """Applies repetition penalties as Keskar et al. 2019 (1909.05858) define them; frequency and presence as
    OpenAI does.

    ``in_prompt`` [rows, V] and ``in_output`` [rows, positions, V] count tokens; both ``logits`` and
    ``in_output`` are overwritten.
    """

    def column(values: list[float]) -> torch.Tensor:
        return on_device(values, logits.device, torch.float32)[:, None, None]

    repetition = column([row.params.repetition_penalty for row in rows])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    is_output = in_output > 0
    torch.where(is_output | (in_prompt[:, None] > 0), repeated, logits, out=logits)
    del repeated
    logits -= in_output.mul_(column([row.params.frequency_penalty for row in rows]))
    logits -= is_output * column([row.params.presence_penalty for row in rows])
    return logits
