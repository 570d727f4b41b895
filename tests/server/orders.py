"""What a test orders the fake worker to do while it runs, through a file that the next worker finds, too.

With orders a test waits for what it needs to have happened, then lets the next thing happen. Nothing in it
depends on how long anything takes.
"""

import os
from pathlib import Path

DIE = "die"
HANG = "hang"
KEEP_FILES = "keep the files"


class WorkerOrders:
    """Without an order the worker does whatever there is to do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at_most(self, num_steps: int) -> None:
        """No more steps than that since the worker's start; messages are still taken."""
        self._write(str(num_steps))

    def die(self) -> None:
        """A worker that runs dies, and none becomes ready until there is another order."""
        self._write(DIE)

    def hang(self) -> None:
        """The worker's loop stands still; its process lives."""
        self._write(HANG)

    def keep_files(self) -> None:
        """The files of prefixes cannot be forgotten."""
        self._write(KEEP_FILES)

    def go_on(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, order: str) -> None:
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(order)
        os.replace(unfinished, self.path)
