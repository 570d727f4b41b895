"""``/v1/completions``: request, response and chunk (which have the same shape)."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from server.schemas.common import Answer, Choice, GenerationRequest, is_none

TokenId = Annotated[int, Field(ge=0)]


def _kind_of_prompt(value: Any) -> str | None:
    """Which of the four prompt forms this is, so that an error is about that form only."""
    if isinstance(value, str):
        return "string"
    if not isinstance(value, list) or not value:
        return None
    return {str: "strings", int: "tokens", list: "token_lists"}.get(type(value[0]))


Prompt = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[str], Tag("strings")]
    | Annotated[list[TokenId], Tag("tokens")]
    | Annotated[list[list[TokenId]], Tag("token_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, or a list of strings, token ids or token-id lists",
    ),
]


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "foretoken-demo", "prompt": "Once upon a time", "max_tokens": 40}]
        }
    )

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, description="Default 16.")
    echo: bool | None = Field(None, description="Start the text with the prompt.")
    best_of: int | None = Field(None, ge=1, description="Only if equal to n.")


class CompletionChoice(Choice):
    text: str
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)


class Completion(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
