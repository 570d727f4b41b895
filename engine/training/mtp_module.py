"""Trains an MTP head with torch: transformers' own layer over whole texts, several steps at each place.

Each step computes what inference does, as for other heads: it sees what the first one sees, and the states
that the steps before it have left at its own place.
"""

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MtpModule(nn.Module):
    """``layer``, ``norm`` and ``rotary`` are those of transformers' model of the layer alone; ``output``
    [drafted tokens, hidden size] is the output layer, which is not trained."""

    output: torch.Tensor

    def __init__(self, layer: nn.Module, norm: nn.Module, rotary: nn.Module, output: torch.Tensor) -> None:
        super().__init__()
        size = output.shape[1]
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.embedding_norm = deepcopy(norm)
        self.state_norm = deepcopy(norm)
        self.layer = layer
        self.norm = norm
        self.rotary = rotary
        self.register_buffer("output", output, persistent=False)

    def forward(self, hidden: torch.Tensor, embedded: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each step's logits [texts, places, drafted tokens].

        ``hidden`` [texts, places, taps, hidden size] are the target's states, after its last norm in the last
        tap, and ``embedded`` for each step the embeddings [texts, places, hidden size] of the tokens that it
        gets.
        """
        states, kept, logits = hidden[:, :, -1], _Kept(), []
        for step, vectors in enumerate(embedded):
            joined = torch.cat((self.embedding_norm(vectors), self.state_norm(states)), dim=-1)
            states = self.norm(self._through_layer(self.projection(joined), step, kept))
            logits.append(F.linear(states, self.output.to(states.dtype)))
        return logits

    def _through_layer(self, x: torch.Tensor, step: int, kept: "_Kept") -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        is_hidden = places > places[:, None], *(places != places[:, None] for _ in range(step))
        mask = torch.zeros(len(places), (1 + step) * len(places), dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(torch.cat(is_hidden, dim=1), -torch.inf)[None, None]
        found: Any = self.layer(
            x, position_embeddings=self._angles(x, step), attention_mask=mask, past_key_values=kept
        )
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    def _angles(self, x: torch.Tensor, step: int) -> Any:
        return self.rotary(x, (step + torch.arange(x.shape[1], device=x.device))[None])


class _Kept:
    """Serves the layer as transformers' cache: it has the keys and values of all steps, one after the
    other."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *place: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)
