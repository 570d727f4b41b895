"""Finds what draws and judges rows on a device: kernels, where they do exactly what torch does."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch

from truedraft.engine.cuda import torch_sampling, triton_run
from truedraft.engine.rows.columns import DEVICE_WIDTH, DRAFTS_AT, Field, Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.probes import CHECKS, Check

# Each row of the comparison has this many drafts, where rows may have so many, after this many tokens.
CHECK_DRAFTS, CHECK_STORED = 3, 41


logger = logging.getLogger(__name__)


class Sampling(Protocol):
    """Is the interface of the modules ``sampling_kernels`` and ``torch_sampling``, which tests replace."""

    def draw_drafts(
        self, logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, place: torch.Tensor
    ) -> None: ...

    def judge(
        self, logits: torch.Tensor, draft_probs: torch.Tensor, numbers: torch.Tensor, verdicts: torch.Tensor
    ) -> None: ...


def find_sampling(vocab_size: int, max_drafts: int, device: torch.device) -> Sampling:
    """Returns the kernels if they serve ``device`` and are right; else torch's operations, with a warning if
    the kernels were worth trying. The programs that are compared are those that serve rows of up to
    ``max_drafts``."""
    if not triton_run.is_fit(device) or find_spec("triton") is None:
        return torch_sampling
    try:
        kernels: Sampling = import_module("truedraft.engine.cuda.sampling_kernels")  # This imports triton.
        if is_right(kernels, vocab_size, max_drafts, device):
            return kernels
        what = "differ from torch's operations"
    except Exception as error:  # compilers and drivers fail in many ways
        what = f"cannot be used ({error})"
    logger.warning("The sampling kernels %s. Draws by torch take several times as long.", what)
    return torch_sampling


@torch.inference_mode()
def is_right(sampling: Sampling, vocab_size: int, max_drafts: int, device: torch.device) -> bool:
    """Tells whether ``sampling`` draws and verifies like torch's operations: by every rule, with all cuts,
    for logits with ties and for those that leave few tokens or none."""
    num_drafts = min(CHECK_DRAFTS, max_drafts)
    made = [_logits_of(check, vocab_size) for check in CHECKS]
    logits, draft_logits = (torch.stack(each).to(device) for each in zip(*made, strict=True))
    logits, draft_logits = logits[:, : num_drafts + 1].contiguous(), draft_logits[:, :num_drafts]
    for is_drawn in (True, False):
        results = [
            _drawn_and_judged(one, logits, draft_logits, check_rows(max_drafts, is_drawn).to(device))
            for one in (sampling, torch_sampling)
        ]
        if not all(map(torch.equal, *results)):
            return False
    return True


def _logits_of(check: Check, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the target's logits [drafts + 1, V], and the draft's [drafts, V], which are close enough that
    some drafts are accepted."""
    generator = torch.Generator().manual_seed(check.seed)
    logits = 3 * torch.randn(CHECK_DRAFTS + 1, vocab_size, generator=generator)
    if check.logits == "with ties":
        logits.round_()
    elif check.logits == "equal":
        logits.zero_()
    elif check.logits in ("one", "few"):
        logits[:, 1 if check.logits == "one" else 3 :] = -torch.inf
    elif check.logits == "NaN":
        logits[0, vocab_size // 3] = torch.nan
    elif check.logits == "none":
        logits[-1] = -torch.inf
    near = logits[:-1].nan_to_num(nan=0.0, neginf=-torch.inf)
    return logits, near + torch.randn(near.shape, generator=generator)


def _drawn_and_judged(
    sampling: Sampling, logits: torch.Tensor, draft_logits: torch.Tensor, numbers: torch.Tensor
) -> list[torch.Tensor]:
    """Returns everything that is written, except distributions for which no rule asks."""
    num_rows, device, num_drafts = len(numbers), logits.device, logits.shape[1] - 1
    drawn_from = torch.zeros(num_drafts, num_rows, logits.shape[2], device=device)
    for number, place in enumerate(torch.arange(num_drafts, device=device)[:, None].unbind()):
        sampling.draw_drafts(draft_logits[:, number].contiguous(), drawn_from[number], numbers, place)
    probs = drawn_from.transpose(0, 1).contiguous()
    most_drafts = numbers.shape[1] - DRAFTS_AT
    verdicts = torch.zeros(num_rows, 3 + most_drafts, dtype=torch.int64, device=device)
    sampling.judge(logits, probs, numbers, verdicts)
    is_asked_for = (numbers[:, Field.RULE] != Rule.EXACT_MATCH.code) & (numbers[:, Field.NUM_DRAWN] > 0)
    return [verdicts, numbers, torch.where(is_asked_for[:, None, None], probs, 0.0)]


def check_rows(max_drafts: int, is_drawn: bool) -> torch.Tensor:
    """Returns the rows of the comparison, whose drafts the draft model draws or which are certain."""
    num_drafts = min(CHECK_DRAFTS, max_drafts)
    numbers = torch.zeros(len(CHECKS), DRAFTS_AT + max_drafts, dtype=torch.int64)
    seeds = [(-1) ** check.seed * (check.seed << 40) + check.seed for check in CHECKS]
    texts = [LoneText(check.params, check.rule, seed) for check, seed in zip(CHECKS, seeds, strict=True)]
    rows = RowTable().rows_of(texts)
    numbers[:, :DEVICE_WIDTH] = torch.from_numpy(rows[0].table.numbers[: len(rows), :DEVICE_WIDTH])
    numbers[:, Field.NUM_DRAFTS] = num_drafts
    numbers[:, Field.NUM_DRAWN] = num_drafts * is_drawn
    for line, check in zip(numbers, CHECKS, strict=True):
        line[Field.NUM_STORED] = CHECK_STORED + check.seed
        line[DRAFTS_AT : DRAFTS_AT + num_drafts] = (torch.arange(num_drafts) + check.seed) % 3
    return numbers
