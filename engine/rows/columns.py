"""Names the columns of a row in one place: the numbers by which a sequence drafts and draws its tokens.

A row is one line of 64-bit numbers, in the order of ``Field``. torch sees views of its columns, C sees the
structure ``Row`` of ``native/rows.h``, which ``python -m tools.write_headers`` writes from here, and a device
has a copy of the first columns, up to ``DEVICE_WIDTH``.
"""

from enum import Enum, IntEnum


class Rule(Enum):
    """Names the rules of verification, and with them how a row's drafts are drawn."""

    EXACT_MATCH = "exact_match"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"

    # Every step looks rules up, and an enumeration's own hash is written in Python.
    __hash__ = object.__hash__

    @property
    def uses_draft_probs(self) -> bool:
        return self in (Rule.REJECTION, Rule.BLOCK)

    @property
    def code(self) -> int:
        """Returns the rule's number in its column."""
        return RULES.index(self)


RULES = tuple(Rule)

# C declares a column as one of these: a number, or the address of an array that the table keeps.
INTEGER, FLOAT = "int64_t ", "double "
IDS, OWN_IDS, FLOATS, WORDS = "const int64_t *", "int64_t *", "const float *", "uint32_t *"


class Field(IntEnum):
    """Numbers the columns. Each has the type that C declares, and says what it holds."""

    type: str
    text: str

    def __new__(cls, kind: str, text: str) -> "Field":
        number = len(cls.__members__)
        field = int.__new__(cls, number)
        field._value_ = number
        field.type, field.text = kind, text
        return field

    # A device needs these columns in every round.
    NUM_STORED = INTEGER, "tokens before the pending one, which is its position"
    NUM_DRAFTS = INTEGER, "drafts that the round scores; -1: the round has no such row"
    NUM_DRAWN = INTEGER, "drafts that come with distributions: num_drafts, or none"
    NUM_SKIPPED = INTEGER, "1: the draft model's cache has the token before the pending one"
    STATE_SLOT = INTEGER, "where the target's cache has the row's states; -1: it has none"
    NUM_FOLDED = INTEGER, "tokens that these states are folded over before the round"
    NUM_FOLDED_AFTER = INTEGER, "the same after the round"
    DRAFT_STATE_SLOT = INTEGER, "where the draft model's cache has the row's states; -1: it has none"
    DRAFT_NUM_FOLDED = INTEGER, "tokens that these states are folded over before the round"
    DRAFT_NUM_FOLDED_AFTER = INTEGER, "the same after the round"
    SEED = INTEGER, "what all random numbers of the row depend on"
    RULE = INTEGER, "how drafts are verified"
    TOP_K = INTEGER, "tokens that may be drawn; 0: all"
    TEMPERATURE = FLOAT, "above 0; greedy rows have 1 and do not look at it"
    TOP_P = FLOAT, "mass that may be drawn; 1: all"
    MIN_P = FLOAT, "smallest ratio to the most likely token's probability; 0: any"
    # The host needs these in addition.
    DRAFTS_GREEDILY = INTEGER, "whether a draft model drafts its most likely token"
    REPETITION = FLOAT, "repetition penalty; 1: off"
    FREQUENCY = FLOAT, "frequency penalty; 0: off"
    PRESENCE = FLOAT, "presence penalty; 0: off"
    MIN_NUM_TOKENS = INTEGER, "length of the text below which stop tokens are forbidden"
    MAX_NUM_TOKENS = INTEGER, "the longest text, prompt included"
    NUM_STOPS = INTEGER, "entries of stop_ids"
    STOP_IDS = IDS, "tokens that end the text"
    NUM_BIASES = INTEGER, "entries of bias_ids and biases"
    BIAS_IDS = IDS, "tokens with a bias"
    BIASES = FLOATS, "what is added to their logits"
    TOKEN_IDS = OWN_IDS, "[max_num_tokens] the text"
    NUM_COUNTED = INTEGER, "tokens of the text that counts know"
    NUM_DISTINCT = INTEGER, "entries of distinct_ids and counts"
    NUM_DISTINCT_IN_PROMPT = INTEGER, "entries of tokens that stand in the prompt: the first ones"
    DISTINCT_IDS = OWN_IDS, "[max_num_tokens] tokens of the text; NULL: the row has no penalties"
    COUNTS = OWN_IDS, "[max_num_tokens] how often each of them stands in the output"
    NUM_MASKED = INTEGER, "positions that mask knows; later ones allow every token"
    MASK_WORDS = INTEGER, "words of 32 tokens in the mask of a position"
    MASK = WORDS, "[positions, mask_words] a bit for each allowed token; NULL: no mask"
    # Several rounds in C need these in addition.
    NUM_COMPUTED = (
        INTEGER,
        "tokens in the target's cache: of a prompt any number, else num_stored",
    )
    NUM_WANTED = INTEGER, "tokens to draft in each round, as far as there is room for them"
    NUM_KNOWN = INTEGER, "drafts that are known before the first round, in place of drawn ones"
    NUM_DRAFT_STORED = INTEGER, "tokens of the text in the draft model's cache"
    NUM_BLOCKS = INTEGER, "blocks of the row in the target's cache"
    BLOCKS = IDS, "[num_blocks, kinds of layers] the target's block table, with room for all rounds"
    NUM_DRAFT_BLOCKS = INTEGER, "blocks of the row in the draft model's cache"
    DRAFT_BLOCKS = IDS, "[num_draft_blocks, kinds of layers] the draft model's, with room for all rounds"
    ADAPTER = INTEGER, "the number of the target's adapter; -1: none"
    SHIFT = INTEGER, "what is added to an index for its position in the target's passes, after pictures"


WIDTH = len(Field)
DEVICE_WIDTH = int(Field.DRAFTS_GREEDILY)
# On a device token ids follow: the one before the pending one, the pending one, then the drafts.
IDS_AT = DEVICE_WIDTH
DRAFTS_AT = IDS_AT + 2
# These columns hold the target's states; the draft model's follow them.
NUM_STATE_FIELDS = 3
