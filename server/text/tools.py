"""What a request lets the model call, and how its answer is read."""

from dataclasses import dataclass
from typing import Any

from server.errors import InvalidRequestError, UnsupportedParameterError
from server.schemas.chat import ChatRequest
from server.schemas.responses import ResponsesRequest
from server.schemas.tools import FunctionDefinition
from server.text.families import CallFormat
from server.text.message_reader import MessageFormat
from server.text.prompt import TokenPrompt
from server.text.tokenizer import Tokenizer
from server.text.tool_grammar import arguments_schema, call_grammar


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call, or must if ``required``."""

    functions: list[FunctionDefinition]
    calls: CallFormat
    special_ids: dict[str, int]
    required: bool
    parallel: bool

    def grammar(self, schema: Any = None) -> str:
        """``schema``: of an answer that calls nothing; None for any text."""
        return call_grammar(
            self.functions,
            self.calls,
            self.special_ids,
            required=self.required,
            parallel=self.parallel,
            schema=schema,
        )


def tool_use(request: ChatRequest | ResponsesRequest, tokenizer: Tokenizer) -> ToolUse | None:
    """None where nothing can be called. ``InvalidRequestError`` for a choice that there is not, and for a
    model whose chat template does not write tools."""
    functions, choice = request.functions, request.tool_choice or "auto"
    if not functions:
        if choice not in ("none", "auto"):
            raise InvalidRequestError("tool_choice is only allowed with tools.", param="tool_choice")
        return None
    names = [function.name for function in functions]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise InvalidRequestError(f"There are two tools named '{name}'.", param=f"tools.{position}")
    if choice == "none":
        return None
    named = None if isinstance(choice, str) else choice.name
    if named is not None and named not in names:
        raise InvalidRequestError(
            f"tool_choice names '{named}', which is not among the tools.", param="tool_choice"
        )
    calls = _call_format(tokenizer)
    return ToolUse(
        functions=[each for each in functions if named in (None, each.name)],
        calls=calls,
        special_ids=tokenizer.special_ids(calls.literals),
        required=choice != "auto",
        parallel=named is None and request.parallel_tool_calls is not False,
    )


def message_format(use: ToolUse | None, tokenizer: Tokenizer, prompt: TokenPrompt) -> MessageFormat:
    marks = tokenizer.templates.reasoning_marks
    return MessageFormat(
        reasoning=marks,
        calls=use.calls if use else None,
        is_reasoning=marks is not None and prompt.text.rstrip().endswith(marks.open.rstrip()),
        schemas={each.name: arguments_schema(each) for each in use.functions} if use else {},
    )


def _call_format(tokenizer: Tokenizer) -> CallFormat:
    templates = tokenizer.templates
    if "tools" not in templates.variables:
        raise UnsupportedParameterError("This model's chat template does not write tools.", param="tools")
    if templates.call_format is None:
        raise UnsupportedParameterError(
            "How this model's chat template writes tool calls is not known here.", param="tools"
        )
    return templates.call_format
