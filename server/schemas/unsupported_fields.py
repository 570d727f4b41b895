"""Request fields that are not honoured: refused by name with what to use instead, or reported as ignored.

Refused is what would change the output. Serving a field means deleting its line here and declaring it in
``server.schemas``. Called by the routes before anything is computed.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from pydantic import BaseModel

from truedraft.engine.parameters import CUTS, PENALTIES
from truedraft.server.errors import (
    InvalidRequestError,
    ThreadUnsupportedError,
    UnsupportedParameterError,
)
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest, Message
from truedraft.server.schemas.common import OtherPart, SamplingRequest, TextPart
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.messages import (
    MessagesRequest,
    SealedThought,
    TextBlock,
    ThinkingBlock,
    TokenCountRequest,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from truedraft.server.schemas.response_items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputReasoning,
    InputShellCall,
    OtherInput,
    ReasoningText,
)
from truedraft.server.schemas.responses import (
    INCLUDE_LOGPROBS,
    InputMessage,
    ReasoningOptions,
    ResponsesRequest,
)
from truedraft.server.schemas.strict import RequestPart
from truedraft.server.schemas.structured import JsonObjectFormat, StructuredOutputs, TextOptions
from truedraft.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from truedraft.server.schemas.tools import OtherTool


def one_of(*names: str) -> str:
    """Returns ``'a', 'b' or 'c'``."""
    quoted = [f"'{name}'" for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


class Refused(NamedTuple):
    """``instead`` completes the error's sentence. ``neutral`` values ask for nothing; null never does."""

    instead: str
    neutral: tuple[object, ...] = ()


USE_CUTS = f"use {one_of('temperature', *CUTS)}"
USE_PENALTIES = f"use {one_of(*PENALTIES)}"
LENGTH = "use 'max_tokens', or 'max_output_tokens' on /v1/responses"
THINKING = "use 'reasoning_effort' or chat_template_kwargs"
BIAS = "use 'logit_bias'"
TEXT_ONLY = "this server reads and writes text only"
ONE_BEAM = "tokens are sampled one after the other; use 'n' for several answers"
SPLIT_REASONING = "reasoning always comes apart from the text, as 'reasoning_content'"
STATELESS = "nothing is stored here; send the whole conversation as 'input'"
IN_CHATS = "use /v1/chat/completions"
LOGPROBS = "use 'logprobs'"

