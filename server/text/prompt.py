"""A request's prompt, in whatever form it came, to the token ids the engine continues.

Uses ``server.text.tokenizer`` for text; knows nothing of sampling. Called by the routes, in a thread, because
a long prompt takes a while to encode.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from truedraft.engine.messages import Picture
from truedraft.server.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedParameterError,
)
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest, Message, TemplateFields
from truedraft.server.schemas.common import GenerationRequest, SamplingRequest, ThinkingBudget, content_text
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.foreign_parts import OtherPart
from truedraft.server.schemas.response_items import (
    InputAction,
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputReasoning,
    InputServerCall,
    OtherInput,
)
from truedraft.server.schemas.responses import AnyInput, InputMessage, ResponsesRequest
from truedraft.server.text.families import GENERIC
from truedraft.server.text.generic_tools import as_plain_messages
from truedraft.server.text.infill import infill_tokens
from truedraft.server.text.pictures import (
    Shown,
    Sight,
    check_marks,
    is_picture,
    no_pictures,
    pictures_in,
    placed,
    shown,
)
from truedraft.server.text.tokenizer import ChatTemplateError, Tokenizer

# Fields of a message that templates get. An undeclared one is reported as ignored, so it must not matter.
TEMPLATE_FIELDS = {"role", "name", "tool_call_id", "reasoning_content"}

# OpenAI has two names for the same role.
SYSTEM_ROLES = ("system", "developer")

# Templates let a model reason or not by one of these variables.
THINKING_SWITCHES = ("enable_thinking", "thinking")


class TokenPrompt(NamedTuple):
    """``text`` is what ``echo`` repeats; of given token ids it is there only then. ``ending`` are the last
    tokens, as far as they decide how the text goes on."""

    token_ids: list[int]
    text: str
    ending: Sequence[int] = ()
    pictures: Sequence[Picture] = ()


class PromptLimits(NamedTuple):
    """A request's prompts may have this much, which is checked before anything is tokenized.

    ``max_characters`` is that of all of them together (a setting), ``max_tokens`` that of each, for the
    reason that ``context`` says. ``sight`` None: the model sees no pictures.
    """

    max_characters: int
    max_tokens: int
    context: str
    vocab_size: int
    sight: Sight | None = None


def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, limits: PromptLimits
) -> list[TokenPrompt]:
    prompts = _as_prompt_list(request.prompt)
    check_characters(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), limits, "prompt")
    if request.truncate_prompt_tokens is None:
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(prompt, tokenizer, limits, "prompt")
    if request.suffix:
        _check_suffix(request, request.suffix, tokenizer, limits)
    encoded = [_token_prompt(prompt, request, tokenizer, limits.vocab_size) for prompt in prompts]
    if not all(prompt.token_ids for prompt in encoded):
        raise InvalidRequestError("The prompt is empty: there is nothing to continue.", param="prompt")
    return encoded


def chat_prompt(
    request: ChatRequest | ResponsesRequest, tokenizer: Tokenizer, limits: PromptLimits, leniency: Leniency
) -> TokenPrompt:
    if isinstance(request, ChatRequest):
        messages = request.messages
    else:
        messages = input_messages(request.input, request.instructions)
    name = request.prompt_field
    if isinstance(request, ChatRequest):
        options = template_options(request, tokenizer, leniency)
    else:
        options = response_options(request, tokenizer, leniency)
    pictures = shown(messages, limits.sight)
    text = render_chat(
        messages, tokenizer, param=name, options=options, pictures=pictures, sight=limits.sight
    )
    check_characters(len(text), limits, name)
    if request.truncate_prompt_tokens is None:
        check_length(text, tokenizer, limits, name)
    elif pictures:
        raise InvalidRequestError(
            "truncate_prompt_tokens is not allowed with pictures: it could cut one in two.",
            param="truncate_prompt_tokens",
        )
    # The template writes the special tokens itself; the tokenizer must not add them again.
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise InvalidRequestError("The chat template made an empty prompt.", param=name)
    token_ids = token_ids[-(request.truncate_prompt_tokens or len(token_ids)) :]
    ending = tokenizer.ending(token_ids)
    if not pictures or limits.sight is None:
        return TokenPrompt(token_ids, text, ending)
    token_ids, placed_ones = placed(token_ids, pictures, limits.sight.facts, name)
    return TokenPrompt(token_ids, text, ending, placed_ones)


def check_characters(num_characters: int, limits: PromptLimits, param: str) -> None:
    """``RequestTooLargeError`` for more text than the server is willing to tokenize."""
    if num_characters > limits.max_characters:
        raise RequestTooLargeError(
            f"The {_named(param)} {num_characters} characters, but at most {limits.max_characters} are "
            "allowed (max_prompt_characters).",
            param=param,
        )


def _named(param: str) -> str:
    """Returns the subject of a sentence on a field's length, with its verb."""
    return f"{param} have" if param == "messages" else f"{param} has"


