"""Has the operations of a round in C (``ops.c``): float32 logits on a CPU.

torch computes noise, a logarithm and a quotient for every token and sorts for top-p, each an operation of its
own; for small models that is a quarter of a round. At load both ways are compared (``native_ops``).
"""

import ctypes
import logging
from array import array

import torch

from truedraft.engine.memory.pointers import address, as_floats, new, shape_of
from truedraft.engine.native.library import load_library
from truedraft.engine.native.ops_check import agrees
from truedraft.engine.rows.columns import WIDTH, Field
from truedraft.engine.rows.drafts import DraftDraw, Drafts, RowVerdict
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import TorchOps

FLOAT, INTEGER = torch.float32, torch.int64

logger = logging.getLogger(__name__)


def native_ops(rules: GenerationRules = NO_RULES) -> "NativeOps | None":
    """Returns the C operations; None where they cannot be built, or differ from torch's on a few rows."""
    library = load_library()
    if library is None:
        return None
    if agrees(NativeOps(library)):
        return NativeOps(library, rules)
    logger.warning("The native draws differ from torch's and are not used")
    return None


class NativeOps:
    """Is a ``RoundOps``. Tokens that the checkpoint forbids or forces by ``rules`` are left to torch."""

    reads_drafts = True

    def __init__(self, library: ctypes.CDLL, rules: GenerationRules = NO_RULES) -> None:
        self.library = library
        self.torch = TorchOps(rules)

    def adjust(
        self, step: StepRows, logits: torch.Tensor, drafted: torch.Tensor, offset: int, counts: list[int]
    ) -> torch.Tensor:
        if not step.adjusted or self.torch.rules:
            return self.torch.adjust(step, logits, drafted, offset, counts)
        logits, drafted = as_floats(logits).clone(), drafted.contiguous()
        shape, width = shape_of(logits, 2), drafted.shape[1]
        each = array("q", counts)
        if sum(counts) != shape[0] or len(drafted) != len(counts) or offset + max(counts) - 1 > width:
            raise ValueError(
                f"{list(shape)} logits and {list(drafted.shape)} drafts are not of {counts} positions"
            )
        for i in step.adjusted:
            row = step.rows[i]
            if row.is_penalised:
                row.copy_text()
            if row.matcher is not None:
                drafts = drafted[i, : offset + counts[i] - 1].tolist()
                row.write_masks(drafts, offset)
        self.library.adjust(
            *self._lines(step),
            address(drafted, INTEGER, (len(counts), width)),
            width,
            offset,
            address(each, INTEGER, (len(counts),)),
            address(logits, FLOAT, shape),
            shape[1],
        )
        return logits

    def draw(self, step: StepRows, logits: torch.Tensor, offset: int) -> DraftDraw:
        logits = as_floats(logits)
        shape = len(step.rows), step.vocab_size
        ids, place = new(shape[:1], INTEGER)
        probs, at_probs = new(shape, FLOAT) if step.uses_draft_probs else (None, None)
        given = address(logits, FLOAT, shape)
        if not self.library.draw(*self._lines(step), offset, given, shape[1], place, at_probs):
            raise MemoryError("no memory to draw drafts")
        return DraftDraw(ids, probs)

    def judge(self, step: StepRows, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        logits, token_ids = as_floats(logits), drafts.token_ids.contiguous()
        num_rows, width = shape = len(drafts.lengths), token_ids.shape[1]
        vocab_size = step.vocab_size
        at_probs = None
        if (probs := drafts.probs) is not None:
            probs = probs.contiguous()
            at_probs = address(probs, FLOAT, (*shape, vocab_size))
        lines, numbers = step.lines, step.table.numbers
        numbers[lines, Field.NUM_DRAFTS] = drafts.lengths
        numbers[lines, Field.NUM_DRAWN] = 0 if probs is None else drafts.lengths
        if any(not 0 <= token_id < vocab_size for ids in drafts.ids for token_id in ids):
            raise ValueError(f"a draft is none of the target's {vocab_size} tokens")
        verdicts, place = new((num_rows, 3), INTEGER)
        is_done = self.library.judge(
            *self._lines(step),
            address(token_ids, INTEGER, shape),
            at_probs,
            width,
            address(logits, FLOAT, (sum(drafts.lengths) + num_rows, vocab_size)),
            vocab_size,
            place,
        )
        if not is_done:
            raise MemoryError("no memory to judge drafts")
        return [RowVerdict(kept, token_id, bool(failed)) for kept, token_id, failed in verdicts.tolist()]

    def _lines(self, step: StepRows) -> tuple[int, int, int]:
        """Returns the table's address, and the numbers of the rows' lines in it."""
        index, table = step.lines, step.table.numbers
        return (
            address(table, INTEGER, (len(table), WIDTH)),
            address(index, INTEGER, (len(index),)),
            len(index),
        )
