"""Options of the commands that are clients of a running server, ``bench`` and ``top``: flags only."""

import os
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict


class ClientOptions(BaseSettings):
    """Server"""

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_implicit_flags=True, cli_exit_on_error=False, extra="forbid"
    )

    base_url: str = Field("http://127.0.0.1:8000/v1", description="The server's URL, with /v1 or without.")
    api_key: str | None = Field(None, description="Default: OPENAI_API_KEY's value.")

    @property
    def key(self) -> str:
        return os.environ.get("OPENAI_API_KEY", "") if self.api_key is None else self.api_key

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leaves out the environment, where names such as SEED or MODEL belong to others."""
        return (init_settings,)


class BenchOptions(ClientOptions):
    """Put load on a running OpenAI-compatible server and measure it."""

    model: str | None = Field(None, description="Default: the first of /v1/models.")
    chat: bool = Field(False, description="Use chat completions instead of completions.")
    concurrency: list[PositiveInt] | None = Field(
        None, description="Numbers of clients in closed loops. Default: 1,4,16, or none with --rate."
    )
    rate: list[PositiveFloat] = Field([], description="Requests per second of open loops.")
    requests: PositiveInt | None = Field(
        None, description="Requests of one load, once. Default: 2 a client, 32 for a rate."
    )
    repeats: PositiveInt = Field(5, description="Number of times each load is run; loads alternate.")
    max_tokens: PositiveInt = Field(128, description="Largest number of tokens of each request.")
    temperature: float = Field(0.0, description="Sampling temperature, sent with each request.")
    ignore_eos: bool = Field(
        False,
        description="Generate exactly --max-tokens tokens each time; OpenAI's own API refuses the field.",
    )
    extra_body: dict[str, Any] = Field({}, description="JSON object that is added to every request.")
    prompts: Path | None = Field(
        None, description="File of prompts, one a line, text or JSON. Default: story openings."
    )
    seed: int = Field(0, description="Seed of the random arrival times under --rate.")
    timeout: PositiveFloat = Field(600.0, description="Seconds without a byte after which a request fails.")
    wait: float = Field(60.0, description="Seconds to wait for a server that is still loading.")
    save: Path | None = Field(
        None, description="JSON file to write everything to; a picture is saved next to it."
    )
