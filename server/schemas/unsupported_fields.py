"""Request fields that are not honoured: refused by name with what to use instead, or reported as ignored.

Refused is what would change the output. Serving a field means deleting its line here and declaring it in
``server.schemas``. Called by the routes before anything is computed.
"""

from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import BaseModel

from truedraft.server.errors import (
    InvalidRequestError,
    ThreadUnsupportedError,
    UnsupportedParameterError,
)
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest, Message
from truedraft.server.schemas.common import SamplingRequest, TextPart
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.decisions import DecisionRequest, Question
from truedraft.server.schemas.discovery import ShowRequest
from truedraft.server.schemas.embeddings import (
    DocumentText,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from truedraft.server.schemas.foreign_parts import NO_PICTURES, PICTURES, TRACES, OtherPart
from truedraft.server.schemas.infill import InfillRequest
from truedraft.server.schemas.messages import (
    Conversation,
    MessagesInputMessage,
    MessagesRequest,
    SealedThought,
    TextBlock,
    ThinkingBlock,
    TokenCountRequest,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from truedraft.server.schemas.other_servers import (
    OTHERS,
    TEXT_ONLY,
    UNSUPPORTED,
    Refused,
)
from truedraft.server.schemas.response_items import (
    InputAction,
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputReasoning,
    InputServerCall,
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
from truedraft.server.schemas.tools import FunctionDefinition, OtherTool

STATELESS = "nothing is stored here; send the whole conversation as 'input'"
STATELESS_CHAT = "nothing is stored here; send the whole conversation as 'messages'"
SYSTEM_MESSAGE = "send a message of the role 'system'"
IN_CHATS = "use /v1/chat/completions"

# Only chats have these.
_CHAT_FIELDS: Mapping[str, Refused] = {
    "add_generation_prompt": Refused(IN_CHATS, (True,)),
    "continue_final_message": Refused(IN_CHATS, (False,)),
    "documents": Refused(IN_CHATS),
}

# Only completions and chats have these.
_SCORING_FIELDS: Mapping[str, Refused] = {
    "logprob_token_ids": Refused(IN_CHATS),
    "prompt_logprobs": Refused(IN_CHATS),
    "prompt_logprobs_start": Refused(IN_CHATS, (0,)),
}

# What any of the other servers takes, with the alternative where there is one.
_ANYWHERE: Mapping[str, Refused] = {**OTHERS, **UNSUPPORTED}

# Other servers cut texts that are too long by these.
_CUT = "use 'truncate_prompt_tokens'"
_CUTTING: Mapping[str, Refused] = {
    "max_chunks_per_doc": Refused(_CUT),
    "max_tokens_per_doc": Refused(_CUT),
    "truncate": Refused(_CUT, (False, "NONE")),
    "truncation": Refused(_CUT, (False,)),
    "truncation_direction": Refused("use 'truncation_side'"),
    "use_activation": Refused("scores and vectors are as the model's files say", (True,)),
}

# Anthropic's own clients send these to any server, which the server's own service would act on.
_REPORTED_OF_MESSAGES = {"context_management"}

# One kind of object does not have these, while others may. Keys that no table has are reported.
REFUSED_IN: Mapping[type[BaseModel], Mapping[str, Refused]] = {
    CompletionRequest: {
        **_ANYWHERE,
        **_CHAT_FIELDS,
        "chat_template_kwargs": Refused(IN_CHATS),
        "enable_thinking": Refused(IN_CHATS),
        "input": Refused("use 'prompt', or /v1/responses"),
        "instructions": Refused(f"write them into the 'prompt', or {IN_CHATS}"),
        "messages": Refused(f"{IN_CHATS}, or 'prompt'"),
        "parallel_tool_calls": Refused(IN_CHATS, (True, False)),
        # -1 is no limit, which is another length than the default of this endpoint.
        "n_predict": Refused("use 'max_tokens'"),
        "num_predict": Refused("use 'max_tokens'"),
        "reasoning_effort": Refused(IN_CHATS, ("none",)),
        "system": Refused(f"write it into the 'prompt', or {IN_CHATS}"),
        "tool_choice": Refused(IN_CHATS, ("none", "auto")),
        "tools": Refused(IN_CHATS),
        "top_logprobs": Refused("use 'logprobs' with a number", (0,)),
    },
    ChatRequest: {
        **_ANYWHERE,
        "best_of": Refused("use 'n'", (1,)),
        "echo": Refused("use /v1/completions", (False,)),
        "background": Refused("use 'stream', and keep the connection", (False,)),
        "conversation": Refused(STATELESS_CHAT),
        "input": Refused("use 'messages', or /v1/responses"),
        "instructions": Refused(SYSTEM_MESSAGE),
        "max_output_tokens": Refused("use 'max_completion_tokens'"),
        "output_config": Refused("use 'response_format' and 'reasoning_effort'"),
        "previous_response_id": Refused(STATELESS_CHAT),
        "prompt": Refused("use 'messages', or /v1/completions"),
        "system": Refused(SYSTEM_MESSAGE),
        "text": Refused("use 'response_format'"),
    },
    ResponsesRequest: {
        **_ANYWHERE,
        **_CHAT_FIELDS,
        "background": Refused("use 'stream', and keep the connection", (False,)),
        "context_management": Refused("shorten the 'input', or use 'truncate_prompt_tokens'"),
        "conversation": Refused(STATELESS),
        "logprobs": Refused(f"use include: ['{INCLUDE_LOGPROBS}']", (False,)),
        "max_completion_tokens": Refused("use 'max_output_tokens'"),
        "max_tokens": Refused("use 'max_output_tokens'"),
        "messages": Refused("use 'input'"),
        "n": Refused(IN_CHATS, (1,)),
        "prediction": Refused(IN_CHATS),
        "previous_response_id": Refused(STATELESS),
        "prompt": Refused("use 'instructions' and 'input'; no prompts are stored here"),
        **_SCORING_FIELDS,
        "reasoning_effort": Refused("use reasoning.effort", ("none",)),
        "response_format": Refused("use text.format", ({"type": "text"},)),
        "system": Refused("use 'instructions'"),
        "thinking": Refused("use reasoning.effort or 'enable_thinking'"),
        "return_token_ids": Refused(IN_CHATS, (False,)),
        "truncation": Refused("use 'truncate_prompt_tokens'", ("disabled",)),
    },
    MessagesRequest: {
        **{name: refused for name, refused in _ANYWHERE.items() if name not in _REPORTED_OF_MESSAGES},
        **_CHAT_FIELDS,
        "enable_thinking": Refused("use 'thinking'"),
        "thinking_budget": Refused("use thinking.budget_tokens"),
        "thinking_token_budget": Refused("use thinking.budget_tokens"),
        "logprobs": Refused(IN_CHATS, (False,)),
        "max_completion_tokens": Refused("use 'max_tokens'"),
        "n": Refused(IN_CHATS, (1,)),
        "output_format": Refused("use output_config.format"),
        "prediction": Refused(IN_CHATS),
        "prompt": Refused("use 'messages', or /v1/completions"),
        **_SCORING_FIELDS,
        "reasoning_effort": Refused("use output_config.effort", ("none",)),
        "response_format": Refused("use output_config.format", ({"type": "text"},)),
        "return_token_ids": Refused(IN_CHATS, (False,)),
        "stop": Refused("use 'stop_sequences'"),
        "top_logprobs": Refused(IN_CHATS, (0,)),
    },
    DecisionRequest: {
        **_ANYWHERE,
        "messages": Refused("use 'input'"),
        "instructions": Refused("write them into each question, or send a message of the role 'system'"),
    },
    Question: {
        "options": Refused("use 'choices', objects with a 'value'"),
        "criteria": Refused("use 'choices' or 'levels'"),
        "labels": Refused("use 'levels', objects with a 'label'"),
    },
    ShowRequest: {},
    InfillRequest: {
        **_ANYWHERE,
        "messages": Refused(IN_CHATS),
        "max_tokens": Refused("use 'n_predict'"),
        "suffix": Refused("use 'input_suffix'"),
    },
    TokenCountRequest: {},
    TokenizeRequest: UNSUPPORTED,
    DetokenizeRequest: {},
    EmbeddingRequest: {
        **_CUTTING,
        "embd_normalize": Refused("use 'normalize'", (2,)),
        "embedding_type": Refused("use 'encoding_format'", ("float",)),
        "embedding_types": Refused("use 'encoding_format'", (["float"],)),
        "inputs": Refused("use 'input'"),
        "late_chunking": Refused("texts are computed one by one; send each piece as a text", (False,)),
        "messages": Refused("write the conversation out as a text, and use 'input'"),
        "normalized": Refused("use 'normalize'"),
        "output_dimension": Refused("use 'dimensions'"),
        "output_dtype": Refused("use 'encoding_format'", ("float",)),
        "prompt": Refused("use 'input', and 'prompt_name' for one of the model's prompts"),
        "task": Refused("use 'input_type' or 'prompt_name'"),
        "task_type": Refused("use 'input_type' or 'prompt_name'"),
        "texts": Refused("use 'input'"),
    },
    RerankRequest: {
        **_CUTTING,
        "input_type": Refused("the query and the documents have the model's prompts for each"),
        "prompt_name": Refused("the query and the documents have the model's prompts for each"),
        "rank_fields": Refused("write what counts into each document's text"),
        "raw_scores": Refused("scores are as the model's files say", (False,)),
        "return_text": Refused("use 'return_documents'", (True,)),
        "texts": Refused("use 'documents'"),
        "top_k": Refused("use 'top_n'"),
    },
    ScoreRequest: {
        **_CUTTING,
        "documents": Refused("use 'text_2', or /v1/rerank"),
        "items": Refused("use 'text_2'"),
        "queries": Refused("use 'text_1'"),
        "query": Refused("use 'text_1', or /v1/rerank"),
    },
    DocumentText: {},
    Message: {
        "audio": Refused(f"{TEXT_ONLY}; put what was said into 'content'"),
        "function_call": Refused("use 'tool_calls'"),
    },
    FunctionDefinition: {
        "input_schema": Refused("use 'parameters'"),
        "inputSchema": Refused("use 'parameters'"),
    },
    ToolDefinition: {
        "parameters": Refused("use 'input_schema'"),
        "inputSchema": Refused("use 'input_schema'"),
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
            InputAction,
            InputServerCall,
            InputCallOutput,
            InputReasoning,
            ReasoningText,
        ),
        frozenset({"id", "phase", "status", "summary", "encrypted_content"})
        | {"caller", "created_by", "environment", "max_output_length", "namespace", "server_label"}
        | {"approval_request_id"},
    ),
    **dict.fromkeys(
        (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock, ToolDefinition),
        frozenset({"cache_control", "caller", "citations", "eager_input_streaming", "signature"}),
    ),
}

# Parts and items cannot be read if they are of these kinds; each has what to send in its place.
INSTEAD_OF_PARTS: dict[str, str] = {
    "image_url": NO_PICTURES,
    "input_audio": "this server reads text only; write down what is said in a text part",
    "file": "this server reads text only; put the file's text into a text part",
    "additional_tools": "put these tools into 'tools'",
    "browser_state": "this server reads text only; describe what the browser shows in a text part",
    "configuration_update": "set what it changes in the request itself",
    "container_upload": "this server reads text only; put the file's text into a text part",
    "item_reference": "nothing is stored here; send the item itself",
    "compaction": "nothing is stored here; send the conversation itself",
}
INSTEAD_OF_PARTS |= {"input_image": INSTEAD_OF_PARTS["image_url"], "image": INSTEAD_OF_PARTS["image_url"]}
INSTEAD_OF_PARTS |= {"document": INSTEAD_OF_PARTS["file"], "search_result": INSTEAD_OF_PARTS["file"]}
INSTEAD_OF_PARTS |= {"input_file": INSTEAD_OF_PARTS["file"], "audio": INSTEAD_OF_PARTS["input_audio"]}


# Messages of these may have pictures, if the model sees.
MAY_SHOW = (ChatRequest, ResponsesRequest, Conversation, TokenizeRequest)


def check_parameters(request: RequestPart, leniency: Leniency) -> None:
    """Refuses what would change the output and is not served, and reports what is ignored."""
    if not any(isinstance(request, kind) for kind in REFUSED_IN):
        raise TypeError(f"missing support table for {type(request).__name__}")
    if isinstance(request, SamplingRequest):
        _check_extra_output(request, leniency)
    if isinstance(request, ChatRequest | TokenizeRequest):
        for number, message in enumerate(request.messages or []):
            _check_message(message, f"messages.{number}.")
    _check_keys(request, "", leniency, isinstance(request, MAY_SHOW))


def _check_keys(model: BaseModel, prefix: str, leniency: Leniency, shows: bool) -> None:
    """Checks the undeclared keys of an object, and of all objects inside of it. ``shows``: messages may have
    pictures."""
    kind = type(model)
    for name, value in (model.model_extra or {}).items():
        if (refused := _refused_in(kind).get(name)) is not None:
            if refused.asks_for(value):
                value_matters = " with this value" if refused.neutral else ""
                raise _unsupported(prefix + name, refused.instead, value_matters)
        elif value is not None and name not in _harmless_in(kind):
            leniency.ignore(prefix + name, "unknown_parameter")
    for name, inner in _objects_in(model):
        match inner:
            case OtherTool() | SealedThought():
                leniency.ignore(prefix + name)
            case OtherInput() | OtherPart() if inner.type in TRACES:
                leniency.ignore(prefix + name)
            case OtherPart() if shows and inner.type in PICTURES and _is_shown(model):
                inner.put(f"{prefix}{name}")  # the route knows whether the model sees it
            case OtherPart() if _is_read(inner, model):
                if inner.thought is not None and model.role != "assistant":  # type: ignore[attr-defined]
                    leniency.ignore(prefix + name)
            case OtherPart() | OtherInput():
                instead = INSTEAD_OF_PARTS.get(inner.type, TEXT_ONLY)
                raise _unsupported(f"{prefix}{name}.type", instead, f" as {inner.type[:40]!r}")
            case _:
                _check_keys(inner, f"{prefix}{name}.", leniency, shows)


def _is_shown(parent: BaseModel) -> bool:
    """Tells whether pictures in ``parent`` are shown to a model that sees: those in a user's message."""
    return isinstance(parent, Message | InputMessage | MessagesInputMessage) and parent.role == "user"


def _is_read(part: OtherPart, parent: BaseModel) -> bool:
    """Returns whether a part of ``parent`` is read: thoughts, calls and results only of messages."""
    if part.text is not None:
        return True
    if not isinstance(parent, Message | InputMessage | MessagesInputMessage):
        return False
    return (
        part.thought is not None
        or part.result is not None
        or (part.call is not None and parent.role == "assistant")
    )


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
