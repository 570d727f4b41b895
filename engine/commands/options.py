"""The terminal's commands read the engine's settings and their own options, as ``serve`` does."""

from typing import Any

from pydantic import BaseModel, Field
from pydantic_settings import SettingsConfigDict

from truedraft.engine.config import EngineConfig
from truedraft.engine.llm import LLM
from truedraft.engine.models.generation_defaults import default_sampling
from truedraft.engine.parameters import CUTS, PARAMETERS


def command_options(name: str) -> SettingsConfigDict:
    """Errors are exceptions, which ``server.cli.main`` prints as one line."""
    return SettingsConfigDict(
        env_prefix="TRUEDRAFT_",
        cli_prog_name=f"truedraft {name}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        extra="forbid",
    )


def option(name: str, default: Any = None) -> Any:
    """Returns the option of a sampling parameter, as its row describes it. ``default`` None leaves the value
    to what the model's makers recommend."""
    row = PARAMETERS[name]
    assert row.range is not None
    help_ = row.help
    if default is None and row.gguf_key:
        help_ += f" Default: what the model's makers recommend, else {row.default:g}."
    limits: Any = row.range.limits
    return Field(default, **limits, description=help_)


class SamplingOptions(BaseModel):
    """Sampling"""

    temperature: float | None = option("temperature")
    top_p: float | None = option("top_p")
    top_k: int | None = option("top_k")
    min_p: float | None = option("min_p")
    seed: int | None = Field(None, description="Makes sampling repeatable. Default: drawn anew.")

    def asked(self) -> dict[str, Any]:
        """Returns the parameters that were given a value."""
        values = {name: getattr(self, name) for name in ("temperature", "seed", *CUTS)}
        return {name: value for name, value in values.items() if value is not None}


def recommended(llm: LLM, settings: EngineConfig) -> dict[str, Any]:
    """Returns what the target's generation config sets, unless the settings say to leave it."""
    if settings.generation_config == "none":
        return {}
    values: dict[str, Any] = default_sampling(llm.core.target.model.generation_config)
    return values | ({"top_k": int(values["top_k"])} if "top_k" in values else {})
