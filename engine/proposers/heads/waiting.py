"""Keeps states that wait for a head: those of a sequence's last tokens that the head's cache does not have
yet.
"""

import torch

from truedraft.engine.core.step import MAX_CATCH_UP_TOKENS


class Waiting:
    """Holds states: the first ``num_tokens`` of ``states`` [MAX_CATCH_UP_TOKENS, hidden size] wait."""

    __slots__ = ("num_tokens", "states")

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_tokens = 0
        self.states = torch.empty(MAX_CATCH_UP_TOKENS, hidden_size, dtype=dtype, device=device)

    @property
    def known(self) -> torch.Tensor:
        """Returns the states that wait."""
        return self.states[: self.num_tokens]

    def add(self, states: torch.Tensor) -> None:
        end = self.num_tokens + len(states)
        self.states[self.num_tokens : end] = states
        self.num_tokens = end
