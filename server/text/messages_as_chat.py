"""Requests of ``/v1/messages`` become chats here, and are then answered like any other chat.

Anthropic's form has calls, their results and thoughts as blocks of a message's content; chats have calls and
thoughts next to the content, and results as messages of their own.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from truedraft.server.errors import InvalidRequestError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest, Message, ThinkingSwitch
from truedraft.server.schemas.common import SamplingRequest, TextPart
from truedraft.server.schemas.foreign_parts import OtherPart
from truedraft.server.schemas.messages import (
    AnyBlock,
    AnyText,
    Conversation,
    MessagesInputMessage,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from truedraft.server.schemas.structured import JsonSchemaFormat, NamedSchema
from truedraft.server.schemas.tools import (
    CalledFunction,
    ChatTool,
    FunctionDefinition,
    GivenCall,
    NamedChoice,
    NamedFunction,
    OtherTool,
    ToolChoice,
)
from truedraft.server.text.pictures import is_picture
from truedraft.server.text.prompt import template_variables
from truedraft.server.text.tokenizer import Tokenizer

CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}

# Thoughts can be shown or left out.
DISPLAYS = (None, "summarized", "omitted")

# Blocks of these types stand in messages of one role only.
ROLES = {"thinking": "assistant", "tool_use": "assistant", "mcp_tool_use": "assistant", "tool_result": "user"}


class MessagesChat(ChatRequest):
    """This chat has the tools of a request of ``/v1/messages``, which defines them in another place."""

    @property
    def tool_places(self) -> list[str]:
        return [
            f"tools.{number}.input_schema"
            for number, tool in enumerate(self.tools or [])
            if isinstance(tool, ChatTool)
        ]


def as_chat(request: Conversation, tokenizer: Tokenizer, leniency: Leniency) -> MessagesChat:
    shared = (
        request.model_fields_set & type(request).model_fields.keys() & SamplingRequest.model_fields.keys()
    )
    messages = chat_messages(request, tokenizer)
    is_continued = messages[-1].role == "assistant"
    choice = request.tool_choice
    output = request.output_config
    return MessagesChat.model_construct(
        **{name: getattr(request, name) for name in shared},
        messages=messages,
        max_tokens=request.declared("max_tokens"),
        continue_final_message=is_continued,
        chat_template_kwargs=_template_variables(request, tokenizer, leniency) or None,
        # These variables say whether it reasons.
        thinking=None
        if request.thinking is None
        else ThinkingSwitch(type="adaptive", budget_tokens=request.thinking.budget_tokens),
        tools=_tools(request) or None,
        tool_choice=_tool_choice(request),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        response_format=(
            None
            if output is None or output.format is None
            else JsonSchemaFormat(
                type="json_schema", json_schema=NamedSchema(name="answer", schema=output.format.json_schema)
            )
        ),
    )


def chat_messages(request: Conversation, tokenizer: Tokenizer) -> list[Message]:
    """Returns the messages, those of one role in a row as one, without a last one that says nothing.

    Many chat templates write a system message in the first place only; elsewhere the user says it.
    """
    messages: list[Message] = []
    if request.system:
        messages.append(Message(role="system", content=_text(request.system)))
    called: set[str] = set()
    for number, message in enumerate(request.messages):
        for each in _messages_of(message, called, f"messages.{number}.content"):
            is_later = each.role == "system" and any(known.role != "system" for known in messages)
            if is_later and not tokenizer.templates.has_later_system:
                each.role = "user"
            _append(messages, each)
    if messages and messages[-1].role == "assistant" and _is_empty(messages[-1]):
        messages.pop()
    if not messages:
        raise InvalidRequestError("messages: there is nothing to answer.", param="messages")
    return messages


def _messages_of(message: MessagesInputMessage, called: set[str], where: str) -> Iterator[Message]:
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
        return
    for number, block in enumerate(message.content):
        place = f"{where}.{number}"
        _check_place(message, block, place)
        match block:
            case OtherPart() if is_picture(block):
                yield Message.model_construct(role=message.role, content=[block])
            case TextBlock():
                yield Message(role=message.role, content=block.text)
            case ThinkingBlock():
                yield Message(role="assistant", content="", reasoning_content=block.thinking)
            case ToolUseBlock():
                called.add(block.id)
                function = CalledFunction(name=block.name, arguments=json.dumps(block.input))
                call = GivenCall(id=block.id, function=function)
                yield Message(role="assistant", content="", tool_calls=[call])
            case ToolResultBlock():
                if block.tool_use_id not in called:
                    raise InvalidRequestError(
                        f"{place}: no tool_use with the id '{block.tool_use_id}' comes before its result.",
                        param=f"{place}.tool_use_id",
                    )
                yield Message(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
            case OtherPart(call=GivenCall() as call):
                called.add(call.id)
                yield Message(role="assistant", content="", tool_calls=[call])
            case OtherPart(result=(call_id, result)) if call_id in called:
                yield Message(role="tool", content=result, tool_call_id=call_id)
            case OtherPart(text=str(text)):
                yield Message(role=message.role, content=text)
            case _:
                pass  # it is reported


def _result(block: ToolResultBlock) -> str:
    """Chat templates know nothing of errors: the text says so."""
    text = _text(block.content or "")
    return ": ".join(filter(None, ["Error", text])) if block.is_error else text


def _append(messages: list[Message], message: Message) -> None:
    """Joins it with the last one, if both are of one role; every result stays a message of its own."""
    last = messages[-1] if messages else None
    if last is None or last.role != message.role or message.role == "tool":
        messages.append(message)
        return
    last.content = _joined_contents(last.content, message.content)
    last.reasoning_content = _joined(last.reasoning_content, message.reasoning_content) or None
    if message.tool_calls:
        last.tool_calls = [*(last.tool_calls or []), *message.tool_calls]


def _joined_contents(first: Any, second: Any) -> Any:
    """Returns a text, or a list of parts where one of the contents has pictures."""
    if not isinstance(first, list) and not isinstance(second, list):
        return _joined(first, second)
    parts: list[Any] = []
    for content in (first, second):
        parts += content if isinstance(content, list) else [TextPart(text=content)] if content else []
    return parts


def _joined(*texts: object) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _text(content: str | Sequence[AnyText]) -> str:
    if isinstance(content, str):
        return content
    return _joined(*(block.text for block in content))


def _is_empty(last: Message) -> bool:
    """Returns whether it leaves the answer nothing to go on with. What it has must be text."""
    assert isinstance(last.content, str)
    if last.tool_calls:
        raise InvalidRequestError(
            "messages: the last message has a tool_use without its tool_result.", param="messages"
        )
    if last.reasoning_content and not last.content:
        raise InvalidRequestError(
            "messages: the last message of the assistant cannot end with a thinking block.", param="messages"
        )
    if last.content != last.content.rstrip():
        raise InvalidRequestError(
            "messages: final assistant content cannot end with trailing whitespace.", param="messages"
        )
    return not last.content


def _check_place(message: MessagesInputMessage, block: AnyBlock, place: str) -> None:
    role = ROLES.get(block.type, message.role)
    if message.role != role:
        raise InvalidRequestError(
            f"{place}: a block of type '{block.type}' belongs in a message of the role '{role}'.", param=place
        )


def _tools(request: Conversation) -> list[ChatTool | OtherTool]:
    return [
        ChatTool(
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
        )
        if isinstance(tool, ToolDefinition)
        else tool
        for tool in request.tools or []
    ]


def _tool_choice(request: Conversation) -> ToolChoice | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequestError(
            "tool_choice.name: Field required", param="tool_choice.name", code="missing_required_parameter"
        )
    return NamedChoice(type="function", function=NamedFunction(name=choice.name))


def _template_variables(request: Conversation, tokenizer: Tokenizer, leniency: Leniency) -> dict[str, Any]:
    """Returns what the chat template is told of reasoning."""
    asked: dict[str, tuple[str, Any]] = {}
    thinking, output = request.thinking, request.output_config
    if output is not None:
        asked["output_config.effort"] = "reasoning_effort", output.effort
    if thinking is not None:
        if thinking.type in ("enabled", "disabled"):
            asked["thinking.type"] = "enable_thinking", thinking.type == "enabled"
        elif thinking.type != "adaptive":
            leniency.ignore("thinking.type")
        if thinking.display not in DISPLAYS:
            leniency.ignore("thinking.display")
    return template_variables(asked, tokenizer, leniency)
