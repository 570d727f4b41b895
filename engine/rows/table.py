"""Keeps the rows of all sequences that draw tokens: a sequence enters at one place, and leaves at one place.

Everything that drafts, adjusts or verifies reads the columns here: in torch, in C, and in a device's copy.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch

from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pointers import address
from truedraft.engine.messages import SamplingParams, Verification
from truedraft.engine.parameters import FILLING, PARAMETERS, PENALTIES
from truedraft.engine.rows.columns import FLOAT, RULES, WIDTH, Field, Rule

SMALLEST = torch.finfo(torch.float32).tiny
FIRST_CAPACITY = 32
# Parameters fill these columns as they are; the second value tells which hold floats.
FILLED = [(row.name, Field[row.column], Field[row.column].type == FLOAT) for row in FILLING]
Numbers: TypeAlias = "np.ndarray[Any, Any] | array[float]"
WORD_BYTES = 4


class Text(Protocol):
    """Describes the input of a row: ``core.sequence.Sequence``."""

    params: SamplingParams
    seed: int
    drafts_greedily: bool
    token_ids: list[int]
    num_prompt_tokens: int
    num_encoder_tokens: int
    stop_token_ids: frozenset[int]
    matcher: Any
    has_rules: bool

    # A ``Sequence`` has these as attributes; a lone text derives them.

    @property
    def greedy(self) -> bool: ...

    @property
    def verification(self) -> Verification: ...

    @property
    def max_num_tokens(self) -> int: ...


class Row:
    """Is one line of the table, with the parts of a sequence that are no numbers.

    ``token_ids`` is the sequence's own list, its pending token included, and ``matcher`` knows which tokens a
    grammar allows after them. ``is_plain`` says that the row is never traced, and its logits are never
    adjusted. ``arrays`` keeps the arrays alive whose addresses are in the columns.
    """

    __slots__ = (
        "__weakref__",
        "_always_adjusts",
        "_num_copied",
        "arrays",
        "block_ids",
        "drafts_greedily",
        "first_token",
        "is_plain",
        "matcher",
        "min_num_tokens",
        "num_prompt_tokens",
        "number",
        "params",
        "rule",
        "seed",
        "stop_token_ids",
        "table",
        "token_ids",
    )

    def __init__(self, table: "RowTable", number: int, text: Text) -> None:
        params = text.params
        self.table, self.number = table, number
        self.params, self.token_ids, self.matcher = params, text.token_ids, text.matcher
        self.stop_token_ids = sorted(text.stop_token_ids)
        self.num_prompt_tokens, self.first_token = text.num_prompt_tokens, text.num_encoder_tokens
        self.min_num_tokens = text.num_prompt_tokens + params.min_tokens
        self.rule = Rule.EXACT_MATCH if text.greedy else Rule(text.verification)
        self.seed, self.drafts_greedily = text.seed, text.drafts_greedily
        self.arrays: dict[Field, Any] = {}
        self.block_ids: dict[Field, list[int]] = {}
        self._num_copied = 0
        self._always_adjusts = bool(params.logit_bias) or self.is_penalised or self.matcher is not None
        self._always_adjusts |= text.has_rules
        self.is_plain = not (self._always_adjusts or params.min_tokens or params.trace)

    @property
    def is_penalised(self) -> bool:
        params = self.params
        return any(getattr(params, name) != PARAMETERS[name].default for name in PENALTIES)

    @property
    def is_below_minimum(self) -> bool:
        return len(self.token_ids) < self.min_num_tokens

    @property
    def needs_adjustment(self) -> bool:
        return self._always_adjusts or self.is_below_minimum

    @property
    def prompt(self) -> list[int]:
        """Returns the part of the prompt that the decoder has seen."""
        return self.token_ids[self.first_token : self.num_prompt_tokens]

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def text(self) -> list[int]:
        """Returns the tokens that the decoder has seen: penalties and rules do not see an encoder's
        tokens."""
        return self.token_ids[self.first_token :] if self.first_token else self.token_ids

    @property
    def position(self) -> int:
        """Returns the absolute index of the first token that a round draws."""
        return len(self.token_ids)

    def copy_text(self) -> None:
        """Brings the array of token ids up to date; a text only ever grows."""
        first, end = self._num_copied, len(self.token_ids)
        if first != end:
            self.arrays[Field.TOKEN_IDS][first:end] = array("q", self.token_ids[first:])
            self._num_copied = end

    def take_text(self, end: int) -> list[int]:
        """Returns the tokens that C has written after the text, up to ``end``; the sequence will get them,
        too."""
        first, self._num_copied = self._num_copied, end
        return self.arrays[Field.TOKEN_IDS][first:end].tolist()  # type: ignore[no-any-return]

    def keep_blocks(self, field: Field, length: Field, table: BlockTable) -> None:
        """Writes the address of a block table into two columns; most often it is the same as before."""
        entries = table.entries
        if self.block_ids.get(field) != entries:
            blocks = self.arrays[field] = array("q", entries)
            self.block_ids[field] = entries[:]
            line = self.table.numbers[self.number]
            line[field] = address(blocks, torch.int64, (len(blocks),)) if blocks else 0
            line[length] = len(table.block_ids)

    def write_masks(self, draft_ids: list[int], first: int) -> None:
        """Writes the grammar's masks after ``first`` of the drafts and after each further one."""
        assert self.matcher is not None
        num_positions, words = len(draft_ids) + 1 - first, self.matcher.mask_words
        mask = self.arrays.get(Field.MASK)
        if mask is None or len(mask) < num_positions * words:
            mask = self.arrays[Field.MASK] = array("i", bytes(WORD_BYTES * num_positions * words))
        place = address(mask, torch.int32, (len(mask),))
        is_bound = self.matcher.write_masks(place, draft_ids, first)
        line = self.table.numbers[self.number]
        line[Field.MASK], line[Field.MASK_WORDS], line[Field.NUM_MASKED] = (
            place,
            words,
            is_bound * num_positions,
        )


