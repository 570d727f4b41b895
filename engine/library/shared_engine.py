"""Lets several threads share one engine: requests are decoded together, by whichever thread takes the next
step.

Everything that a call has submitted is aborted when the call ends, in whatever way.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from threading import Lock

from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Failed, Generate, TokenOutput

Answers = deque[TokenOutput | Failed]


class SharedEngine:
    """Wraps the engine. ``lock`` guards it, and everything else that its callers must not use at the same
    time."""

    def __init__(self, core: EngineCore) -> None:
        self._core: EngineCore | None = core
        self.lock = Lock()
        self._request_ids = count()
        # Each call reads here the outputs of its open requests.
        self._answers: dict[str, Answers] = {}
        self._closed: deque[str] = deque()  # The next request that gets the lock aborts these.

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise RequestError("closed", "this LLM has been closed; load it again")
        return self._core

    def shut_down(self) -> None:
        """Ends all running calls and drops the models, whose memory is free once nobody else refers to
        them."""
        with self.lock:
            if self._core is not None:
                self._fail_all("the LLM was closed")
                self._core = None

    def new_id(self) -> str:
        return f"prompt-{next(self._request_ids)}"

    def submit(self, request: Generate, answers: Answers) -> None:
        """Queues a request, whose outputs will be put into ``answers``."""
        with self.lock:
            self._abort_closed()
            core = self.core
            self._answers[request.request_id] = answers
            core.add(request)

    def results(self, answers: Answers) -> Iterator[TokenOutput]:
        """Yields the outputs of a call's requests without end, whichever call takes the steps."""
        while True:
            if not answers:
                with self.lock:
                    self._abort_closed()
                    if not answers:
                        self._step()
            while answers:
                result = answers.popleft()
                if isinstance(result, Failed):
                    raise RequestFailedError(result)
                yield result

    def abort(self, request_id: str, index: int) -> None:
        """Ends one sequence, whose text is complete."""
        with self.lock:
            self.core.abort(request_id, index)

    def close(self, request_ids: Iterable[str]) -> None:
        """Aborts the requests of a call. If this happens during another call's step, as when the garbage
        collector ends a stream, they are aborted later."""
        self._closed.extend(request_ids)
        if self.lock.acquire(blocking=False):
            try:
                self._abort_closed()
            finally:
                self.lock.release()

    def _step(self) -> None:
        """Takes one step for all calls.

        Anything that interrupts it, such as Ctrl-C, ends all calls: the engine's state cannot be trusted
        after that.
        """
        try:
            for result in self.core.step():
                self._answers[result.request_id].append(result)
        except BaseException as error:
            self._fail_all(f"a step was ended by {error!r}")
            raise

    def _fail_all(self, reason: str) -> None:
        self.core.reset()
        for request_id, answers in self._answers.items():
            answers.append(Failed(request_id, "interrupted", reason))

    def _abort_closed(self) -> None:
        if self._closed and self._core is not None:
            request_ids = {self._closed.popleft() for _ in range(len(self._closed))}
            self._core.abort_all(request_ids)
            for request_id in request_ids:
                self._answers.pop(request_id, None)


class RequestFailedError(RequestError):
    """The engine ended the request ``request_id`` with an error."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.code, failed.message)
        self.request_id = failed.request_id
