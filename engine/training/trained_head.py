"""Defines where the kinds of trained heads differ: how one begins, and how it is saved."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from truedraft.engine.formats.gguf_file import is_gguf
from truedraft.engine.layers.linear import Embeddings, Linear
from truedraft.engine.models.architecture import read_architecture
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.reader import HALVES


class TrainedHead(ABC):
    """Describes a head to train. ``embeddings`` are its inputs. It drafts no more than ``most_drafted``
    tokens by default; ``rate`` is its usual learning rate by the target's hidden size, as larger heads take
    smaller steps.
    """

    most_drafted: ClassVar[float]
    rate: ClassVar[float]
    embeddings: Embeddings

    @abstractmethod
    def module(self, token_ids: torch.Tensor | None) -> nn.Module:
        """Makes the module to train, in float32, as it begins; it drafts the tokens ``token_ids``, None:
        all."""

    @abstractmethod
    def save(self, folder: Path, module: nn.Module, token_ids: torch.Tensor | None) -> None:
        """Writes ``module`` in a layout that ``--draft`` loads."""


def stored_dtype(path: str, options: LoadOptions) -> torch.dtype:
    """Returns the type in which a head for the target at ``path`` is saved: 16 bits, unless the target's
    checkpoint has more."""
    if is_gguf(path):
        return torch.float16
    stored = read_architecture(path, options).config.get_text_config().dtype
    return stored if stored in HALVES else torch.float32


def rows_of(output: Linear, like: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
    """Returns an output layer's weights [tokens, hidden size] of ``token_ids``, None: of all. ``like``
    [hidden size] has the type and device of its inputs."""
    with torch.no_grad():
        rows = output(torch.eye(len(like), dtype=like.dtype, device=like.device)).T.float()
    return rows if token_ids is None else rows[token_ids.to(rows.device)]
