"""Holds what the target's passes need of a prompt's pictures: what they look like, and where they stand."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PromptPictures:
    """Describes all pictures of one prompt.

    ``places`` are the indices of their tokens, ascending. Each token has ``features`` [tokens, 1 + layers,
    hidden size]: the first one stands in place of its embedding, the others are added to its hidden states
    after the first layers. ``axes`` [3, tokens] are the positions by which the prompt's tokens up to the last
    picture's end are turned; None if these are their indices. Later tokens have their indices plus ``shift``.
    ``identities`` tell the same tokens apart: ids of a text, and a number that is the picture's own.
    """

    places: npt.NDArray[np.int64]
    features: torch.Tensor
    axes: npt.NDArray[np.int64] | None
    shift: int
    identities: list[int]

    @property
    def end(self) -> int:
        """Returns the index of the first token after the last picture."""
        return len(self.identities)

    @property
    def num_bytes(self) -> int:
        return self.features.nbytes

    def axes_of(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Returns [3, tokens], the positions of the tokens from ``first`` to ``end``."""
        later = np.arange(max(first, self.end), max(end, self.end), dtype=np.int64) + self.shift
        known = np.arange(first, min(end, self.end), dtype=np.int64)
        before = known[None].repeat(3, 0) if self.axes is None else self.axes[:, known]
        return np.concatenate((before, later[None].repeat(3, 0)), axis=1)

    def rows(self, first: int, end: int) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Returns which of the tokens from ``first`` to ``end`` are a picture's, counted from ``first``, and
        their features."""
        begin, stop = np.searchsorted(self.places, (first, end))
        return self.places[begin:stop] - first, self.features[begin:stop]
