"""Tools: functions that a request offers to the model, which of them it may call, and its calls."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, from_json

from truedraft.server.schemas.answer import is_none
from truedraft.server.schemas.strict import StrictModel
from truedraft.server.schemas.structured import JsonSchema

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(StrictModel):
    name: FunctionName = Field(description="What the model calls it.")
    description: str | None = Field(None, description="Written out by the chat template.")
    parameters: JsonSchema | None = Field(None, description="Default: a function without parameters.")
    strict: bool | None = Field(
        None,
        description="Arguments match the schema either way; keywords that are not supported are an error.",
    )


def _only_functions(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError("unsupported", "Tools of type '{kind}' are not supported", {"kind": kind})
    return value


class ChatTool(StrictModel):
    """As chats name it."""

    type: Literal["function"]
    function: FunctionDefinition


class ResponsesTool(FunctionDefinition):
    """The same, as `/v1/responses` names it."""

    type: Literal["function"]


Tool = Annotated[ChatTool, BeforeValidator(_only_functions)]
FlatTool = Annotated[ResponsesTool, BeforeValidator(_only_functions)]


class NamedFunction(StrictModel):
    name: str


class NamedChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class FlatNamedChoice(NamedFunction):
    type: Literal["function"]


def _kind_of_choice(value: Any) -> str | None:
    if value in ("none", "auto", "required"):
        return "mode"
    return "function" if not isinstance(value, str) else None


ChoiceMode = Literal["none", "auto", "required"]
_KIND = Discriminator(
    _kind_of_choice,
    custom_error_type="tool_choice",
    custom_error_message="Input should be 'none', 'auto', 'required' or an object of type 'function'",
)
ToolChoice = Annotated[Annotated[ChoiceMode, Tag("mode")] | Annotated[NamedChoice, Tag("function")], _KIND]
FlatToolChoice = Annotated[
    Annotated[ChoiceMode, Tag("mode")] | Annotated[FlatNamedChoice, Tag("function")], _KIND
]


def _json_object(text: str) -> str:
    try:
        is_object = isinstance(from_json(text or "{}"), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError("Input should be a JSON object, as text")
    return text or "{}"


ArgumentsText = Annotated[str, AfterValidator(_json_object)]


class CalledFunction(BaseModel):
    """``arguments``: JSON, as text."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: ArgumentsText


class GivenCall(BaseModel):
    """A call in an earlier message of the assistant."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(BaseModel):
    name: str | None = Field(None, exclude_if=is_none)
    arguments: str


class ToolCallDelta(BaseModel):
    """The first one of a call has its id and name, the others only more of the arguments."""

    index: int
    id: str | None = Field(None, exclude_if=is_none)
    type: Literal["function"] | None = Field(None, exclude_if=is_none)
    function: FunctionDelta
