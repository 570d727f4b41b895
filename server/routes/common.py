"""What the generating endpoints share: the checks before anything is computed, and the submission.

Every error here has its real HTTP status, because nothing has been sent yet.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response

from engine.messages import Ready, TokenLogprob
from server.errors import (
    ApiError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedParameterError,
)
from server.generation import Generation, Job
from server.logprobs import prompt_logprobs
from server.parameters import check_parameters
from server.prompt import PromptLimits, TokenPrompt
from server.responding import AnswerWriter, respond_stream, respond_whole
from server.sampling_params import (
    build_sampling_params,
    check_answer_size,
    check_prediction,
    longest_prompt,
)
from server.schemas.answer import Answer, SpeculationReport
from server.schemas.common import ChunkStreamOptions, GenerationRequest, SamplingRequest
from server.schemas.completion import CompletionRequest
from server.schemas.logprobs import PromptLogprobs
from server.services import Model, Services
from server.settings import Settings
from server.speculation_report import speculation_report
from server.sse import DONE, chunk_event, error_event

CHUNK_STREAM = "`data:` lines, each a chunk as JSON, then `data: [DONE]`."

MAX_HEADER_LENGTH = 1000

# Endpoint, as metrics name it -> prefix of its ids.
ID_PREFIXES = {"completions": "cmpl-", "chat.completions": "chatcmpl-", "responses": "resp_"}


def check_request(body: SamplingRequest, services: Services) -> dict[str, str]:
    """Refuse what is not served; return the headers that report what is ignored."""
    check_model(body.model, services)
    if body.priority and not services.settings.allow_priority:
        raise UnsupportedParameterError(
            "This server does not let requests choose their 'priority' (setting allow_priority).",
            param="priority",
        )
    return ignored_header(check_parameters(body, strict=services.settings.strict_parameters))


def check_model(name: str, services: Services) -> None:
    served = services.settings.served_names
    if name not in served:
        raise ModelNotFoundError(
            f"The model '{name}' does not exist; this server has '{', '.join(served)}'.", param="model"
        )


def ignored_header(names: list[str]) -> dict[str, str]:
    """Field names come from the client: keep the header ASCII, printable and short."""
    escaped = [name.encode("unicode_escape").decode("ascii") for name in names]
    return {"x-foretoken-ignored": ", ".join(escaped)[:MAX_HEADER_LENGTH]} if names else {}


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """One submitted request, and what every answer and chunk of it repeats."""

    body: SamplingRequest
    generation: Generation
    model: Model
    services: Services
    created: int

    def header(self) -> dict[str, Any]:
        return {
            "id": self.generation.job.id,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self.model.fingerprint,
        }

    def totals(self) -> dict[str, Any]:
        """``usage``, and ``foretoken`` for a client that spoke of speculation."""
        return {"usage": self.generation.usage(), "foretoken": self.report()}

    def report(self) -> SpeculationReport | None:
        if self.body.speculation is None:
            return None
        return speculation_report(self.generation, self.services.settings, self.model.worker)

    def ending(self) -> dict[str, Any]:
        """For the last chunk of a choice: the report, if the whole answer ends here and no usage follows."""
        is_last = self.generation.is_complete and not self.include_usage
        return {"foretoken": self.report()} if is_last else {}

    def prompt_logprobs(self, scored: list[TokenLogprob | None] | None) -> PromptLogprobs | None:
        """``scored`` is missing where there is nothing to say: for a prompt of one token."""
        if not isinstance(self.body, GenerationRequest) or self.body.prompt_logprobs is None:
            return None
        return prompt_logprobs(scored or [None], self.body.prompt_logprobs, self.model.tokenizer.vocabulary)

    def token_ids(self, token_ids: list[int]) -> list[int] | None:
        is_asked_for = isinstance(self.body, GenerationRequest) and self.body.return_token_ids
        return token_ids if is_asked_for else None

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return isinstance(options, ChunkStreamOptions) and bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.body.stream_options
        return isinstance(options, ChunkStreamOptions) and bool(options.continuous_usage_stats)


class ChunkWriter(ABC):
    """An ``AnswerWriter`` of chunks: what completions and chats have in common on the wire."""

    end = DONE

    def __init__(self, context: GenerationContext) -> None:
        self._context = context

    @abstractmethod
    def chunks(self) -> AsyncIterator[Answer]: ...

    async def events(self) -> AsyncIterator[bytes]:
        context = self._context
        async for chunk in self.chunks():
            if context.continuous_usage:
                chunk.usage = context.generation.usage()
            yield chunk_event(chunk, with_usage=self._context.include_usage)

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)


def check_room(body: SamplingRequest, num_prompts: int, services: Services, key: str) -> None:
    """What can be refused before the prompts are tokenized: too many choices, or a full queue."""
    num_choices, most = num_prompts * choices_per_prompt(body), services.settings.max_choices
    if num_choices > most:
        raise InvalidRequestError(
            f"{num_choices} choices (prompts times n) were asked for, but at most {most} are allowed "
            "(max_choices).",
            param="n",
        )
    services.engine.check_room(num_choices, key=key)


def choices_per_prompt(body: SamplingRequest) -> int:
    return isinstance(body, GenerationRequest) and body.n or 1


def prompt_limits(services: Services, worker: Ready) -> PromptLimits:
    max_tokens, context = longest_prompt(worker)
    return PromptLimits(services.settings.max_prompt_characters, max_tokens, context, worker.vocab_size)


def cache_salt(body: SamplingRequest, key: str, settings: Settings) -> str:
    """Keys have their prefixes apart: by how soon an answer comes, one could tell what another has sent."""
    own = body.cache_salt or ""
    is_shared = settings.share_prefixes or len(settings.api_keys) < 2
    return own if is_shared else f"{key}/{own}"


def start_generation(
    endpoint: Literal["completions", "chat.completions", "responses"],
    body: SamplingRequest,
    prompts: list[TokenPrompt],
    model: Model,
    services: Services,
    key: str,
    prediction: list[int] | None = None,
) -> GenerationContext:
    settings, n = services.settings, choices_per_prompt(body)
    check_prediction(prediction, model.worker)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    params = build_sampling_params(body, num_prompt_tokens=longest, worker=model.worker, limits=settings)
    check_answer_size(body, params, [len(prompt.token_ids) for prompt in prompts], n, settings)
    job = Job(
        id=f"{ID_PREFIXES[endpoint]}{uuid.uuid4().hex}",
        endpoint=endpoint,
        prompts=prompts,
        params=params,
        n=n,
        priority=body.priority or 0,
        cache_prompt=body.cache_prompt is not False,
        cache_salt=cache_salt(body, key, settings),
        key=key,
        prediction_token_ids=prediction,
        stop_strings=body.stop or [],
        include_stop_string=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
    )
    generation = Generation(job, services.engine, model.tokenizer, services.metrics)
    generation.start(settings.request_timeout)
    return GenerationContext(body, generation, model, services, created=int(time.time()))


async def respond(
    request: Request, context: GenerationContext, writer: AnswerWriter, headers: dict[str, str]
) -> Response:
    send = respond_stream if context.body.stream else respond_whole
    return await send(request, context.generation, writer, headers)
