"""Items of ``/v1/responses`` other than messages: thoughts, calls, and the results of calls."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

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


class InputShellCall(RequestPart):
    """Another model called its shell. The action is written as the arguments."""

    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]

    @property
    def call(self) -> GivenCall:
        return _made_call(self.call_id, "local_shell", self.action)


def _made_call(call_id: str, name: str, arguments: dict[str, Any]) -> GivenCall:
    written = json.dumps(arguments, ensure_ascii=False)
    return GivenCall(id=call_id, function=CalledFunction(name=name, arguments=written))


class InputCallOutput(RequestPart):
    """A call's result is given back to the model."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str
    output: Content = Field(description="A string, or text parts, which are joined by newlines.")


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
