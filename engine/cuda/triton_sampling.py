"""Finds what draws and judges captured rows: kernels, where they do bit for bit what torch's operations do."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch

from truedraft.engine.cuda import torch_sampling, triton_run
from truedraft.engine.cuda.fields import DRAFTS, Field, RuleCode

# Rows, drafts of each, and positions of the text, of the comparison.
CHECK_ROWS, CHECK_DRAFTS, CHECK_STORED = 16, 2, 41
CHECK_TEMPERATURES, CHECK_MIN_PS = (1.0, 0.6, 1.7), (0.0, 0.0, 0.05)
CHECK_TOP_KS, CHECK_TOP_PS = (0, 20, 0, 3, 50), (1.0, 0.9, 0.95, 0.5)

logger = logging.getLogger(__name__)


class Sampling(Protocol):
    """The module ``sampling_kernels``, ``torch_sampling``, or what stands in for them in tests."""

    def draw_drafts(
        self, logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, pass_number: torch.Tensor
    ) -> None: ...

    def judge(
        self, logits: torch.Tensor, draft_probs: torch.Tensor, numbers: torch.Tensor, verdicts: torch.Tensor
    ) -> None: ...


def find_sampling(vocab_size: int, device: torch.device) -> Sampling:
    """Returns the kernels if they serve ``device`` and are right; else torch's operations, with a warning if
    the kernels were worth trying."""
    if not triton_run.is_fit(device) or find_spec("triton") is None:
        return torch_sampling
    try:
        kernels: Sampling = import_module("truedraft.engine.cuda.sampling_kernels")  # which imports triton
        if is_right(kernels, vocab_size, device):
            return kernels
        what = "differ from torch's operations"
    except Exception as error:  # compilers and drivers fail in many ways
        what = f"cannot be used ({error})"
    logger.warning("The sampling kernels %s: draws and verdicts take several times as long without", what)
    return torch_sampling


@torch.inference_mode()
def is_right(sampling: Sampling, vocab_size: int, device: torch.device) -> bool:
    """Tells whether ``sampling`` draws and judges like torch's operations, by every rule, with all cuts, over
    logits with ties, few tokens or none."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(CHECK_ROWS, CHECK_DRAFTS + 1, vocab_size, generator=generator)
    logits[1::4] = logits[1::4].round()  # equal ones on both sides of every cut
    logits[2, :, 1:] = -torch.inf
    logits[3] = -torch.inf
    logits[3, :, vocab_size // 2] = 1.5
    logits[4] = 0.0
    logits[5, 1, vocab_size // 3] = torch.nan
    logits[6, 1] = -torch.inf
    # Drafts are drawn from something close, so that some stand.
    draft_logits = (logits[:, :CHECK_DRAFTS].nan_to_num() + 0.5).to(device)
    logits = logits.to(device)
    for is_drawn in (True, False):
        results = [
            _drawn_and_judged(one, logits, draft_logits, check_rows(vocab_size, is_drawn).to(device))
            for one in (sampling, torch_sampling)
        ]
        if not all(map(torch.equal, *results)):
            return False
    return True


def _drawn_and_judged(
    sampling: Sampling, logits: torch.Tensor, draft_logits: torch.Tensor, numbers: torch.Tensor
) -> list[torch.Tensor]:
    """Returns everything that is written, but for distributions that no rule asks for."""
    num_rows, device = len(numbers), logits.device
    probs = torch.zeros(num_rows, CHECK_DRAFTS, logits.shape[2], device=device)
    for number in range(CHECK_DRAFTS):
        sampling.draw_drafts(
            draft_logits[:, number].contiguous(), probs, numbers, torch.tensor([number], device=device)
        )
    verdicts = torch.zeros(num_rows, 3 + CHECK_DRAFTS, dtype=torch.int64, device=device)
    sampling.judge(logits, probs, numbers, verdicts)
    is_asked_for = (numbers[:, Field.RULE] != RuleCode.EXACT_MATCH) & (numbers[:, Field.NUM_DRAWN] > 0)
    return [verdicts, numbers, torch.where(is_asked_for[:, None, None], probs, 0.0)]


def check_rows(vocab_size: int, is_drawn: bool) -> torch.Tensor:
    """Returns rows of every rule with drafts, which the draft model draws or which are certain."""
    numbers = torch.zeros(CHECK_ROWS, DRAFTS + CHECK_DRAFTS, dtype=torch.int64)
    floats = numbers.view(torch.float64)
    for row in range(CHECK_ROWS):
        numbers[row, Field.NUM_STORED] = CHECK_STORED + row
        numbers[row, Field.NUM_DRAFTS] = CHECK_DRAFTS
        numbers[row, Field.NUM_DRAWN] = CHECK_DRAFTS * is_drawn
        numbers[row, Field.SEED] = (-1) ** row * (row << 40) + row
        numbers[row, Field.RULE] = row // 2 % len(RuleCode)
        for field, values in (
            (Field.TEMPERATURE, CHECK_TEMPERATURES),
            (Field.TOP_P, CHECK_TOP_PS),
            (Field.MIN_P, CHECK_MIN_PS),
        ):
            floats[row, field] = values[row % len(values)]
        numbers[row, Field.TOP_K] = CHECK_TOP_KS[row % len(CHECK_TOP_KS)]
        numbers[row, DRAFTS:] = torch.tensor([row * 7, vocab_size // 2]) % vocab_size
    return numbers
