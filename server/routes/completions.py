"""``POST /v1/completions``: check, tokenize, submit, answer."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from truedraft.engine.messages import TokenLogprob
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.openapi import answer_or_stream
from truedraft.server.http.work import in_thread_if_long, while_wanted
from truedraft.server.routes.checks import check_request, check_room, prompt_limits, use_model
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.submit import start_generation
from truedraft.server.routes.waiting import GeneratingRoute
from truedraft.server.routes.writer import CHUNK_STREAM, ChunkWriter, respond
from truedraft.server.schemas.completion import Completion, CompletionChoice, CompletionRequest
from truedraft.server.schemas.examples import COMPLETIONS
from truedraft.server.schemas.logprobs import CompletionLogprobs
from truedraft.server.services import ServicesDep
from truedraft.server.text.choice import ChoiceDelta, FinishedChoice
from truedraft.server.text.grammar.requested import structured_grammar
from truedraft.server.text.logprobs import ScoredToken, completion_logprobs, echoed_tokens
from truedraft.server.text.prompt import completion_prompts, num_prompts, predicted_tokens

router = APIRouter(tags=["generate"], route_class=GeneratingRoute)


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_model=None,
    responses=answer_or_stream(Completion, CHUNK_STREAM),
)
async def create_completion(
    body: Annotated[CompletionRequest, Body(openapi_examples=COMPLETIONS)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Continue one or several prompts, given as text or token ids."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    model, key = await use_model(body.model, request, services), api_key_of(request.scope)
    check_room(body, num_prompts(body), model, key)
    limits = prompt_limits(model)
    prompts = await in_thread_if_long(request, completion_prompts, body, model.tokenizer, limits)
    checking = structured_grammar(
        body, model.tokenizer, services.grammar_validator, leniency, key=key, run=services.work.run
    )
    grammar = await while_wanted(request, checking)
    prediction = await in_thread_if_long(request, predicted_tokens, body, model.tokenizer, limits)
    context = start_generation(
        "completions", body, prompts, model, services, request, leniency, prediction, grammar
    )
    return await respond(request, context, CompletionWriter(context, body))


class CompletionWriter(ChunkWriter):
    chunk_object = "text_completion"

    def __init__(self, context: GenerationContext, body: CompletionRequest) -> None:
        super().__init__(context)
        self._echo = bool(body.echo)
        self._num_top_logprobs = body.logprobs

    def whole(self, choices: list[FinishedChoice]) -> Completion:
        context = self._context
        return Completion(
            **context.header(), choices=[self._whole_choice(choice) for choice in choices], **context.totals()
        )

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        context = self._context
        seen: set[int] = set()
        async for delta in context.generation.deltas():
            is_first = delta.index not in seen
            seen.add(delta.index)
            if is_first and self._echo and self._num_top_logprobs is not None:
                # The prompt may be long, and all of its log-probabilities are in this chunk.
                prepared, write = context.generation.prepared, partial(self._chunk_choice, delta, is_first)
                choice = await context.services.work.run(
                    prepared.answer_weight, prepared.key, write, may_refuse=False
                )
            else:
                choice = self._chunk_choice(delta, is_first)
            is_news = choice["text"] or choice.get("token_ids") or choice.get("origins")
            if is_news or delta.finish_reason:
                yield self._chunk([choice], **context.ending())
        if context.include_usage:
            yield self._chunk([], is_last=True, truedraft=context.report())

    def _whole_choice(self, choice: FinishedChoice) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=self._echoed(choice.index) + choice.text,
            logprobs=self._logprobs(self._echoed_tokens(choice.index, choice.prompt_scored) + choice.scored),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self._context.token_ids(choice.token_ids),
            origins=self._context.origins(choice.origins),
            prompt_logprobs=self._context.prompt_logprobs(choice.prompt_scored),
            prompt_token_ids=self._prompt_token_ids(choice.index),
        )

    def _chunk_choice(self, delta: ChoiceDelta, is_first: bool) -> dict[str, Any]:
        echoed = self._echoed_tokens(delta.index, delta.prompt_scored) if is_first else []
        scored = echoed + delta.scored
        return self._choice(
            delta,
            self._logprobs(scored) if scored else None,
            text=(self._echoed(delta.index) if is_first else "") + delta.text,
            prompt_token_ids=self._prompt_token_ids(delta.index) if is_first else None,
        )

    def _echoed(self, choice: int) -> str:
        return self._context.generation.prepared.prompt_of(choice).text if self._echo else ""

    def _echoed_tokens(self, choice: int, scored: list[TokenLogprob | None] | None) -> list[ScoredToken]:
        """Nothing unless ``echo`` and ``logprobs``; ``scored`` is missing for a prompt of one token."""
        if not self._echo or self._num_top_logprobs is None:
            return []
        prompt = self._context.generation.prepared.prompt_of(choice)
        return echoed_tokens(prompt, scored or [None], self._context.model.tokenizer)

    def _logprobs(self, scored: list[ScoredToken]) -> CompletionLogprobs | None:
        if self._num_top_logprobs is None:
            return None
        return completion_logprobs(scored, self._num_top_logprobs, self._context.model.tokenizer.vocabulary)

    def _prompt_token_ids(self, choice: int) -> list[int] | None:
        return self._context.token_ids(self._context.generation.prepared.prompt_of(choice).token_ids)
