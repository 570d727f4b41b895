"""Request fields that are not honoured: refused by name, or reported as unknown.

One table says which of OpenAI's and the usual extensions' fields are not served; a value that changes
nothing (``tools: []``) is fine. Serving a field means deleting its line here and declaring it in
``server.schemas``. Called by the routes before anything is computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from truedraft.server.errors import InvalidRequestError, UnknownParameterError, UnsupportedParameterError
from truedraft.server.schemas.chat import ChatRequest, Message, OtherPart
from truedraft.server.schemas.common import SamplingRequest
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.response_items import InputCallOutput, InputText, OtherInput
from truedraft.server.schemas.responses import INCLUDE_LOGPROBS, InputMessage, ResponsesRequest

# Field -> values that ask for nothing. Null never asks for anything.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "enable_thinking": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "max_new_tokens": (),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_predict": (),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "reasoning_format": ("auto", "deepseek"),
    "regex": (),
    "repeat_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "suffix": ("",),
    "tfs_z": (1,),
    "thinking": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "truncation_side": ("left",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
    "xtc_probability": (0,),
}

# Fields that only chats have.
CHAT_FIELDS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "reasoning_effort": ("none",),
}

# The same for fields that only other endpoints have.
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    **CHAT_FIELDS,
    "chat_template_kwargs": ({},),
    "max_completion_tokens": (),
    "messages": (),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
UNSUPPORTED_IN_CHATS: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "max_output_tokens": (),
    "prompt": (),
}
UNSUPPORTED_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    **CHAT_FIELDS,
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "n": (1,),
    "prediction": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "truncation": ("disabled",),
}

# The same for the fields of a message.
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
}

# Fields of a message that only repeat an earlier answer.
HARMLESS_IN_MESSAGE = frozenset({"annotations", "refusal"})
HARMLESS_IN_INPUT = frozenset({"id", "phase", "status", "summary"})
HARMLESS_IN_INPUT_TEXT = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})


def check_parameters(request: SamplingRequest, *, strict: bool) -> list[str]:
    """Refuse what is not served; return the names of unknown fields, which are refused if ``strict``."""
    if request.store:
        raise _unsupported("store")
    extra = request.model_extra or {}
    match request:
        case CompletionRequest():
            _check_best_of(request)
            unknown = _check(extra, {**UNSUPPORTED, **UNSUPPORTED_IN_COMPLETIONS}, prefix="")
        case ChatRequest():
            unknown = _check(extra, {**UNSUPPORTED, **UNSUPPORTED_IN_CHATS}, prefix="")
            unknown += check_messages(request.messages, strict=False)
        case ResponsesRequest():
            unknown = _check(extra, {**UNSUPPORTED, **UNSUPPORTED_IN_RESPONSES}, prefix="")
            unknown += _check_input(request)
        case _:
            raise TypeError(f"missing support table for {type(request).__name__}")
    _refuse_unknown(unknown, strict=strict)
    return unknown


def check_messages(messages: Sequence[Message], *, strict: bool) -> list[str]:
    """The same for the messages of a chat."""
    unknown = []
    for position, message in enumerate(messages):
        unknown += _check_message(message, f"messages.{position}.")
    _refuse_unknown(unknown, strict=strict)
    return unknown


def _refuse_unknown(unknown: Sequence[str], *, strict: bool) -> None:
    if unknown and strict:
        raise UnknownParameterError(f"Unknown field '{unknown[0]}'.", param=unknown[0])


def _check(
    fields: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]], prefix: str
) -> list[str]:
    unknown = []
    for name, value in fields.items():
        if name not in unsupported:
            unknown.append(prefix + name)
        elif value is not None and not _is_neutral(value, unsupported[name]):
            raise _unsupported(prefix + name)
    return unknown


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # In Python 0 == False; in JSON they are different things.
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of")


def _check_message(message: Message, prefix: str) -> list[str]:
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(
            f"{prefix}content is missing; only an assistant's message may have none.",
            param=f"{prefix}content",
            code="missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError("Only an assistant calls tools.", param=f"{prefix}tool_calls")
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            if isinstance(part, OtherPart):
                raise _unsupported(f"{prefix}content.{position}.type")
    return _check(_extra(message, HARMLESS_IN_MESSAGE), UNSUPPORTED_IN_MESSAGE, prefix)


def _check_input(request: ResponsesRequest) -> list[str]:
    for position, included in enumerate(request.include or []):
        if included != INCLUDE_LOGPROBS:
            raise _unsupported(f"include.{position}")
    unknown: list[str] = []
    if isinstance(request.input, str):
        return unknown
    for position, item in enumerate(request.input):
        prefix = f"input.{position}."
        if isinstance(item, OtherInput):
            raise _unsupported(f"{prefix}type")
        unknown += _check(_extra(item, HARMLESS_IN_INPUT), {}, prefix)
        match item:
            case InputMessage():
                unknown += _check_parts(item.content, f"{prefix}content.")
            case InputCallOutput():
                unknown += _check_parts(item.output, f"{prefix}output.")
    return unknown


def _check_parts(content: str | list[InputText | OtherInput], prefix: str) -> list[str]:
    unknown: list[str] = []
    for number, part in enumerate([] if isinstance(content, str) else content):
        if not isinstance(part, InputText):
            raise _unsupported(f"{prefix}{number}.type")
        unknown += _check(_extra(part, HARMLESS_IN_INPUT_TEXT), {}, f"{prefix}{number}.")
    return unknown


def _extra(model: BaseModel, harmless: frozenset[str]) -> dict[str, Any]:
    """Undeclared fields that say something and may matter."""
    extra = model.model_extra or {}
    return {name: value for name, value in extra.items() if name not in harmless and value is not None}


def _unsupported(name: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"'{name}' is not supported with this value.", param=name)
