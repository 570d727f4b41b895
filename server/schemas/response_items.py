"""Items of ``/v1/responses`` other than messages: thoughts, calls, and the results of calls."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from truedraft.server.schemas.answer import TokenOrigin, is_none
from truedraft.server.schemas.common import Content
from truedraft.server.schemas.logprobs import ChatTokenLogprob
from truedraft.server.schemas.strict import RequestPart
from truedraft.server.schemas.tools import CalledFunction, GivenCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OtherInput(RequestPart):
    """Any other item is parsed so that it can be judged by its name."""

    type: str


class InputCall(RequestPart):
    """It gives back a call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @property
    def call(self) -> GivenCall:
        return GivenCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))


class InputCustomCall(RequestPart):
    """Another model called a tool that takes text. Its input is written as an argument."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str

    @property
    def call(self) -> GivenCall:
        return _made_call(self.call_id, self.name, {"input": self.input})


# Calls of tools that another model was trained with -> the field that holds what it asked for, and the name
# that the call gets.
ACTION_CALLS = {
    "local_shell_call": ("action", "local_shell"),
    "shell_call": ("action", "shell"),
    "apply_patch_call": ("operation", "apply_patch"),
}
CALL_OUTPUTS = tuple(f"{call}_output" for call in ("function_call", "custom_tool_call", *ACTION_CALLS))


class InputAction(RequestPart):
    """Another model used its shell or its editor. What it asked for is written as the arguments."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_what_it_asked_for(self) -> Self:
        if self.asked is None:
            raise ValueError(f"'{ACTION_CALLS[self.type][0]}' is missing")
        return self

    @property
    def asked(self) -> dict[str, Any] | None:
        return self.action if ACTION_CALLS[self.type][0] == "action" else self.operation

    @property
    def call(self) -> GivenCall:
        return _made_call(self.call_id, ACTION_CALLS[self.type][1], self.asked or {})


class InputServerCall(RequestPart):
    """Another server called a tool of an MCP server, and holds what came back."""

    type: Literal["mcp_call"]
    id: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None

    @property
    def call(self) -> GivenCall:
        return GivenCall(id=self.id, function=CalledFunction(name=self.name, arguments=self.arguments))

    @property
    def result(self) -> str:
        failed = self.error if isinstance(self.error, str) or not self.error else json.dumps(self.error)
        return f"Error: {failed}" if failed else self.output or ""


def _made_call(call_id: str, name: str, arguments: dict[str, Any]) -> GivenCall:
    written = json.dumps(arguments, ensure_ascii=False)
    return GivenCall(id=call_id, function=CalledFunction(name=name, arguments=written))


class InputCallOutput(RequestPart):
    """A call's result is given back to the model."""

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str
    output: Content | None = Field(None, description="A string, or text parts, which are joined by newlines.")

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """A local shell's output names its call as ``id``. A shell's is a list of what each command printed;
        a patch may say no more than whether it was applied."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if value.get("type") == "local_shell_call_output" and value.get("call_id") is None and "id" in value:
            value["call_id"] = value.pop("id")
        if value.get("type") == "shell_call_output" and isinstance(value.get("output"), list):
            value["output"] = json.dumps(value["output"], ensure_ascii=False)
        if value.get("type") == "apply_patch_call_output" and value.get("output") is None:
            value["output"] = str(value.get("status", "completed"))
        if value.get("output") is None:
            value.pop("output", None)
        return value

    @model_validator(mode="after")
    def _has_output(self) -> Self:
        if self.output is None:
            raise ValueError("'output' is missing")
        return self


class ReasoningText(RequestPart):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class InputReasoning(RequestPart):
    """Reasoning before an earlier answer is given back as it was."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field([], description="Always empty.")
    logprobs: list[ChatTokenLogprob] = []
    origins: list[TokenOrigin] | None = Field(None, exclude_if=is_none)


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = Field([], description="Always empty.")
    content: list[ReasoningText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputReasoning | OutputMessage | OutputCall