def check_length(text: str, tokenizer: Tokenizer, limits: PromptLimits, param: str) -> None:
    """``ContextLengthError`` for a text that cannot fit however it is tokenized."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest > limits.max_tokens:
        raise ContextLengthError(
            f"{limits.context}, but the {_named(param)} {len(text)} characters, at least {fewest} tokens.",
            param=param,
        )


def render_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    param: str,
    options: Mapping[str, Any],
    pictures: Sequence[Shown] = (),
    sight: Sight | None = None,
) -> str:
    """The conversation as the model's template writes it; ``param`` is the request's field at fault.
    ``pictures`` are those that the messages have."""
    templates = tokenizer.templates
    if not pictures and (unseen := pictures_in(messages)):
        raise no_pictures(unseen[0])
    messages = [each for message in messages for each in _unpacked(message)]
    written = _template_messages(_joined_system(messages))
    if templates.call_format is GENERIC:
        written = as_plain_messages(written, options.get("tools"), has_system=templates.has_system)
        options = {name: value for name, value in options.items() if name != "tools"}
    elif "tool_calls" not in templates.source:
        _refuse_calls(messages, param)
    if ".thinking" in templates.source:  # gpt-oss's name for it
        for fields in written:
            if "reasoning_content" in fields:
                fields["thinking"] = fields["reasoning_content"]
    if sight is not None:
        check_marks(tokenizer.vocabulary.text_of(sight.facts.token_id), [written, options], pictures, param)
    try:
        return tokenizer.apply_chat_template(written, options)
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), param=param) from error


def _refuse_calls(messages: Sequence[Message], param: str) -> None:
    for position, message in enumerate(messages):
        if message.tool_calls:
            where = f".{position}.tool_calls" if param == "messages" else ""
            raise UnsupportedParameterError(
                "This model's chat template does not write tool calls.", param=param + where
            )


def template_options(request: TemplateFields, tokenizer: Tokenizer, leniency: Leniency) -> dict[str, Any]:
    variables = _variables(request, "reasoning_effort", request.reasoning_effort, tokenizer, leniency)
    return variables | request.template_options()


def response_options(request: ResponsesRequest, tokenizer: Tokenizer, leniency: Leniency) -> dict[str, Any]:
    """The same for ``/v1/responses``."""
    tools = [
        {"type": "function", "function": function.for_template()}
        for function in request.functions
        if request.tool_choice != "none"
    ]
    effort = request.reasoning.effort if request.reasoning is not None else None
    variables = _variables(request, "reasoning.effort", effort, tokenizer, leniency)
    return variables | {"tools": tools or None}


def _variables(
    request: TemplateFields | ResponsesRequest,
    effort_field: str,
    effort: str | None,
    tokenizer: Tokenizer,
    leniency: Leniency,
) -> dict[str, Any]:
    """Returns what the request's fields about reasoning and the template's own variables come to."""
    given = request.chat_template_kwargs or {}
    asked = {f"chat_template_kwargs.{name}": (name, value) for name, value in given.items()}
    asked[effort_field] = "reasoning_effort", effort
    if isinstance(request, TemplateFields) and request.thinking is not None:
        asked["thinking"] = "enable_thinking", request.thinking.is_on
    asked["enable_thinking"] = "enable_thinking", request.enable_thinking
    if isinstance(request, ThinkingBudget) and request.budget is not None:
        name, budget = request.budget
        if "thinking_budget" in tokenizer.templates.variables:
            asked[name] = "thinking_budget", budget
    return template_variables(asked, tokenizer, leniency)


def template_variables(
    asked: Mapping[str, tuple[str, Any]], tokenizer: Tokenizer, leniency: Leniency
) -> dict[str, Any]:
    """Returns the template's variables. ``asked``: what a field of the request wants a variable to be.

    What the template does not use cannot change the prompt, so it is reported as ignored, unless the template
    has another variable for the same.
    """
    own: dict[str, Any] = {}
    translated: dict[str, Any] = {}
    for field, (name, value) in asked.items():
        is_given = value is not None or field.startswith("chat_template_kwargs.")
        if not is_given:
            continue
        if name in tokenizer.templates.variables:
            own[name] = value
        elif (others := _translated(name, value, tokenizer)) is not None:
            translated |= others
        else:
            leniency.ignore(field)
    return translated | own


def _translated(name: str, value: Any, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns what a template gets that has another name for how much to reason; None if it has no such."""
    variables = tokenizer.templates.variables
    switch = next((switch for switch in THINKING_SWITCHES if switch in variables), None)
    if name not in ("reasoning_effort", *THINKING_SWITCHES):
        return None
    is_off = value == "none" if name == "reasoning_effort" else not value
    if switch is not None:
        return {switch: not is_off}
    if "reasoning_effort" in variables:
        return {"reasoning_effort": "none"} if is_off else {}
    reasons = tokenizer.templates.reasoning_marks is not None
    is_so = not reasons if is_off else reasons and name != "reasoning_effort"
    return {} if is_so else None


