"""Runs a round's operations on a device, where the host reads once: when the verdict is there.

Draws and verdicts are kernels over the rows' columns, which are sent once a round, and say bit for bit what
torch's operations do. How often penalised rows have said each token is counted on the device. Drafts are
drawn without adjustments, for which the host would have to see them one by one; that is exact, as the verdict
knows what they were drawn from.
"""

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from truedraft.engine.cuda.triton_sampling import Sampling
from truedraft.engine.memory.host_to_device import on_device, send
from truedraft.engine.rows.columns import DEVICE_WIDTH, DRAFTS_AT, Field, Rule
from truedraft.engine.rows.drafts import DraftDraw, Drafts, RowVerdict
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import TorchOps, pad_rows


class DeviceOps(TorchOps):
    """Lets ``sampling`` draw and judge up to ``max_drafts`` drafts of a row, and ``max_judged`` positions at
    a time, padding included; torch does the rest."""

    reads_drafts = False

    def __init__(
        self,
        sampling: Sampling,
        max_drafts: int,
        max_judged: int,
        device: torch.device,
        rules: GenerationRules = NO_RULES,
    ) -> None:
        super().__init__(rules)
        self.sampling = sampling
        self.max_drafts = max_drafts
        self.max_judged = max_judged
        self.places = torch.arange(max_drafts + 1, device=device)[:, None].unbind()
        self._counts: WeakKeyDictionary[Row, _Counts] = WeakKeyDictionary()

    def draw(self, step: StepRows, logits: torch.Tensor, offset: int) -> DraftDraw:
        is_usual = all(greedily is (rule is Rule.EXACT_MATCH) for rule, greedily in step.drafting)
        # The kernel keeps no distributions of greedy rows, which only a trace asks for.
        if step.traced or not is_usual or offset >= self.max_drafts:
            return super().draw(step, logits, offset)
        if step.columns is None:  # the kernel draws as long as it is asked to
            everything = [self.max_drafts] * len(step.rows)
            step.columns = self._send(step, everything, everything)
        numbers = step.columns
        probs = logits.new_empty(len(step.rows), step.vocab_size, dtype=torch.float32)
        self.sampling.draw_drafts(logits.float().contiguous(), probs, numbers, self.places[offset])
        return DraftDraw(numbers[:, DRAFTS_AT + offset], probs if step.uses_draft_probs else None)

    def judge(self, step: StepRows, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
        num_rows, width = len(step.rows), drafts.token_ids.shape[1]
        if not num_rows or width > self.max_drafts:
            return super().judge(step, logits, drafts)
        drawn = [0] * num_rows if drafts.probs is None else drafts.lengths
        if step.columns is None:
            numbers = self._send(step, drafts.lengths, drawn, drafts.known or ())
        else:
            numbers = step.columns
            counts = on_device([drafts.lengths, drawn], step.device)
            numbers[:, Field.NUM_DRAFTS : Field.NUM_DRAWN + 1] = counts.T
        if drafts.known is None or numbers is step.columns:
            numbers[:, DRAFTS_AT : DRAFTS_AT + width] = drafts.token_ids
        probs = logits.new_zeros(num_rows, 0, step.vocab_size) if drafts.probs is None else drafts.probs
        probs = probs.float().contiguous()
        verdicts = numbers.new_zeros(num_rows, 3 + self.max_drafts)
        end = 0
        for some in slices(drafts.lengths, self.max_judged):
            lengths = drafts.lengths[some]
            first, end = end, end + sum(lengths) + len(lengths)
            padded = pad_rows(logits[first:end].float(), lengths, max(lengths) + 1).contiguous()
            self.sampling.judge(padded, probs[some], numbers[some], verdicts[some])
        found = verdicts.tolist()
        drafts.ids = [row[3 : 3 + length] for row, length in zip(found, drafts.lengths, strict=True)]
        return [RowVerdict(kept, token_id, bool(failed)) for kept, token_id, failed, *_ in found]

    def text_counts(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> torch.Tensor:
        for row in rows:
            if row not in self._counts:
                self._counts[row] = _Counts(vocab_size, device)
        return torch.stack([self._counts[row].of(row) for row in rows], dim=1)

    def _send(
        self, step: StepRows, num_drafts: list[int], num_drawn: list[int], known: Sequence[Sequence[int]] = ()
    ) -> torch.Tensor:
        """Returns the rows' columns on the device, with ``known`` drafts and room for others: int64 [rows,
        ...]."""
        numbers = np.zeros((len(step.rows), DRAFTS_AT + self.max_drafts), dtype=np.int64)
        numbers[:, :DEVICE_WIDTH] = step.table.numbers[step.lines, :DEVICE_WIDTH]
        numbers[:, Field.NUM_DRAFTS], numbers[:, Field.NUM_DRAWN] = num_drafts, num_drawn
        for line, ids in zip(numbers, known, strict=False):
            line[DRAFTS_AT : DRAFTS_AT + len(ids)] = ids
        return send(torch.from_numpy(numbers), step.device)


def slices(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Yields slices of neighbouring rows with drafts of these ``lengths``: each row with one position more
    than the longest draft of its slice, they have up to ``most`` positions together. A row that has more is
    alone."""
    first = longest = 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > first and (row + 1 - first) * (longest + 1) > most:
            yield slice(first, row)
            first, longest = row, length
    yield slice(first, len(lengths))


class _Counts:
    """Counts a row's tokens on the device; only those that are new are sent."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(2, vocab_size, device=device)
        self._num_counted = 0

    def of(self, row: Row) -> torch.Tensor:
        """Returns how often each token stands in the prompt and in the output, which goes on where it ended
        before: [2, V]."""
        text, end, vocab_size = row.token_ids, row.num_prompt_tokens, self._counts.shape[1]
        first = max(self._num_counted, row.first_token)
        places = [vocab_size * (place >= end) + text[place] for place in range(first, len(text))]
        new = on_device(places, self._counts.device)
        self._counts.view(-1).scatter_add_(0, new, torch.ones_like(new, dtype=self._counts.dtype))
        self._num_counted = len(text)
        return self._counts
