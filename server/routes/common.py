"""What the generating endpoints share: the checks before anything is computed, and the submission.

Every error here has its real HTTP status, because nothing has been sent yet.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from engine.messages import TokenLogprob
from server.errors import (
    ApiError,
    ClientDisconnectedError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedMediaTypeError,
)
from server.generation import Generation, Job
from server.logprobs import prompt_logprobs
from server.parameters import check_parameters
from server.prompt import TokenPrompt
from server.responding import AnswerWriter, respond_stream, respond_whole
from server.sampling_params import build_sampling_params, check_prediction
from server.schemas.common import (
    Answer,
    ChunkStreamOptions,
    GenerationRequest,
    SamplingRequest,
    SpeculationReport,
)
from server.schemas.completion import CompletionRequest
from server.schemas.json_body import parse_json
from server.schemas.logprobs import PromptLogprobs
from server.services import Model, Services
from server.speculation_report import speculation_report
from server.sse import DONE, chunk_event, error_event

CHUNK_STREAM = "`data:` lines, each a chunk as JSON, then `data: [DONE]`."

MAX_CHOICES = 1024
MAX_HEADER_LENGTH = 1000

# Endpoint, as metrics name it -> prefix of its ids.
ID_PREFIXES = {"completions": "cmpl-", "chat.completions": "chatcmpl-", "responses": "resp_"}


class JsonRequest(Request):
    """A request whose body has been parsed already."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """A route that takes JSON only, read by ``parse_json``; every route with a body is one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parse_and_handle(request: Request) -> Response:
            _require_json(request)
            request = JsonRequest(request.scope, request.receive)
            try:
                content = await request.body()
            except ClientDisconnect as error:
                raise ClientDisconnectedError("The client closed the connection.") from error
            if content:  # FastAPI says what an empty body lacks
                request.parsed = parse_json(content)
            return await handle(request)

        return parse_and_handle


def _require_json(request: Request) -> None:
    """Without this FastAPI would call a form body a wrong type."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = media_type.partition("/")
    if main != "application" or (sub != "json" and not sub.endswith("+json")):
        raise UnsupportedMediaTypeError("Send the request as JSON with 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaTypeError("Send the request as it is, without a Content-Encoding.")


def check_request(body: SamplingRequest, services: Services) -> dict[str, str]:
    """Refuse what is not served; return the headers that report what is ignored."""
    check_model(body.model, services)
    return ignored_header(check_parameters(body, strict=services.settings.strict_parameters))


def check_model(name: str, services: Services) -> None:
    served = services.settings.served_model_name
    if name != served:
        raise ModelNotFoundError(
            f"The model '{name}' does not exist; this server has '{served}'.", param="model"
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
        return {"id": self.generation.job.id, "created": self.created, "model": self.body.model}

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


class ChunkWriter(ABC):
    """An ``AnswerWriter`` of chunks: what completions and chats have in common on the wire."""

    end = DONE

    def __init__(self, context: GenerationContext) -> None:
        self._context = context

    @abstractmethod
    def chunks(self) -> AsyncIterator[Answer]: ...

    async def events(self) -> AsyncIterator[bytes]:
        async for chunk in self.chunks():
            yield chunk_event(chunk, with_usage=self._context.include_usage)

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)


def start_generation(
    endpoint: Literal["completions", "chat.completions", "responses"],
    body: SamplingRequest,
    prompts: list[TokenPrompt],
    model: Model,
    services: Services,
    prediction: list[int] | None = None,
) -> GenerationContext:
    n = isinstance(body, GenerationRequest) and body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(f"At most {MAX_CHOICES} choices (prompts times n) are allowed.", param="n")
    check_prediction(prediction, model.worker)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    job = Job(
        id=f"{ID_PREFIXES[endpoint]}{uuid.uuid4().hex}",
        endpoint=endpoint,
        prompts=prompts,
        params=build_sampling_params(
            body,
            num_prompt_tokens=longest,
            worker=model.worker,
            max_logprobs=services.settings.max_logprobs,
        ),
        n=n,
        priority=body.priority or 0,
        cache_prompt=body.cache_prompt is not False,
        cache_salt=body.cache_salt or "",
        prediction_token_ids=prediction,
        stop_strings=body.stop or [],
        include_stop_string=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
    )
    generation = Generation(job, services.engine, model.tokenizer, services.metrics)
    generation.start(services.settings.request_timeout)
    return GenerationContext(body, generation, model, services, created=int(time.time()))


async def respond(
    request: Request, context: GenerationContext, writer: AnswerWriter, headers: dict[str, str]
) -> Response:
    send = respond_stream if context.body.stream else respond_whole
    return await send(request, context.generation, writer, headers)
