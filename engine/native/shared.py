"""Names the numbers that C and Python share. Python defines them, and ``shared.h`` is written from here.

``python -m tools.write_headers`` writes it, and ``tests/engine/test_native_headers.py`` compares. Structures
go the other way: ``headers.py`` reads them in C's headers. The structure of a row alone is defined in Python,
too (``rows.h``).
"""

from collections.abc import Mapping
from enum import IntEnum, auto

from truedraft.engine.layers.mlp import ACTIVATIONS, SCORINGS, SWISH_LIMIT, SWISH_SLOPE
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.memory.recurrent_state import CHUNK, ROLLBACK
from truedraft.engine.rows.columns import RULES, Field
from truedraft.engine.sampling.ops import PROB_UNIT
from truedraft.engine.sampling.random import Stream
from truedraft.engine.sampling.splitmix import MIX_1, MIX_2, WEYL

# This many columns of quantised weights lie together.
COLUMNS = 32
# Bytes of the type FLOAT8 are read as numbers that are smaller by this factor.
E4M3_DIVISOR = 256


class WeightType(IntEnum):
    """Names the types of weights. WHOLE8 and FLOAT8 are bytes with scales; quantised embeddings add ggml's
    number of their type to QUANTISED."""

    FLOAT32 = 0
    FLOAT16 = auto()
    BFLOAT16 = auto()
    WHOLE8 = auto()
    FLOAT8 = auto()
    QUANTISED = 16


class PartKind(IntEnum):
    """Names the parts of layers, each of which has a structure of its own."""

    ATTENTION = 0
    GATED_MLP = auto()
    EXPERTS = auto()
    RECURRENT = auto()
    PARALLEL = auto()
    DENSE_AND_EXPERTS = auto()
    LATENT_ATTENTION = auto()


class RecurrenceRule(IntEnum):
    """Names the recurrences of layers with a running state (``layers/recurrent.py``)."""

    SHORT_CONV = 0
    DELTA_RULE = auto()
    MAMBA2 = auto()


def _numbered(names: tuple[str, ...]) -> dict[str, int]:
    return {name.upper(): number for number, name in enumerate(names)}


# Each entry is a comment for an enumeration, and the enumeration.
ENUMERATIONS: dict[str, Mapping[str, int]] = {
    "Rules of verification.": {f"{rule.name}_RULE": rule.code for rule in RULES},
    "Streams of random numbers.": {f"{stream.name}_STREAM": stream for stream in Stream},
    "What weights are kept in; quantised embeddings add a type of blocks to QUANTISED.": dict(
        WeightType.__members__
    ),
    "Types of quantised blocks, as ggml numbers them.": TYPES,
    "Activations of MLPs.": _numbered(ACTIVATIONS),
    "How a router's numbers become scores.": _numbered(SCORINGS),
    "What layers are made of: a part's kind says which structure its data is.": dict(PartKind.__members__),
    "What layers with a running state do with it.": dict(RecurrenceRule.__members__),
}
# Each entry is a comment for a constant, and its value in C.
CONSTANTS = {
    "RULES_BY_PROBS": (
        f"{sum(rule.uses_draft_probs << rule.code for rule in RULES):#x}",
        "a bit for each rule that compares the models' probabilities",
    ),
    "STATE_CHUNK": (str(CHUNK), "tokens between two positions where a state is folded"),
    "STATE_ROLLBACK": (str(ROLLBACK), "the most tokens that may be taken back after a pass"),
    "PROB_UNIT": (PROB_UNIT.hex(), "sums of probabilities count it"),
    "COLUMNS": (str(COLUMNS), "columns of quantised weights that lie together"),
    "E4M3_DIVISOR": (str(E4M3_DIVISOR), "divides numbers of the type FLOAT8"),
    "SWISH_LIMIT": (f"{SWISH_LIMIT}f", "the largest number that clamped_swish lets through"),
    "SWISH_SLOPE": (f"{SWISH_SLOPE}f", "makes x sigmoid(SWISH_SLOPE x) of x"),
    **{
        name: (f"{value:#x}u", "of splitmix64")
        for name, value in (("WEYL", WEYL), ("MIX_1", MIX_1), ("MIX_2", MIX_2))
    },
}
OPENING = """/* Written by "python -m tools.write_headers" from {source}; change that. */

#ifndef {guard}
#define {guard}
"""


def shared_header() -> str:
    """Returns the text of ``shared.h``."""
    lines = [OPENING.format(source="shared.py", guard="TRUEDRAFT_SHARED_H")]
    for what, members in ENUMERATIONS.items():
        lines += [f"/* {what} */", "enum {"]
        lines += [f"    {name} = {int(number)}," for name, number in members.items()]
        lines += ["};", ""]
    lines += [f"#define {name} {value} /* {what} */" for name, (value, what) in CONSTANTS.items()]
    return "\n".join([*lines, "", "#endif", ""])


def rows_header() -> str:
    """Returns the text of ``rows.h``: a line of the table of rows, as ``rows.columns`` describes it."""
    opening = OPENING.format(source="engine/rows/columns.py", guard="TRUEDRAFT_ROWS_H")
    declared = [f"    {field.type}{field.name.lower()};" for field in Field]
    width = max(map(len, declared))
    fields = [f"{line:{width}} /* {field.text} */" for line, field in zip(declared, Field, strict=True)]
    lines = [opening, "#include <stdint.h>", "", "typedef struct {", *fields, "} Row;"]
    return "\n".join([*lines, "", "#endif", ""])
