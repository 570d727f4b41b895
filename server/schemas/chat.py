"""``/v1/chat/completions``: request, response and chunk."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.schemas.common import Answer, Choice, GenerationRequest, TextPart, is_none, kind_of_content
from server.schemas.logprobs import ChatLogprobs, PromptLogprobs


class OtherPart(BaseModel):
    """An image, audio or file part: parsed so that it can be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


def _kind_of_part(value: Any) -> str:
    return "text" if isinstance(value, dict) and value.get("type", "text") == "text" else "other"


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("other")], Discriminator(_kind_of_part)
]


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[ContentPart], Tag("parts")],
    Discriminator(
        kind_of_content,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class Message(BaseModel):
    """One message. Clients echo whole answers back, so empty extras are welcome (``server.parameters``)."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks; `developer` is written as `system`."
    )
    content: Content | None = Field(
        None, description="A string, or text parts, which are joined by newlines."
    )
    name: str | None = Field(None, description="Given to the chat template, which may use it.")


class ChatRequest(GenerationRequest):
    prompt_field: ClassVar[str] = "messages"

    messages: list[Message] = Field(
        min_length=1, description="The conversation so far, written out by the model's chat template."
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="Default: until the context ends.")
    max_tokens: int | None = Field(None, ge=1, description="OpenAI's older name of max_completion_tokens.")
    logprobs: bool | None = Field(None, description="Log-probability of every token of the answer.")
    top_logprobs: int | None = Field(
        None, ge=0, description="With logprobs: the likeliest tokens too, this many at each position."
    )

    logprobs_switch: ClassVar[str] = "logprobs: true"

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Delta(BaseModel):
    """What a chunk adds to its choice; the first one says who speaks."""

    role: Literal["assistant"] | None = Field(None, exclude_if=is_none)
    content: str | None = Field(None, exclude_if=is_none)


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)


class ChatChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)
