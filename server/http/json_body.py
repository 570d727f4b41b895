"""Reads a request body as strict JSON, and refuses what Python's parser accepts but JSON or UTF-8 does not.

``server.http.json_route`` calls it before pydantic sees anything, so that no part of a body, known or not,
can hold a value that breaks later: in the tokenizer, in an error message, on the way to the worker.
"""

import json
import re
from collections import Counter
from typing import Any, NoReturn

from truedraft.engine.text.schema.numbers import read_float
from truedraft.server.errors import InvalidRequestError, RequestTooLargeError

# Lists and objects inside each other. Far below Python's and pydantic's own limits, far above any real body.
MAX_DEPTH = 100

# Each is created in one go, during which nothing else runs: a list of MAX_VALUES numbers takes 0.2 s.
MAX_VALUES = 2_000_000
MAX_CONTAINERS = 100_000

# A string as a whole, or a character that begins a list, an object, a value of an object or a further value.
# A string without an end reaches to the body's: the scan never starts again inside one, so it is linear.
STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{:,]', re.DOTALL)

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(content: bytes) -> Any:
    """Returns the value; raises ``InvalidRequestError`` or ``RequestTooLargeError``."""
    _check_size(content)
    try:
        value = _decoder.decode(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8, from byte {error.start} on") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg}, line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python does not read integers of thousands of digits
        raise _invalid("it has a number with too many digits") from None
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise _too_deep()
    if SURROGATE_ESCAPE.search(content):
        _check_surrogates(value)
    return value


def _check_size(content: bytes) -> None:
    """Count values before they are made. Most bodies hold less even if every byte of their strings counts."""
    num_containers = content.count(b"[") + content.count(b"{") + content.count(b":")
    if num_containers <= MAX_CONTAINERS and content.count(b",") <= MAX_VALUES:
        return
    num_containers = num_values = 0
    for match in STRUCTURE.finditer(content):
        character = match[0][:1]
        num_containers += character in b"[{:"
        num_values += character == b","
        if num_containers > MAX_CONTAINERS:
            raise _too_large(f"more than {MAX_CONTAINERS} lists, objects and keys")
        if num_values > MAX_VALUES:
            raise _too_large(f"more than {MAX_VALUES} values")


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON leaves open which of two equal keys counts, so a client that sends both cannot know."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name in fields if counts[name] > 1)
        shown = twice.encode(errors="backslashreplace").decode()
        raise InvalidRequestError(
            f"The request body has the key '{shown}' twice in one object.", param=shown, code="duplicate_key"
        )
    return fields


_decoder = json.JSONDecoder(
    parse_float=read_float, parse_constant=_refuse_constant, object_pairs_hook=_unique
)


def _is_too_deep(value: Any) -> bool:
    """Goes down level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _check_surrogates(value: Any) -> None:
    r"""A pair of escapes such as ``\ud83d\ude00`` has become one character; a single half is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise _invalid(f"\\u{half:04x} is half of a character, without its other half") from None


def _too_deep() -> InvalidRequestError:
    return _invalid(f"lists and objects are nested deeper than {MAX_DEPTH} levels")


def _too_large(reason: str) -> RequestTooLargeError:
    return RequestTooLargeError(f"The request body holds {reason}.")


def _invalid(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is not valid JSON: {reason}.", code="invalid_json")