# No endpoint serves these.
UNSUPPORTED: Mapping[str, Refused] = {
    "add_special_tokens": Refused("send token ids as the 'prompt' of /v1/completions"),
    "allowed_token_ids": Refused("use 'structured_outputs' or 'logit_bias'"),
    "audio": Refused(TEXT_ONLY),
    "bad_words": Refused(BIAS, ([],)),
    "chat_template": Refused(
        "the server's setting of that name has it; send a finished text to /v1/completions"
    ),
    "custom_logit_processor": Refused("use 'logit_bias' or 'structured_outputs'"),
    "detokenize": Refused("use 'return_token_ids', which gives the ids too", (True,)),
    "dry_multiplier": Refused(USE_PENALTIES, (0,)),
    "dynatemp_range": Refused(USE_CUTS, (0,)),
    "ebnf": Refused("use structured_outputs.grammar, in Lark's notation"),
    "epsilon_cutoff": Refused(USE_CUTS, (0,)),
    "eta_cutoff": Refused(USE_CUTS, (0,)),
    "function_call": Refused("use 'tool_choice'", ("none", "auto")),
    "functions": Refused("use 'tools'", ([],)),
    "grammar": Refused("use structured_outputs.grammar, in Lark's notation", ("",)),
    "guided_choice": Refused("use structured_outputs.choice"),
    "guided_decoding_backend": Refused("use 'structured_outputs', which has one backend"),
    "guided_grammar": Refused("use structured_outputs.grammar, in Lark's notation"),
    "guided_json": Refused("use structured_outputs.json"),
    "guided_regex": Refused("use structured_outputs.regex"),
    "include_reasoning": Refused(SPLIT_REASONING, (True,)),
    "json_schema": Refused("use 'response_format' or structured_outputs.json"),
    "length_penalty": Refused(ONE_BEAM, (1,)),
    "logits_processors": Refused("use 'logit_bias' or 'structured_outputs'", ([],)),
    "logprob_token_ids": Refused(LOGPROBS),
    "max_new_tokens": Refused(LENGTH),
    "mirostat": Refused(USE_CUTS, (0,)),
    "modalities": Refused(TEXT_ONLY, (["text"],)),
    "n_predict": Refused(LENGTH),
    "n_probs": Refused(LOGPROBS, (0,)),
    "no_repeat_ngram_size": Refused(USE_PENALTIES, (0,)),
    "reasoning_format": Refused(SPLIT_REASONING, ("auto", "deepseek")),
    "regex": Refused("use structured_outputs.regex"),
    "repeat_penalty": Refused("use 'repetition_penalty'", (1,)),
    "return_tokens_as_token_ids": Refused("use 'return_token_ids'", (False,)),
    "samplers": Refused(USE_CUTS),
    "separate_reasoning": Refused(SPLIT_REASONING, (True,)),
    "spaces_between_special_tokens": Refused("use 'return_token_ids' and decode them", (True,)),
    "stop_regex": Refused("use 'stop' or structured_outputs.regex", ([],)),
    "suffix": Refused(
        "write both sides into the 'prompt', with the model's own fill-in-the-middle tokens", ("",)
    ),
    "tfs_z": Refused(USE_CUTS, (1,)),
    "thinking": Refused(THINKING),
    "thinking_budget": Refused(THINKING),
    "thinking_token_budget": Refused(THINKING),
    "top_a": Refused(USE_CUTS, (0,)),
    "top_n_sigma": Refused(USE_CUTS, (-1,)),
    "truncation_side": Refused("use 'truncate_prompt_tokens', which keeps the end", ("left",)),
    "typical_p": Refused(USE_CUTS, (1,)),
    "use_beam_search": Refused(ONE_BEAM, (False,)),
    "web_search_options": Refused("offer a function that searches among the 'tools'"),
    "xtc_probability": Refused(USE_CUTS, (0,)),
}

# Only chats have these.
_CHAT_FIELDS: Mapping[str, Refused] = {
    "add_generation_prompt": Refused(IN_CHATS, (True,)),
    "continue_final_message": Refused(IN_CHATS, (False,)),
    "documents": Refused(IN_CHATS, ([],)),
}

