"""``/infill``: llama.cpp's endpoint of editors, which fills the gap between two texts."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from truedraft.server.schemas.common import StopStrings, said, with_parameters
from truedraft.server.schemas.strict import RequestPart


class ExtraFile(RequestPart):
    text: str
    filename: str | None = None


class InfillRequest(with_parameters(RequestPart)):  # type: ignore[misc]  # mypy knows no class that is made
    """Takes the two sides of a gap. Sampling parameters have this server's names and defaults."""

    model: str | None = Field(None, description="The served name; may be left out.")
    input_prefix: str | None = Field(None, description="What is before the gap.")
    input_suffix: str | None = Field(None, description="What is after the gap.")
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True)] | None = Field(
        None, description="Other files that the model is to see."
    )
    prompt: str | None = Field(None, description="What has begun to fill the gap.")
    n_predict: int | None = Field(
        None, ge=-1, description="Largest number of tokens to generate. Default, and -1: all that fit."
    )
    seed: int | None = said("seed")
    stop: StopStrings = Field(None, description="Strings that end the text; they are not part of it.")
    stream: bool | None = Field(None, description="Answer in server-sent events. Default false.")
    cache_prompt: bool | None = Field(None, description="Share what is computed of the prompt. Default true.")


class InfillAnswer(BaseModel):
    """Holds a whole answer, or a part of a streamed one, whose last part has ``stop`` and no content."""

    index: int = 0
    content: str
    tokens: list[int] = Field([], description="The tokens of the content.")
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    tokens_cached: int = Field(description="Tokens of the prompt that the cache had.")
    truncated: Literal[False] = False
    stop_type: Literal["none", "eos", "limit", "word"] = "none"
    stopping_word: str = ""
