"""Decides what a request lets the model call, and how its answer is read."""

from dataclasses import dataclass
from typing import NamedTuple

from truedraft.engine.text.schema.demands import Placed
from truedraft.engine.text.schema.writer import Options
from truedraft.server.errors import InvalidRequestError, UnsupportedParameterError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.families import NEXT_MESSAGE, CallFormat, ReasoningMarks
from truedraft.server.text.grammar.tool_calls import (
    Function,
    Rules,
    after_reasoning,
    arguments_schema,
    call_grammar,
)
from truedraft.server.text.grammar.tool_schemas import check_size, cleaned, placed
from truedraft.server.text.message_parser import MessageFormat
from truedraft.server.text.prompt import TokenPrompt
from truedraft.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call, or must if ``required``. ``places``: where the body has their
    parameters."""

    functions: list[FunctionDefinition]
    places: list[str]
    calls: CallFormat
    token_ids: dict[str, int]
    required: bool
    parallel: bool

    def grammar_of(self, function: Function, options: Options) -> Rules:
        """Returns the grammar of one call of it."""
        return call_grammar(
            [function], self.calls, self.token_ids, required=True, parallel=False, options=options
        )

    def grammar(self, leniency: Leniency, schema: Placed | None, options: Options) -> Rules:
        """``schema``: of an answer that calls nothing; None for any text."""
        return call_grammar(
            [
                placed(function, place, leniency)
                for function, place in zip(self.functions, self.places, strict=True)
            ],
            self.calls,
            self.token_ids,
            required=self.required,
            parallel=self.parallel,
            schema=schema,
            options=options,
        )


def tool_use(
    request: ChatRequest | ResponsesRequest, tokenizer: Tokenizer, leniency: Leniency, max_size: int
) -> ToolUse | None:
    """Returns None where nothing can be called, and refuses a choice that there is not.

    ``max_size``: characters that the schemas of all functions may have together.
    """
    functions, choice = request.functions, request.tool_choice or "auto"
    if not functions:
        if choice not in ("none", "auto"):
            raise InvalidRequestError(
                "tool_choice is only allowed with tools that can be called: functions.", param="tool_choice"
            )
        return None
    names: dict[str, None] = {}
    for position, function in enumerate(functions):
        name, num_before = function.name, len(names)
        names[name] = None
        if len(names) == num_before:
            place = ".".join(request.tool_places[position].split(".")[:2])
            raise InvalidRequestError(f"There are two tools named '{name}'.", param=place)
    if choice == "none":
        return None
    named = None if isinstance(choice, str) else choice.name
    if named is not None and named not in names:
        raise InvalidRequestError(
            f"tool_choice names '{named}', which is not among the functions.", param="tool_choice"
        )
    calls = tokenizer.templates.call_format
    if calls.before_content and request.declared("continue_final_message"):
        raise UnsupportedParameterError(
            "continue_final_message is not supported with tools: calls are messages of their own here.",
            param="continue_final_message",
        )
    check_size([each for each in functions if named in (None, each.name)], max_size)
    for name, place in zip(names, request.tool_places, strict=True):
        ending = calls.before_arguments.lstrip()[:1]
        if ending in name:
            raise InvalidRequestError(
                f"The name '{name}' has {ending!r}, by which this model's calls end a name.",
                param=f"{'.'.join(place.split('.')[:-1])}.name",
            )
    offered = [
        (cleaned(function, place, calls, leniency), place)
        for function, place in zip(functions, request.tool_places, strict=True)
        if named in (None, function.name)
    ]
    return ToolUse(
        functions=[function for function, _ in offered],
        places=[place for _, place in offered],
        calls=calls,
        token_ids=tokenizer.grammar_ids(calls.literals),
        required=choice != "auto",
        parallel=named is None and request.parallel_tool_calls is not False,
    )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A model reasons between these marks before it answers. ``is_open``: the prompt has begun it."""

    marks: ReasoningMarks
    token_ids: dict[str, int]
    is_open: bool

    def before(self, grammar: str, *, has_header: bool) -> tuple[str, list[int]]:
        """``grammar`` for what follows the reasoning, and the tokens after which it starts."""
        return after_reasoning(
            grammar, self.marks, self.token_ids, is_open=self.is_open, has_header=has_header
        )


def find_reasoning(tokenizer: Tokenizer, prompt: TokenPrompt) -> Reasoning | None:
    """None for a model that is not known to reason, and where the prompt has ended it."""
    marks, text = tokenizer.templates.reasoning_marks, prompt.text.rstrip()
    if marks is None:
        return None
    # With headers, what closes the reasoning also begins any answer.
    has_ended = not text.endswith(NEXT_MESSAGE) if marks.answer else text.endswith(marks.close)
    if has_ended:
        return None
    return Reasoning(marks, tokenizer.grammar_ids(marks.literals), text.endswith(marks.open.rstrip()))


# Texts that a model may write before it begins to reason, where each is a token.
SPACES = ("\n", "\n\n", " ")


class Budget(NamedTuple):
    """``tokens`` of reasoning are at most what a request lets a model have. ``marks`` are the engine's
    ``thinking_marks``."""

    tokens: int
    marks: list[list[int]]


def thinking_budget(
    request: ChatRequest | ResponsesRequest,
    tokenizer: Tokenizer,
    reasoning: Reasoning | None,
    use: ToolUse | None,
    leniency: Leniency,
) -> Budget | None:
    """Returns None where nothing is asked for, or nothing can be thought, which is reported."""
    if request.budget is None:
        return None
    name, tokens = request.budget
    if reasoning is None:
        if "thinking_budget" not in tokenizer.templates.variables:
            leniency.ignore(name)
        return None
    marks, ids = reasoning.marks, reasoning.token_ids
    if marks.answer and use is not None:
        raise UnsupportedParameterError(
            f"{name} is not supported with tools: what closes this model's reasoning also begins a call.",
            param=name,
        )
    if not marks.answer and marks.close not in ids:
        longest = [
            request.declared(f"max_{what}") for what in ("tokens", "completion_tokens", "output_tokens")
        ]
        if any(most is not None and most <= tokens for most in longest):
            return None  # no answer is long enough to spend it
        raise UnsupportedParameterError(
            f"{name} is not supported: {marks.close!r}, which ends this model's reasoning, is not one token.",
            param=name,
        )
    written = [
        [] if not mark else [ids[mark]] if mark in ids else tokenizer.encode(mark, add_special_tokens=False)
        for mark in ("" if reasoning.is_open else marks.open, marks.close, marks.answer)
    ]
    spaces = (tokenizer.encode(space, add_special_tokens=False) for space in SPACES)
    return Budget(tokens, [*written, [ids[0] for ids in spaces if len(ids) == 1]])


def message_format(use: ToolUse | None, reasoning: Reasoning | None) -> MessageFormat:
    return MessageFormat(
        reasoning=reasoning.marks if reasoning else None,
        calls=use.calls if use else None,
        must_call=use is not None and use.required,
        is_reasoning=reasoning is not None and reasoning.is_open,
        schemas={each.name: arguments_schema(each) for each in use.functions} if use else {},
        token_ids=(use.token_ids if use else {}) | (reasoning.token_ids if reasoning else {}),
    )