def input_messages(given: str | list[AnyInput], instructions: str | None = None) -> list[Message]:
    """The messages of an ``input`` as ``/v1/responses`` has it, with the instructions in front."""
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    if isinstance(given, str):
        return [*messages, Message(role="user", content=given)]
    thought = ""  # before the item that follows
    called: set[str] = set()
    for item in given:
        match item:
            case InputMessage():
                messages.append(Message.model_construct(role=item.role, content=item.content))
            case InputReasoning():
                thought = "\n".join(part.text for part in item.content or [])
                continue
            case OtherInput():
                continue  # reported
            case InputCall() | InputCustomCall() | InputAction() | InputServerCall():
                call = item.call
                # An assistant's text and calls are items of their own here, and one message for templates.
                if not messages or messages[-1].role != "assistant" or thought:
                    messages.append(Message(role="assistant", content=""))
                if messages[-1].tool_calls is None:
                    messages[-1].tool_calls = []
                messages[-1].tool_calls.append(call)
                called.add(call.id)
                if isinstance(item, InputServerCall):
                    messages[-1].reasoning_content = thought or messages[-1].reasoning_content
                    messages.append(Message(role="tool", content=item.result, tool_call_id=call.id))
            case InputCallOutput():
                if item.call_id not in called:
                    raise InvalidRequestError(
                        f"No call with the id '{item.call_id}' comes before its output.", param="input"
                    )
                content = content_text(item.output)
                messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        if thought and messages[-1].role == "assistant":
            messages[-1].reasoning_content = thought
        thought = ""
    return messages


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"Token id {max(token_ids)} is not in the vocabulary of {vocab_size} tokens.", param=param
        )


def predicted_tokens(
    request: SamplingRequest, tokenizer: Tokenizer, limits: PromptLimits
) -> list[int] | None:
    """The prediction as the model might write it, and as no prompt begins; None if there is none. Where its
    tokens are cut otherwise than the output's, drafting finds its place again."""
    if not isinstance(request, GenerationRequest) or request.prediction is None:
        return None
    text = request.prediction.text
    # The worker gets it once for each prompt.
    times = num_prompts(request) if isinstance(request, CompletionRequest) else 1
    check_characters(times * len(text), limits, "prediction")
    check_length(text, tokenizer, limits, "prediction")
    return tokenizer.encode(text, add_special_tokens=False)


def num_prompts(request: CompletionRequest) -> int:
    prompt = request.prompt
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


def _as_prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    return [token_ids] if token_ids else [item for item in prompt if not isinstance(item, int)]


