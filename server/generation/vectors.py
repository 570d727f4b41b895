"""Runs one HTTP request for vectors: submits its texts, waits for all of them, counts."""

import time
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.engine.messages import Embed, Text
from truedraft.server.errors import ApiError, ClientDisconnectedError, RequestTimeoutError, code_of
from truedraft.server.observability.metrics import RequestMetrics
from truedraft.server.observability.request_summary import Summary
from truedraft.server.schemas.answer import CompletionTokensDetails, PromptTokensDetails, Usage
from truedraft.server.stages import current_stages
from truedraft.server.text.choice import AnswerCounts
from truedraft.server.workers.worker_pool import WorkerPool


@dataclass(slots=True)
class VectorRun:
    """Is a request's share of the engine's work. ``finish`` says how it ended, as far as it has."""

    engine: WorkerPool
    metrics: RequestMetrics
    texts: Sequence[Text]
    key: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    finish: str = "aborted"
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)

    async def vectors(
        self, *, dimensions: int | None = None, normalizes: bool | None = None, priority: int = 0
    ) -> list[bytes]:
        """Returns the numbers of each text's vector as bytes. What is left is aborted if nobody waits."""
        requests = self.metrics
        message = Embed(self.id, list(self.texts), dimensions, normalizes, priority)
        stream = self.engine.submit([message], self.key)
        requests.prompt_tokens.inc(self.num_tokens)
        requests.prompt_size.observe(self.num_tokens)
        try:
            async for outputs in stream:
                self.finish = "stop"
                requests.embedded_texts.inc(len(self.texts))
                requests.requests.labels("stop").inc()
                requests.duration.observe(time.perf_counter() - current_stages().arrived)
                return outputs[0].vectors
        finally:
            stream.close()
        raise AssertionError("a stream ends with an answer or an error")

    def ended_by(self, error: Exception) -> None:
        """Counts a request that ended before its answer was there."""
        self.error, aborted = code_of(error), self.metrics.aborted
        if isinstance(error, ClientDisconnectedError):
            self.error = None
            aborted.labels("disconnect").inc()
        elif isinstance(error, RequestTimeoutError):
            aborted.labels("timeout").inc()
        if isinstance(error, ApiError) and self.error is not None:
            self.finish = "error"

    def summary(self) -> Summary:
        """Returns what the log and traces say of the request."""
        usage = Usage(
            prompt_tokens=self.num_tokens,
            completion_tokens=0,
            total_tokens=self.num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
            completion_tokens_details=CompletionTokensDetails(),
        )
        return Summary(
            id=self.id,
            usage=usage,
            speculation=AnswerCounts(),
            num_rounds=0,
            seconds=time.perf_counter() - current_stages().arrived,
            prepared_seconds=0.0,
            queue_seconds=None,
            first_token_seconds=None,
            finish_reasons=[self.finish],
            error=self.error,
        )


def numbers(vector: bytes) -> "array[float]":
    """Returns a vector's numbers, which are little-endian, as every machine is that is served."""
    return array("f", vector)


def similarity(first: bytes, second: bytes) -> float:
    """Returns the product of two vectors of length 1: the cosine of their angle."""
    return float(sum(a * b for a, b in zip(numbers(first), numbers(second), strict=True)))
