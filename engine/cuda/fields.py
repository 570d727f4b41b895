"""The numbers by which the host tells the device what a decoding row is, and their order."""

from enum import IntEnum, auto


class Field(IntEnum):
    """The numbers of a row, int64; the last three are float64 by their bits. Token ids follow: the one before
    the pending one, the pending one, then the drafts."""

    NUM_STORED = 0  # tokens in the target's cache, which is the position of the pending one
    NUM_DRAFTS = auto()  # to be scored; -1: there is no row
    NUM_DRAWN = auto()  # counts those that the draft model draws: all or none
    NUM_SKIPPED = auto()  # 1: the draft's cache has the token before the pending one
    STATE_SLOT = auto()
    NUM_FOLDED = auto()  # tokens over which states are folded, before the round and after it
    NUM_FOLDED_AFTER = auto()
    DRAFT_STATE_SLOT = auto()
    DRAFT_NUM_FOLDED = auto()
    DRAFT_NUM_FOLDED_AFTER = auto()
    SEED = auto()
    RULE = auto()
    TOP_K = auto()
    TEMPERATURE = auto()
    TOP_P = auto()
    MIN_P = auto()
    IDS = auto()


# Counts those of states, the target's and then the draft model's.
NUM_STATE_FIELDS = 3
# Where the drafts begin, after the token before the pending one and the pending one.
DRAFTS = Field.IDS + 2


class RuleCode(IntEnum):
    """Names the rules of verification for the device."""

    EXACT_MATCH = 0
    REJECTION = 1
    COUPLED = 2
    BLOCK = 3
