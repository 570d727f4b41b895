"""Provides counter-based randomness: every number is a pure function of (seed, position, stream, token id).

Nothing is drawn from a generator that advances, so a sequence's numbers do not depend on who else is in the
batch, on preemption, or on how many tokens were drafted. The hash is splitmix64 (Steele, Lea and Flood 2014,
the finaliser by Stafford): a Weyl sequence through a 64-bit mixer, which is counter-based by construction.
``position`` is the absolute index, in prompt plus output, of the token to be drawn.
"""

from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from truedraft.engine.sampling.splitmix import MASK_64, MIX_1, MIX_2, WEYL, mix

# On a CPU, up to this many numbers are computed one by one: thirty operations on small arrays take longer.
FEW = 16


class Stream(IntEnum):
    """Names the purpose of a number. Streams are independent; only NOISE is shared by target and draft."""

    DRAFT = 1  # draws a drafted token, under the rejection rule
    ACCEPT = 2  # accepts or rejects a drafted token
    RECOVER = 3  # draws the recovered or bonus token
    NOISE = 4  # exponential noise over the vocabulary, under the coupled rule
    ROUND = 5  # seeds of rounds, for DRAFT and ACCEPT


def round_seeds(seeds: torch.Tensor, first_positions: torch.Tensor) -> torch.Tensor:
    """Returns seeds int64 for rounds that start at ``first_positions``.

    A round draws drafts, and under the block rule looks at numbers, beyond the tokens that it keeps. Its
    verdict may depend on them, and so does where its drafts stop, from which later rounds' lengths are
    learned. They are spent: a later round must not meet them again at the same positions. Rounds start at
    different positions.
    """
    with np.errstate(over="ignore"):
        return torch.as_tensor(_keys(_integers(seeds), _integers(first_positions), Stream.ROUND))


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Returns uniform float64 numbers in the open interval (0, 1).

    ``seeds`` and ``positions`` are int64, of shapes that broadcast; the result has the broadcast shape.
    """
    if _are_few(seeds, positions):
        keys, shape = _few_keys(seeds, positions, stream)
        numbers = [((mix(key) >> 12) + 0.5) * 2.0**-52 for key in keys]
        return torch.tensor(numbers, dtype=torch.float64).view(shape)
    with np.errstate(over="ignore"):  # numpy's scalars warn where its arrays wrap.
        return uniform_on_device(_integers(seeds), _integers(positions), stream)


def uniform_on_device(seeds: Any, positions: Any, stream: Stream) -> torch.Tensor:
    """Computes ``uniform`` by the tensors' own operations, on any device."""
    return _to_unit_interval(_mix(_keys(seeds, positions, stream)))


def noise_on_device(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Computes ``exponential_noise`` by the tensors' own operations, on any device."""
    mixed = _mix(_keys(seeds, positions, Stream.NOISE)[..., None] + _counters(vocab_size, seeds.device))
    return _to_unit_interval(mixed).log_().neg_()


def round_seeds_on_device(seeds: torch.Tensor, first_positions: torch.Tensor) -> torch.Tensor:
    """Computes ``round_seeds`` by the tensors' own operations, on any device."""
    keys: torch.Tensor = _keys(seeds, first_positions, Stream.ROUND)
    return keys


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns Exponential(1) noise for every token id: float64 [..., vocab_size] for int64 seeds and
    positions.

    Token i's noise does not depend on ``vocab_size``, so models with differently padded vocabularies share
    it.
    """
    with np.errstate(over="ignore"):
        if _are_few(seeds, positions):
            few, shape = _few_keys(seeds, positions, Stream.NOISE)
            keys = np.array(few, dtype=np.uint64).view(np.int64).reshape(shape)
        else:
            keys = _keys(_integers(seeds), _integers(positions), Stream.NOISE)
        mixed = _mix(keys[..., None] + _integers(_counters(vocab_size, seeds.device)))
    return _to_unit_interval(mixed).log_().neg_()


class KeptNoise:
    """Keeps the noise of some sequences: target and draft meet the same at the same positions."""

    def __init__(self) -> None:
        self._noise: list[torch.Tensor] = []  # [sequences, vocab] of the first positions

    def take(
        self, seeds: torch.Tensor, positions: torch.Tensor, offset: int, num_positions: int, vocab_size: int
    ) -> torch.Tensor:
        """Returns the noise of ``num_positions`` positions of each sequence from ``positions`` + ``offset``
        on: [sequences, num_positions, vocab]. The sequences are always the same."""
        end = offset + num_positions
        noise = self._noise[offset:end]
        first_new = offset + len(noise)
        if first_new < end:
            new = positions[:, None] + torch.arange(first_new, end, device=positions.device)
            computed = exponential_noise(seeds[:, None], new, vocab_size).unbind(1)
            noise += computed
            if first_new == len(self._noise):
                self._noise += computed
        return torch.stack(noise, dim=1)


def _are_few(seeds: torch.Tensor, positions: torch.Tensor) -> bool:
    return seeds.device.type == "cpu" and max(seeds.numel(), positions.numel()) <= FEW


def _few_keys(
    seeds: torch.Tensor, positions: torch.Tensor, stream: Stream
) -> tuple[list[int], tuple[int, ...]]:
    """Returns ``_keys``, computed one by one and unsigned, and their shape."""
    shape = np.broadcast_shapes(seeds.shape, positions.shape)
    pairs = zip(*(x.expand(shape).flatten().tolist() for x in (seeds, positions)), strict=True)
    keys = [mix(mix(seed + stream * WEYL) + position * WEYL) for seed, position in pairs]
    return keys, shape


@lru_cache(maxsize=8)
def _counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Returns numbers that tell token ids apart: int64 [vocab_size]."""
    return torch.arange(1, vocab_size + 1, device=device) * _signed(WEYL)


def _integers(x: torch.Tensor) -> Any:
    """Returns the same int64 numbers, on a CPU as an array: numpy's operations start four times sooner."""
    return x.numpy() if x.device.type == "cpu" else x


def _keys(seeds: Any, positions: Any, stream: Stream) -> Any:
    """Combines seeds, positions and stream; like the next two functions it takes int64 arrays or tensors."""
    return _mix(_mix(seeds + _signed(stream * WEYL)) + positions * _signed(WEYL))


def _mix(x: Any) -> Any:
    """Applies splitmix64's finaliser to int64, whose arithmetic wraps as that of unsigned numbers does."""
    x = x ^ _shift(x, 30)  # This makes a copy, which is changed in place from here on.
    x *= _signed(MIX_1)
    x ^= _shift(x, 27)
    x *= _signed(MIX_2)
    x ^= _shift(x, 31)
    return x


def _shift(x: Any, bits: int) -> Any:
    """Shifts right logically: the shift of signed integers is arithmetic."""
    shifted = x >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted


def _to_unit_interval(x: Any) -> torch.Tensor:
    """Maps the top 52 bits to the middles of intervals: all are exact in float64, and neither 0 nor 1 can
    occur."""
    top = torch.as_tensor(_shift(x, 12))
    return top.double().add_(0.5).mul_(2.0**-52)


def _signed(x: int) -> int:
    x &= MASK_64
    return x - (1 << 64) if x >> 63 else x
