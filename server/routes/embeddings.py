"""``POST /v1/embeddings``: vectors of texts, in OpenAI's shape."""

import base64
import time
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from truedraft.engine.messages import EmbeddingFacts
from truedraft.server.errors import InvalidRequestError, UnsupportedParameterError
from truedraft.server.generation.vectors import numbers
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.large_json import write_json
from truedraft.server.http.openapi import GENERATION_ERRORS
from truedraft.server.http.work import in_thread
from truedraft.server.routes.vector_requests import begin, compute, usage
from truedraft.server.schemas.embeddings import Embedding, EmbeddingAnswer, EmbeddingRequest
from truedraft.server.schemas.examples import EMBEDDINGS
from truedraft.server.services import ServicesDep
from truedraft.server.text.vector_texts import input_texts, num_inputs

router = APIRouter(tags=["embed"], route_class=JsonRoute)


@router.post(
    "/v1/embeddings",
    summary="Make vectors of texts",
    response_model=EmbeddingAnswer,
    responses=GENERATION_ERRORS,
)
async def embeddings(
    body: Annotated[EmbeddingRequest, Body(openapi_examples=EMBEDDINGS)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Returns one vector for each text, in their order."""
    asked = await begin(body, num_inputs(body), services, request, ("embed",))
    _check_dimensions(body.dimensions, asked.facts)
    texts = await in_thread(request, input_texts, body, asked.reading)
    run, vectors = await compute(asked, texts, request, dimensions=body.dimensions, normalizes=body.normalize)

    def written() -> bytes:
        is_base64 = body.encoding_format == "base64"
        data = [
            Embedding.model_construct(
                object="embedding",
                index=index,
                embedding=base64.b64encode(vector).decode() if is_base64 else numbers(vector).tolist(),
            )
            for index, vector in enumerate(vectors)
        ]
        answer = EmbeddingAnswer.model_construct(
            id=f"embd-{run.id}",
            object="list",
            created=int(time.time()),
            model=body.model,
            data=data,
            usage=usage(run),
        )
        return write_json(answer)

    content = await in_thread(request, written)
    return Response(content, headers=asked.leniency.headers(), media_type="application/json")


def _check_dimensions(dimensions: int | None, facts: EmbeddingFacts) -> None:
    if dimensions is None or dimensions == facts.size:
        return
    if not facts.shortens:
        raise UnsupportedParameterError(
            f"This model's vectors have {facts.size} numbers, and their beginnings are no vectors: leave out "
            "'dimensions'. If its makers say otherwise, start the server with --matryoshka.",
            param="dimensions",
        )
    if facts.dimensions and dimensions not in facts.dimensions:
        allowed = ", ".join(map(str, sorted({*facts.dimensions, facts.size})))
        raise InvalidRequestError(f"This model's vectors may have {allowed} numbers.", param="dimensions")
    if dimensions > facts.size:
        raise InvalidRequestError(f"This model's vectors have {facts.size} numbers.", param="dimensions")
