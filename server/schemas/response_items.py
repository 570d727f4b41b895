"""Items of ``/v1/responses`` beside messages: what the model has thought and called, and what came of it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from truedraft.server.schemas.answer import TokenOrigin, is_none
from truedraft.server.schemas.common import CONTENT_KIND
from truedraft.server.schemas.logprobs import ChatTokenLogprob
from truedraft.server.schemas.tools import ArgumentsText

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputItem(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class InputText(InputItem):
    """A text part: what a user or the model said."""

    type: Literal["input_text", "output_text"]
    text: str


class OtherInput(InputItem):
    """An image, a file, a search...: parsed so that it can be refused by name."""

    type: str


def _kind_of_part(value: Any) -> str:
    is_text = isinstance(value, dict) and value.get("type", "input_text") in ("input_text", "output_text")
    return "text" if is_text else "other"


InputPart = Annotated[
    Annotated[InputText, Tag("text")] | Annotated[OtherInput, Tag("other")], Discriminator(_kind_of_part)
]
InputContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[InputPart], Field(fail_fast=True), Tag("parts")],
    CONTENT_KIND,
]


class InputCall(InputItem):
    """A call of an earlier answer, given back as it was."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: ArgumentsText


class InputCallOutput(InputItem):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent


class ReasoningText(InputItem):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class InputReasoning(InputItem):
    """What the model thought before an earlier answer, given back as it was."""

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
