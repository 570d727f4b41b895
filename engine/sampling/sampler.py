"""Combines the rows of one step with the operations that draft and verify them.

It knows nothing of models and schedules: logits come in, token ids go out.
"""

from collections.abc import Sequence

import torch

from truedraft.engine.rows.drafts import DraftDraw, Drafts, RowVerdict
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import RoundOps, TorchOps

TORCH = TorchOps()


class Sampler(StepRows):
    """Draws and verifies for rows. ``ops`` are torch's operations, or others that repeat them."""

    def __init__(
        self, rows: Sequence[Row], vocab_size: int, device: torch.device, ops: RoundOps = TORCH
    ) -> None:
        super().__init__(rows, vocab_size, device)
        self.ops = ops

    def select(self, indices: list[int]) -> "Sampler":
        """Returns the sampler of some of the rows."""
        if len(indices) == len(self.rows):
            return self
        return Sampler([self.rows[i] for i in indices], self.vocab_size, self.device, self.ops)

    def draw_drafts(self, logits: torch.Tensor, drafted: torch.Tensor) -> DraftDraw:
        """Draws each row's next draft from the draft's ``logits`` [B, V], after ``drafted`` [B, so far]."""
        offset = drafted.shape[1]
        # Any draft is exact; a trace can only be followed if it was adjusted.
        if self.ops.reads_drafts or self.traced:
            logits = self.ops.adjust(self, logits, drafted, offset, [1] * len(self.rows))
        return self.ops.draw(self, logits, offset)

    def adjust(self, logits: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        """Returns the logits for ``judge``, made of the target's raw logits [sum of (length + 1), V]."""
        counts = [length + 1 for length in drafts.lengths]
        return self.ops.adjust(self, logits, drafts.token_ids, 0, counts)

    def judge(self, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        """Judges ``drafts`` by the target's adjusted logits."""
        return self.ops.judge(self, logits, drafts)

    def verify(self, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        """Judges ``drafts`` by the target's raw logits."""
        return self.judge(self.adjust(logits, drafts), drafts)
