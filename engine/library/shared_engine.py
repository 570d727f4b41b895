"""One engine that several threads call: requests are decoded together, by whichever takes the next step.

Whatever a call has submitted is aborted when it ends, in whatever way.
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
    """``lock`` is of the engine and of whatever else its callers must not use at the same time."""

    def __init__(self, core: EngineCore) -> None:
        self._core: EngineCore | None = core
        self.lock = Lock()
        self._request_ids = count()
        # Each open request's call reads here what has become of it.
        self._answers: dict[str, Answers] = {}
        self._closed: deque[str] = deque()  # requests that the next one with the lock aborts

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise RequestError("closed", "this LLM has been closed; load it again")
        return self._core

    def shut_down(self) -> None:
        """Ends what runs and lets go of the models, whose memory is free once nobody else refers to them."""
        with self.lock:
            if self._core is not None:
                self._fail_all("the LLM was closed")
                self._core = None

    def new_id(self) -> str:
        return f"prompt-{next(self._request_ids)}"

    def submit(self, request: Generate, answers: Answers) -> None:
        """Queues a request, whose outputs will come into ``answers``."""
        with self.lock:
            self._abort_closed()
            core = self.core
            self._answers[request.request_id] = answers
            core.add(request)

    def results(self, answers: Answers) -> Iterator[TokenOutput]:
        """Yields what comes of a call's requests without end, whichever call takes the steps."""
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
        """Ends the requests of a call. It may be in the midst of another one's step, where the garbage
        collector ends a stream: then they are aborted later."""
        self._closed.extend(request_ids)
        if self.lock.acquire(blocking=False):
            try:
                self._abort_closed()
            finally:
                self.lock.release()

    def _step(self) -> None:
        """Takes one step for all calls.

        Whatever ends it early, such as Ctrl-C, ends all of them: nothing that it leaves can be trusted.
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
    """The engine has given up a request, which ``request_id`` names."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.code, failed.message)
        self.request_id = failed.request_id
