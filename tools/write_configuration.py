"""Write what follows from the declarations of the settings.

These are docs/configuration.md, the types of ``LLM``'s keyword arguments in engine/library/settings.py, and
the table of other servers' flags in docs/migrating.md.

python -m tools.write_configuration
"""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize

from truedraft.engine.config import EngineConfig
from truedraft.server.cli.foreign_flags import table
from truedraft.server.cli.help import configuration_page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
TYPES = ROOT / "engine" / "library" / "settings.py"
MIGRATING = PAGE.with_name("migrating.md")
BEGIN, END = "<!-- written by tools.write_configuration -->\n", "\n<!-- end -->"
OWN_ARGUMENTS = ("target", "draft")  # LLM declares these itself

HEADER = '''"""The keyword arguments of ``LLM`` and their types, for editors and type checkers.

Written from ``EngineConfig`` by ``python -m tools.write_configuration``; a test compares the two.
"""

from os import PathLike
from typing import Literal, TypedDict


class LLMSettings(TypedDict, total=False):
    """Settings of ``truedraft serve`` that concern models, speculation, batching and caches.

    Each is explained in docs/configuration.md.
    """

'''


def library_settings() -> str:
    """Returns the module that declares ``LLMSettings``."""
    fields = EngineConfig.model_fields.items()
    lines = [
        f"    {name}: {written(field.annotation)}\n" for name, field in fields if name not in OWN_ARGUMENTS
    ]
    return HEADER + "".join(lines)


def written(annotation: Any) -> str:
    """Returns a type as source text. A number of bytes may also be a text such as ``2GiB``."""
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(_quoted, get_args(annotation)))}]"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(written, get_args(annotation)))
    if get_origin(annotation) is list:
        return f"list[{', '.join(map(written, get_args(annotation)))}]"
    if hasattr(annotation, "__metadata__"):
        return written(annotation.__origin__)
    if annotation is ByteSize:
        return "int | str"
    if annotation is Path:
        return "str | PathLike[str]"
    return "None" if annotation is type(None) else str(annotation.__name__)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def with_table(page: str) -> str:
    """Returns docs/migrating.md with the table as the module has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    migrating = with_table(MIGRATING.read_text(encoding="utf-8"))
    for path, text in ((PAGE, configuration_page()), (TYPES, library_settings()), (MIGRATING, migrating)):
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
