"""Makes one vector, or one score, of the states of a text's tokens.

Each text is computed by itself, so that its numbers do not depend on the other texts of the pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from truedraft.engine.embedding.files import DenseFile
from truedraft.engine.errors import ModelLoadError

# A function of this type makes a score of the states of a text's tokens.
Head = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": torch.relu,
    "GELU": F.gelu,
}


@dataclass(frozen=True)
class Dense:
    """Is a linear layer for a text's vector. ``is_added`` says that its output is added to its input."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str
    is_added: bool

    @classmethod
    def read(cls, file: DenseFile, device: torch.device) -> "Dense":
        path = file.folder / "model.safetensors"
        if not path.is_file():
            raise ModelLoadError(f"{file.folder} has no model.safetensors")
        tensors = {name: tensor.float().to(device) for name, tensor in load_file(path).items()}
        weight = tensors["linear.weight"]
        if file.is_added and weight.shape[0] != weight.shape[1]:
            raise ModelLoadError(f"{file.folder} adds its input to another size (use_residual)")
        return cls(weight, tensors.get("linear.bias"), file.activation, file.is_added)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        made = FUNCTIONS[self.activation](F.linear(vector[None], self.weight, self.bias)[0])
        return vector + made if self.is_added else made


@dataclass(frozen=True)
class Pooling:
    """Makes a vector of states by its ``modes``, one after the other, and by ``dense``."""

    modes: tuple[str, ...]
    dense: tuple[Dense, ...] = ()
    normalizes: bool = True

    def __call__(
        self, states: torch.Tensor, dimensions: int | None = None, normalizes: bool | None = None
    ) -> torch.Tensor:
        """Returns the vector of ``states``, float32 [tokens, hidden size], cut to its first ``dimensions``
        numbers if these are given. ``normalizes`` overrides what the model's files say."""
        parts = [pool(mode, states) for mode in self.modes]
        vector = parts[0] if len(parts) == 1 else torch.cat(parts)
        for layer in self.dense:
            vector = layer(vector)
        vector = vector if dimensions is None else vector[:dimensions]
        is_normal = self.normalizes if normalizes is None else normalizes
        return F.normalize(vector, dim=0) if is_normal else vector

    def size(self, hidden_size: int) -> int:
        return self.dense[-1].weight.shape[0] if self.dense else hidden_size * len(self.modes)


def pool(mode: str, states: torch.Tensor) -> torch.Tensor:
    """Returns one vector of ``states`` [tokens, hidden size]."""
    match mode:
        case "cls":
            return states[0]
        case "lasttoken":
            return states[-1]
        case "max":
            return states.amax(0)
        case "mean":
            return states.mean(0)
        case "mean_sqrt_len_tokens":
            return states.sum(0) / math.sqrt(len(states))
        case "weightedmean":
            weights = torch.arange(1, len(states) + 1, dtype=states.dtype, device=states.device)[:, None]
            return (states * weights).sum(0) / weights.sum()
    raise AssertionError(mode)


@dataclass(frozen=True)
class Scoring:
    """Makes a score of states by a classifier with one output, and by an activation."""

    head: Head
    activation: str = "Sigmoid"

    def __call__(
        self, states: torch.Tensor, dimensions: int | None = None, normalizes: bool | None = None
    ) -> torch.Tensor:
        """Returns the score [1]; ``normalizes`` False leaves the activation out."""
        score = self.head(states)
        return score if normalizes is False else FUNCTIONS[self.activation](score)

    def size(self, hidden_size: int) -> int:
        return 1


Vectors = Pooling | Scoring


def to_bytes(vectors: Sequence[torch.Tensor]) -> list[bytes | None]:
    """Returns the numbers of each vector, float32 and little-endian; None for a vector with numbers that are
    not finite."""
    found: list[bytes | None] = []
    for vector in vectors:
        numbers = vector.float().cpu().numpy()
        found.append(
            numbers.astype("<f4", copy=False).tobytes() if bool(torch.isfinite(vector).all()) else None
        )
    return found
