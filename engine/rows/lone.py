"""Has texts that belong to no sequence: those of comparisons at load, and of traces that are verified."""

from dataclasses import dataclass, field
from typing import Any

from truedraft.engine.messages import SamplingParams, Verification
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.table import Row, RowTable


@dataclass(eq=False)
class LoneText:
    """Is a ``Text`` with fixed tokens and a fixed continuation. The first ``num_encoder_tokens`` are an
    encoder's."""

    params: SamplingParams
    rule: Rule
    seed: int = 0
    token_ids: list[int] = field(default_factory=lambda: [3, 5, 3])
    num_prompt_tokens: int = 2
    num_encoder_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    matcher: Any = None
    drafts_greedily: bool = False
    has_rules: bool = False

    @property
    def max_num_tokens(self) -> int:
        return len(self.token_ids) + self.params.max_tokens

    @property
    def greedy(self) -> bool:
        return self.rule is Rule.EXACT_MATCH

    @property
    def verification(self) -> Verification:
        return self.rule.value

    def row(self) -> Row:
        """Returns the text's row, in a table of its own."""
        (row,) = RowTable().rows_of([self])
        return row
