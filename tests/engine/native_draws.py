"""The functions that the operations in C draw with, one call a row, and the same by torch's operations."""

import ctypes
from collections.abc import Sequence

import torch

from truedraft.engine.memory.pointers import address, new
from truedraft.engine.messages import SamplingParams
from truedraft.engine.rows.columns import WIDTH, Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.ops import gumbel_argmax, inverse_cdf
from truedraft.engine.sampling.processors import SamplingTensors, to_probs
from truedraft.engine.sampling.random import Stream, exponential_noise, uniform
from truedraft.engine.sampling.verify import Accepted, draw_next

CPU = torch.device("cpu")
FLOAT, DOUBLE, INTEGER = torch.float32, torch.float64, torch.int64


class ByTorch:
    def probs(self, logits: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
        return to_probs(logits, SamplingTensors.build(list(rows), CPU))

    def gumbel_argmax(
        self, probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, offset: int
    ) -> torch.Tensor:
        places = positions[:, None] + offset + torch.arange(probs.shape[1])
        return gumbel_argmax(probs, exponential_noise(seeds[:, None], places, probs.shape[2]))

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        return uniform(seeds, positions, stream)

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return inverse_cdf(probs, uniforms)

    def draw_next(self, accepted: Accepted) -> torch.Tensor:
        return draw_next(accepted)


class InC:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def probs(self, logits: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
        texts = [LoneText(params, Rule.COUPLED) for params in rows]
        table = (own := RowTable().rows_of(texts))[0].table
        logits = logits.float().contiguous()
        vocab_size = logits.shape[2]
        probs, scratch = torch.empty_like(logits), torch.empty(vocab_size)
        for number, (row, each) in enumerate(zip(own, logits, strict=True)):
            for position in range(len(each)):
                self.library.process_row(
                    address(probs[number, position], FLOAT, (vocab_size,)),
                    address(each[position], FLOAT, (vocab_size,)),
                    address(table.numbers[row.number], INTEGER, (WIDTH,)),
                    address(scratch, FLOAT, (vocab_size,)),
                    vocab_size,
                )
        assert len(texts) == len(own)  # rows end with their texts
        return probs

    def gumbel_argmax(
        self, probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, offset: int
    ) -> torch.Tensor:
        probs, seeds, positions = probs.contiguous(), seeds.contiguous(), positions.contiguous()
        ids, place = new(tuple(probs.shape[:2]), INTEGER)
        self.library.gumbel_argmax(
            place,
            address(probs, FLOAT, tuple(probs.shape)),
            address(seeds, INTEGER, (len(probs),)),
            address(positions, INTEGER, (len(probs),)),
            offset,
            *probs.shape,
        )
        return ids

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        seeds, positions = seeds.expand_as(positions).contiguous(), positions.contiguous()
        shape = tuple(positions.shape)
        numbers, place = new(shape, DOUBLE)
        given = address(seeds, INTEGER, shape), address(positions, INTEGER, shape)
        self.library.uniform(place, *given, int(stream), numbers.numel())
        return numbers

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        probs, uniforms = probs.contiguous(), uniforms.contiguous()
        ids, place = new((len(probs),), INTEGER)
        given = address(probs, FLOAT, tuple(probs.shape)), address(uniforms, DOUBLE, (len(probs),))
        self.library.inverse_cdf(place, *given, *probs.shape)
        return ids

    def draw_next(self, accepted: Accepted) -> torch.Tensor:
        target, draft, num_draft, num_accepted, weights, uniforms = accepted
        ids = []
        for row, (at, most) in enumerate(zip(num_accepted.tolist(), num_draft.tolist(), strict=True)):
            own, left = target[row, at].contiguous(), None
            if at < most:
                left = draft[row, at].contiguous()
            ids.append(
                self.library.sample_residual(
                    address(own, FLOAT, tuple(own.shape)),
                    None if left is None else address(left, FLOAT, tuple(left.shape)),
                    float(weights[row]),
                    float(uniforms[row, at]),
                    len(own),
                )
            )
        return torch.tensor(ids)

    def noise_uniforms(self, seed: int, position: int, vocab_size: int) -> torch.Tensor:
        """Returns the uniforms of the noise of ``gumbel_argmax`` for tokens 0 to ``vocab_size``, float64."""
        numbers, place = new((vocab_size,), DOUBLE)
        self.library.noise_uniforms(place, seed, position, vocab_size)
        return numbers
