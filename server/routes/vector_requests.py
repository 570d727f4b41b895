"""What the routes of vectors and scores share: checks, limits, the wait for the engine, and the usage."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from truedraft.engine.messages import EmbeddingFacts, Task, Text
from truedraft.server.errors import InvalidRequestError
from truedraft.server.generation.vectors import VectorRun
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.work import in_thread_if_long, while_wanted
from truedraft.server.leniency import Leniency
from truedraft.server.models.served import Model
from truedraft.server.observability.request_summary import SUMMARY
from truedraft.server.routes.checks import check_fields, check_model, check_priority, prompt_limits, use_model
from truedraft.server.schemas.embeddings import VectorRequest, VectorUsage
from truedraft.server.services import Services
from truedraft.server.text.vector_texts import Reading


@dataclass(frozen=True, slots=True)
class Asked:
    """Is a checked request whose texts are not encoded yet."""

    model: Model
    reading: Reading
    leniency: Leniency
    priority: int
    key: str

    @property
    def facts(self) -> EmbeddingFacts:
        return self.reading.facts

    @property
    def task(self) -> Task:
        return self.model.worker.task


async def begin(
    body: VectorRequest,
    num_texts: int,
    services: Services,
    request: Request,
    tasks: Sequence[Task],
) -> Asked:
    """Refuses what is cheap to refuse. ``tasks`` are those of the models that are asked."""
    settings = check_model(body.model, request, services).settings
    check_priority(body.priority, settings)
    leniency = await in_thread_if_long(request, check_fields, body, services)
    if num_texts > settings.max_texts:
        raise InvalidRequestError(
            f"There are {num_texts} texts, but at most {settings.max_texts} are allowed (max_texts).",
            param="input",
        )
    model, key = await use_model(body.model, request, services, tasks), api_key_of(request.scope)
    model.engine.check_room(1, key=key)
    facts = model.worker.embedding
    assert facts is not None
    reading = Reading(model.tokenizer, facts, prompt_limits(model), body)
    return Asked(model, reading, leniency, body.priority or 0, key)


async def compute(
    asked: Asked,
    texts: Sequence[Text],
    request: Request,
    *,
    dimensions: int | None = None,
    normalizes: bool | None = None,
) -> tuple[VectorRun, list[bytes]]:
    """Waits for the vectors of all texts, unless the client leaves or its time is over."""
    run = VectorRun(asked.model.engine, asked.model.metrics.requests, texts, asked.key)
    request.scope["state"][SUMMARY] = run.summary
    computing = run.vectors(dimensions=dimensions, normalizes=normalizes, priority=asked.priority)
    try:
        return run, await while_wanted(request, computing)
    except Exception as error:
        run.ended_by(error)
        raise


def usage(run: VectorRun) -> VectorUsage:
    return VectorUsage(prompt_tokens=run.num_tokens, total_tokens=run.num_tokens)
