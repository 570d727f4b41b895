"""``/v1/responses``: the stateless subset that is text in, text out; its request and its answer.

Events of a stream hold these same parts; ``server.routes.responses`` writes them.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field

from truedraft.server.schemas.answer import SpeculationReport, is_none
from truedraft.server.schemas.common import (
    Content,
    ReasoningEffort,
    SamplingRequest,
    TemplateVariables,
    ThinkingBudget,
)
from truedraft.server.schemas.response_items import (
    ACTION_CALLS,
    CALL_OUTPUTS,
    InputAction,
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputReasoning,
    InputServerCall,
    OtherInput,
    OutputItem,
)
from truedraft.server.schemas.strict import RequestPart, alternative, tag
from truedraft.server.schemas.structured import TextOptions
from truedraft.server.schemas.tools import (
    FlatTool,
    FlatToolChoice,
    FunctionDefinition,
    ResponsesTool,
)

INCLUDE_LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[dict[str, str], Field(fail_fast=True)]

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputMessage(RequestPart):
    """A message is part of the input. The output of an earlier answer can be given back as it is."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks; `developer` is written as `system`."
    )
    content: Content = Field(description="A string, or text parts, which are joined by newlines.")


def _kind_of_item(value: Any) -> str:
    kind = (value.get("type") or "message") if isinstance(value, dict) else "message"
    if kind in ("message", "function_call", "custom_tool_call", "mcp_call", "reasoning"):
        return tag(kind)
    return tag("action" if kind in ACTION_CALLS else "output" if kind in CALL_OUTPUTS else "other")


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return tag("string")
    return tag("items") if isinstance(value, list) else None


AnyInput = Annotated[
    Annotated[InputMessage, alternative("message")]
    | Annotated[InputCall, alternative("function_call")]
    | Annotated[InputCustomCall, alternative("custom_tool_call")]
    | Annotated[InputAction, alternative("action")]
    | Annotated[InputServerCall, alternative("mcp_call")]
    | Annotated[InputCallOutput, alternative("output")]
    | Annotated[InputReasoning, alternative("reasoning")]
    | Annotated[OtherInput, alternative("other")],
    Discriminator(_kind_of_item),
]


InputItems = Annotated[
    Annotated[str, alternative("string")]
    | Annotated[list[AnyInput], Field(min_length=1, fail_fast=True), alternative("items")],
    Discriminator(
        _kind_of_input,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of messages and items",
    ),
]


class ReasoningOptions(RequestPart):
    effort: ReasoningEffort | None = Field(
        None,
        description="How much to reason, for chat templates that use it; `none` also sets "
        "`enable_thinking` to false.",
    )
    summary: str | None = Field(
        None, description="Accepted, not used: the reasoning itself is returned, not a summary."
    )


class ResponsesRequest(ThinkingBudget, SamplingRequest):
    """Takes text and gives text; nothing is stored. Every sampling parameter of chats works here too."""

    prompt_field: ClassVar[str] = "input"
    logprobs_switch: ClassVar[str] = f"include: ['{INCLUDE_LOGPROBS}']"

    input: InputItems = Field(description="What the user says, or the conversation so far.")
    instructions: str | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Largest number of tokens to generate. Default: as many as the context has room for.",
    )
    text: TextOptions | None = Field(None, description="Format that the text must have. Default: any text.")
    reasoning: ReasoningOptions | None = Field(None, description="How much to reason.")
    enable_thinking: bool | None = Field(
        None, description="Whether to reason, for chat templates that can switch it."
    )
    chat_template_kwargs: TemplateVariables = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] | None = Field(
        None, description="Functions that the model may call, written out by the chat template."
    )
    tool_choice: FlatToolChoice | None = Field(
        None,
        description="Whether to call: `none`, `auto` (the default), `required`, or a function by its name.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls at once. Default true.")
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description=f"What the answer is to hold in addition. Only `{INCLUDE_LOGPROBS}` is served."
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        description="With the log-probabilities: also report this many of the most likely tokens at each.",
    )
    metadata: Metadata | None = Field(
        None, description="Repeated in the answer, with at most `max_metadata` characters; it is not stored."
    )

    @property
    def functions(self) -> list[FunctionDefinition]:
        return [tool for tool in self.tools or [] if isinstance(tool, ResponsesTool)]

    @property
    def tool_places(self) -> list[str]:
        """Returns where each function's parameters stand in the body."""
        return [
            f"tools.{number}.parameters"
            for number, tool in enumerate(self.tools or [])
            if isinstance(tool, ResponsesTool)
        ]

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDE_LOGPROBS in (self.include or [])


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = Field(0, description="Not counted here: always 0.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0
    thinking_budget_spent: bool | None = Field(None, exclude_if=is_none)


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningOptions
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: TextOptions
    tool_choice: FlatToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    truedraft: SpeculationReport | None = Field(None, exclude_if=is_none)
