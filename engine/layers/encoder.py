"""Makes the input of an encoder's first layer: vectors of tokens, of their positions and of their texts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from truedraft.engine.layers.linear import Embeddings
from truedraft.engine.layers.mlp import MlpRun
from truedraft.engine.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class InputEmbeddings:
    """Adds the vectors of each token, and norms the sum. ``positions`` [positions, hidden size] belong to its
    place in its text, ``types`` [types, hidden size] to the first or the second text of a pair. Places are
    counted from the one after ``padding``, where that is given: tokens with that id share its place, and are
    not counted.
    """

    words: Embeddings
    positions: torch.Tensor | None = None
    types: torch.Tensor | None = None
    norm: Norm | None = None
    padding: int | None = None
    scale: float = 1.0

    @property
    def longest(self) -> int | None:
        """Returns the number of tokens that a text may have; None if that is not decided here."""
        if self.positions is None:
            return None
        return len(self.positions) - (0 if self.padding is None else self.padding + 1)

    def __call__(
        self,
        token_ids: torch.Tensor,
        places: torch.Tensor,
        kinds: torch.Tensor,
        run: MlpRun,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Returns the first hidden states [tokens, hidden size]. ``places`` [tokens] count each text's tokens
        as ``place_of`` does, ``kinds`` [tokens] are 1 in the second text of a pair."""
        hidden = self.words.look_up(token_ids).to(dtype)
        if self.scale != 1:
            hidden = hidden * self.scale
        if self.types is not None:
            hidden = hidden + F.embedding(kinds.clamp(max=len(self.types) - 1), self.types)
        if self.positions is not None:
            hidden = hidden + F.embedding(places, self.positions)
        return hidden if self.norm is None else run.norm(self.norm, hidden)

    def places_of(self, token_ids: list[int]) -> list[int]:
        """Returns the places of a text's tokens."""
        if self.padding is None:
            return list(range(len(token_ids)))
        places, place = [], self.padding
        for token_id in token_ids:
            place += token_id != self.padding
            places.append(self.padding if token_id == self.padding else place)
        return places
