"""Run one HTTP request: submit its prompts, turn token outputs into text deltas, count, clean up.

Between the routes, which know the two answer formats, and the engine client, which knows token ids. A
request of p prompts with ``n`` sequences each has p * n choices, numbered prompt by prompt.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from truedraft.engine.messages import FinishReason, TokenOutput
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.engine.text.stop_strings import StopStrings
from truedraft.engine.text.text_stream import continued
from truedraft.server.errors import (
    RequestTimeoutError,
    code_of,
)
from truedraft.server.generation.pauses import Pauses
from truedraft.server.generation.prepared_request import PreparedRequest
from truedraft.server.observability.metrics import ModelMetrics, RequestTimer
from truedraft.server.observability.request_summary import Summary
from truedraft.server.schemas.answer import CompletionTokensDetails, PromptTokensDetails, Usage
from truedraft.server.text.choice import (
    AnswerCounts,
    ChoiceDelta,
    ChoiceReader,
    FinishedChoice,
)
from truedraft.server.text.message_parser import MessageParser
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers.engine_stream import EngineStream
from truedraft.server.workers.worker_pool import WorkerPool


class Generation:
    """``start`` it, read ``deltas`` or ``collect``, and always ``close`` it."""

    def __init__(
        self, prepared: PreparedRequest, engine: WorkerPool, tokenizer: Tokenizer, metrics: ModelMetrics
    ) -> None:
        self.prepared = prepared
        self._engine = engine
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        self._timer = RequestTimer(metrics.requests, self._num_prompt_tokens)
        self._stream: EngineStream[TokenOutput] | None = None
        self.counts = AnswerCounts()
        self.choices = list(_readers(prepared, tokenizer, self.counts))
        self._num_unfinished = len(self.choices)
        self._num_tokens = 0
        self._cached_tokens = [0] * len(prepared.prompts)
        self._num_cached_tokens = 0  # the sum of them, which a stream may want with each of its events
        self._deadline: asyncio.TimerHandle | None = None
        self._is_over = False
        self._error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Is true once every choice has ended."""
        return self._num_unfinished == 0

    def start(self, seconds_left: float | None = None, timeout: float | None = None) -> None:
        """Submit to the engine; raises ``NotReadyError`` or ``QueueFullError``.

        After ``seconds_left``, the rest of the request's ``timeout``, whatever reads the deltas gets
        ``RequestTimeoutError``.
        """
        if requests := self.prepared.engine_requests():
            self._stream = self._engine.submit(requests, self.prepared.key)
            if seconds_left is not None:
                late = RequestTimeoutError(f"The request was not finished within {timeout:g} seconds.")
                loop = asyncio.get_running_loop()
                self._deadline = loop.call_later(seconds_left, self._stream.fail, late)
        self._timer.submitted()

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        pauses = Pauses()
        if self._stream is None:
            for choice in self.choices:
                self._num_unfinished -= 1
                yield choice.end_without_tokens()
                await pauses.due()
        else:
            try:
                async for outputs in self._stream:
                    pauses.restart()
                    for delta in self._take(outputs):
                        yield delta
                        await pauses.due()
            except Exception as error:
                self._is_over = True  # failed, which is not the same as abandoned
                self._error = code_of(error)
                if isinstance(error, RequestTimeoutError):
                    self._timer.aborted("timeout")
                raise
        self._is_over = True
        by_length = any(choice.finish_reason == "length" for choice in self.choices)
        reason: FinishReason = "length" if by_length else "stop"
        self._timer.finished(reason, self.counts.drafted, self.counts.accepted)

    async def collect(self) -> list[FinishedChoice]:
        choices = [FinishedChoice(index) for index in range(self.prepared.num_choices)]
        async for delta in self.deltas():
            choices[delta.index].add(delta)
        return choices

    def close(self) -> None:
        """Free whatever the engine still computes for this request."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stream is not None:
            self._stream.close()
        if not self._is_over:
            self._is_over = True
            self._timer.aborted("disconnect")

    def usage(self) -> Usage:
        prompt, counts = self._num_prompt_tokens, self.counts
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_tokens,
            total_tokens=prompt + self._num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=counts.reasoning,
                accepted_prediction_tokens=counts.predicted,
                rejected_prediction_tokens=counts.mispredicted,
                thinking_budget_spent=None
                if self.prepared.params.thinking_budget is None
                else any(choice.budget_spent for choice in self.choices),
            ),
        )

    def summary(self) -> Summary:
        unfinished = "aborted" if self._error is None else "error"
        return Summary(
            id=self.prepared.id,
            usage=self.usage(),
            speculation=self.counts,
            num_rounds=sum(choice.num_rounds for choice in self.choices),
            seconds=self._timer.seconds,
            prepared_seconds=self._timer.prepared_seconds,
            queue_seconds=self._timer.queue_seconds,
            first_token_seconds=self._timer.first_token_seconds,
            finish_reasons=[choice.finish_reason or unfinished for choice in self.choices],
            error=self._error,
        )

    def _take(self, outputs: Sequence[TokenOutput]) -> Iterator[ChoiceDelta]:
        """Turn what has come for each choice into one delta, and end its sequence at a stop string."""
        by_sequence: dict[tuple[str, int], list[TokenOutput]] = {}
        for output in outputs:
            by_sequence.setdefault(output.sequence, []).append(output)
        for (request_id, index), rounds in by_sequence.items():
            prompt = int(request_id.rpartition("-")[2])
            choice = self.choices[prompt * self.prepared.n + index]
            if choice.finish_reason is not None:
                continue  # was on its way when the stop string was found
            if index == 0:
                self._num_cached_tokens += rounds[0].num_cached_tokens - self._cached_tokens[prompt]
                self._cached_tokens[prompt] = rounds[0].num_cached_tokens
            if not self.prepared.wants_tokens:
                self._num_unfinished -= 1
                yield choice.read_prompt(rounds[0])
                continue
            delta = choice.read(rounds)
            if delta.finish_reason is not None:
                self._num_unfinished -= 1
                assert self._stream is not None
                self._stream.stop(request_id, index)
            self._num_tokens += len(delta.token_ids)
            self._timer.output(delta, rounds[0].queue_seconds)
            yield delta


def _readers(prepared: PreparedRequest, tokenizer: Tokenizer, counts: AnswerCounts) -> Iterator[ChoiceReader]:
    """Yields the readers of all choices, which share what the request and their prompt have in common."""
    new = tokenizer.stream(
        skip_special_tokens=prepared.skip_special_tokens,
        marks=prepared.message.literals if prepared.message is not None else (),
    )
    stops = StopStrings(prepared.stop_strings)
    for number, prompt in enumerate(prepared.prompts):
        stream = continued(new.copy(), prompt.ending) if prepared.continues_prompt else new
        for index in range(number * prepared.n, (number + 1) * prepared.n):
            yield ChoiceReader(
                index,
                Detokenizer(
                    stream.copy(),
                    stops,
                    include_stop_string=prepared.include_stop_string,
                    min_tokens=prepared.params.min_tokens,
                ),
                include_stop_string=prepared.include_stop_string,
                text_start=len(prompt.text) if prepared.echo else 0,
                stop_token_ids=prepared.params.stop_token_ids,
                prediction_length=len(prepared.prediction_token_ids or ()),
                message=None if prepared.message is None else MessageParser(prepared.message),
                counts=counts,
            )
