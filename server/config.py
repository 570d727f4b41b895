"""What the whole server can be told: the engine's settings and HTTP's own, declared once.

Flags, ``FORETOKEN_*`` environment, a YAML file and ``--help`` all come from the ``Settings`` declaration.
``load_settings`` ranks the sources: flags, environment, YAML, defaults. Called by ``server.cli``.
"""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from engine.config import BUNDLED_PAIR, EngineConfig

ENV_PREFIX = "FORETOKEN_"
BUNDLED_MODEL_NAME = "foretoken-demo"


class ConfigError(Exception):
    """The configuration cannot be used; the message is meant for the person who wrote it."""


def _split_commas(value: object) -> object:
    """Let flags and environment give a list as ``a,b``; YAML gives real lists."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return value
    return [item.strip() for part in parts for item in (part.split(",") if isinstance(part, str) else [part])]


class ServerSettings(BaseModel):
    """Server"""

    config: Path | None = Field(
        None, description="YAML file with any of these settings (keys written with underscores)."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: str = Field(
        "", description="Name that requests use in 'model'. Default: the target's folder name or hub id."
    )
    chat_template: Path | None = Field(
        None, description="Jinja chat template that replaces, or supplies, the model's own."
    )
    drain_timeout: float = Field(
        30,
        ge=0,
        description="Seconds that running requests get to finish when the server is told to stop, "
        "while new ones get 503. A second signal stops it at once.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message that is logged; info includes one line per request."
    )


class AccessSettings(BaseModel):
    """Access"""

    api_keys: Annotated[list[SecretStr], NoDecode, BeforeValidator(_split_commas)] = Field(
        [], description="Bearer keys that may use the API, comma-separated. Default: no authentication."
    )
    cors_origins: Annotated[list[str], NoDecode, BeforeValidator(_split_commas)] = Field(
        [], description="Web origins that may call the API from a browser, comma-separated. Default: none."
    )


class RequestSettings(BaseModel):
    """Requests and limits"""

    strict_parameters: bool = Field(
        False, description="Refuse unknown request fields instead of listing them in x-foretoken-ignored."
    )
    max_logprobs: int = Field(
        5, ge=5, description="Largest 'logprobs' on completions; above 20, chats and prompts may have it too."
    )
    max_body_size: ByteSize = Field(
        ByteSize(8 << 20), description="Largest request body; a larger one gets 413."
    )
    max_queued_requests: int = Field(
        256, ge=1, description="Prompts that may wait for their first token; more get 429."
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens that may wait for their first token; more get 429, "
        "but a request that finds nothing waiting is always taken. Default: no limit.",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds until an unfinished request ends with 504, or a stream with an error event. "
        "Default: no limit.",
    )


class Settings(BaseSettings, EngineConfig, RequestSettings, AccessSettings, ServerSettings):
    """Settings of ``foretoken serve``."""

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Rank constructor values (the YAML file's) below the environment; flags always rank first."""
        return env_settings, init_settings

    @model_validator(mode="after")
    def _name_the_model(self) -> Self:
        if not self.served_model_name:
            self.served_model_name = _default_model_name(str(self.target))
        return self

    def engine_config(self) -> EngineConfig:
        return EngineConfig.model_validate(self.model_dump(include=set(EngineConfig.model_fields)))


def load_settings(flags: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge all sources, or raise ``ConfigError`` with a message that names the setting at fault."""
    environ = os.environ if environ is None else environ
    check_flags(flags)
    check_environment(environ)
    path = _config_path(flags, environ)
    yaml_values = read_yaml(path) if path else {}
    try:
        return Settings(_cli_parse_args=list(flags), _cli_exit_on_error=False, **yaml_values)
    except ValidationError as error:
        # One line for each setting: a setting of several types is refused once for each of them.
        first = {detail["loc"][:1]: detail for detail in reversed(error.errors())}
        raise ConfigError("\n".join(map(_describe, reversed(first.values())))) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def check_flags(flags: Sequence[str]) -> None:
    """Refuse unknown flags by name before argparse does so with a page of usage."""
    known = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    negated = {
        f"--no-{name.replace('_', '-')}"
        for name, field in Settings.model_fields.items()
        if field.annotation is bool
    }
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and name not in known | negated:
            raise ConfigError(unknown_key("flag", name, known | negated))


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse variables that are nearly settings. Others may be: Kubernetes makes some of a service's name."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in environ:
        shown = name.upper()
        if shown.startswith(ENV_PREFIX) and shown not in known:
            nearest = difflib.get_close_matches(shown, sorted(known), n=1, cutoff=0.9)
            if nearest:
                raise ConfigError(f"Unknown variable {name}. Did you mean {nearest[0]}?")


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
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"Unknown {kind} {name}." + (f" Did you mean {nearest[0]}?" if nearest else "")


def _config_path(flags: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """The file must be read before the flags can be merged with it, so find its flag by hand."""
    for position, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == "--config":
            following = flags[position + 1] if position + 1 < len(flags) else None
            path = value if equals else following
            if not path:
                raise ConfigError("--config needs the path of a YAML file.")
            return Path(path)
    path = environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(path) if path else None


def _default_model_name(target: str) -> str:
    if Path(target).is_relative_to(BUNDLED_PAIR):
        return BUNDLED_MODEL_NAME
    return Path(target).resolve().name if Path(target).exists() else target


def _describe(error: ErrorDetails) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    given = error.get("input")
    shown = f", not {given!r}" if isinstance(given, str | int | float) and name != "api_keys" else ""
    return f"{name}: {error['msg']}{shown}."
