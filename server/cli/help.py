"""The texts of ``--help`` and of ``docs/configuration.md``, from the declarations of the settings.

argparse's own page shows Python types and raw defaults; these are for people. Called by ``server.cli.main``
and ``tools/write_configuration.py``.
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from truedraft.engine.commands.options import SamplingOptions
from truedraft.engine.config import EngineConfig
from truedraft.server.cli.settings_sources import flag_name
from truedraft.server.settings import ENV_PREFIX, Settings

MAX_WIDTH = 100
USUAL_WIDTH = 80  # lines are so long where no terminal says otherwise
INDENT = 30
NARROW = 80  # where descriptions begin below their flags

# The shared settings that ``--help`` shows; ``--help-all`` shows all.
EVERYDAY = (
    *("config", "host", "port", "served_model_name", "workers", "log_level", "api_keys", "cors_origins"),
    *("target", "draft", "device", "dtype", "quantize", "num_threads", "max_model_len"),
    *("method", "num_speculative_tokens", "max_num_sequences", "cache_memory"),
)

INTRODUCTION = """\
usage: truedraft serve [TARGET ...] [OPTIONS]

Start the HTTP server; without options, the bundled demo pair on http://127.0.0.1:8000. Several targets are
several models, which are loaded when a request names them.

An option --some-name can also be set as TRUEDRAFT_SOME_NAME in the environment or as some_name in a YAML
file given with --config. Flags win over the environment, and the environment over the file.
"""

COMMAND_INTRODUCTION = """\
{usage}

{description}
"""

ENGINE_INTRODUCTION = """
The engine's options can also be set as TRUEDRAFT_SOME_NAME in the environment or as some_name in a YAML file
given with --config.
"""

PAGE_INTRODUCTION = """\
# Configuration

Every setting of `truedraft serve`. Each is a key of a YAML file (`--config my.yaml`), a variable of the
environment and a flag; flags win over the environment, the environment over the file, the file over the
defaults. Lists are comma-separated in flags and variables and real lists in YAML; sizes are written as `2GiB`
or in bytes. An unknown key or flag is an error that names the nearest known one, and so is a variable that is
nearly one of these. Example files are in [configs/](../configs).

