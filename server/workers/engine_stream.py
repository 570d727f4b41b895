"""Streams what the engine produces for one HTTP request: all of its prompts' sequences on one queue.

It also keeps the requests as they were sent, so that they can be sent again as long as nothing has come back.
Filled by ``server.workers.worker_pool``, read by ``server.generation``. ``close`` is synchronous on purpose:
it must work inside a cancelled task.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeAlias, TypeVar

from truedraft.engine.messages import Embed, Embedded, Generate, TokenOutput

# Outputs that are read at once: about those of one step.
MOST_AT_ONCE = 32

AbortSequence = Callable[[str, int | None], None]
EngineRequest: TypeAlias = Generate | Embed
Output: TypeAlias = TokenOutput | Embedded
# What comes back of a request: tokens, or all of its vectors at once.
OutputT = TypeVar("OutputT", TokenOutput, Embedded)


class EngineStream(Generic[OutputT]):
    """Async iterator of what has come since the last time, in order; a slow reader gets more at once, but no
    more than can be read in a moment.

    Ends when every sequence has finished or was stopped.
    """

    def __init__(self, requests: Sequence[EngineRequest], abort: AbortSequence) -> None:
        self._by_id = {request.request_id: request for request in requests}
        self.num_submissions = 1
        self._abort = abort
        self._outputs: deque[OutputT] = deque()
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None  # what the reader waits for
        self._open = {request.request_id: set(range(request.n)) for request in requests}

    def deliver(self, output: OutputT) -> None:
        """Called by the worker pool. Late tokens of a stopped sequence are dropped."""
        if not self._is_open(output.request_id, output.index):
            return
        if output.finish_reason is not None:
            self._end(output.request_id, output.index)
        self._outputs.append(output)
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """One lost prompt ends the whole HTTP request; one that has all of its tokens cannot fail."""
        if not self._open:
            return
        self.close()
        self._error = error
        self._wake_reader()

    def has_open_sequences(self, request_id: str) -> bool:
        return request_id in self._open

    def open_sequences(self, request_id: str) -> set[int]:
        return self._open.get(request_id, set())

    def request(self, request_id: str) -> EngineRequest:
        return self._by_id[request_id]

    def stop(self, request_id: str, index: int) -> None:
        """The caller needs no more of this sequence (its stop string is complete)."""
        if self._is_open(request_id, index):
            self._end(request_id, index)
            self._abort(request_id, index)

    def close(self) -> None:
        """Abort whatever is unfinished. Harmless when everything has finished."""
        request_ids = list(self._open)
        self._open.clear()
        for request_id in request_ids:
            self._abort(request_id, None)

    def _wake_reader(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _is_open(self, request_id: str, index: int) -> bool:
        return index in self._open.get(request_id, ())

    def _end(self, request_id: str, index: int) -> None:
        self._open[request_id].discard(index)
        if not self._open[request_id]:
            del self._open[request_id]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[OutputT]:
        if self._outputs:
            await asyncio.sleep(0)  # whoever is late lets others go first
        elif self._open:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self._outputs:
            return [self._outputs.popleft() for _ in range(min(MOST_AT_ONCE, len(self._outputs)))]
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration
