"""Tells whether variants say the same, and how sure the target was where they part.

Greedy text of one target must be the same from everybody. Other kernels sum in another order, so where the
two best tokens are nearly tied either may win; a difference with a clear margin is a bug.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

Tokens = Sequence[Sequence[int]]


class Miss(NamedTuple):
    """First difference of one answer; ``margin`` is between the target's two best logits there."""

    variant: str
    prompt: int
    position: int
    margin: float | None


def same_text(outputs: Mapping[str, Tokens], reference: str) -> dict[str, str]:
    """Counts the answers of each variant that are the reference's, token by token."""
    found = {}
    for name, answers in outputs.items():
        pairs = zip(answers, outputs[reference], strict=True)
        found[name] = f"{sum(list(ours) == list(theirs) for ours, theirs in pairs)}/{len(answers)}"
    return found


def misses(
    outputs: Mapping[str, Tokens], reference: str, prompts: Sequence[list[int]], model: Any | None
) -> list[Miss]:
    """Every answer that is not the reference's. Without a ``model`` of the target, margins are None."""
    found = []
    for name, answers in outputs.items():
        for index, (answer, expected) in enumerate(zip(answers, outputs[reference], strict=True)):
            if list(answer) == list(expected):
                continue
            pairs = enumerate(zip(answer, expected, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(answer), len(expected)))
            context = [*prompts[index], *expected[:position]]
            found.append(Miss(name, index, position, None if model is None else margin(model, context)))
    return found


@torch.no_grad()
def margin(model: Any, token_ids: list[int]) -> float:
    """Difference of the two best logits after these tokens."""
    logits = model(torch.tensor([token_ids], device=model.device)).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return float(best - second)