This page is written from the declarations in `engine/config.py` and `server/settings.py` by
`python -m tools.write_configuration`.
"""

TABLE_HEAD = "| key | flag | environment | default | what it does |\n|---|---|---|---|---|\n"

# Types are shown by these words. The most specific type comes first.
PLACEHOLDERS: Mapping[type, str] = {
    ByteSize: "SIZE",
    int: "N",
    float: "NUMBER",
    Path: "PATH",
    str: "TEXT",
}


def serve_help(*, is_whole: bool) -> str:
    """Returns the everyday options, or all of them."""
    return f"{_filled(INTRODUCTION)}\n{_options(setting_groups(), is_whole=is_whole)}"


# Commands whose first word may be the target, without its flag.
TARGET_FIRST = {"chat": ["[target]"], "check": ["[target]"]}


def command_help(command: str, kind: type[BaseModel], *, is_whole: bool) -> str:
    """Returns the help of another command: its own options, and the everyday ones that it shares, or all."""
    (description, own), *groups = reversed(list(setting_groups(kind)))
    positional = [name for name, field in own.items() if field.is_required()]
    positional += TARGET_FIRST.get(command, [])
    usage = " ".join(["usage: truedraft", command, *map(str.upper, positional), "[OPTIONS]"])
    introduction = COMMAND_INTRODUCTION.format(usage=usage, description=description)
    if issubclass(kind, EngineConfig):
        introduction += ENGINE_INTRODUCTION
    shared = _options(reversed(groups), is_whole=is_whole or not issubclass(kind, EngineConfig))
    return f"{_filled(introduction)}\n{_group('Options', own)}{shared}"


def _options(groups: Iterable[tuple[str, dict[str, FieldInfo]]], *, is_whole: bool) -> str:
    text, num_left_out = "", 0
    for title, fields in groups:
        shown = {name: field for name, field in fields.items() if is_whole or is_everyday(name)}
        text += _group(title, shown) if shown else ""
        num_left_out += len(fields) - len(shown)
    return text + (f"\n--help-all shows {num_left_out} more options.\n" if num_left_out else "")


def is_everyday(name: str) -> bool:
    """Tells whether ``--help`` shows a setting that commands share."""
    return name in EVERYDAY or name in SamplingOptions.model_fields


def _group(title: str, fields: Mapping[str, FieldInfo]) -> str:
    return f"\n{title}:\n" + "".join(_entry(name, field) for name, field in fields.items())


def configuration_page() -> str:
    return PAGE_INTRODUCTION + "".join(
        f"\n## {title}\n\n{TABLE_HEAD}" + "".join(_row(name, field) for name, field in fields.items())
        for title, fields in setting_groups()
    )


def setting_groups(kind: type[BaseModel] = Settings) -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    """Yields the classes that ``kind`` is made of: their titles, and the settings that each declares last."""
    declaring: dict[str, type] = {}
    for group in reversed(kind.__mro__):
        declaring |= dict.fromkeys(vars(group).get("__annotations__", {}), group)
    for group in reversed(kind.__mro__):
        names = [name for name, last in declaring.items() if last is group and name in kind.model_fields]
        if names:
            title = str(group.__doc__).partition("\n")[0]
            yield title, {name: kind.model_fields[name] for name in names}


def _entry(name: str, field: FieldInfo) -> str:
    width = _width()
    indent = INDENT if width >= NARROW else 6
    flag = f"  {_flag(name, field)}"
    default = _shown_default(field)
    description = f"{field.description}{f' [{default}]' if default else ''}"
    lines = textwrap.wrap(description, width - indent, break_on_hyphens=False)
    first = [flag] if len(flag) >= indent - 1 else [f"{flag:<{indent}}{lines.pop(0)}"]
    return "\n".join([*first, *(" " * indent + line for line in lines)]) + "\n"


def _width() -> int:
    """Returns the terminal's, or that of COLUMNS; a line of 100 characters is long enough to read."""
    return min(MAX_WIDTH, shutil.get_terminal_size((USUAL_WIDTH, 24)).columns)


def _filled(text: str) -> str:
    """Fills each paragraph anew; usage lines stay as they are."""
    return "\n\n".join(
        part if part.startswith("usage:") else textwrap.fill(part, _width(), break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    )


def _row(name: str, field: FieldInfo) -> str:
    default = _shown_default(field)
    cells = [
        f"`{name}`",
        f"`{_flag(name, field)}`",
        f"`{ENV_PREFIX}{name.upper()}`",
        f"`{default}`" if default else "",
        str(field.description),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _flag(name: str, field: FieldInfo) -> str:
    words = flag_name(name, field)
    if field.is_required():
        return name.upper()
    if field.annotation is bool:
        return f"--[no-]{words}"
    shown = _placeholder(field.annotation)
    if shown in ("N", "NUMBER") and str(field.description).startswith("Seconds"):
        shown = "SECONDS"
    return f"--{words} {shown}"


def _placeholder(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    origins = {get_origin(part) for part in (annotation, *get_args(annotation))}
    if list in origins:
        return "A,B,..."
    if dict in origins:
        return "JSON"
    words = [word for part in get_args(annotation) for word in get_args(part) if isinstance(word, str)]
    candidates = [annotation, *get_args(annotation), *map(_bare, get_args(annotation))]
    shown = [shown for kind, shown in PLACEHOLDERS.items() if kind in candidates][:1]
    return "|".join([*shown, *words])


def _bare(annotation: Any) -> Any:
    """The type inside ``Annotated``."""
    return getattr(annotation, "__origin__", None)


def _shown_default(field: FieldInfo) -> str:
    """Empty where there is none to show: the description tells what happens then."""
    if field.is_required():
        return ""
    if isinstance(field.default, ByteSize):
        return field.default.human_readable().replace(".0", "")
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    is_nothing = field.default is None or field.default in ("", [], {})
    return "" if is_nothing else str(field.default)
