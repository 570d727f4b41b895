"""Kernels that draw and judge as a tape sees them: each launch is one operation."""

from types import SimpleNamespace
from typing import Any

import torch


def on_tape(sampling: Any) -> Any:
    """Returns ``sampling`` as operations of torch, whatever it is made of."""

    @torch.library.custom_op(f"truedraft_tests::draw_{id(sampling)}", mutates_args={"probs", "numbers"})
    def draw_drafts(
        logits: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor, pass_number: torch.Tensor
    ) -> None:
        sampling.draw_drafts(logits, probs, numbers, pass_number)

    @torch.library.custom_op(f"truedraft_tests::judge_{id(sampling)}", mutates_args={"verdicts"})
    def judge(
        logits: torch.Tensor, draft_probs: torch.Tensor, numbers: torch.Tensor, verdicts: torch.Tensor
    ) -> None:
        sampling.judge(logits, draft_probs, numbers, verdicts)

    return SimpleNamespace(draw_drafts=draw_drafts, judge=judge)
