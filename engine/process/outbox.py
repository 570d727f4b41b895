"""Decides which outputs leave the worker after a step, and which wait for those of the next steps.

A message, its way through the front end and the client's reading cost much the same whether there is one
token in it or ten, and steps of a small model take about a millisecond. The module knows neither sockets nor
models.
"""

import time
from collections.abc import Callable, Sequence

from truedraft.engine.messages import TokenOutput

# The front end needs about this long for a message of one stream, and may be busy with messages half of the
# time. For that reason tokens never wait longer than the second number says.
SECONDS_OF_A_STREAM, LONGEST = 0.00015, 0.05


class Outbox:
    """Sends to everyone at most every ``interval`` seconds, or less often where streams are many; 0 sends
    after every step.

    A sequence's first and last outputs never wait, nor do outputs that these would overtake.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._held: list[TokenOutput] = []
        self._last_time = clock() - interval

    def put(self, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
        """Takes in a step's outputs; returns those to be sent now."""
        self._held += outputs
        if self._clock() >= self._last_time + self._interval_of(len(outputs)):
            return self.empty()
        urgent = {
            output.sequence for output in outputs if output.is_first or output.finish_reason is not None
        }
        due = [output for output in self._held if output.sequence in urgent]
        self._held = [output for output in self._held if output.sequence not in urgent]
        return due

    def empty(self) -> list[TokenOutput]:
        """Returns everything, because it is time or because no step will follow."""
        self._last_time = self._clock()
        held, self._held = self._held, []
        return held

    def _interval_of(self, num_streams: int) -> float:
        grown = min(num_streams * SECONDS_OF_A_STREAM, LONGEST)
        return max(self._interval, grown) if self._interval else 0.0

    def forget(self, request_id: str, index: int | None) -> None:
        """Drops this sequence's tokens, or with index None those of the whole request: its client has
        left."""
        self._held = [
            output
            for output in self._held
            if output.request_id != request_id or index not in (None, output.index)
        ]