def _token_prompt(
    prompt: str | list[int], request: CompletionRequest, tokenizer: Tokenizer, vocab_size: int
) -> TokenPrompt:
    """Truncated where the request says so; token ids get their text only if ``echo`` repeats it."""
    if not isinstance(prompt, str):
        check_token_ids(prompt, vocab_size, "prompt")
    if request.suffix:
        ids = infill_tokens(tokenizer, prompt, request.suffix, param="suffix")
        return TokenPrompt(ids, "", tokenizer.ending(ids))
    if isinstance(prompt, str):
        token_ids, text = tokenizer.encode(prompt, add_special_tokens=True), prompt
    else:
        token_ids, text = prompt, None
    limit = request.truncate_prompt_tokens
    if limit is not None and len(token_ids) > limit:
        token_ids, text = token_ids[-limit:], None
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=False) if request.echo else ""
    return TokenPrompt(token_ids, text, tokenizer.ending(token_ids))


def _check_suffix(
    request: CompletionRequest, suffix: str, tokenizer: Tokenizer, limits: PromptLimits
) -> None:
    """Refuses a suffix that is too long, and what cannot be said of a prompt with two sides."""
    check_characters(num_prompts(request) * len(suffix), limits, "suffix")
    check_length(suffix, tokenizer, limits, "suffix")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise InvalidRequestError(
                f"{name} is not allowed with suffix: the prompt has two sides then.", param=name
            )


def _joined_system(messages: Sequence[Message]) -> list[Message]:
    """System and developer messages at the beginning become one: many templates take only one, and first."""
    num_leading = next((n for n, each in enumerate(messages) if each.role not in SYSTEM_ROLES), len(messages))
    if num_leading < 2:
        return list(messages)
    text = "\n\n".join(message.text for message in messages[:num_leading])
    return [messages[0].model_copy(update={"content": text}), *messages[num_leading:]]


def _unpacked(message: Message) -> Iterator[Message]:
    """Yields a message as chats have it: thoughts and calls that are parts of its content stand next to it,
    and results are messages in front of it. A call that stands there already is not written twice."""
    parts = message.content if isinstance(message.content, list) else []
    others = [part for part in parts if isinstance(part, OtherPart) and not part.place]
    if not others:
        yield message
        return
    for part in others:
        if part.result is not None:
            yield Message(role="tool", content=part.result[1], tool_call_id=part.result[0])
    text: Any = content_text(message.content)
    if pictures_in([message]):
        text = [part for part in parts if part.text is not None or is_picture(part)]
    changed = message.model_copy(update={"content": text})
    if message.role == "assistant":
        known = message.tool_calls or []
        ids = {call.id for call in known}
        calls = [*known, *(part.call for part in others if part.call is not None and part.call.id not in ids)]
        thoughts = "\n".join(part.thought for part in others if part.thought)
        changed.tool_calls = calls or None
        changed.reasoning_content = message.reasoning_content or thoughts or None
    if text or message.role == "assistant" or not any(part.result for part in others):
        yield changed


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Answers of tools get the name of what was called, which some templates write."""
    names: dict[str, str] = {}
    written = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or []}
        fields = _template_message(message)
        if message.role == "tool" and message.tool_call_id in names:
            fields.setdefault("name", names[message.tool_call_id])
        written.append(fields)
    return written


def _in_order(content: Any) -> list[dict[str, str]]:
    """Returns texts and pictures as templates of models that see expect them. Texts that follow each other
    are joined by newlines, as without pictures."""
    written: list[dict[str, str]] = []
    for part in content:
        if is_picture(part):
            written.append({"type": "image"})
        elif part.text is not None and written and written[-1]["type"] == "text":
            written[-1]["text"] += f"\n{part.text}"
        elif part.text is not None:
            written.append({"type": "text", "text": part.text})
    return written


def _template_message(message: Message) -> dict[str, Any]:
    """Returns what templates expect: plain text, arguments as an object, and 'system' as the role's name."""
    fields = message.model_dump(include=TEMPLATE_FIELDS, exclude_none=True)
    fields["role"] = "system" if message.role in SYSTEM_ROLES else message.role
    fields["content"] = _in_order(message.content) if pictures_in([message]) else message.text
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.given},
            }
            for call in message.tool_calls
        ]
    return fields
