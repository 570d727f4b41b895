"""Tools: functions that a request offers to the model, which of them it may call, and its calls."""

import json
from json import JSONDecoder
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, Discriminator, Field, model_validator
from pydantic_core import from_json
from typing_extensions import TypedDict

from truedraft.server.schemas.strict import RequestPart, alternative, tag
from truedraft.server.schemas.structured import JsonSchema

# Every form of a call writes the name as it is, between quotes or marks.
NOT_IN_NAMES = "\"'`\\<>"


def _usable_name(name: str) -> str:
    if not name.isprintable() or name != name.strip() or not name or set(name) & set(NOT_IN_NAMES):
        raise ValueError("a name is printable text without quotes, backslashes, '<' and '>'")
    return name


# Names of MCP's servers have dots, slashes and colons, too.
FunctionName = Annotated[
    str,
    AfterValidator(_usable_name),
    Field(json_schema_extra={"minLength": 1, "pattern": r"""^[^\x00-\x20"'`\\<>]+$"""}),
]


class FunctionDefinition(RequestPart):
    name: FunctionName = Field(description="What the model calls it.")
    description: str | None = Field(None, description="Written out by the chat template.")
    parameters: JsonSchema | None = Field(None, description="Default: a function without parameters.")
    strict: bool | None = Field(
        None,
        description="Arguments match the schema either way. If true, what cannot be enforced of it is an "
        "error; else it is left out.",
    )

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(include=set(FunctionDefinition.model_fields), exclude_none=True)


class ChatTool(RequestPart):
    """A function in the form that chats use."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ResponsesTool(FunctionDefinition):
    """A tool is written like this on `/v1/responses`."""

    type: Literal["function"] = "function"


class OtherTool(RequestPart):
    """The model cannot call it: a web search, a shell, a namespace... It is left out."""

    type: str


def _kind_of_tool(value: Any) -> str:
    kind = (value.get("type") or "function") if isinstance(value, dict) else "function"
    return tag("function") if kind == "function" else tag("other")


_TOOL_KIND = Discriminator(_kind_of_tool)
Tool = Annotated[
    Annotated[ChatTool, alternative("function")] | Annotated[OtherTool, alternative("other")], _TOOL_KIND
]
FlatTool = Annotated[
    Annotated[ResponsesTool, alternative("function")] | Annotated[OtherTool, alternative("other")], _TOOL_KIND
]


class NamedFunction(RequestPart):
    name: str


class NamedChoice(RequestPart):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class FlatNamedChoice(NamedFunction):
    type: Literal["function"]


def _kind_of_choice(value: Any) -> str | None:
    if value in ("none", "auto", "required"):
        return tag("mode")
    return tag("function") if not isinstance(value, str) else None


ChoiceMode = Literal["none", "auto", "required"]
_KIND = Discriminator(
    _kind_of_choice,
    custom_error_type="tool_choice",
    custom_error_message="Input should be 'none', 'auto', 'required' or an object of type 'function'",
)
ToolChoice = Annotated[
    Annotated[ChoiceMode, alternative("mode")] | Annotated[NamedChoice, alternative("function")], _KIND
]
FlatToolChoice = Annotated[
    Annotated[ChoiceMode, alternative("mode")] | Annotated[FlatNamedChoice, alternative("function")], _KIND
]


class CalledFunction(RequestPart):
    """Its arguments are a JSON object written as text; if the answer was cut off, the beginning of one."""

    name: str
    arguments: str = "{}"

    @property
    def given(self) -> dict[str, Any]:
        """Returns the arguments as far as they go. Text that begins no object is kept as a single one."""
        read = _beginning_of_json(self.arguments or "{}")
        return read if isinstance(read, dict) else {"arguments": self.arguments}


def _beginning_of_json(text: str) -> Any:
    """Returns None for text that is none, such as one with something after its value."""
    try:
        JSONDecoder().raw_decode(text.strip())
        is_cut = False
    except (ValueError, RecursionError):
        is_cut = True
    try:
        return from_json(text, allow_partial="trailing-strings" if is_cut else "off", allow_inf_nan=False)
    except ValueError:
        return None


class GivenCall(RequestPart):
    """Holds a call that an earlier message of the assistant has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_a_custom_tool(cls, value: Any) -> Any:
        """Another model's tool took any text, which is written as an argument."""
        custom = value.get("custom") if isinstance(value, dict) and value.get("type") == "custom" else None
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            return value
        arguments = json.dumps({"input": custom["input"]}, ensure_ascii=False)
        return {"id": value.get("id"), "function": {"name": custom.get("name"), "arguments": arguments}}


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first one of a call has its id and name, the others only more of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta
