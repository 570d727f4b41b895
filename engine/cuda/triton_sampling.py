"""Finds what draws and judges rows on a device: kernels, where they do exactly what torch does."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

import torch

from truedraft.engine.cuda import torch_sampling, triton_run
from truedraft.engine.rows.columns import DRAFTS_AT, Field, Rule

# Drafts of each row of the comparison, and the tokens before them.
CHECK_DRAFTS, CHECK_STORED = 3, 41


class Check(NamedTuple):
    """Describes one row of the comparison: what is drawn how, and what its logits are like."""

    rule: Rule
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logits: Literal["any", "equal", "with ties", "one", "few", "NaN", "none"] = "any"
    seed: int = 0


_CHECKS = (
    Check(Rule.EXACT_MATCH, logits="equal"),
    Check(Rule.EXACT_MATCH, logits="NaN"),
    Check(Rule.REJECTION, 0.6, 5, logits="with ties"),
    Check(Rule.COUPLED, 1.7, 9, 0.7, logits="with ties"),
    Check(Rule.BLOCK, top_p=0.9),
    Check(Rule.REJECTION, top_p=0.5, logits="equal"),
    Check(Rule.COUPLED, min_p=0.1),
    Check(Rule.BLOCK, logits="none"),
    Check(Rule.REJECTION, 2.5, 12, 0.6),
    Check(Rule.BLOCK, 1.2, 4, logits="with ties"),
    Check(Rule.COUPLED, 1e-30, top_p=0.95, logits="one"),
    Check(Rule.REJECTION, 3.0, 20, 0.99, logits="few"),
    *[Check(rule, 3.0, logits="few") for rule in (Rule.BLOCK, Rule.REJECTION) * 3],
)
CHECKS = tuple(check._replace(seed=seed) for seed, check in enumerate(_CHECKS))

logger = logging.getLogger(__name__)


class Sampling(Protocol):
    """The module ``sampling_kernels``, ``torch_sampling``, or what stands in for them in tests."""

    def draw_drafts(
        self, logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, place: torch.Tensor
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
    made = [_logits_of(check, vocab_size) for check in CHECKS]
    logits, draft_logits = (torch.stack(each).to(device) for each in zip(*made, strict=True))
    for is_drawn in (True, False):
        results = [
            _drawn_and_judged(one, logits, draft_logits, check_rows(vocab_size, is_drawn).to(device))
            for one in (sampling, torch_sampling)
        ]
        if not all(map(torch.equal, *results)):
            return False
    return True


def _logits_of(check: Check, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the target's logits [drafts + 1, V], and the draft's [drafts, V], close enough that some drafts
    stand."""
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
    """Returns everything that is written, but for distributions that no rule asks for."""
    num_rows, device = len(numbers), logits.device
    drawn_from = torch.zeros(CHECK_DRAFTS, num_rows, logits.shape[2], device=device)
    for number, place in enumerate(torch.arange(CHECK_DRAFTS, device=device).split(1)):
        sampling.draw_drafts(draft_logits[:, number].contiguous(), drawn_from[number], numbers, place)
    probs = drawn_from.transpose(0, 1).contiguous()
    verdicts = torch.zeros(num_rows, 3 + CHECK_DRAFTS, dtype=torch.int64, device=device)
    sampling.judge(logits, probs, numbers, verdicts)
    is_asked_for = (numbers[:, Field.RULE] != Rule.EXACT_MATCH.code) & (numbers[:, Field.NUM_DRAWN] > 0)
    return [verdicts, numbers, torch.where(is_asked_for[:, None, None], probs, 0.0)]


def check_rows(vocab_size: int, is_drawn: bool) -> torch.Tensor:
    """Returns the rows of the comparison with drafts, which the draft model draws or which are certain."""
    numbers = torch.zeros(len(CHECKS), DRAFTS_AT + CHECK_DRAFTS, dtype=torch.int64)
    floats = numbers.view(torch.float64)
    for row, check in enumerate(CHECKS):
        numbers[row, Field.NUM_STORED] = CHECK_STORED + check.seed
        numbers[row, Field.NUM_DRAFTS] = CHECK_DRAFTS
        numbers[row, Field.NUM_DRAWN] = CHECK_DRAFTS * is_drawn
        numbers[row, Field.SEED] = (-1) ** check.seed * (check.seed << 40) + check.seed
        numbers[row, Field.RULE] = check.rule.code
        numbers[row, Field.TOP_K] = check.top_k
        floats[row, Field.TEMPERATURE] = check.temperature
        floats[row, Field.TOP_P] = check.top_p
        floats[row, Field.MIN_P] = check.min_p
        numbers[row, DRAFTS_AT:] = (torch.arange(CHECK_DRAFTS) + check.seed) % 3
    return numbers
