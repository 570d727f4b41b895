"""The requests that the engine has not finished: the stream and the worker of each, and which still wait.

Limits how many may wait, orders those of several API keys fairly, and knows which of them another worker can
take over when one dies. Owned by ``server.workers.worker_pool``.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

from truedraft.engine.messages import Generate
from truedraft.server.errors import ApiError, QueueFullError
from truedraft.server.settings import RequestSettings
from truedraft.server.workers.engine_stream import EngineRequest, EngineStream, Output

# So many workers may die with a request before it is answered with an error.
MAX_SUBMISSIONS = 2


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Settings of the same names; None is no limit."""

    max_queued_sequences: int = 256
    max_queued_tokens: int | None = None

    @classmethod
    def of(cls, settings: RequestSettings) -> Self:
        return cls(settings.max_queued_sequences, settings.max_queued_tokens)


class FairShare:
    """Start order of several keys' requests, by weighted fair queueing in sequences.

    A request's tag is where its key's line would end with it if all keys were served evenly; the lowest tag
    goes first. So a key's first sequence goes before another's hundredth, and one key alone is served in
    order of arrival.
    """

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._now = 0

    def tag(self, key: str, num_sequences: int) -> int:
        end = max(self._now, self._ends.get(key, 0)) + num_sequences
        self._ends[key] = end
        return end

    def started(self, tag: int, num_sequences: int) -> None:
        """Keys that come now join where the served ones are, not where those were long ago."""
        self._now = max(self._now, tag - num_sequences)

    def reset(self) -> None:
        """Nothing is open: no key has an advantage to make up for."""
        self._ends.clear()
        self._now = 0


class Waiting:
    """Counts what waits of each key, within a limit. A key may have its even share of that whatever the
    others have, and what finds nothing waiting is always taken."""

    def __init__(self, what: str, setting: str, limit: int | None) -> None:
        self._what = what
        self._setting = setting
        self._limit = limit
        self._of: Counter[str] = Counter()

    def add(self, number: int, key: str) -> None:
        self._of[key] += number

    def check_room(self, number: int, key: str) -> None:
        """``QueueFullError`` if so many more of the key may not wait."""
        waiting, own = self._of.total(), self._of[key]
        if self._limit is None or not waiting or waiting + number <= self._limit:
            return
        num_keys = len(+self._of) + (not own)
        if (own + number) * num_keys <= self._limit:
            return
        whose = f"{own} of them of this API key, " if key else ""
        bound = f"its share of the limit of {self._limit}" if num_keys > 1 else f"the limit of {self._limit}"
        raise QueueFullError(
            f"{waiting} {self._what} are waiting, {whose}and the {number} of this request would exceed "
            f"{bound} ({self._setting}). Try again later."
        )


