"""Request fields that are not honoured: refused by name, or reported as unknown.

One table says which of OpenAI's and the usual extensions' fields are not served; a value that changes
nothing (``tools: []``) is fine. Serving a field means deleting its line here and declaring it in
``server.schemas``. Called by the routes before anything is computed.
"""

from collections.abc import Mapping
from typing import Any

from server.errors import UnknownParameterError, UnsupportedParameterError
from server.schemas.chat import ChatRequest, Message, OtherPart
from server.schemas.common import GenerationRequest
from server.schemas.completion import CompletionRequest

# Field -> values that ask for nothing. Null never asks for anything.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

# The same for a field that only chats have.
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {"top_logprobs": (0,)}

# The same for the fields of a message.
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}

# Fields of a message that the template may use or that only repeat an earlier answer.
HARMLESS_IN_MESSAGE = frozenset({"annotations", "refusal", "tool_call_id"})


def check_parameters(request: GenerationRequest, *, strict: bool) -> list[str]:
    """Refuse what is not served; return the names of unknown fields, which are refused if ``strict``."""
    unsupported = UNSUPPORTED
    if isinstance(request, CompletionRequest):
        unsupported = {**UNSUPPORTED, **UNSUPPORTED_IN_COMPLETIONS}
        _check_best_of(request)
    unknown = _check(request.model_extra or {}, unsupported, prefix="")
    if isinstance(request, ChatRequest):
        for position, message in enumerate(request.messages):
            unknown += _check_message(message, f"messages.{position}.")
    if unknown and strict:
        raise UnknownParameterError(f"Unknown field '{unknown[0]}'.", param=unknown[0])
    return unknown


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
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            if isinstance(part, OtherPart):
                raise _unsupported(f"{prefix}content.{position}.type")
    extra = {
        name: value
        for name, value in (message.model_extra or {}).items()
        if name not in HARMLESS_IN_MESSAGE and value is not None
    }
    return _check(extra, UNSUPPORTED_IN_MESSAGE, prefix)


def _unsupported(name: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"This server does not support '{name}' with this value.", param=name)
