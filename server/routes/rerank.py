"""``POST /v1/rerank``, in Jina's and Cohere's shape, and ``POST /v1/score``: how well texts go together.

A model that scores pairs reads both texts at once. One that makes vectors reads each by itself; the score is
then the cosine of their angle.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from truedraft.engine.messages import Text
from truedraft.server.errors import InvalidRequestError
from truedraft.server.generation.vectors import VectorRun, numbers, similarity
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.large_json import write_json
from truedraft.server.http.openapi import GENERATION_ERRORS
from truedraft.server.http.work import in_thread
from truedraft.server.routes.vector_requests import Asked, begin, compute, usage
from truedraft.server.schemas.embeddings import (
    RerankAnswer,
    RerankRequest,
    RerankResult,
    Score,
    ScoreAnswer,
    ScoreRequest,
)
from truedraft.server.schemas.examples import RERANK, SCORE
from truedraft.server.services import ServicesDep
from truedraft.server.text.vector_texts import prompt_of

router = APIRouter(tags=["embed"], route_class=JsonRoute)
RERANKS: dict[str, Any] = {
    "summary": "Order documents by a query",
    "response_model": RerankAnswer,
    "responses": GENERATION_ERRORS,
}
SCORES: dict[str, Any] = {
    "summary": "Score pairs of texts",
    "response_model": ScoreAnswer,
    "responses": GENERATION_ERRORS,
}


@router.post("/v1/rerank", **RERANKS)
@router.post("/v2/rerank", **RERANKS, include_in_schema=False)
@router.post("/rerank", **RERANKS, include_in_schema=False)
async def rerank(
    body: Annotated[RerankRequest, Body(openapi_examples=RERANK)], request: Request, services: ServicesDep
) -> Response:
    """Returns the documents' scores, the best one first; of equal ones the first in the request."""
    documents = body.texts
    asked = await begin(body, len(documents), services, request, ("rerank", "embed"))
    run, scores = await _scores(
        [body.query] * len(documents), documents, body.instruction, asked, request, "documents"
    )
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        RerankResult(
            index=index,
            document={"text": documents[index]} if shows else None,
            relevance_score=scores[index],
        )
        for index in order
    ]
    answer = RerankAnswer(id=f"rerank-{run.id}", model=body.model, results=results, usage=usage(run))
    return await _written(answer, asked, request)


@router.post("/v1/score", **SCORES)
@router.post("/score", **SCORES, include_in_schema=False)
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=SCORE)], request: Request, services: ServicesDep
) -> Response:
    """Returns the scores of pairs, in their order."""
    firsts, seconds = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: give one or as many.", param="text_2"
        )
    asked = await begin(body, len(seconds), services, request, ("rerank", "embed"))
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    run, scores = await _scores(firsts, seconds, body.instruction, asked, request, "text_2")
    data = [Score(index=index, score=each) for index, each in enumerate(scores)]
    answer = ScoreAnswer(
        id=f"score-{run.id}", created=int(time.time()), model=body.model, data=data, usage=usage(run)
    )
    return await _written(answer, asked, request)


async def _scores(
    firsts: Sequence[str],
    seconds: Sequence[str],
    instruction: str | None,
    asked: Asked,
    request: Request,
    param: str,
) -> tuple[VectorRun, list[float]]:
    facts = asked.facts
    if instruction is not None and not facts.pair_template:
        raise InvalidRequestError(
            "This model is not asked in words: leave out instruction.", param="instruction"
        )
    if asked.task == "rerank":
        texts = await in_thread(request, _pairs, firsts, seconds, instruction, asked, param)
        run, vectors = await compute(asked, texts, request)
        return run, [numbers(vector)[0] for vector in vectors]
    distinct = list(dict.fromkeys(firsts))
    texts = await in_thread(request, _apart, distinct, seconds, asked, param)
    run, vectors = await compute(asked, texts, request, normalizes=True)
    of_first = dict(zip(distinct, vectors, strict=False))
    rest = vectors[len(distinct) :]
    return run, [similarity(of_first[first], second) for first, second in zip(firsts, rest, strict=True)]


def _pairs(
    firsts: Sequence[str], seconds: Sequence[str], instruction: str | None, asked: Asked, param: str
) -> list[Text]:
    if asked.facts.pair_template:
        return asked.reading.asked(firsts, seconds, instruction, param)
    return asked.reading.encode(list(zip(firsts, seconds, strict=True)), param)


def _apart(queries: Sequence[str], documents: Sequence[str], asked: Asked, param: str) -> list[Text]:
    """Returns the texts for a model of vectors, with its prompts for what is searched for, and searched."""
    kinds = (("query", queries), ("document", documents))
    pairs = [(prompt_of(asked.facts, None, kind) + text, None) for kind, texts in kinds for text in texts]
    return asked.reading.encode(pairs, param)


async def _written(answer: RerankAnswer | ScoreAnswer, asked: Asked, request: Request) -> Response:
    content = await in_thread(request, write_json, answer)
    return Response(content, headers=asked.leniency.headers(), media_type="application/json")
