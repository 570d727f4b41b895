"""Makes a running generation of a checked request and its token ids."""

import time
import uuid
from typing import Literal

from fastapi import Request
from msgspec import structs

from truedraft.server.errors import QueueFullError
from truedraft.server.generation.generation import Generation
from truedraft.server.generation.prepared_request import PreparedRequest
from truedraft.server.generation.sampling_params import (
    build_sampling_params,
    check_answer_size,
    check_prediction,
)
from truedraft.server.http.at_end import at_end
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.work import in_thread, in_thread_if_long, seconds_left, while_wanted
from truedraft.server.leniency import Leniency
from truedraft.server.models.served import Model
from truedraft.server.routes.checks import check_room, choices_per_prompt, prompt_limits, use_model
from truedraft.server.routes.context import GenerationContext
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.common import SamplingRequest
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.services import Services
from truedraft.server.settings import Settings
from truedraft.server.text.grammar.requested import NO_GRAMMAR, Grammar, structured_grammar
from truedraft.server.text.message_parser import MessageFormat
from truedraft.server.text.prompt import TokenPrompt, chat_prompt, predicted_tokens
from truedraft.server.text.tools import Budget, find_reasoning, message_format, thinking_budget, tool_use

# Endpoint, as metrics name it -> prefix of its ids.
ID_PREFIXES = {
    "completions": "cmpl-",
    "chat.completions": "chatcmpl-",
    "responses": "resp_",
    "messages": "msg_",
}
# The pictures of open requests take at most this, in this process and again in the worker.
MOST_PIXEL_BYTES = 1 << 30


async def start_chat(
    endpoint: Literal["chat.completions", "responses", "messages"],
    body: ChatRequest | ResponsesRequest,
    request: Request,
    services: Services,
    leniency: Leniency,
) -> GenerationContext:
    """Submits messages, which the chat template writes out; what is cheap to refuse is refused first."""
    model, key = await use_model(body.model, request, services), api_key_of(request.scope)
    check_room(body, 1, model, key)
    limits = prompt_limits(model)
    tools = await in_thread_if_long(
        request, tool_use, body, model.tokenizer, leniency, services.settings.max_grammar_size
    )
    prompt = await in_thread(request, chat_prompt, body, model.tokenizer, limits, leniency)
    _hold_pictures(prompt, request, services)
    reasoning = find_reasoning(model.tokenizer, prompt)
    checking = structured_grammar(
        body,
        model.tokenizer,
        services.grammar_validator,
        leniency,
        tools,
        reasoning,
        key=key,
        run=services.work.run,
    )
    budget = thinking_budget(body, model.tokenizer, reasoning, tools, leniency)
    grammar = await while_wanted(request, checking)
    prediction = await in_thread_if_long(request, predicted_tokens, body, model.tokenizer, limits)
    message = message_format(tools, reasoning)
    return start_generation(
        endpoint, body, [prompt], model, services, request, leniency, prediction, grammar, message, budget
    )


def _hold_pictures(prompt: TokenPrompt, request: Request, services: Services) -> None:
    """Counts the bytes of a request's pictures until it has ended, and refuses them where they are too many
    with those of others."""
    num_bytes = sum(len(picture.pixels) for picture in prompt.pictures)
    if num_bytes and services.num_pixel_bytes + num_bytes > MOST_PIXEL_BYTES:
        raise QueueFullError("The server has as many pictures of other requests as it holds. Try again.")
    services.num_pixel_bytes += num_bytes

    def let_go() -> None:
        services.num_pixel_bytes -= num_bytes

    at_end(request.scope, let_go)


def num_input_tokens(body: ChatRequest | ResponsesRequest, model: Model, leniency: Leniency) -> int:
    """Returns the number of tokens of a conversation, also of one that is too long for the model."""
    tool_use(body, model.tokenizer, leniency, model.settings.max_grammar_size)
    limits = prompt_limits(model)
    endless = limits._replace(max_tokens=limits.max_characters)
    return len(chat_prompt(body, model.tokenizer, endless, leniency).token_ids)


def start_generation(
    endpoint: Literal["completions", "chat.completions", "responses", "messages"],
    body: SamplingRequest,
    prompts: list[TokenPrompt],
    model: Model,
    services: Services,
    request: Request,
    leniency: Leniency,
    prediction: list[int] | None = None,
    grammar: Grammar = NO_GRAMMAR,
    message: MessageFormat | None = None,
    budget: Budget | None = None,
) -> GenerationContext:
    settings, n, key = model.settings, choices_per_prompt(body), api_key_of(request.scope)
    check_prediction(prediction, model.worker)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    params = build_sampling_params(
        body, num_prompt_tokens=longest, worker=model.worker, limits=settings, leniency=leniency
    )
    params = structs.replace(params, grammar=grammar.text, grammar_after=grammar.after)
    if budget is not None:
        params = structs.replace(params, thinking_budget=budget.tokens, thinking_marks=budget.marks)
    check_answer_size(body, params, [len(prompt.token_ids) for prompt in prompts], n, settings)
    prepared = PreparedRequest(
        id=f"{ID_PREFIXES[endpoint]}{uuid.uuid4().hex}",
        endpoint=endpoint,
        prompts=prompts,
        params=params,
        n=n,
        priority=body.priority or 0,
        cache_prompt=body.cache_prompt is not False,
        cache_salt=cache_salt(body.cache_salt, key, settings),
        key=key,
        prediction_token_ids=prediction,
        stop_strings=body.stop or [],
        include_stop_string=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        continues_prompt=_continues_prompt(body, model, message),
        message=message,
        adapter=model.adapter,
        report_trace=body.speculation is not None and body.speculation.trace,
    )
    generation = Generation(prepared, model.engine, model.tokenizer, model.metrics)
    generation.start(seconds_left(request.scope), settings.request_timeout)
    return GenerationContext(body, generation, model, services, leniency, created=int(time.time()))


def _continues_prompt(body: SamplingRequest, model: Model, message: MessageFormat | None) -> bool:
    """Returns whether the text goes on where the prompt ends: a message begins one, and so does a decoder
    whose prompt is read by an encoder."""
    if model.worker.encoder_decoder is not None:
        return False
    return message is None or bool(body.declared("continue_final_message"))


def cache_salt(asked: str | None, key: str, settings: Settings) -> str:
    """Keys have their prefixes apart: by how soon an answer comes, one could tell what another has sent."""
    own = asked or ""
    is_shared = settings.share_prefixes or len(settings.api_keys) < 2
    return own if is_shared else f"{key}/{own}"
