"""Drafts with one of Gemma 4's assistants, which looks at what the target has stored and keeps nothing
itself: it needs the target's last state alone, has nothing to catch up with, and nothing to take back.
"""

from collections.abc import Sequence as Sequences
from weakref import WeakKeyDictionary

import torch

from truedraft.engine.core.needs import Need
from truedraft.engine.core.proposer import Observation, Proposer
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import StepPlan
from truedraft.engine.messages import ASSISTANT, HeadOutput
from truedraft.engine.models.heads.assistant import AssistantRunner
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.drawn import drawn_drafts, lengths_of
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.ops import in_width
from truedraft.engine.sampling.sampler import Sampler


class AssistantProposer(Proposer):
    """Drafts with the assistant of ``runner``."""

    name = ASSISTANT
    can_lag = False
    need = Need.HEAD
    draws = True
    head_output: HeadOutput = "own"

    def __init__(self, runner: AssistantRunner) -> None:
        self.runner = runner
        # This number stands for the last norm's output.
        self.taps = (runner.assistant.target.num_layers,)
        # A sequence's state is that after so many of its tokens.
        self._last: WeakKeyDictionary[Sequence, tuple[int, torch.Tensor]] = WeakKeyDictionary()

    @property
    def runners(self) -> Sequences[ModelRunner]:
        return (self.runner,)

    def reset(self) -> None:
        self._last.clear()

    def observe(self, observations: Sequences[Observation]) -> None:
        for seen in observations:
            assert seen.hidden is not None
            # The pass may write its next states where these are.
            self._last[seen.sequence] = seen.first + len(seen.token_ids), seen.hidden[-1].clone()

    def state(self, sequence: Sequence) -> torch.Tensor | None:
        """Returns the state [1, hidden size] before the pending token; None if it is not known, as before the
        first pass and after a preemption."""
        num_told, state = self._last.get(sequence, (0, None))
        return state if num_told == len(sequence) - 1 == sequence.target_blocks.num_computed_tokens else None

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        sequences = [part.sequence for part in plan.rows]
        known = [self.state(sequence) for sequence in sequences]
        lengths = [
            0 if state is None else length
            for state, length in zip(known, lengths_of(plan, self.name), strict=True)
        ]
        states = {row: state for row, state in enumerate(known) if state is not None}

        def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
            tables = [sequences[row].target_blocks for row in rows]
            ids = [sequences[row].token_ids[-1] for row in rows] if last_ids is None else last_ids
            logits, after = self.runner.next_token(tables, ids, [states[row] for row in rows])
            assert after is not None
            states.update(zip(rows, after.unbind(), strict=True))
            return in_width(logits, self.runner.vocab_size)

        return drawn_drafts(lengths, sampler, next_logits)
