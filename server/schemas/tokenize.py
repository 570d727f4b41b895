"""``/tokenize`` and ``/detokenize``: requests and answers. Unknown fields are reported."""

from typing import Annotated

from pydantic import BaseModel, Field

from truedraft.server.schemas.answer import is_none
from truedraft.server.schemas.chat import Message, TemplateFields
from truedraft.server.schemas.strict import RequestPart


class TokenizeRequest(TemplateFields, RequestPart):
    """Takes either a text as completions would, or messages as chats would."""

    model: str | None = Field(None, description="The served name; may be left out.")
    prompt: str | None = Field(None, description="A text.")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, min_length=1, description="A conversation."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokens that the tokenizer puts around a text. Default: true for a prompt, false "
        "for messages, whose template has written them; so the count is what a request would be charged.",
    )
    return_token_strs: bool | None = Field(None, description="Also return each token's text. Default false.")


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int = Field(
        description="Largest number of tokens, prompt and output together, that a request may have."
    )
    tokens: list[int]
    token_strs: list[str] | None = Field(
        None,
        exclude_if=is_none,
        description="Each token's text; a token that is part of a character has its bytes, such as `\\xf0`.",
    )


class DetokenizeRequest(RequestPart):
    model: str | None = Field(None, description="The served name; may be left out.")
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(
        description="Token ids."
    )


class DetokenizeAnswer(BaseModel):
    prompt: str = Field(description="The text, with special tokens.")