# One kind of object does not have these, while others may. Keys that no table has are reported.
REFUSED_IN: Mapping[type[BaseModel], Mapping[str, Refused]] = {
    CompletionRequest: {
        **UNSUPPORTED,
        **_CHAT_FIELDS,
        "chat_template_kwargs": Refused(IN_CHATS, ({},)),
        "enable_thinking": Refused(IN_CHATS),
        "max_completion_tokens": Refused("use 'max_tokens'"),
        "messages": Refused(f"{IN_CHATS}, or 'prompt'"),
        "parallel_tool_calls": Refused(IN_CHATS, (True, False)),
        "reasoning_effort": Refused(IN_CHATS, ("none",)),
        "tool_choice": Refused(IN_CHATS, ("none", "auto")),
        "tools": Refused(IN_CHATS, ([],)),
        "top_logprobs": Refused("use 'logprobs' with a number", (0,)),
    },
    ChatRequest: {
        **UNSUPPORTED,
        "best_of": Refused("use 'n'", (1,)),
        "echo": Refused("use /v1/completions", (False,)),
        "max_output_tokens": Refused("use 'max_completion_tokens'"),
        "prompt": Refused("use 'messages', or /v1/completions"),
    },
    ResponsesRequest: {
        **UNSUPPORTED,
        **_CHAT_FIELDS,
        "background": Refused("use 'stream', and keep the connection", (False,)),
        "context_management": Refused("shorten the 'input', or use 'truncate_prompt_tokens'", ([],)),
        "conversation": Refused(STATELESS),
        "logprobs": Refused(f"use include: ['{INCLUDE_LOGPROBS}']", (False,)),
        "max_completion_tokens": Refused("use 'max_output_tokens'"),
        "max_tokens": Refused("use 'max_output_tokens'"),
        "messages": Refused("use 'input'"),
        "n": Refused(IN_CHATS, (1,)),
        "prediction": Refused(IN_CHATS),
        "previous_response_id": Refused(STATELESS),
        "prompt": Refused("use 'instructions' and 'input'; no prompts are stored here"),
        "prompt_logprobs": Refused(IN_CHATS),
        "reasoning_effort": Refused("use reasoning.effort", ("none",)),
        "response_format": Refused("use text.format", ({"type": "text"},)),
        "return_token_ids": Refused(IN_CHATS, (False,)),
        "truncation": Refused("use 'truncate_prompt_tokens'", ("disabled",)),
    },
    MessagesRequest: {
        **UNSUPPORTED,
        **_CHAT_FIELDS,
        "enable_thinking": Refused("use 'thinking'"),
        "logprobs": Refused(IN_CHATS, (False,)),
        "max_completion_tokens": Refused("use 'max_tokens'"),
        "n": Refused(IN_CHATS, (1,)),
        "output_format": Refused("use output_config.format"),
        "prediction": Refused(IN_CHATS),
        "prompt": Refused("use 'messages', or /v1/completions"),
        "prompt_logprobs": Refused(IN_CHATS),
        "reasoning_effort": Refused("use output_config.effort", ("none",)),
        "response_format": Refused("use output_config.format", ({"type": "text"},)),
        "return_token_ids": Refused(IN_CHATS, (False,)),
        "stop": Refused("use 'stop_sequences'", ([],)),
        "top_logprobs": Refused(IN_CHATS, (0,)),
    },
    TokenCountRequest: {},
    TokenizeRequest: UNSUPPORTED,
    DetokenizeRequest: {},
    Message: {
        "audio": Refused(f"{TEXT_ONLY}; put what was said into 'content'"),
        "function_call": Refused("use 'tool_calls'"),
    },
    JsonObjectFormat: {"schema": Refused("use the type 'json_schema'")},
    StructuredOutputs: {
        "json_object": Refused("use response_format: {'type': 'json_object'}", (False,)),
        "structural_tag": Refused("use 'tools' or structured_outputs.grammar"),
        "whitespace_pattern": Refused("use 'x-guidance' in the schema"),
    },
}

# These only repeat an earlier answer, or change nothing at all.
HARMLESS_IN: Mapping[type[BaseModel], frozenset[str]] = {
    Message: frozenset({"annotations"}),
    TextPart: frozenset({"annotations", "logprobs", "origins"}),
    **dict.fromkeys(
        (
            InputMessage,
            InputCall,
            InputCustomCall,
            InputShellCall,
            InputCallOutput,
            InputReasoning,
            ReasoningText,
        ),
        frozenset({"id", "phase", "status", "summary", "encrypted_content"}),
    ),
    **dict.fromkeys(
        (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock, ToolDefinition),
        frozenset({"cache_control", "caller", "citations", "eager_input_streaming", "signature"}),
    ),
}

# These are traces of what another server's tools did; without them the conversation says the same.
TRACES = {"file_search_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call"}

# Parts and items cannot be read if they are of these kinds; each has what to send in its place.
INSTEAD_OF_PARTS: dict[str, str] = {
    "image_url": "this server reads text only; describe the image in a text part",
    "input_audio": "this server reads text only; write down what is said in a text part",
    "file": "this server reads text only; put the file's text into a text part",
    "item_reference": "nothing is stored here; send the item itself",
    "compaction": "nothing is stored here; send the conversation itself",
}
INSTEAD_OF_PARTS |= {"input_image": INSTEAD_OF_PARTS["image_url"], "image": INSTEAD_OF_PARTS["image_url"]}
INSTEAD_OF_PARTS |= {"document": INSTEAD_OF_PARTS["file"], "search_result": INSTEAD_OF_PARTS["file"]}
INSTEAD_OF_PARTS |= {"input_file": INSTEAD_OF_PARTS["file"], "audio": INSTEAD_OF_PARTS["input_audio"]}


