"""Describes, as data, how families of models write tool calls and reasoning; chat templates tell families.

``server.text.message_parser`` reads answers by it, ``server.text.grammar.tool_calls`` constrains them.
"""

import secrets
import string
from dataclasses import dataclass, replace
from typing import Literal

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallFormat:
    """``first`` and ``later`` stand before the names of calls and tell a call from text; ``trigger``, the
    beginning of ``first``, can only begin a call. ``before_content`` stands before an answer without calls,
    ``quote`` around strings of quoted arguments."""

    name: str
    template_marks: tuple[str, ...]
    trigger: str
    first: str
    later: str | None  # None: the family writes one call only
    before_arguments: str
    end: str
    last: str = ""
    at_start: bool = False  # a call is the whole answer
    before_content: str = ""
    arguments: Literal["json", "tags", "quoted"] = "json"
    quote: str = ""
    call_id_prefix: str = "call_"
    call_id_length: int = 24

    @property
    def literals(self) -> list[str]:
        own = [self.first, self.later or "", self.before_arguments, self.end, self.last]
        return [*own, self.before_content, self.quote]

    def new_call_id(self) -> str:
        return self.call_id_prefix + "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.call_id_length))


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks stand around an answer's reasoning. ``answer`` is the last message's header, if there are any."""

    open: str
    close: str
    answer: str = ""

    @property
    def literals(self) -> list[str]:
        return [self.open, self.close, self.answer]


# gpt-oss writes several messages in a row, each with a header.
HEADER_END, MESSAGE_END, NEXT_MESSAGE = "<|message|>", "<|end|>", "<|start|>assistant"
FINAL_HEADER = f"<|channel|>final{HEADER_END}"

HERMES = CallFormat(
    name="hermes",  # Hermes, Qwen2.5, Qwen3
    template_marks=("<tool_call>", '"arguments"'),
    trigger="<tool_call>",
    first='<tool_call>\n{"name": "',
    later='\n<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    end="}\n</tool_call>",
)

# Every other model has this form: its template writes no tools, so ``server.text.generic_tools`` does.
GENERIC = replace(HERMES, name="generic", template_marks=())

# The first format applies that has all of its marks in the template.
CALL_FORMATS = (
    CallFormat(
        name="qwen_tags",  # Qwen3-Coder, Qwen3.5
        template_marks=("<tool_call>", "<function=", "<parameter="),
        trigger="<tool_call>",
        first="<tool_call>\n<function=",
        later="\n<tool_call>\n<function=",
        before_arguments=">\n",
        end="</function>\n</tool_call>",
        arguments="tags",
    ),
    HERMES,
    CallFormat(
        name="llama3",
        template_marks=("<|start_header_id|>", '"parameters": '),
        trigger='{"name": "',
        first='{"name": "',
        later=None,
        before_arguments='", "parameters": ',
        end="}",
        at_start=True,
    ),
    CallFormat(
        name="mistral",
        template_marks=("[TOOL_CALLS]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        first="[TOOL_CALLS]",
        later="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        end="",
        call_id_prefix="",
        call_id_length=9,
    ),
    CallFormat(
        name="mistral_list",  # before 2025
        template_marks=("[TOOL_CALLS]",),
        trigger="[TOOL_CALLS]",
        first='[TOOL_CALLS][{"name": "',
        later=', {"name": "',
        before_arguments='", "arguments": ',
        end="}",
        last="]",
        call_id_prefix="",
        call_id_length=9,
    ),
    CallFormat(
        name="gpt_oss",
        template_marks=("<|channel|>commentary", "functions.", "<|call|>"),
        trigger="<|channel|>commentary to=functions.",
        first="<|channel|>commentary to=functions.",
        later=None,
        before_arguments=f" <|constrain|>json{HEADER_END}",
        end="",
        at_start=True,
        before_content=FINAL_HEADER,
    ),
    CallFormat(
        name="gemma4",
        template_marks=("<|tool_call>", "<tool_call|>"),
        trigger="<|tool_call>",
        first="<|tool_call>call:",
        later="<|tool_call>call:",
        before_arguments="{",
        end="}<tool_call|>",
        arguments="quoted",
        quote='<|"|>',
    ),
    CallFormat(
        name="function_gemma",
        template_marks=("<start_function_call>", "<end_function_call>"),
        trigger="<start_function_call>",
        first="<start_function_call>call:",
        later="<start_function_call>call:",
        before_arguments="{",
        end="}<end_function_call>",
        arguments="quoted",
        quote="<escape>",
    ),
)

REASONING_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|channel>thought\n", "<channel|>"),
    ReasoningMarks(
        f"<|channel|>analysis{HEADER_END}", f"{MESSAGE_END}{NEXT_MESSAGE}", FINAL_HEADER
    ),  # gpt-oss
)


def find_call_format(template: str) -> CallFormat:
    found = (each for each in CALL_FORMATS if all(mark in template for mark in each.template_marks))
    return next(found, GENERIC)


def find_reasoning_marks(template: str) -> ReasoningMarks | None:
    return next((each for each in REASONING_MARKS if (each.answer or each.close) in template), None)
