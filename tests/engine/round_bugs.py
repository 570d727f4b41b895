"""Bugs of captured rounds: lines of the engine that are changed, and one that no line can tell."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.models import captured_round, round_inputs
from engine.models.captured_round import CapturedRound
from engine.models.round_inputs import RoundBucket, RoundInputs
from engine.sampling import captured_verify

Patch = pytest.MonkeyPatch
# A module, what is right in it, what is wrong.
LINES = {
    "noise of the position before": (
        captured_verify,
        "first_positions[:, None] + offsets",
        "first_positions[:, None] + offsets - 1",
    ),
    "noise of the row's first position": (
        captured_verify,
        "first_positions[:, None] + offsets",
        "first_positions[:, None] + 0 * offsets",
    ),
    "padding is compared": (captured_verify, " & (offsets[:-1] < num_draft[:, None])", ""),
    "drafts stand behind one that does not": (captured_verify, ".cumprod(-1).sum(-1)", ".sum(-1)"),
    "a row draws by another's numbers": (
        captured_verify,
        "rows.repeated(num_positions)",
        "DrawTensors(*(column.repeat(num_positions) for column in rows))",
    ),
    "the first token follows": (captured_verify, "own.gather(1, num_accepted[:, None])[:, 0]", "own[:, 0]"),
    "failures that were not reached are told": (captured_verify, "(is_broken & is_needed)", "is_broken"),
    "the last logits may be broken": (
        captured_verify,
        "offsets <= num_accepted[:, None]",
        "offsets < num_accepted[:, None]",
    ),
    "infinity is a number": (captured_verify, "~logits.amax(-1).isfinite()", "logits.amax(-1).isnan()"),
    "drawn one too early": (round_inputs, "first + 1, drafted", "first, drafted"),
    "padding is stored": (round_inputs, "torch.where(is_token, block, self.scratch_block)", "block"),
    "slots without the table": (round_inputs, "block * self.block_size +", "positions - "),
    "padding is drafted": (
        round_inputs,
        "counts[:] = [*num_draft, *padding]",
        "counts[:] = max(num_draft, default=0)",
    ),
    "one seed for all": (round_inputs, "pack(rows, draws)", "pack(rows[:1] * len(rows), draws)"),
    "the pending token is lost": (round_inputs, "known[:] = [*pending, *padding]", "known[:] = 0"),
    "drafts of the round before": (captured_round, "if drafts.numel():", "if False:"),
    "a token is not counted as computed": (captured_round, "+= count + 1", "+= count"),
}


def plant(module: ModuleType, right: str, wrong: str, patch: Patch) -> None:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), names)
    if module is captured_verify:
        patch.setattr(captured_round, "captured_verify", names["captured_verify"])
    elif module is round_inputs:
        for method in ("send", "batch"):
            patch.setattr(RoundInputs, method, getattr(names["RoundInputs"], method))
    else:
        for method in ("replay", "launch"):
            patch.setattr(CapturedRound, method, getattr(names["CapturedRound"], method))


def verdicts_of_the_round_before(patch: Patch) -> None:
    """Of the last one of the same shape, as if the host had not waited."""
    honest = CapturedRound.replay
    before: dict[RoundBucket, torch.Tensor] = {}

    def replay(self: CapturedRound, bucket: RoundBucket, *arguments: Any) -> None:
        honest(self, bucket, *arguments)
        verdicts = self._verdicts(bucket)
        now = verdicts.clone()
        verdicts.copy_(before.get(bucket, now))
        before[bucket] = now

    patch.setattr(CapturedRound, "replay", replay)


BUGS: dict[str, Callable[[Patch], None]] = {
    **{name: partial(plant, *line) for name, line in LINES.items()},
    "verdicts of the round before": verdicts_of_the_round_before,
}
# Those that the comparison at start, with healthy logits and nothing behind a row's drafts, cannot see.
SUBTLE = [
    "padding is compared",
    "drafts stand behind one that does not",
    "failures that were not reached are told",
    "the last logits may be broken",
    "infinity is a number",
    "padding is drafted",
    "a token is not counted as computed",
]
