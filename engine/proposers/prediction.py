"""Drafts from what the client expects the output to be: OpenAI's predicted outputs.

Where in the prediction the output is, each sequence's cursor knows (``engine.prediction``). No model and no
memory on the device; deterministic, so exact at any temperature.
"""

from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.messages import Source
from engine.proposers.look_up import look_up_drafts
from engine.sampling.sampler import Drafts, Sampler


class PredictionProposer:
    name: Source = "prediction"

    def look_up(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        assert sequence.prediction is not None
        return len(sequence.prediction.expected(num_tokens)), sequence.prediction.run

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        return look_up_drafts(self.name, scheduled, sampler, _expected)


def _expected(sequence: Sequence, num_tokens: int) -> list[int]:
    assert sequence.prediction is not None
    return sequence.prediction.expected(num_tokens)
