"""These are the requests and answers of ``/v1/messages`` and its ``count_tokens``, in Anthropic's form.

``server.text.messages_as_chat`` makes a chat of a request; nothing else here knows how answers come about.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field

from truedraft.server.schemas.answer import SpeculationReport, is_none
from truedraft.server.schemas.common import NonEmptyString, SamplingRequest
from truedraft.server.schemas.foreign_parts import OtherPart
from truedraft.server.schemas.strict import RequestPart, alternative, tag
from truedraft.server.schemas.structured import JsonSchema
from truedraft.server.schemas.tools import FunctionName, OtherTool

BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(RequestPart):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestPart):
    """It holds what the model thought before an earlier answer, given back as it was."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestPart):
    """An earlier answer made this call, which is given back as it was."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class SealedThought(RequestPart):
    """Another server wrote it for itself only, so it is left out."""

    type: Literal["redacted_thinking"]


def _kind_of_block(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return tag(kind if kind in BLOCKS else "other")


def _kind_of_text(value: Any) -> str:
    return tag("text" if isinstance(value, dict) and value.get("type") == "text" else "other")


def _kind_of_content(value: Any) -> str | None:
    if isinstance(value, str):
        return tag("string")
    return tag("blocks") if isinstance(value, list) else None


CONTENT_KIND = Discriminator(
    _kind_of_content,
    custom_error_type="content_type",
    custom_error_message="Input should be a string or a list of content blocks",
)

AnyText = Annotated[
    Annotated[TextBlock, alternative("text")] | Annotated[OtherPart, alternative("other")],
    Discriminator(_kind_of_text),
]
TextContent = Annotated[
    Annotated[str, alternative("string")]
    | Annotated[list[AnyText], Field(fail_fast=True), alternative("blocks")],
    CONTENT_KIND,
]


class ToolResultBlock(RequestPart):
    """It holds what a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    Annotated[TextBlock, alternative("text")]
    | Annotated[ThinkingBlock, alternative("thinking")]
    | Annotated[SealedThought, alternative("redacted_thinking")]
    | Annotated[ToolUseBlock, alternative("tool_use")]
    | Annotated[ToolResultBlock, alternative("tool_result")]
    | Annotated[OtherPart, alternative("other")],
    Discriminator(_kind_of_block),
]
Content = Annotated[
    Annotated[str, alternative("string")]
    | Annotated[list[AnyBlock], Field(fail_fast=True), alternative("blocks")],
    CONTENT_KIND,
]


class MessagesInputMessage(RequestPart):
    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: Content = Field(description="A string, or blocks; texts are joined by newlines.")


class ToolDefinition(RequestPart):
    type: Literal["custom"] | None = None
    name: FunctionName = Field(description="What the model calls it.")
    description: str | None = Field(None, description="What the tool does, for the model to read.")
    input_schema: JsonSchema
    strict: bool | None = Field(
        None,
        description="Inputs match the schema either way. If true, what cannot be enforced of it is an error; "
        "else it is left out.",
    )


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return tag("custom" if kind in (None, "custom", "function") else "server")


AnyTool = Annotated[
    Annotated[ToolDefinition, alternative("custom")] | Annotated[OtherTool, alternative("server")],
    Discriminator(_kind_of_tool),
]


class ToolChoice(RequestPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Name of the tool; required with the type `tool`.")
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestPart):
    """Says whether the model reasons. Values that this server does not know are ignored and reported."""

    type: str = Field(description="`enabled`, `disabled`, or `adaptive`, which leaves it to the model.")
    budget_tokens: int | None = Field(None, ge=0)
    display: str | None = Field(None, description="`omitted` leaves out what was thought.")


class JsonFormat(RequestPart):
    type: Literal["json_schema"]
    json_schema: JsonSchema = Field(alias="schema")


class OutputConfig(RequestPart):
    effort: str | None = None
    format: JsonFormat | None = None


class Conversation(RequestPart):
    """It is all that the model reads."""

    model: str = Field(description="The served name; `GET /v1/models` tells it.")
    messages: Annotated[list[MessagesInputMessage], Field(fail_fast=True)] = Field(
        min_length=1,
        description="The conversation so far. If its last message is the assistant's, the answer "
        "continues it.",
    )
    system: TextContent | None = Field(
        None, description="A system message in front: a string or text blocks."
    )
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = Field(
        None, description="Functions that the model may call. Tools of Anthropic's own types are left out."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="Whether to call: `auto` (the default), `any`, a `tool` by its name, or `none`."
    )
    thinking: Thinking | None = Field(
        None, description="Whether to reason, for chat templates that can switch it. Default: the template's."
    )
    output_config: OutputConfig | None = Field(
        None, description="A JSON schema that the text matches; an effort, for chat templates that use it."
    )
    cache_control: dict[str, Any] | None = Field(
        None, description="Accepted: equal beginnings share without it."
    )


class MessagesRequest(Conversation, SamplingRequest):
    """This is Anthropic's form of a chat. Every sampling parameter of chats works here too."""

    prompt_field: ClassVar[str] = "messages"

    max_tokens: int = Field(
        ge=0, description="Largest number of tokens to generate; required. 0 only fills the prefix cache."
    )
    stop: Annotated[list[NonEmptyString], Field(fail_fast=True)] | None = Field(
        None, alias="stop_sequences", description="Strings that end the text, at most `max_stop_strings`."
    )
    inference_geo: str | None = Field(None, description="Accepted, not used.")
    speed: Literal["standard", "fast"] | None = Field(None, description="Accepted: there is one speed.")
    diagnostics: dict[str, Any] | None = Field(None, description="Accepted, not used.")


class TokenCountRequest(Conversation):
    """This is the same conversation, to be counted."""


class TokenCount(BaseModel):
    input_tokens: int


class Text(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class Thought(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = Field(
        description="Signs nothing; it is there because clients only give back thoughts that have one."
    )


class ToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Text | Thought | ToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputDetails(BaseModel):
    thinking_tokens: int
    thinking_budget_spent: bool | None = Field(None, exclude_if=is_none)


class MessagesUsage(BaseModel):
    input_tokens: int = Field(description="Prompt tokens that were computed for this request.")
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int = Field(
        description="Prompt tokens that the prefix cache had from earlier requests."
    )
    output_tokens: int
    output_tokens_details: OutputDetails
    service_tier: Literal["standard"] = "standard"


class MessagesAnswer(BaseModel):
    """This is Anthropic's ``Message``. In a stream's first event it is empty, and the reason null."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    truedraft: SpeculationReport | None = Field(None, exclude_if=is_none)


class MessagesErrorDetails(BaseModel):
    type: str = Field(description="The kind of error, such as `invalid_request_error`.")
    message: str = Field(description="What went wrong, for people to read.")
    details: dict[str, str | None] = Field(
        description="What went wrong, for programs to compare (`error_code`)."
    )


class MessagesErrorAnswer(BaseModel):
    """Every error of these paths has this shape."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetails
    request_id: str
