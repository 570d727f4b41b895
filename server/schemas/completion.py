"""``/v1/completions``: request, response and chunk (which have the same shape)."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field

from truedraft.server.schemas.answer import Answer, Choice, is_none
from truedraft.server.schemas.common import GenerationRequest
from truedraft.server.schemas.logprobs import CompletionLogprobs, PromptLogprobs
from truedraft.server.schemas.strict import alternative, tag

TokenId = Annotated[int, Field(ge=0)]


def _kind_of_prompt(value: Any) -> str | None:
    """Tells which of the four forms a prompt has, so that an error is about that form only."""
    if isinstance(value, str):
        return tag("string")
    if not isinstance(value, list) or not value:
        return None
    return {str: tag("strings"), int: tag("tokens"), list: tag("token_lists")}.get(type(value[0]))


Prompt = Annotated[
    Annotated[str, alternative("string")]
    | Annotated[list[str], Field(fail_fast=True), alternative("strings")]
    | Annotated[list[TokenId], Field(fail_fast=True), alternative("tokens")]
    | Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(fail_fast=True),
        alternative("token_lists"),
    ],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, or a list of strings, token ids or token-id lists",
    ),
]


def _false_as_none(value: object) -> object:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    prompt_field: ClassVar[str] = "prompt"

    prompt: Prompt = Field(description="Whitespace is text like any other; no tokens at all are refused.")
    max_tokens: int | None = Field(
        None, ge=0, description="Largest number of tokens to generate. Default 16."
    )
    max_completion_tokens: int | None = Field(
        None, ge=0, description="The name of max_tokens on chats; both may be given if they are equal."
    )
    suffix: str | None = Field(
        None,
        description="What comes after the text: it fills the gap, if the model has tokens for that.",
    )
    echo: bool | None = Field(None, description="Start the text with the prompt.")
    logprobs: Annotated[int | None, Field(ge=0), BeforeValidator(_false_as_none)] = Field(
        None, description="Report log-probabilities: the token's own, and this many of the most likely ones."
    )
    best_of: int | None = Field(None, ge=1, description="Accepted if it equals n.")


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)


class Completion(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
