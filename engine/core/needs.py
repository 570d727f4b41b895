"""Names what the rows of a step need of whatever runs it. Sets of names are quick to unite and to compare."""

from collections.abc import Set
from enum import StrEnum, auto


class Need(StrEnum):
    """Names abilities that the loop in C may lack. A row's needs never change; others arise from a step's
    plan."""

    PROMPT = auto()  # more known tokens than the pending one, or a piece of a prompt
    LONG_PROMPT = auto()  # many of them, or only a part of them; or the log-probabilities of a prompt
    DRAFT_MODEL = auto()  # drafts from the draft model
    HEAD = auto()  # drafts from a head on the target's states
    PROPOSER = auto()  # drafts from another proposer
    CATCH_UP = auto()  # its cache computes more than a few missing tokens first, or instead of a draft
    SAMPLING = auto()  # temperature above 0
    OTHER_DRAWS = auto()  # the draft model is greedy where the target is not, or the other way round
    BLOCK_RULE = auto()  # block verification
    BIAS = auto()  # logit_bias, or stop tokens forbidden below min_tokens
    PENALTIES = auto()  # presence, frequency, repetition
    RULES = auto()  # tokens that the checkpoint's generation config forbids or forces
    PICTURES = auto()  # pictures in the prompt, after which positions are shifted indices
    MASK = auto()  # tokens allowed by position, by a grammar
    LOGPROBS = auto()
    TRACE = auto()


# The loop in C runs a step if it supports all of the step's needs: ``needs <= supports``.
Needs = Set[Need]
EVERY_NEED: Needs = frozenset(Need)
