"""The requests that the engine has not finished: which stream each belongs to, and which still wait.

Limits how many may wait, and knows which of them the next worker can take over when one dies. Owned by
``server.engine_client``.
"""

from collections.abc import Sequence

from engine.messages import Generate, TokenOutput
from server.engine_stream import EngineStream
from server.errors import ApiError, QueueFullError

# How many workers may die with a request before it is answered with an error.
MAX_SUBMISSIONS = 2


class OpenRequests:
    """A request waits until its first token comes back. ``max_waiting_tokens`` None is no limit."""

    def __init__(self, max_waiting: int, max_waiting_tokens: int | None) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._streams: dict[str, EngineStream] = {}
        self._waiting: dict[str, int] = {}  # request -> prompt tokens

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def check_room(self, requests: Sequence[Generate]) -> None:
        """``QueueFullError`` if these may not wait. One that finds nothing waiting is always let in."""
        num_waiting, num_waiting_tokens = len(self._waiting), sum(self._waiting.values())
        if num_waiting >= self._max_waiting:
            raise QueueFullError(f"{num_waiting} requests are waiting already. Try again later.")
        limit, num_tokens = (
            self._max_waiting_tokens,
            sum(len(request.prompt_token_ids) for request in requests),
        )
        if limit is not None and num_waiting and num_waiting_tokens + num_tokens > limit:
            raise QueueFullError(
                f"{num_waiting_tokens} prompt tokens are waiting already; with the {num_tokens} of this "
                f"request they would be more than {limit}. Try again later."
            )

    def add(self, request: Generate, stream: EngineStream) -> None:
        self._streams[request.request_id] = stream
        self._waiting[request.request_id] = len(request.prompt_token_ids)

    def deliver(self, output: TokenOutput) -> None:
        """Hand an output to its stream, if there still is one."""
        self._waiting.pop(output.request_id, None)
        if stream := self._streams.get(output.request_id):
            stream.deliver(output)
            self.forget_if_finished(output.request_id)

    def forget_if_finished(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.has_open_sequences(request_id):
            del self._streams[request_id]
            self._waiting.pop(request_id, None)

    def fail(self, request_id: str, error: ApiError) -> None:
        if stream := self._streams.get(request_id):
            stream.fail(error)

    def fail_all(self, error: ApiError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)

    def fail_lost(self, error: ApiError) -> None:
        """A worker has died. Fail what no other can take over: requests of which something has come back,
        and those that were with a dying worker before, as they may be what kills it."""
        for stream in set(self._streams.values()):
            if stream.has_output or stream.num_submissions >= MAX_SUBMISSIONS:
                stream.fail(error)

    def submit_again(self) -> list[Generate]:
        """What the next worker takes over, in the order in which it came."""
        streams = dict.fromkeys(self._streams.values())
        for stream in streams:
            stream.num_submissions += 1
        return [request for stream in streams for request in stream.requests]
