"""The text of ``foretoken serve --help``, written from the ``Settings`` declaration.

argparse's own page shows Python types and raw defaults; this one is for people. Called by ``server.cli``.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from engine.config import EngineConfig
from server.config import Settings

WIDTH = 100
INDENT = 30

INTRODUCTION = """\
usage: foretoken serve [OPTIONS]

Start the HTTP server; without options, the bundled demo pair on http://127.0.0.1:8000.

An option --some-name can also be set as FORETOKEN_SOME_NAME in the environment or as some_name in a YAML
file given with --config. Flags win over the environment, and the environment over the file.
"""

# How types are shown, most specific first.
PLACEHOLDERS: Mapping[type, str] = {ByteSize: "SIZE", int: "N", float: "X", Path: "PATH", str: "TEXT"}


def serve_help() -> str:
    engine = {
        name: field for name, field in Settings.model_fields.items() if name in EngineConfig.model_fields
    }
    http = {name: field for name, field in Settings.model_fields.items() if name not in engine}
    return f"{INTRODUCTION}\n{_section('server', http)}\n{_section('models and engine', engine)}"


def _section(title: str, fields: Mapping[str, FieldInfo]) -> str:
    return f"{title}:\n" + "".join(_entry(name, field) for name, field in fields.items())


def _entry(name: str, field: FieldInfo) -> str:
    flag = f"  --{name.replace('_', '-')} {_placeholder(field.annotation)}".rstrip()
    default = _shown_default(field)
    description = f"{field.description}{f' [{default}]' if default else ''}"
    lines = textwrap.wrap(description, WIDTH - INDENT)
    first = [flag] if len(flag) >= INDENT - 1 else [f"{flag:<{INDENT}}{lines.pop(0)}"]
    return "\n".join([*first, *(" " * INDENT + line for line in lines)]) + "\n"


def _placeholder(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if annotation is bool:
        return ""
    if get_origin(annotation) is list:
        return "A,B,..."
    candidates = [annotation, *get_args(annotation)]
    return next((shown for kind, shown in PLACEHOLDERS.items() if kind in candidates), "VALUE")


def _shown_default(field: FieldInfo) -> str:
    """Empty where there is none to show: the description tells what happens then."""
    if isinstance(field.default, ByteSize):
        return field.default.human_readable(separator=" ")
    is_nothing = field.default is None or field.default is False or field.default in ("", [])
    return "" if is_nothing else str(field.default)
