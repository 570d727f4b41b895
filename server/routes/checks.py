"""Routes check this of a request before it costs anything: fields, model, number of choices, queue.
``use_model`` is where each of them gets its model.

Every error has its real HTTP status, because nothing has been sent yet.
"""

from collections.abc import Sequence

from fastapi import Request

from truedraft.engine.messages import Ready, Task
from truedraft.server.entries import Rights
from truedraft.server.errors import InvalidRequestError, PermissionDeniedError, UnsupportedParameterError
from truedraft.server.generation.sampling_params import longest_prompt, longest_request
from truedraft.server.http.at_end import at_end
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.work import while_wanted
from truedraft.server.leniency import Leniency
from truedraft.server.models.registry import Hold
from truedraft.server.models.served import Model, ServedModel
from truedraft.server.schemas.common import GenerationRequest, SamplingRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.schemas.strict import RequestPart
from truedraft.server.schemas.unsupported_fields import check_parameters
from truedraft.server.services import Services
from truedraft.server.settings import Settings
from truedraft.server.text.front_metadata import leave_out_metadata
from truedraft.server.text.pictures import Sight
from truedraft.server.text.prompt import PromptLimits

# Where a request's state has its hold on the model that it uses.
HOLD = "hold"
# See ``max_prompt_characters``.
CHARACTERS_PER_TOKEN = 8
# Each task has an endpoint, and words for what a model of it does.
ENDPOINTS: dict[Task, tuple[str, str]] = {
    "generate": ("/v1/chat/completions", "writes text"),
    "embed": ("/v1/embeddings", "makes vectors of texts"),
    "rerank": ("/v1/rerank", "scores pairs of texts"),
}
ANY_TASK = tuple(ENDPOINTS)
LEAST_CHARACTERS, MOST_CHARACTERS = 500_000, 4_000_000


def check_request(body: SamplingRequest, request: Request, services: Services) -> Leniency:
    """Refuse what is not served; return what reports what is ignored."""
    check_model(body.model, request, services)
    check_priority(body.priority, services.settings)
    return check_fields(body, services)


def check_priority(priority: int | None, settings: Settings) -> None:
    if priority and not settings.allow_priority:
        raise UnsupportedParameterError(
            "This server does not let requests choose their 'priority' (setting allow_priority).",
            param="priority",
        )


def check_fields(body: RequestPart, services: Services) -> Leniency:
    """Holds the body of any route to the limits and to the fields that are served."""
    settings = services.settings
    stops, tools = (body.declared(field) or [] for field in ("stop", "tools"))
    metadata = (body.metadata or {}) if isinstance(body, ResponsesRequest) else {}
    size = sum(len(name) + len(value) for name, value in metadata.items())
    held = (
        ("stop", len(stops), "stop strings", "max_stop_strings"),
        ("stop", sum(map(len, stops)), "characters of stop strings", "max_stop_characters"),
        ("tools", len(tools), "tools", "max_tools"),
        ("metadata", size, "characters of metadata", "max_metadata"),
    )
    for param, number, what, limit in held:
        most = getattr(settings, limit)
        if number > most:
            raise InvalidRequestError(
                f"There are {number} {what}, but at most {most} are allowed ({limit}).", param=param
            )
    leniency = Leniency(strict=settings.strict_fields)
    check_parameters(body, leniency)
    leave_out_metadata(body, leniency)
    return leniency


def rights_of(request: Request, services: Services) -> Rights:
    """Returns what the request's key may do."""
    return services.settings.rights_of(api_key_of(request.scope))


def check_model(name: str | None, request: Request, services: Services) -> ServedModel:
    """Returns the model that a request names, loaded or not; without a name the only one that there is."""
    allowed = rights_of(request, services).models
    if name is not None:
        return services.models.find(name, allowed)
    models = services.models.allowed(allowed)
    if len(models) != 1:
        names = ", ".join([model.name for model in models] or services.models.names_for(allowed))
        raise InvalidRequestError(
            f"Name a model: this server has {names}.", param="model", code="missing_required_parameter"
        )
    return models[0]


def operated_model(
    name: str | None, request: Request, services: Services, *, by_adapter: bool = False
) -> ServedModel:
    """Returns the model, unless the key has no right to load, unload and clear. An adapter's name stands for
    its model only with ``by_adapter``."""
    model = check_model(name, request, services)
    if not rights_of(request, services).may_operate:
        raise PermissionDeniedError(
            "This key may not load or unload models, nor clear their prefix caches. The word 'operate' after "
            "a key in the file of api_key_file gives it that right."
        )
    if name is not None and not by_adapter and model.adapters.own_name(name) is not None:
        raise InvalidRequestError(f"'{name}' is a LoRA adapter: name its model.", param="model")
    services.check_not_draining()
    return model


async def use_model(
    name: str | None, request: Request, services: Services, tasks: Sequence[Task] = ("generate",)
) -> Model:
    """Returns the model that a request names, as soon as it is loaded, and keeps it so until the request has
    ended; ``NotReadyError`` if it cannot be had. Every route gets its model here, which must be made for one
    of ``tasks``."""
    served = check_model(name, request, services)
    services.check_not_draining()
    state = request.scope["state"]
    if HOLD not in state:
        state[HOLD] = Hold(services.models)
        at_end(request.scope, state[HOLD].release)
    if state[HOLD].model is not served:
        taking = state[HOLD].take(served)
        await (while_wanted(request, taking) if services.models.must_wait(served) else taking)
    model = served.loaded(name)
    if model.adapter is not None:
        at_end(request.scope, served.adapters.use(model.adapter, model.engine))
    check_task(model, tasks, request.scope["route"].path)
    return model


def check_task(model: Model, tasks: Sequence[Task], endpoint: str) -> None:
    """Refuses a request that the model was not made for, and names the endpoint that it serves."""
    if (task := model.worker.task) in tasks:
        return
    own, does = ENDPOINTS[task]
    raise InvalidRequestError(
        f"The model '{model.name}' {does}, which {endpoint} does not ask for: use {own}, or serve a model "
        f"for {endpoint} (setting task: {tasks[0]}).",
        param="model",
        code="wrong_task",
    )


def check_room(body: SamplingRequest, num_prompts: int, model: Model, key: str) -> None:
    """Refuses what it can before the prompts are tokenized: too many choices, or a full queue."""
    num_choices, most = num_prompts * choices_per_prompt(body), model.settings.max_choices
    if num_choices > most:
        raise InvalidRequestError(
            f"{num_choices} choices (prompts times n) were asked for, but at most {most} are allowed "
            "(max_choices).",
            param="n",
        )
    model.engine.check_room(num_choices, key=key)


def choices_per_prompt(body: SamplingRequest) -> int:
    n = body.n if isinstance(body, GenerationRequest) else None
    return n or 1


def prompt_limits(model: Model) -> PromptLimits:
    worker = model.worker
    max_tokens, context = longest_prompt(worker)
    most = model.settings.max_prompt_characters or max_prompt_characters(worker)
    return PromptLimits(most, max_tokens, context, worker.vocab_size, sight_of(model))


def sight_of(model: Model) -> Sight | None:
    """Returns how the model sees pictures; None if it sees none."""
    facts, settings = model.worker.vision, model.settings
    if facts is None:
        return None
    return Sight(facts, settings.max_image_pixels, settings.allowed_media_domains)


def max_prompt_characters(worker: Ready) -> int:
    """Returns the setting's default: more text than fits, unless nearly all of it is blank."""
    by_context = CHARACTERS_PER_TOKEN * longest_request(worker)
    return max(LEAST_CHARACTERS, min(by_context, MOST_CHARACTERS))
