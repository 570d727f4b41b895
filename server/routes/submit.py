"""From a checked request and its token ids to a running generation."""

import time
import uuid
from typing import Literal

from msgspec import structs

from server.generation import Generation, Job
from server.routes.checks import choices_per_prompt
from server.routes.context import GenerationContext
from server.sampling_params import build_sampling_params, check_answer_size, check_prediction
from server.schemas.common import SamplingRequest
from server.schemas.completion import CompletionRequest
from server.services import Model, Services
from server.settings import Settings
from server.text.grammar import NO_GRAMMAR, Grammar
from server.text.message_reader import MessageFormat
from server.text.prompt import TokenPrompt

# Endpoint, as metrics name it -> prefix of its ids.
ID_PREFIXES = {"completions": "cmpl-", "chat.completions": "chatcmpl-", "responses": "resp_"}


def start_generation(
    endpoint: Literal["completions", "chat.completions", "responses"],
    body: SamplingRequest,
    prompts: list[TokenPrompt],
    model: Model,
    services: Services,
    key: str,
    prediction: list[int] | None = None,
    grammar: Grammar = NO_GRAMMAR,
    message: MessageFormat | None = None,
) -> GenerationContext:
    settings, n = services.settings, choices_per_prompt(body)
    check_prediction(prediction, model.worker)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    params = build_sampling_params(body, num_prompt_tokens=longest, worker=model.worker, limits=settings)
    params = structs.replace(params, grammar=grammar.text, grammar_after=grammar.after)
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
        message=message,
        report_trace=body.speculation is not None and body.speculation.trace,
    )
    generation = Generation(job, services.engine, model.tokenizer, services.metrics)
    generation.start(settings.request_timeout)
    return GenerationContext(body, generation, model, services, created=int(time.time()))


def cache_salt(body: SamplingRequest, key: str, settings: Settings) -> str:
    """Keys have their prefixes apart: by how soon an answer comes, one could tell what another has sent."""
    own = body.cache_salt or ""
    is_shared = settings.share_prefixes or len(settings.api_keys) < 2
    return own if is_shared else f"{key}/{own}"
