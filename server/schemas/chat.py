"""``/v1/chat/completions``: request, response and chunk."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from truedraft.server.schemas.answer import Answer, Choice, is_none
from truedraft.server.schemas.common import (
    Content,
    GenerationRequest,
    ReasoningEffort,
    TemplateVariables,
    ThinkingBudget,
    content_text,
)
from truedraft.server.schemas.logprobs import ChatLogprobs, PromptLogprobs
from truedraft.server.schemas.strict import RequestPart
from truedraft.server.schemas.tools import (
    ChatTool,
    FunctionDefinition,
    GivenCall,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)


class Message(RequestPart):
    """A message has a role and content. Clients echo whole answers back, with all that these had."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks; `developer` is written as `system`."
    )
    content: Content | None = Field(
        None, description="A string, or text parts, which are joined by newlines."
    )
    name: str | None = Field(None, description="Given to the chat template, which may use it.")
    tool_call_id: str | None = Field(
        None, description="The call that this message answers; given to the chat template, which may use it."
    )
    reasoning_content: str | None = Field(
        None,
        description="What the model thought before an earlier answer; given to the chat template, "
        "which may use it.",
    )
    refusal: str | None = Field(None, description="What an assistant said instead of an answer.")
    tool_calls: Annotated[list[GivenCall], Field(fail_fast=True)] | None = Field(
        None, description="What an assistant's message has called."
    )

    @property
    def text(self) -> str:
        return content_text(self.content) or self.refusal or ""


class ThinkingSwitch(RequestPart):
    """Says whether the model reasons."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] = Field(
        description="`adaptive` and `auto` leave it to the model."
    )
    budget_tokens: int | None = Field(None, ge=0, description="Another name of thinking_budget.")

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class TemplateFields(RequestPart):
    """Fields that control how the chat template writes the messages."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        None, description="Functions that the model may call, written out by the chat template."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="How much to reason, for chat templates that use it; `none` also sets "
        "`enable_thinking` to false.",
    )
    enable_thinking: bool | None = Field(
        None, description="Whether to reason, for chat templates that can switch it."
    )
    thinking: ThinkingSwitch | None = Field(
        None, description="Whether to reason, as an object of type `enabled` or `disabled`."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt with the opening of the assistant's turn. Default: true, unless "
        "continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open, so that the answer goes on with it. Default false."
    )
    chat_template_kwargs: TemplateVariables = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        None, description="Given to the chat template, which may use it."
    )

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message cannot be used together")
        return self

    def template_options(self) -> dict[str, Any]:
        """Returns the options of transformers' ``apply_chat_template``."""
        is_open = bool(self.continue_final_message)
        asked = self.add_generation_prompt
        tools = [
            {"type": "function", "function": tool.function.for_template()}
            for tool in self.tools or []
            if isinstance(tool, ChatTool)
        ]
        return {
            "tools": tools or None,
            "add_generation_prompt": not is_open if asked is None else asked,
            "continue_final_message": is_open,
            "documents": self.documents,
        }


class ChatRequest(TemplateFields, ThinkingBudget, GenerationRequest):
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, description="The conversation so far, written out by the model's chat template."
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="Largest number of tokens to generate. Default: as many as the context has room for.",
    )
    max_tokens: int | None = Field(None, ge=1, description="OpenAI's older name for max_completion_tokens.")
    logprobs: bool | None = Field(
        None, description="Report the log-probability of every token of the answer."
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        description="With logprobs: also report this many of the most likely tokens at each position.",
    )

    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether to call: `none`, `auto` (the default), `required`, or a function by its name.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls at once. Default true.")

    @property
    def functions(self) -> list[FunctionDefinition]:
        return [tool.function for tool in self.tools or [] if isinstance(tool, ChatTool)]

    @property
    def tool_places(self) -> list[str]:
        """Returns where each function's parameters stand in the body."""
        return [
            f"tools.{number}.function.parameters"
            for number, tool in enumerate(self.tools or [])
            if isinstance(tool, ChatTool)
        ]

    def template_options(self) -> dict[str, Any]:
        """Without the tools if none may be called."""
        options = super().template_options()
        return options | {"tools": None} if self.tool_choice == "none" else options

    logprobs_switch: ClassVar[str] = "logprobs: true"

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def budgets(self) -> dict[str, int]:
        of_switch = None if self.thinking is None else self.thinking.budget_tokens
        return super().budgets | ({} if of_switch is None else {"thinking.budget_tokens": of_switch})


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, exclude_if=is_none)
    tool_calls: list[ToolCall] | None = Field(None, exclude_if=is_none)


class Delta(BaseModel):
    """A chunk adds this to its choice; the first one says who speaks."""

    role: Literal["assistant"] | None = Field(None, exclude_if=is_none)
    content: str | None = Field(None, exclude_if=is_none)
    reasoning_content: str | None = Field(None, exclude_if=is_none)
    tool_calls: list[ToolCallDelta] | None = Field(None, exclude_if=is_none)


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)
