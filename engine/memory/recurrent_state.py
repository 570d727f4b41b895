"""Running states of layers that have one in place of keys and values: what is kept of each sequence.

A state is a sum over all tokens of a text, so a token cannot be taken out of it again. It is therefore folded
only at positions that are multiples of ``CHUNK``, and only over tokens that no truncation can take back. What
came since then lies in a log of records, by position: rejected drafts are simply overwritten. A token's
numbers depend on its position and on the tokens before it, and not on how passes were cut.
"""

from dataclasses import dataclass

import torch

from truedraft.engine.memory.huge_pages import HugePages

# Tokens between two positions where a state is folded.
CHUNK = 16
# The most tokens that may be taken back after a pass: as many drafts as a request may ask for.
ROLLBACK = 32
# Positions that a record's log must hold: up to a chunk that is not folded yet, and what may be taken back.
NUM_RECORDS = -(-(CHUNK + ROLLBACK) // CHUNK) * CHUNK


def num_folded(num_certain_tokens: int) -> int:
    """Returns over how many tokens a state is folded after a pass, when so many are certain. One record stays
    at least: what shares all of a prompt but its last token finds a state that is not too new for it."""
    return max(0, num_certain_tokens - 1) // CHUNK * CHUNK


@dataclass(frozen=True, slots=True)
class StateShape:
    """Says how large a layer's state is: a matrix for each head. A record has a key of ``rows`` numbers for
    each of ``key_heads``, a value of ``columns`` for each head, and each head's decay."""

    heads: int
    rows: int
    columns: int
    key_heads: int


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """What one layer keeps of each sequence: inputs of a convolution over ``width`` tokens, and a state and
    its records, if it has one."""

    channels: int
    width: int
    state: StateShape | None
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def num_inputs(self) -> int:
        """Returns for how many positions inputs are kept: a prefix may end a chunk before the newest."""
        return CHUNK + ROLLBACK + self.width - 1

    @property
    def working_bytes_per_token(self) -> int:
        """Returns the bytes of what a pass computes of a token, all of it in float32 but for decays."""
        if (shape := self.state) is None:
            return 0
        numbers = self.channels + 3 * shape.heads * shape.columns
        return numbers * torch.float32.itemsize + shape.heads * torch.float64.itemsize

    @property
    def bytes_per_sequence(self) -> int:
        size = self.num_inputs * self.channels * torch.float32.itemsize
        if (shape := self.state) is None:
            return size
        numbers = shape.heads * shape.rows * shape.columns
        record = shape.key_heads * shape.rows + shape.heads * shape.columns
        size += (numbers + NUM_RECORDS * record) * torch.float32.itemsize
        return size + NUM_RECORDS * shape.heads * torch.float64.itemsize


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's tensors; each begins with the slot. Position p has its record at p modulo the number of
    records, its input at p modulo that of inputs. Without a state only inputs have numbers."""

    state: torch.Tensor  # [slots, heads, rows, columns]
    keys: torch.Tensor  # [slots, records, key heads * rows]
    values: torch.Tensor  # [slots, records, heads * columns]
    decays: torch.Tensor  # [slots, records, heads], float64: the factors
    inputs: torch.Tensor  # [slots, inputs, channels]

    @classmethod
    def zeros(cls, spec: RecurrentCache, num_slots: int, pages: HugePages) -> "LayerState":
        shape = spec.state or StateShape(0, 0, 0, 0)
        num_records = NUM_RECORDS if spec.state is not None else 0

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return pages.zeros(num_slots, *size, dtype=dtype, device=spec.device)

        return cls(
            zeros(shape.heads, shape.rows, shape.columns),
            zeros(num_records, shape.key_heads * shape.rows),
            zeros(num_records, shape.heads * shape.columns),
            zeros(num_records, shape.heads, dtype=torch.float64),
            zeros(spec.num_inputs, spec.channels),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.state, self.keys, self.values, self.decays, self.inputs
