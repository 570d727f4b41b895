"""Declares the options of the terminal's commands, in addition to the engine's settings, which all of them
have.

They stand apart from the commands so that help and wrong usage do not wait for torch.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.fetch_bar import fetch_bar
from truedraft.engine.hub.located import located
from truedraft.engine.messages import MTP
from truedraft.engine.parameters import CUTS, PARAMETERS
from truedraft.engine.training.defaults import EAGLE_RATE, EAGLE_VOCABULARY, MTP_RATE

S = TypeVar("S", bound=EngineConfig)


def check_adapters(settings: EngineConfig) -> None:
    """Raises ``ModelLoadError`` for adapters, since no option of a command chooses one."""
    if settings.lora_modules:
        raise ModelLoadError(
            "lora_modules is for truedraft serve and for LLM in Python, where requests choose an adapter; "
            "leave it out here"
        )


def with_models(settings: S) -> S:
    """Returns the settings with paths of models, after fetching what is not here; raises
    ``ModelLoadError``."""
    check_adapters(settings)
    with fetch_bar() as tell:
        return located(settings, tell, lambda note: print(note, file=sys.stderr))


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


def option(name: str) -> Any:
    """Returns the option of a sampling parameter, as its row describes it. Its default is the value that the
    model's makers recommend."""
    row = PARAMETERS[name]
    assert row.range is not None
    help_ = row.help
    if row.gguf_key:
        help_ += f" Default: what the model's makers recommend, else {row.default:g}."
    limits: Any = row.range.limits
    return Field(None, **limits, description=help_)


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


class ChatSettings(EngineConfig, SamplingOptions, BaseSettings):
    """Talk with a model in the terminal; its chat template writes the conversation out."""

    model_config = command_options("chat")

    system: str | None = Field(None, description="System prompt.")
    max_tokens: int | None = Field(
        None, ge=1, description="Tokens of an answer at most. Default: what the model's context leaves."
    )
    stats: bool = Field(False, description="Show the speed and what speculation did after each answer.")


class GenerateSettings(EngineConfig, SamplingOptions, BaseSettings):
    """Stream a completion to the terminal; accepted draft tokens are coloured."""

    model_config = command_options("generate")

    prompt: CliPositionalArg[str] = Field(description="Text to continue.")
    compare: bool = Field(False, description="Also decode without speculation and print both speeds.")
    rounds: bool = Field(
        False, description="Print each round: what was drafted, what the target made of it, the text."
    )
    max_tokens: int = Field(200, ge=1, description="Largest number of tokens to generate.")
    repeats: int = Field(5, ge=1, description="Timed pairs of runs under --compare.")


class ReplaySettings(EngineConfig, BaseSettings):
    """Replay a traced answer against both models and confirm every decision."""

    model_config = command_options("verify-trace")

    draft: str | None = Field(
        None,
        description="What has drafted, as for the server; where that was auto, what its start says is taken.",
    )
    file: CliPositionalArg[Path] = Field(
        description="JSON file: an answer to a request with speculation: {trace: true}, "
        "or the truedraft object of one."
    )
    tolerance: float | None = Field(
        None, gt=0, description="How far probabilities may be off. Default: 0.0001, more in half precision."
    )


class CheckSettings(EngineConfig, BaseSettings):
    """Check a pair of models: tokenizers, exactness, acceptance and speed."""

    model_config = command_options("check")

    prompts: Path | None = Field(
        None,
        description="File of prompts, one a line. A target with a chat template gets each as a user's "
        "message. Default: four openings, to be continued.",
    )
    chat: bool = Field(True, description="Apply the target's chat template, if it has one, to prompts.")
    compare: bool = Field(
        True,
        description="Measure what else the target could draft with here, too: n-grams, the MTP head of its "
        "checkpoint, self:int8 and self:int4.",
    )
    compare_with: list[str] = Field(
        [], description="More drafts to compare with: folders or hub ids of models and heads."
    )
    samples: int = Field(
        500,
        ge=100,
        description="Texts sampled under each rule, with random parameters; twice as many under block.",
    )
    repeats: int = Field(5, ge=1, description="Timed runs of each variant.")
    seconds: float = Field(
        14.0, gt=0, description="Seconds to spend on measuring the speed of each draft, roughly."
    )
    long_seconds: float = Field(
        20.0,
        gt=0,
        description="Seconds to spend on texts beyond the target's windows and original contexts, roughly.",
    )
    json_output: bool = Field(
        False, validation_alias="json", description="Print one JSON object instead of the report."
    )


class TrainSettings(EngineConfig, BaseSettings):
    """Train a head that drafts for a target, from texts that the target writes itself."""

    model_config = command_options("train-draft")

    prompts: Path | None = Field(
        None,
        description="File of prompts that texts begin with: one a line, or in a .jsonl file objects with "
        "'messages' or 'prompt'.",
    )
    out: Path | None = Field(None, description="Folder for the head.")
    head: str | None = Field(
        None,
        description="MTP head to train further: mtp, that of the target's checkpoint, or a file or folder of "
        "such a head. Default: a new EAGLE-3 head is trained.",
    )
    tokens: int = Field(1_000_000, ge=1, description="Tokens to learn from, written by the target.")
    text_tokens: int = Field(256, ge=8, description="Tokens of a text, its prompt included.")
    temperature: float = Field(1.0, ge=0, le=2, description="Temperature at which the target writes.")
    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["auto", "full"] = Field(
        "auto",
        description="Tokens that the head drafts, the most frequent ones of the texts; full: all. auto: all, "
        f"but no more than {EAGLE_VOCABULARY} for a new head. An MTP head is trained on these and can "
        "draft the others, too.",
    )
    steps: int = Field(4, ge=1, le=8, description="Drafted tokens that the head is trained for.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        description=f"Largest learning rate. Default: {EAGLE_RATE}, for an MTP head "
        f"{MTP_RATE}, by the target's hidden size.",
    )
    texts_per_update: int = Field(1, ge=1, description="Texts of one step of the optimiser.")

    @model_validator(mode="after")
    def _has_files(self) -> Self:
        if self.prompts is None or self.out is None:
            raise ValueError("--prompts names the file of prompts, and --out the folder for the head")
        self.prompts, self.out = self.prompts.expanduser(), self.out.expanduser()
        if self.head is not None and self.head.startswith("~"):
            self.head = str(Path(self.head).expanduser())
        if self.draft == MTP and self.head is None:
            raise ValueError("--draft drafts for a server: --head mtp names the head to train further")
        return self


class ModelCommand(BaseSettings):
    """Model"""

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_implicit_flags=True, cli_exit_on_error=False, extra="forbid"
    )


class PullSettings(ModelCommand):
    """Fetch a model from the hub, or go on where an earlier fetch has ended; prints its path."""

    name: CliPositionalArg[str] = Field(
        description="owner/repository, owner/repository:QUANT, owner/repository/file.gguf, or its address."
    )
    allow_pickle: bool = Field(False, description="Fetch pytorch_model.bin where there are no safetensors.")
    trust_remote_code: bool = Field(False, description="Fetch the code that a checkpoint brings along, too.")


class ListSettings(ModelCommand):
    """List the models that have been fetched, the last used ones first."""

    paths: bool = Field(False, description="Print only the paths, one a line.")


class RemoveSettings(ModelCommand):
    """Remove a fetched model, or one quantisation of it, from this machine."""

    name: CliPositionalArg[str] = Field(
        description="owner/repository for all of it, owner/repository:QUANT or a file for a part."
    )
