"""JSON of answers that may be large, written in pieces.

pydantic writes a model in one go, during which no other thread of Python runs; what is written here lets the
event loop have its turns. Called in a thread by ``server.routes.responding`` and ``server.routes.tokenize``.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

# Items that are written in one go: some milliseconds.
BATCH = 2000


def write_json(value: Any) -> bytes:
    """The same JSON as ``model_dump_json``'s."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        yield from _model(value)
    elif isinstance(value, list) and (len(value) > BATCH or any(isinstance(v, BaseModel) for v in value)):
        yield from _list(value)
    else:
        yield to_json(value)


def _model(model: BaseModel) -> Iterator[bytes]:
    separator = b"{"
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if field.exclude_if is not None and field.exclude_if(value):
            continue
        yield separator + to_json(name) + b":"
        yield from _pieces(value)
        separator = b","
    yield b"{}" if separator == b"{" else b"}"


def _list(items: list[Any]) -> Iterator[bytes]:
    yield b"["
    if len(items) > BATCH:
        for start in range(0, len(items), BATCH):
            yield (b"," if start else b"") + to_json(items[start : start + BATCH])[1:-1]
    else:
        for number, item in enumerate(items):
            yield b"," if number else b""
            yield from _pieces(item)
    yield b"]"