class RowTable:
    """``numbers`` has a line for each sequence, int64; ``floats`` is the same memory as float64."""

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[Text, Row] = WeakKeyDictionary()
        self._free: list[int] = []
        self.numbers = np.zeros((0, WIDTH), dtype=np.int64)
        self.floats = self.numbers.view(np.float64)

    def rows_of(self, texts: Sequence[Text]) -> list[Row]:
        """Returns the rows of sequences; a new sequence enters here."""
        return [self._rows.get(text) or self._add(text) for text in texts]

    def lines_of(self, rows: Sequence[Row]) -> "np.ndarray[Any, Any]":
        """Returns the numbers of the rows' lines, int64; the lines are up to date with their texts then."""
        lines = np.array([row.number for row in rows], dtype=np.int64)
        self.numbers[lines, Field.NUM_STORED] = [len(row.token_ids) - 1 for row in rows]
        return lines

    def _add(self, text: Text) -> Row:
        if not self._free:
            self._grow()
        number, params = self._free.pop(), text.params
        row = self._rows[text] = Row(self, number, text)
        line, floats = self.numbers[number], self.floats[number]
        line[Field.NUM_DRAFTS] = line[Field.STATE_SLOT] = line[Field.DRAFT_STATE_SLOT] = -1
        line[Field.SEED], line[Field.RULE] = text.seed, RULES.index(row.rule)
        for name, field, is_float in FILLED:
            (floats if is_float else line)[field] = getattr(params, name)
        floats[Field.TEMPERATURE] = max(floats[Field.TEMPERATURE] or 1.0, SMALLEST)
        line[Field.DRAFTS_GREEDILY] = text.drafts_greedily
        line[Field.MIN_NUM_TOKENS], line[Field.MAX_NUM_TOKENS] = row.min_num_tokens, text.max_num_tokens
        line[Field.NUM_STOPS], line[Field.NUM_BIASES] = len(row.stop_token_ids), len(params.logit_bias)
        self._keep(row, Field.BIASES, array("f", params.logit_bias.values()), torch.float32)
        self._keep(row, Field.STOP_IDS, np.array(row.stop_token_ids, dtype=np.int64))
        self._keep(row, Field.BIAS_IDS, np.array(list(params.logit_bias), dtype=np.int64))
        own = [Field.TOKEN_IDS, *([Field.DISTINCT_IDS, Field.COUNTS] if row.is_penalised else [])]
        for field in own:
            self._keep(row, field, np.zeros(text.max_num_tokens, dtype=np.int64))
        if row.is_penalised:
            # Tokens of the prompt count as seen, but not as repeated.
            distinct = list(dict.fromkeys(row.prompt))
            row.arrays[Field.DISTINCT_IDS][: len(distinct)] = distinct
            line[Field.NUM_DISTINCT] = line[Field.NUM_DISTINCT_IN_PROMPT] = len(distinct)
            line[Field.NUM_COUNTED] = text.num_prompt_tokens
        finalize(text, self._release, number).atexit = False
        return row

    def _release(self, number: int) -> None:
        """Forgets a sequence: the next one that takes its line finds nothing there."""
        self.numbers[number] = 0
        self._free.append(number)

    def _grow(self) -> None:
        """Doubles the number of lines. Addresses of lines are good for one call of C."""
        before = len(self.numbers)
        capacity = max(FIRST_CAPACITY, 2 * before)
        numbers = np.zeros((capacity, WIDTH), dtype=np.int64)
        numbers[:before] = self.numbers
        self.numbers, self.floats = numbers, numbers.view(np.float64)
        self._free += range(capacity - 1, before - 1, -1)

    def _keep(self, row: Row, field: Field, values: "Numbers", dtype: torch.dtype = torch.int64) -> None:
        """Keeps an array of the row alive, and writes its address into the column."""
        row.arrays[field] = values
        self.numbers[row.number, field] = address(values, dtype, (len(values),)) if len(values) else 0
