"""``/v1/responses``: the stateless subset that is text in, text out; its request and its answer.

Events of a stream hold these same parts; ``server.routes.responses`` writes them.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.schemas.answer import SpeculationReport, TokenOrigin, is_none
from server.schemas.common import SamplingRequest
from server.schemas.logprobs import ChatTokenLogprob
from server.schemas.structured import TextOptions
from server.schemas.tools import MAX_TOOLS, FlatTool, FlatToolChoice, FunctionDefinition

INCLUDE_LOGPROBS = "message.output_text.logprobs"

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputText(BaseModel):
    """A text part: what a user or the model said."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["input_text", "output_text"]
    text: str


class OtherInput(BaseModel):
    """An image, a file, a tool call...: parsed so that it can be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


def _kind_of_part(value: Any) -> str:
    is_text = isinstance(value, dict) and value.get("type", "input_text") in ("input_text", "output_text")
    return "text" if is_text else "other"


def _kind_of_content(value: Any) -> str | None:
    if isinstance(value, str):
        return "string"
    return "parts" if isinstance(value, list) else None


InputPart = Annotated[
    Annotated[InputText, Tag("text")] | Annotated[OtherInput, Tag("other")], Discriminator(_kind_of_part)
]


class InputMessage(BaseModel):
    """A message. The output of an earlier answer can be given back as it is."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks; `developer` is written as `system`."
    )
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[InputPart], Field(fail_fast=True), Tag("parts")],
        Discriminator(
            _kind_of_content,
            custom_error_type="content_type",
            custom_error_message="Input should be a string or a list of text parts",
        ),
    ] = Field(description="A string, or text parts, which are joined by newlines.")


def _kind_of_item(value: Any) -> str:
    is_message = not isinstance(value, dict) or value.get("type") in (None, "message")
    return "message" if is_message else "other"


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return "string"
    return "items" if isinstance(value, list) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")] | Annotated[OtherInput, Tag("other")],
    Discriminator(_kind_of_item),
]


class ResponsesRequest(SamplingRequest):
    """Text in, text out, nothing stored. Every sampling parameter of chats works here too."""

    prompt_field: ClassVar[str] = "input"
    logprobs_switch: ClassVar[str] = f"include: ['{INCLUDE_LOGPROBS}']"

    input: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("items")],
        Discriminator(
            _kind_of_input,
            custom_error_type="input_type",
            custom_error_message="Input should be a string or a list of messages",
        ),
    ] = Field(description="What the user says, or the conversation so far.")
    instructions: str | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: int | None = Field(None, ge=1, description="Default: until the context ends.")
    text: TextOptions | None = Field(None, description="What the text must be. Default: any text.")
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call, written out by the chat template."
    )
    tool_choice: FlatToolChoice | None = Field(
        None,
        description="Whether to call: `none`, `auto` (the default), `required`, or a function by its name.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls at once. Default true.")
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description=f"Only `{INCLUDE_LOGPROBS}`."
    )
    top_logprobs: int | None = Field(
        None, ge=0, description="With the log-probabilities: the likeliest tokens too, this many at each."
    )
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = Field(
        None, description="Repeated in the answer, not kept."
    )

    @property
    def functions(self) -> list[FunctionDefinition]:
        return list(self.tools or [])

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDE_LOGPROBS in (self.include or [])


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field([], description="Always empty.")
    logprobs: list[ChatTokenLogprob] = []
    origins: list[TokenOrigin] | None = Field(None, exclude_if=is_none)


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = Field(0, description="Not counted here: always 0.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class FailureDetails(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponsesAnswer(BaseModel):
    """OpenAI's ``Response``. What is always the same here says so by having a default."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: FailureDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, None] = {"effort": None, "summary": None}
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: TextOptions
    tool_choice: str
    tools: list[Any] = []
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    foretoken: SpeculationReport | None = Field(None, exclude_if=is_none)
