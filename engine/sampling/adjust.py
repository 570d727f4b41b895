"""What is added to or taken from raw logits before temperature: bias, penalties, the minimum length.

In this order: logit_bias, repetition penalty, frequency and presence penalties, then stop tokens are
forbidden below ``min_tokens``, a mask forbids all that it does not allow, and the checkpoint's own rules have
the last word. Frequency and presence penalties count the output alone, the repetition penalty asks whether a
token stands in prompt or output. Every position sees the output as it would stand there: with the drafted
tokens before it, each counted once.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from truedraft.engine.memory.host_to_device import on_device, send
from truedraft.engine.messages import SamplingParams
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules

if TYPE_CHECKING:
    from truedraft.engine.sampling.grammar import Matcher


@dataclass(frozen=True, slots=True)
class History:
    """What one row's adjustments depend on. ``token_ids`` is prompt and output, pending token included.

    The first ``num_encoder_tokens`` are an encoder's: penalties and rules do not see them. ``matcher`` knows
    which tokens are allowed after the text and drafts.
    """

    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    num_encoder_tokens: int = 0
    rules: GenerationRules = NO_RULES
    matcher: "Matcher | None" = None
    _always_adjusts: bool = field(init=False)

    def __post_init__(self) -> None:
        always = bool(self.params.logit_bias) or self.penalized or bool(self.rules)
        object.__setattr__(self, "_always_adjusts", always or self.matcher is not None)

    @property
    def may_need_adjustment(self) -> bool:
        """Now or at another length."""
        return self._always_adjusts or self.params.min_tokens > 0

    @property
    def text(self) -> list[int]:
        """What the decoder has seen."""
        return self.token_ids[self.num_encoder_tokens :] if self.num_encoder_tokens else self.token_ids

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def penalized(self) -> bool:
        params = self.params
        return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1

    @property
    def below_minimum(self) -> bool:
        return len(self.token_ids) - self.num_prompt_tokens < self.params.min_tokens

    @property
    def needs_adjustment(self) -> bool:
        return self._always_adjusts or self.below_minimum


def adjust_logits(
    logits: torch.Tensor,
    histories: list[History],
    drafted: torch.Tensor,
    offset: int,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns adjusted float32 logits, of the shape of ``logits`` [rows, positions, V], which stay unchanged.

    Position j of a row predicts the token that follows its history and ``drafted[row, : offset + j]``;
    ``drafted`` is [rows, at least offset + positions - 1]. ``counts`` [2, penalised rows, V]: how often each
    token stands in their prompts and in their outputs, where that is known already.
    """
    logits = logits.float().clone()
    for row, history in enumerate(histories):
        if bias := history.params.logit_bias:
            ids = on_device(list(bias), logits.device)
            logits[row, :, ids] += on_device(list(bias.values()), logits.device, torch.float32)
    penalized = [row for row, history in enumerate(histories) if history.penalized]
    if penalized:
        members = [histories[row] for row in penalized]
        rows = on_device(penalized, logits.device)
        of_text = _text_counts(members, logits.shape[2], logits.device) if counts is None else counts
        in_prompt, in_output = of_text
        by_position = _counts(in_output, drafted[rows], offset, logits.shape[1])
        logits[rows] = _penalize(logits[rows], members, in_prompt, by_position)
    # The host reads all drafts at once.
    reads = any(history.matcher is not None or history.rules for history in histories)
    draft_ids = drafted.tolist() if reads else []
    for row, history in enumerate(histories):
        _forbid_stop_tokens(logits[row], history, offset)
        if history.matcher is not None:
            masks = history.matcher.masks(draft_ids[row][: offset + logits.shape[1] - 1], offset)
            if masks is not None:
                _forbid_masked(logits[row], masks)
        if history.rules:
            _apply_rules(logits[row], history, draft_ids[row], offset)
    return logits


def _forbid_stop_tokens(logits: torch.Tensor, history: History, offset: int) -> None:
    """Changes ``logits`` [positions, V] of one row in place, as far as its text is too short to end."""
    num_output = len(history.token_ids) - history.num_prompt_tokens + offset
    num_forbidden = max(0, min(history.params.min_tokens - num_output, logits.shape[0]))
    if num_forbidden and history.stop_token_ids:
        ids = on_device(sorted(history.stop_token_ids), logits.device)
        logits[:num_forbidden].index_fill_(-1, ids, -torch.inf)


def replace_broken(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [..., V] with NaN, infinity or nothing allowed become flat, and are named: [...]; None if there
    are none."""
    # Elsewhere the question would cost a wait.
    if logits.device.type == "cpu" and all(map(math.isfinite, logits.amax(-1).flatten().tolist())):
        return logits, None
    broken = ~logits.amax(-1).isfinite()
    return torch.where(broken[..., None], 0.0, logits), broken


def _forbid_masked(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """``logits`` [positions, V] of one row, changed in place; ``mask`` may have fewer positions."""
    # The words go to the device as they are: 32 tokens in each.
    mask = send(mask, logits.device)
    bits = mask[..., None] >> torch.arange(32, device=mask.device) & 1
    allowed = bits.bool().flatten(1)[:, : logits.shape[1]]
    allowed = F.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
    logits[: len(allowed)].masked_fill_(~allowed, -torch.inf)


def _apply_rules(logits: torch.Tensor, history: History, drafted: list[int], offset: int) -> None:
    """``logits`` [positions, V] of one row, changed in place."""
    num_output = len(history.token_ids) - history.num_prompt_tokens
    ends = not history.params.ignore_eos  # else there is no end to force
    for position, row in enumerate(logits, start=offset):
        is_last = ends and num_output + position == history.params.max_tokens - 1
        history.rules.apply(row, history.text + drafted[:position], is_last)


def _text_counts(histories: list[History], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Returns how often each token stands in the prompts, and how often in the outputs: float32 [2, rows, V].
    Of an encoder-decoder's prompt only what begins the output counts."""
    prompts = [
        history.token_ids[history.num_encoder_tokens : history.num_prompt_tokens] for history in histories
    ]
    texts = prompts + [history.output for history in histories]
    counts = [torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size) for ids in texts]
    return send(torch.stack(counts).float().view(2, len(histories), -1), device)


def _counts(base: torch.Tensor, drafted: torch.Tensor, offset: int, num_positions: int) -> torch.Tensor:
    """Returns how often each token is output before each position, float32 [rows, positions, V], from how
    often it stands in the outputs so far, ``base`` [rows, V]."""
    one_hot = F.one_hot(drafted[:, : offset + num_positions - 1], base.shape[1]).float()
    before_first = base + one_hot[:, :offset].sum(1)
    later = before_first[:, None] + one_hot[:, offset:].cumsum(1)
    return torch.cat([before_first[:, None], later], dim=1)


def _penalize(
    logits: torch.Tensor, histories: list[History], in_prompt: torch.Tensor, in_output: torch.Tensor
) -> torch.Tensor:
    """Repetition as Keskar et al. 2019 (1909.05858) define it; frequency and presence as OpenAI does.

    ``in_prompt`` [rows, V] and ``in_output`` [rows, positions, V] count tokens.
    """

    def column(values: list[float]) -> torch.Tensor:
        return on_device(values, logits.device, torch.float32)[:, None, None]

    seen = (in_prompt[:, None] > 0) | (in_output > 0)
    repetition = column([h.params.repetition_penalty for h in histories])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    logits = logits - column([h.params.frequency_penalty for h in histories]) * in_output
    return logits - column([h.params.presence_penalty for h in histories]) * (in_output > 0)
