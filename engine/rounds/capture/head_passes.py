"""Runs a head's captured passes: over the target's states that wait, and then over its own states.

Like a draft model's they read the drawn tokens on the device. The host says once a round how many states wait
in each row, and which tokens come after them.
"""

from collections.abc import Iterable, Sequence

import torch

from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.rounds.capture.capture import Capture, SentNumbers
from truedraft.engine.rounds.capture.rows import DRAFT, DeviceRows
from truedraft.engine.rounds.capture.shapes import Shape
from truedraft.engine.rows.columns import Field


class HeadPasses:
    """Runs the passes. ``runner`` runs the head's model over its own cache. A first pass is fed up to
    ``max_fed`` states of a row, later ones are fed the one that the pass before has left."""

    def __init__(
        self, head: Head, runner: ModelRunner, rows: DeviceRows, max_fed: int, capture: Capture
    ) -> None:
        self.head = head
        self.runner = runner
        self.rows = rows
        self.max_fed = max_fed
        size, dtype, device = head.hidden_size, head.model.dtype, runner.device
        self.states = torch.zeros(rows.max_rows, max_fed, size, dtype=dtype, device=device)
        self.own = torch.zeros(rows.max_rows, size, dtype=dtype, device=device)
        # Its columns for each row are the number of waiting states, then the tokens that come after them.
        self.sent = SentNumbers(rows.max_rows * (1 + max_fed), device, capture)
        self.fed = self.sent.numbers.view(rows.max_rows, 1 + max_fed)
        self._host = self.sent.host.view(rows.max_rows, 1 + max_fed).numpy()

    def feed(self, rows: Iterable[int], spans: Sequence[Span]) -> None:
        """Copies to the device what the next first pass reads in these rows: states, tokens after them."""
        self.sent.wait()
        self._host[:, 0] = 0
        places: list[int] = []
        states: list[torch.Tensor] = []
        for row, span in zip(rows, spans, strict=True):
            assert span.states is not None
            count, first = len(span.token_ids), row * self.states.shape[1]
            self._host[row, : 1 + count] = count, *span.token_ids
            places += range(first, first + count)
            states.append(span.states)
        self.sent.send(self.fed.numel())
        self.states.flatten(0, 1).index_copy_(0, on_device(places, self.own.device), torch.cat(states))

    def run(self, shape: Shape, logits: torch.Tensor) -> None:
        """Runs a pass over the rows' input; ``logits`` [rows, the target's vocabulary] become those of the
        next token. This runs while it is captured."""
        rows, num_rows = self.rows, shape.rows
        is_there = rows.field(num_rows, Field.NUM_DRAFTS) >= 0
        every = torch.arange(num_rows, device=self.own.device)
        # A place holds the state of its token and the token after it.
        end = rows.field(num_rows, Field.NUM_STORED)
        if shape.fed == 1:
            counts = torch.where(is_there, 1, 0)
            token_ids = rows.ids(num_rows)[:, 1:2]
            states, last = self.own[:num_rows], every
        else:
            counts = torch.where(is_there, self.fed[:num_rows, 0], 0)
            token_ids = self.fed[:num_rows, 1 : 1 + shape.fed]
            states = self.states[:num_rows, : shape.fed].flatten(0, 1)
            last = every * shape.fed + (counts - 1).clamp(min=0)
        batch = rows.batch(DRAFT, token_ids, end - counts, torch.zeros_like(counts), counts, last)
        batch.states = states
        found, hidden = self.head.model.compute(batch, self.runner.cache, (self.head.output,))
        assert hidden is not None
        self.own[:num_rows].copy_(hidden[:, 0].index_select(0, last))
        logits.copy_(self.head.in_width(found, logits.shape[1]))
        rows.go_on(num_rows)
