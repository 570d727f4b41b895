"""Writes what derives from the rows of the parameters: the table in the documentation, and the page's list.

python -m tools.write_parameters
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from truedraft.engine.parameters import PARAMETERS, Parameter

ROOT = Path(__file__).parent.parent
NAMES = {float: "number", int: "integer", str: "string", bool: "boolean", type(None): "null"}
INTRODUCTION = """# Parameters of a request

Written by `python -m tools.write_parameters` from `engine/parameters.py`, where each parameter is one row.
A null, or a field left out, means the default. Marked defaults (\\*) give way to those of the target's
`generation_config.json` (setting `generation_config`). The [library](python-api.md) has all of them
by these names. [The support matrix](support-matrix.md) says what each of them does under each verification
rule, and [the API](http-api.md) which other fields there are.

| parameter | type | values | default | endpoints | what it does |
|---|---|---|---|---|---|
"""
FIELD_NAMES = """
Elsewhere `max_tokens` is `max_completion_tokens` (chats) or `max_output_tokens` (responses), `logprobs` is
`top_logprobs` (chats and responses), and `grammar` is in [`structured_outputs`](structured-outputs.md).
"""


def table() -> str:
    """Returns docs/parameters.md."""
    return INTRODUCTION + "".join(map(_row, PARAMETERS.values())) + FIELD_NAMES


def _row(row: Parameter) -> str:
    values = "" if row.range is None else str(row.range)
    default = "" if row.default is None or row.default in ([], {}) else _default(row)
    mark = "\\*" if row.gguf_key else ""
    return f"| `{row.name}` | {_type(row.type)} | {values} | {default}{mark} | {row.where} | {row.help} |\n"


def _default(row: Parameter) -> str:
    return json.dumps(row.default) if isinstance(row.default, bool) else f"{row.default:g}"


def _type(kind: Any) -> str:
    """Returns a type in JSON's words; null goes without saying."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return ", ".join(_type(each) for each in get_args(kind) if each is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if origin is list:
        return f"list of {_type(get_args(kind)[0])}s"
    if origin is dict:
        key, value = get_args(kind)
        return f"object of {_type(value)}s by {'token id' if key is int else 'name'}"
    return NAMES[kind]


def page_module() -> str:
    """Returns the page's list of number fields, and which of the parameters OpenAI's SDK knows."""
    fields = [_field(row) for row in PARAMETERS.values() if row.step is not None]
    known = [row.name for row in PARAMETERS.values() if row.is_openai]
    lines = "".join(f"  {json.dumps(field)},\n" for field in fields)
    return (
        '// Written by "python -m tools.write_parameters" from engine/parameters.py; change that.\n\n'
        f"export const SAMPLING = [\n{lines}];\n\n"
        f"// OpenAI's SDK has arguments of these names.\nexport const OPENAI = {json.dumps(known)};\n"
    )


def _field(row: Parameter) -> dict[str, Any]:
    """Describes an input of type number. Where makers recommend a value, an empty field asks for that."""
    assert row.range is not None
    assert row.step is not None
    first, _, rest = row.name.partition("_")
    label = f"{first.capitalize()}{'-' if len(rest) == 1 else ' '}{rest}".strip()
    low, high = row.range.low + (row.step if row.range.above else 0), row.range.high
    if row.type is int and row.off:
        low = max(low, row.default)
    bounds: dict[str, Any] = {"min": low, "max": high}
    if high is None or high > 2**53:
        bounds = {"min": low} if low > -(2**53) else {}
    placeholder = "default" if row.gguf_key else "random" if row.default is None else f"{row.default:g}"
    return {"name": row.name, "label": label, **bounds, "step": row.step, "placeholder": placeholder}


WRITTEN: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "parameters.md": table,
    ROOT / "server" / "page" / "parameters.js": page_module,
}


def main() -> None:
    for path, text in WRITTEN.items():
        path.write_text(text(), encoding="utf-8")
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