class OpenRequests:
    """A sequence waits until its first token comes back."""

    def __init__(self, limits: QueueLimits) -> None:
        self._streams: dict[str, EngineStream[Any]] = {}
        self._waiting: dict[str, set[int]] = {}  # request -> its sequences without a token
        self._waiting_sequences = Waiting("sequences", "max_queued_sequences", limits.max_queued_sequences)
        self._waiting_tokens = Waiting("prompt tokens", "max_queued_tokens", limits.max_queued_tokens)
        self._fair_share = FairShare()
        self._tags: dict[str, int] = {}
        self._worker_of: dict[str, int] = {}  # request -> the number of its worker, once it has one
        self._num_sequences: Counter[int] = Counter()  # keys are workers

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_http_requests(self) -> int:
        return len(set(self._streams.values()))

    def check_room(self, num_sequences: int, num_tokens: int, key: str = "") -> None:
        """``QueueFullError`` if a request of this size may not wait.

        ``num_tokens`` is 0 as long as the prompts are not tokenized: a full queue needs no prompt to be
        refused.
        """
        self._waiting_sequences.check_room(num_sequences, key)
        self._waiting_tokens.check_room(num_tokens, key)

    def place(self, request: Generate, key: str) -> int:
        """Returns the tag of the key's line; 0 without keys, so that requests go first come, first served."""
        if not key:
            return 0
        self._tags[request.request_id] = self._fair_share.tag(key, request.n)
        return self._tags[request.request_id]

    def add(self, request: EngineRequest, stream: EngineStream[Any]) -> None:
        self._streams[request.request_id] = stream
        self._waiting[request.request_id] = set(range(request.n))
        self._waiting_sequences.add(request.n, request.tenant)
        self._waiting_tokens.add(request.num_prompt_tokens, request.tenant)

    def assign(self, request: EngineRequest, worker: int) -> None:
        self._worker_of[request.request_id] = worker
        self._num_sequences[worker] += request.n

    def worker_of(self, request_id: str) -> int | None:
        return self._worker_of.get(request_id)

    def num_sequences(self, worker: int) -> int:
        """Counts the sequences of requests that the worker has not finished."""
        return self._num_sequences[worker]

    def deliver(self, output: Output) -> None:
        """Hand an output to its stream, if there still is one."""
        stream = self._streams.get(output.request_id)
        if output.is_first:
            self._begin(output, stream)
        if stream is not None:
            stream.deliver(output)
            if output.finish_reason is not None:
                self.forget_if_finished(output.request_id)

    def forget_if_finished(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.has_open_sequences(request_id):
            for index in self._waiting.get(request_id, set()) - stream.open_sequences(request_id):
                self._leave(request_id, index, stream)
            return
        for index in list(self._waiting.get(request_id, ())):
            self._leave(request_id, index, stream)
        self._unassign(request_id)
        del self._streams[request_id]
        self._tags.pop(request_id, None)
        if not self._streams:
            self._fair_share.reset()

    def _begin(self, output: Output, stream: EngineStream[Any] | None) -> None:
        if stream is None or output.index not in self._waiting.get(output.request_id, ()):
            return
        if (tag := self._tags.get(output.request_id)) is not None:
            self._fair_share.started(tag, stream.request(output.request_id).n)
        self._leave(output.request_id, output.index, stream)

    def _leave(self, request_id: str, index: int, stream: EngineStream[Any]) -> None:
        """One sequence waits no more; its prompt's tokens count until the last one of the request does."""
        waiting = self._waiting[request_id]
        waiting.discard(index)
        key = stream.request(request_id).tenant
        self._waiting_sequences.add(-1, key)
        if not waiting:
            del self._waiting[request_id]
            self._waiting_tokens.add(-stream.request(request_id).num_prompt_tokens, key)

    def fail(self, request_id: str, error: ApiError) -> None:
        if stream := self._streams.get(request_id):
            stream.fail(error)

    def fail_all(self, error: ApiError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)

    def lose_worker(self, worker: int, error: ApiError) -> None:
        """A worker has died, and its requests are ``unassigned``. Fail what no other can take over: requests
        that have output, and those that were with a dying worker before, as they may be what kills it."""
        lost = [request_id for request_id, holder in self._worker_of.items() if holder == worker]
        begun = {self._streams[request_id] for request_id in lost if self._has_begun(request_id)}
        for request_id in lost:
            self._unassign(request_id)
        for stream in dict.fromkeys(self._streams[request_id] for request_id in lost):
            if stream in begun or stream.num_submissions >= MAX_SUBMISSIONS:
                stream.fail(error)
            else:
                stream.num_submissions += 1

    def unassigned(self) -> list[EngineRequest]:
        """Returns what a worker has still to take over, in the order in which it came."""
        return [
            stream.request(request_id)
            for request_id, stream in self._streams.items()
            if request_id not in self._worker_of
        ]

    def _has_begun(self, request_id: str) -> bool:
        num_waiting = len(self._waiting.get(request_id, ()))
        return num_waiting < self._streams[request_id].request(request_id).n

    def _unassign(self, request_id: str) -> None:
        worker = self._worker_of.pop(request_id, None)
        if worker is not None:
            self._num_sequences[worker] -= self._streams[request_id].request(request_id).n
