"""A request's prompt, in whatever form it came, to the token ids the engine continues.

Uses ``server.tokenizer`` for text; knows nothing of sampling. Called by the routes, in a thread, because a
long prompt takes a while to encode.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from server.errors import InvalidRequestError
from server.schemas.chat import ChatRequest, Message
from server.schemas.common import GenerationRequest, TextPart
from server.schemas.completion import CompletionRequest
from server.schemas.responses import InputMessage, InputText, ResponsesRequest
from server.tokenizer import ChatTemplateError, Tokenizer


class TokenPrompt(NamedTuple):
    """``text`` is what ``echo`` repeats."""

    token_ids: list[int]
    text: str


def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, vocab_size: int
) -> list[TokenPrompt]:
    prompts = [
        _truncate(_token_prompt(prompt, tokenizer, vocab_size), request.truncate_prompt_tokens, tokenizer)
        for prompt in _as_prompt_list(request.prompt)
    ]
    if not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequestError("The prompt is empty: there is nothing to continue.", param="prompt")
    return prompts


def chat_prompt(request: ChatRequest | ResponsesRequest, tokenizer: Tokenizer) -> TokenPrompt:
    messages = request.messages if isinstance(request, ChatRequest) else input_messages(request)
    text = render_chat(messages, tokenizer, param=request.prompt_field)
    # The template writes the special tokens itself; the tokenizer must not add them again.
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise InvalidRequestError("The chat template made an empty prompt.", param=request.prompt_field)
    return _truncate(TokenPrompt(token_ids, text), request.truncate_prompt_tokens, tokenizer)


def render_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, *, param: str, add_generation_prompt: bool = True
) -> str:
    """The conversation as the model's template writes it; ``param`` is the request's field at fault."""
    try:
        return tokenizer.apply_chat_template(
            [_template_message(message) for message in messages], add_generation_prompt=add_generation_prompt
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), param=param) from error


def input_messages(request: ResponsesRequest) -> list[Message]:
    """The messages of a ``/v1/responses`` request, with the instructions in front."""
    messages = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    items = [item for item in request.input if isinstance(item, InputMessage)]
    return [*messages, *(Message(role=item.role, content=_input_text(item)) for item in items)]


def _input_text(item: InputMessage) -> str:
    if isinstance(item.content, str):
        return item.content
    return "\n".join(part.text for part in item.content if isinstance(part, InputText))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"Token id {max(token_ids)} is not in the vocabulary of {vocab_size} tokens.", param=param
        )


def predicted_tokens(request: GenerationRequest, tokenizer: Tokenizer) -> list[int] | None:
    """The prediction as the model might write it, and as no prompt begins; None if there is none. Where its
    tokens are cut otherwise than the output's, drafting finds its place again."""
    if request.prediction is None:
        return None
    return tokenizer.encode(request.prediction.text, add_special_tokens=False)


def _truncate(prompt: TokenPrompt, num_tokens: int | None, tokenizer: Tokenizer) -> TokenPrompt:
    """The last ``num_tokens`` tokens, whatever the first ones are."""
    if num_tokens is None or len(prompt.token_ids) <= num_tokens:
        return prompt
    kept = prompt.token_ids[-num_tokens:]
    return TokenPrompt(kept, tokenizer.decode(kept, skip_special_tokens=False))


def _as_prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    return [token_ids] if token_ids else [item for item in prompt if not isinstance(item, int)]


def _token_prompt(prompt: str | list[int], tokenizer: Tokenizer, vocab_size: int) -> TokenPrompt:
    if isinstance(prompt, str):
        return TokenPrompt(tokenizer.encode(prompt, add_special_tokens=True), prompt)
    check_token_ids(prompt, vocab_size, "prompt")
    return TokenPrompt(prompt, tokenizer.decode(prompt, skip_special_tokens=False))


def _template_message(message: Message) -> dict[str, Any]:
    """What templates expect: plain text, and 'system' for OpenAI's newer name of the same role."""
    fields = message.model_dump(exclude={"content"}, exclude_none=True)
    fields["role"] = "system" if message.role == "developer" else message.role
    fields["content"] = _plain_text(message)
    return fields


def _plain_text(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content if isinstance(part, TextPart))
    return message.content or ""
