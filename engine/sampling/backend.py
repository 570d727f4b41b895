"""How a sampler makes distributions of logits and draws from them: what is asked for, and torch's way.

``engine.native.backend`` does the same in C, on a CPU.
"""

from typing import Protocol

import torch

from truedraft.engine.sampling.ops import gumbel_argmax, inverse_cdf
from truedraft.engine.sampling.processors import SamplingTensors, to_probs
from truedraft.engine.sampling.random import Stream, exponential_noise, uniform
from truedraft.engine.sampling.verify import draw_next


class SamplingBackend(Protocol):
    """The rows of one step, always in the same order; made for each step anew."""

    def probs(self, logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
        """``processors.to_probs``: [sequences, positions, vocab], float32, from logits of that shape."""

    def gumbel_argmax(
        self, probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, offset: int
    ) -> torch.Tensor:
        """Token ids [sequences, n]: what ``probs`` [sequences, n, vocab] draw under the coupled rule.

        A sequence's first row is drawn at its position (int64 [sequences]) + ``offset``, by its seed.
        """

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        """``random.uniform``, of the shape of ``positions``."""

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """``ops.inverse_cdf``: token ids [sequences] for float32 probs [sequences, vocab]."""

    def draw_next(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor,
        num_draft: torch.Tensor,
        num_accepted: torch.Tensor,
        weights: torch.Tensor,
        recover_uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """``verify.draw_next``: token ids [sequences] from float32 probabilities."""


class TorchBackend:
    """On any device. The noise that drafts have met is kept for their verification."""

    def __init__(self) -> None:
        self._noise: list[torch.Tensor] = []  # [sequences, vocab] of the first positions

    def probs(self, logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
        return to_probs(logits, sampling)

    def gumbel_argmax(
        self, probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, offset: int
    ) -> torch.Tensor:
        end = offset + probs.shape[1]
        noise = self._noise[offset:end]
        first_new = offset + len(noise)
        if first_new < end:
            new = positions[:, None] + torch.arange(first_new, end, device=probs.device)
            computed = exponential_noise(seeds[:, None], new, probs.shape[-1]).unbind(1)
            noise += computed
            if first_new == len(self._noise):
                self._noise += computed
        return gumbel_argmax(probs, torch.stack(noise, dim=1))

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        return uniform(seeds, positions, stream)

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return inverse_cdf(probs, uniforms)

    def draw_next(self, *args: torch.Tensor) -> torch.Tensor:
        return draw_next(*args)
