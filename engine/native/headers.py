"""Reads the C headers' declarations for ctypes, instead of repeating them: one order of fields, one list of
arguments.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HEADERS = sorted(FOLDER.glob("*.h"))

Integer = ctypes.c_int64
TYPES = {
    "int64_t": Integer,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
FUNCTION = re.compile(r"^(int64_t|int|void) (\w+)\(([^)]*)\);", re.MULTILINE)


def fields_of(struct: str, *values: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Returns ``_fields_`` of the structure of that name: pointers are ``c_void_p`` whatever they point at.
    ``values`` are structures that are inside it."""
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + struct + ";", _code())
    types = TYPES | {value.__name__: value for value in values}
    return [field for line in body.split(";") if line.strip() for field in _declared(line, types)]


def declare_functions(library: ctypes.CDLL) -> None:
    """Gives the functions that the headers declare the types of their arguments and results."""
    for result, name, arguments in FUNCTION.findall(_code()):
        function = getattr(library, name)
        function.restype = TYPES[result]
        function.argtypes = (
            []
            if arguments == "void"
            else [kind for argument in arguments.split(",") for _, kind in _declared(argument, TYPES)]
        )


def _declared(line: str, types: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names and types of a declaration such as ``const float *cos, *sin``."""
    first, *others = line.split(",")
    *words, first = first.split()
    (kind,) = set(words) - {"const"}
    for name in (first, *others):
        pointer = "*" in name
        yield name.strip().lstrip("*"), ctypes.c_void_p if pointer else types[kind]


def _code() -> str:
    return COMMENT.sub("", "\n".join(path.read_text() for path in HEADERS))
