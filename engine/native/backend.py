"""Distributions and draws in C (``sampling.c``): float32 logits on a CPU.

torch computes noise, a logarithm and a quotient for every token and sorts for top-p, each an operation of its
own; for small models that is a quarter of a round. At load both ways are compared (``native_backend``).
"""

import ctypes
import logging
from ctypes import byref

import torch

from truedraft.engine.memory.pointers import address, as_floats, new, shape_of
from truedraft.engine.messages import SamplingParams
from truedraft.engine.native.library import Processors, load_library
from truedraft.engine.sampling.backend import TorchBackend
from truedraft.engine.sampling.processors import SamplingTensors
from truedraft.engine.sampling.random import KeptNoise, Stream
from truedraft.engine.sampling.verify import Accepted

CPU = torch.device("cpu")
FLOAT, DOUBLE, INTEGER = torch.float32, torch.float64, torch.int64
# Probabilities may differ by it; both ways round to 1e-7.
TOLERANCE = 1e-5
# Both ways are compared on a vocabulary that fills no vector; every processor alone and with others.
PROBE_VOCAB = 1003
PROBE_DRAWS = 16  # each row is drawn from this often
PROBE_PARAMS = [
    SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in (
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 0.9, 0.0),
        (1.5, 20, 1.0, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, 50, 0.8, 0.05),
    )
]

logger = logging.getLogger(__name__)


def native_backend() -> "NativeBackend | None":
    """None where the C functions cannot be had, or differ from torch's on a few rows."""
    library = load_library()
    if library is None:
        return None
    backend = NativeBackend(library)
    if _agrees(backend):
        return backend
    logger.warning("The native draws differ from torch's and are not used")
    return None


class NativeBackend:
    """One object serves every step. It keeps where the parameters of its last rows are: mostly the same
    tensors come again, which never change."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._columns: tuple[SamplingTensors, int, Processors] | None = None

    def probs(self, logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
        logits = as_floats(logits)
        shape = sequences, _, vocab_size = shape_of(logits, 3)
        cuts = sampling.largest_top_k or sampling.any_top_p or sampling.any_min_p
        work = self.library.get_num_threads(), vocab_size
        scratch, work_place = new(work, FLOAT) if cuts else (None, None)
        if self._columns is None or self._columns[0] is not sampling or self._columns[1] != sequences:
            types = FLOAT, INTEGER, FLOAT, FLOAT
            columns = zip(sampling[:4], types, strict=True)
            places = [address(column, dtype, (sequences, 1)) for column, dtype in columns]
            self._columns = sampling, sequences, Processors(*places)
        probs, place = new(shape, FLOAT)
        given = address(logits, FLOAT, shape)
        self.library.process(place, given, byref(self._columns[2]), work_place, *shape)
        del scratch  # kept until here
        return probs

    def gumbel_argmax(
        self,
        probs: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        offset: int,
        noise: KeptNoise | None = None,
    ) -> torch.Tensor:
        # Kept as long as the pointers to them are used.
        probs, seeds, positions = probs.contiguous(), seeds.contiguous(), positions.contiguous()
        shape = shape_of(probs, 3)
        ids, place = new(shape[:2], INTEGER)
        self.library.gumbel_argmax(
            place,
            address(probs, FLOAT, shape),
            address(seeds, INTEGER, shape[:1]),
            address(positions, INTEGER, shape[:1]),
            offset,
            *shape,
        )
        return ids

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        seeds, positions = seeds.expand_as(positions).contiguous(), positions.contiguous()
        shape = tuple(positions.shape)
        numbers, place = new(shape, DOUBLE)
        self.library.uniform(
            place,
            address(seeds, INTEGER, shape),
            address(positions, INTEGER, shape),
            int(stream),
            numbers.numel(),
        )
        return numbers

    def inverse_cdf(self, probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        probs, uniforms = probs.contiguous(), uniforms.contiguous()
        shape = shape_of(probs, 2)
        ids, place = new(shape[:1], INTEGER)
        self.library.inverse_cdf(
            place,
            address(probs, FLOAT, shape),
            address(uniforms, DOUBLE, shape[:1]),
            *shape,
        )
        return ids

    def draw_next(self, accepted: Accepted) -> torch.Tensor:
        args = [arg.contiguous() for arg in accepted]
        rows, drafts, vocab_size = shape_of(accepted.draft_probs, 3)
        each, places = (rows,), (rows, drafts + 1)
        types = FLOAT, FLOAT, INTEGER, INTEGER, DOUBLE, DOUBLE
        shapes = (*places, vocab_size), (rows, drafts, vocab_size), each, each, each, places
        ids, place = new(each, INTEGER)
        self.library.draw_next(place, *map(address, args, types, shapes), rows, drafts, vocab_size)
        return ids

    def noise_uniforms(self, seed: int, position: int, vocab_size: int) -> torch.Tensor:
        """Returns the uniforms of the noise of ``gumbel_argmax`` for tokens 0 to ``vocab_size``, float64."""
        numbers = torch.empty(vocab_size, dtype=DOUBLE)
        self.library.noise_uniforms(address(numbers, DOUBLE, (vocab_size,)), seed, position, vocab_size)
        return numbers


def _agrees(backend: NativeBackend) -> bool:
    reference = TorchBackend()
    shape = len(PROBE_PARAMS), 2, PROBE_VOCAB
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sampling = SamplingTensors.build(PROBE_PARAMS, CPU)
    probs = reference.probs(logits, sampling)
    if not torch.allclose(backend.probs(logits, sampling), probs, rtol=0, atol=TOLERANCE):
        return False
    probs = probs.repeat(PROBE_DRAWS, 1, 1)
    seeds = torch.arange(len(probs)) * 12345
    drawn = seeds, seeds % 100, 3
    if not torch.equal(backend.gumbel_argmax(probs, *drawn), reference.gumbel_argmax(probs, *drawn)):
        return False
    numbers = seeds[:, None], seeds[:, None] + torch.arange(2), Stream.RECOVER
    uniforms = reference.uniform(*numbers)
    if not torch.equal(backend.uniform(*numbers), uniforms):
        return False
    first = probs[:, 0], uniforms[:, 0]
    if not torch.equal(backend.inverse_cdf(*first), reference.inverse_cdf(*first)):
        return False
    # One token was drafted from a flatter distribution; every second row has accepted it.
    draft = probs[:, :1].sqrt()
    draft /= draft.sum(-1, keepdim=True)
    weights = (1 + uniforms[:, 1]) / 2
    accepted = Accepted(probs, draft, torch.ones_like(seeds), seeds % 2, weights, uniforms)
    return torch.equal(backend.draw_next(accepted), reference.draw_next(accepted))
