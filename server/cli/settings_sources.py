"""Reads the settings from where they come: flags, environment, a YAML file, in this order of rank.

Every failure is a ``ConfigError`` that names the setting at fault. Called by ``server.cli.main``.
"""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

from truedraft.engine.config import EngineConfig
from truedraft.engine.config_errors import describe, nearest
from truedraft.engine.errors import ConfigError
from truedraft.server.cli.foreign_flags import hint
from truedraft.server.settings import ENV_PREFIX, Settings

S = TypeVar("S", bound=BaseSettings)
ADAPTERS = "--lora-modules"


def load_settings(flags: Sequence[str]) -> Settings:
    """Reads those of ``truedraft serve``, with usual short forms: the target or several models first and
    without a flag, and ``--api-key`` for one key."""
    return read_options(
        Settings,
        [
            f"--api-keys{flag.removeprefix('--api-key')}" if flag.partition("=")[0] == "--api-key" else flag
            for flag in entries_apart(models_first(flags))
        ],
    )


def entries_apart(flags: Sequence[str]) -> Sequence[str]:
    """Gives each of several values of ``--lora-modules`` a flag of its own."""
    found: list[str] = []
    is_open = False
    for flag in flags:
        if is_open and not flag.startswith("-"):
            found += [flag] if found[-1] == ADAPTERS else [ADAPTERS, flag]
            continue
        is_open = flag.partition("=")[0] == ADAPTERS
        found.append(flag)
    return found


def models_first(flags: Sequence[str]) -> Sequence[str]:
    """Returns flags before which the target may have stood, or several models, without their flag."""
    number = next((place for place, flag in enumerate(flags) if flag.startswith("-")), len(flags))
    if number < 2:
        return target_first(flags)
    return [f"--models={','.join(flags[:number])}", *flags[number:]]


def target_first(flags: Sequence[str]) -> Sequence[str]:
    """Returns flags of which the first may have been the target, without its flag."""
    return ["--target", *flags] if flags and not flags[0].startswith("-") else flags


def read_options(kind: type[S], flags: Sequence[str]) -> S:
    """A command's options: from its flags, and those of the engine and the server from the environment and a
    file, too. ``ConfigError`` with a message that names the option at fault."""
    values: dict[str, Any] = {}
    if issubclass(kind, EngineConfig):
        check_environment(os.environ, kind)
        flags, path = _take_config(flags, os.environ)
        given = {name.upper() for name in os.environ}
        values = {
            name: value
            for name, value in (read_yaml(path) if path else {}).items()
            if name in kind.model_fields and f"{ENV_PREFIX}{name.upper()}" not in given
        }
        flags = [
            f"--tensor-parallel-size{flag.removeprefix('-tp')}" if flag.partition("=")[0] == "-tp" else flag
            for flag in flags
        ]
    check_flags(flags, kind)
    try:
        return kind(_cli_parse_args=list(flags), _cli_exit_on_error=False, **values)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None
    except SettingsError as error:
        raise ConfigError(wrong_usage(error)) from None


def check_flags(flags: Sequence[str], kind: type[BaseModel]) -> None:
    """Refuses unknown flags by name before argparse does so with a list of all of them."""
    options = [(name, field) for name, field in kind.model_fields.items() if not field.is_required()]
    fields = {flag_name(name, field): field for name, field in options}
    known = {f"--{name}" for name in fields}
    negated = {f"--no-{name}" for name, field in fields.items() if field.annotation is bool}
    for flag in flags:
        name = flag.partition("=")[0]
        is_flag = name.startswith("--") or hint(name)
        if is_flag and name not in known | negated:
            raise ConfigError(unknown_key("flag", name, known | negated))


def flag_name(name: str, field: FieldInfo) -> str:
    alias = field.validation_alias
    return (alias if isinstance(alias, str) else name).replace("_", "-")


def check_environment(environ: Mapping[str, str], kind: type[BaseModel]) -> None:
    """Refuse variables that are nearly settings. Others may be: Kubernetes makes some of a service's name."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in (*Settings.model_fields, *kind.model_fields)}
    for name in environ:
        shown = name.upper()
        if not shown.startswith(ENV_PREFIX) or shown in known:
            continue
        if meant := difflib.get_close_matches(shown, sorted(known), n=1, cutoff=0.9):
            raise ConfigError(f"Unknown variable {name}. Did you mean {meant[0]}?")


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"The configuration file {path} must hold 'key: value' lines.")
    known = set(Settings.model_fields) - {"config"}
    for key in values:
        if key not in known:
            raise ConfigError(unknown_key("key", str(key), known) + f" (in {path})")
    return values


def unknown_key(kind: str, name: str, known: Iterable[str]) -> str:
    return f"Unknown {kind} {name}." + (hint(name) or nearest(name, known))


def _take_config(flags: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], Path | None]:
    """The other flags, and the file, which must be read before the flags can be merged with it."""
    for position, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == "--config":
            end = position + (1 if equals else 2)
            path = value if equals else "".join(flags[position + 1 : end])
            if not path:
                raise ConfigError("--config needs the path of a YAML file.")
            return [*flags[:position], *flags[end:]], Path(path)
    path = environ.get(f"{ENV_PREFIX}CONFIG", "")
    return list(flags), Path(path) if path else None


def wrong_usage(error: SettingsError) -> str:
    """Returns argparse's own message, such as one about a flag without its value."""
    return f"{str(error).removeprefix('error parsing CLI: ')}."