def check_parameters(request: RequestPart, leniency: Leniency) -> None:
    """Refuses what would change the output and is not served, and reports what is ignored."""
    if not any(isinstance(request, kind) for kind in REFUSED_IN):
        raise TypeError(f"missing support table for {type(request).__name__}")
    if isinstance(request, SamplingRequest):
        _check_extra_output(request, leniency)
    if isinstance(request, ChatRequest | TokenizeRequest):
        for number, message in enumerate(request.messages or []):
            _check_message(message, f"messages.{number}.")
    _check_keys(request, "", leniency)


def _check_keys(model: BaseModel, prefix: str, leniency: Leniency) -> None:
    """Checks the undeclared keys of an object, and of all objects inside of it."""
    kind = type(model)
    for name, value in (model.model_extra or {}).items():
        if (refused := _refused_in(kind).get(name)) is not None:
            if not _is_neutral(value, refused.neutral):
                value_matters = " with this value" if refused.neutral else ""
                raise _unsupported(prefix + name, refused.instead, value_matters)
        elif value is not None and name not in _harmless_in(kind):
            leniency.ignore(prefix + name, "unknown_parameter")
    for name, inner in _objects_in(model):
        match inner:
            case OtherTool() | SealedThought():
                leniency.ignore(prefix + name)
            case OtherInput(type=kind_of_item) if kind_of_item in TRACES:
                leniency.ignore(prefix + name)
            case OtherPart() | OtherInput():
                instead = INSTEAD_OF_PARTS.get(inner.type, TEXT_ONLY)
                raise _unsupported(f"{prefix}{name}.type", instead, f" as {inner.type[:40]!r}")
            case _:
                _check_keys(inner, f"{prefix}{name}.", leniency)


def _objects_in(model: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    """Yields them by their paths. Lists of anything else may be long, and are not walked through."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield field.alias or name, value
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            yield from ((f"{field.alias or name}.{number}", item) for number, item in enumerate(value))


@cache
def _refused_in(kind: type[BaseModel]) -> Mapping[str, Refused]:
    tables = (REFUSED_IN.get(base, {}) for base in kind.__mro__)
    return {name: refused for table in tables for name, refused in table.items()}


@cache
def _harmless_in(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset().union(*(HARMLESS_IN.get(base, frozenset()) for base in kind.__mro__))


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # In Python 0 == False; in JSON they are different things.
    return value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def _check_extra_output(request: SamplingRequest, leniency: Leniency) -> None:
    """Reports declared fields that ask for more than an answer has here."""
    if request.store:
        leniency.ignore("store")
    if request.service_tier not in (None, "auto", "default", "standard_only"):
        leniency.ignore("service_tier")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        leniency.ignore("stream_options.include_obfuscation")
    match request:
        case CompletionRequest():
            if request.best_of is not None and request.best_of != (request.n or 1):
                raise _unsupported("best_of", "use 'n', and choose yourself")
        case MessagesRequest():
            if "thread" in (request.model_extra or {}):
                raise ThreadUnsupportedError(
                    "'thread' is not supported: nothing is stored here; send the whole conversation.",
                    param="thread",
                )
            if request.speculation is not None and request.speculation.origins is not False:
                raise _unsupported("speculation.origins", IN_CHATS)
        case ResponsesRequest():
            for number, included in enumerate(request.include or []):
                if included != INCLUDE_LOGPROBS:
                    leniency.ignore(f"include.{number}")
            if isinstance(request.reasoning, ReasoningOptions) and request.reasoning.summary is not None:
                leniency.ignore("reasoning.summary")
            if isinstance(request.text, TextOptions) and request.text.verbosity not in (None, "medium"):
                leniency.ignore("text.verbosity")


def _check_message(message: Message, prefix: str) -> None:
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(
            f"{prefix}content is missing; only an assistant's message may have none.",
            param=f"{prefix}content",
            code="missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError("Only an assistant calls tools.", param=f"{prefix}tool_calls")


def _unsupported(name: str, instead: str, what: str = "") -> UnsupportedParameterError:
    return UnsupportedParameterError(f"'{name}' is not supported{what}: {instead}.", param=name)
