"""Keeps running states of layers that have one in place of keys and values.

A state is a sum over all tokens of a text, so a token cannot be taken out of it again. It is therefore folded
only at positions that are multiples of ``CHUNK``, and only over tokens that no truncation can take back.
Later tokens lie in a log of records, by position: rejected drafts are simply overwritten. A token's numbers
depend on its position and on the tokens before it, and not on how passes were cut.
"""

from dataclasses import dataclass

import torch

from truedraft.engine.memory.huge_pages import HugePages

# States are folded at positions that are this many tokens apart.
CHUNK = 16
# At most this many tokens may be taken back after a pass: as many drafts as a request may ask for.
ROLLBACK = 32
# A log of records must hold this many positions: up to a chunk that is not folded yet, and the tokens that
# may be taken back.
NUM_RECORDS = -(-(CHUNK + ROLLBACK) // CHUNK) * CHUNK


def num_folded(num_certain_tokens: int) -> int:
    """Returns the number of tokens over which a state is folded after a pass, given the number of certain
    ones. One record stays at least: a text that shares all of a prompt but its last token then finds a state
    that is not too new for it."""
    return max(0, num_certain_tokens - 1) // CHUNK * CHUNK


@dataclass(frozen=True, slots=True)
class StateShape:
    """Holds the sizes of a layer's state: a matrix for each head. A record has a key of ``rows`` numbers for
    each of ``key_heads``, a value of ``columns`` for each head, and each head's decay."""

    heads: int
    rows: int
    columns: int
    key_heads: int


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """Describes what one layer keeps of each sequence: inputs of a convolution over ``width`` tokens, and a
    state and its records, if it has one."""

    channels: int
    width: int
    state: StateShape | None
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def num_inputs(self) -> int:
        """Returns the number of positions whose inputs are kept: a prefix may end a chunk before the
        newest."""
        return CHUNK + ROLLBACK + self.width - 1

    @property
    def working_bytes_per_token(self) -> int:
        """Returns the bytes that a pass needs for one token; all numbers are float32 except decays."""
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
    """Holds one layer's tensors; each begins with the slot. Position p has its record at p modulo the number
    of records, its input at p modulo that of inputs. Without a state only inputs have numbers."""

    state: torch.Tensor  # [slots, heads, rows, columns]
    keys: torch.Tensor  # [slots, records, key heads * rows]
    values: torch.Tensor  # [slots, records, heads * columns]
    decays: torch.Tensor  # [slots, records, heads], float64: the decay factors
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
