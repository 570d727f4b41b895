"""Shows on stderr how far models are fetched: a bar on a terminal, elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from truedraft.engine import terminal
from truedraft.engine.hub import fetch
from truedraft.engine.hub.repository import shown_size

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def fetch_bar(write: Callable[[str], None] | None = None) -> Iterator[fetch.Tell]:
    """Yields a function to be called with each progress. Without a terminal ``write`` gets the lines, by
    default on stderr."""
    out = terminal.console(stderr=True)
    if write is not None or not out.is_terminal:
        yield _Lines(write or _to_stderr).tell
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True, refresh_per_second=4) as progress:
        yield _Bars(progress).tell


class _Bars:
    """Holds a bar for each model."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def tell(self, heard: fetch.Progress) -> None:
        if heard.name not in self._tasks:
            short = heard.name.rpartition("/")[2][-28:]
            self._tasks[heard.name] = self._progress.add_task(short, total=heard.total)
        self._progress.update(self._tasks[heard.name], completed=heard.done)


class _Lines:
    """Writes a line every few seconds, and one at the end of each model."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._began: dict[str, tuple[float, int]] = {}
        self._last = 0.0

    def tell(self, heard: fetch.Progress) -> None:
        now = time.monotonic()
        began, had = self._began.setdefault(heard.name, (now, heard.done))
        if now - self._last < SECONDS_BETWEEN_LINES and heard.done < heard.total:
            return
        self._last = now
        speed = (heard.done - had) / max(now - began, 1e-3)
        left = (
            f", {(heard.total - heard.done) / speed:.0f} s left" if speed and heard.done < heard.total else ""
        )
        size = f"{shown_size(heard.done)} of {shown_size(heard.total)}"
        self._write(f"Fetching {heard.name}: {size}, {shown_size(speed)}/s{left}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
