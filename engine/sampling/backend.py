"""What makes distributions of logits and draws from them: the operations, and torch's way to compute them.

``engine.native.backend`` does the same in C, on a CPU. Either is a value: what it returns depends on what it
is given alone.
"""

from typing import Protocol

import torch

from truedraft.engine.sampling.ops import gumbel_argmax, inverse_cdf
from truedraft.engine.sampling.processors import SamplingTensors, to_probs
from truedraft.engine.sampling.random import KeptNoise, Stream, uniform
from truedraft.engine.sampling.verify import Accepted, draw_next


class SamplingBackend(Protocol):
    """The operations of a sampler."""

    def probs(self, logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
        """Does as ``processors.to_probs``: [sequences, positions, vocab], float32, from logits alike."""

    def gumbel_argmax(
        self,
        probs: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        offset: int,
        noise: KeptNoise | None = None,
    ) -> torch.Tensor:
        """Returns token ids [sequences, n]: what ``probs`` [sequences, n, vocab] draw under the coupled rule.

        A sequence's first row is drawn at its position (int64 [sequences]) + ``offset``, by its seed.
        ``noise`` keeps what was computed for these sequences.
        """

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Does as ``random.uniform``; the result has the shape of ``positions``."""

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Does as ``ops.inverse_cdf``: token ids [sequences] for float32 probs [sequences, vocab]."""

    def draw_next(self, accepted: Accepted) -> torch.Tensor:
        """Does as ``verify.draw_next``."""


class TorchBackend:
    """Computes on any device."""

    def probs(self, logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
        return to_probs(logits, sampling)

    def gumbel_argmax(
        self,
        probs: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        offset: int,
        noise: KeptNoise | None = None,
    ) -> torch.Tensor:
        _, num_positions, vocab_size = probs.shape
        noise = noise or KeptNoise()
        return gumbel_argmax(probs, noise.take(seeds, positions, offset, num_positions, vocab_size))

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        return uniform(seeds, positions, stream)

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return inverse_cdf(probs, uniforms)

    def draw_next(self, accepted: Accepted) -> torch.Tensor:
        return draw_next(accepted)
