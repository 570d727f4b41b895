"""Prints what commands print: colours and progress on a terminal, plain lines elsewhere, no control
characters.

rich decides by the stream: NO_COLOR, TERM and FORCE_COLOR are respected, and a pipe gets plain text.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

# Output that does not go to a terminal has this width, which is enough for every table.
PLAIN_WIDTH = 250
GAP = 2  # This many characters are between columns.
# Loading has these stages: engine, target, draft, caches, costs. Without a draft there is one less.
NUM_LOADING_STAGES = 4
# These characters join others: without them some emoji and scripts fall apart.
JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Replaces control and formatting characters by escapes, so that a model's text cannot steer a
    terminal."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t" or character in JOINERS
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


class FoldingTable(Table):
    """Breaks into several tables, one below the other, where the terminal is too narrow for all columns.

    Each begins with the ``num_left`` columns of text, whose cells fold where even they do not fit.
    """

    def __init__(self, columns: Sequence[str], num_left: int) -> None:
        super().__init__(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
        self._num_left = num_left
        for place, name in enumerate(columns):
            is_text = place < num_left
            self.add_column(
                name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
            )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = list(self._parts(console, options))
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
            return
        for number, columns in enumerate(parts):
            if number:
                yield Text()
            part = FoldingTable([str(column.header) for column in columns], self._num_left)
            part.show_header = self.show_header
            for cells in zip(*(column.cells for column in columns), strict=True):
                part.add_row(*cells)
            yield part

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[Column]]:
        """Yields the columns of each table: those of text, and as many of the others as fit."""
        text, numbers = self.columns[: self._num_left], self.columns[self._num_left :]
        left = sum(self._width(column, console, options) for column in text)
        taken: list[Column] = []
        width = left
        for column in numbers:
            own = self._width(column, console, options)
            if taken and width + own - GAP > options.max_width:
                yield [*text, *taken]
                taken, width = [], left
            taken.append(column)
            width += own
        yield [*text, *taken]

    def _width(self, column: Column, console: Console, options: ConsoleOptions) -> int:
        cells = ([column.header] if self.show_header else []) + list(column.cells)
        return GAP + max((Measurement.get(console, options, cell).maximum for cell in cells), default=0)


def table(columns: Sequence[str], *, num_left: int = 1) -> Table:
    """Makes a table whose numbers are aligned to the right, except for the first ``num_left`` columns."""
    return FoldingTable(columns, num_left)


class Stages:
    """Shows a bar with the name of the stage that runs."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._begun = False

    def begin(self, name: str) -> None:
        """Ends the stage before, if any, and shows the next one."""
        self._progress.update(self._task, description=name, advance=int(self._begun))
        self._begun = True


@contextmanager
def stages(total: int) -> Iterator[Stages]:
    """Shows a bar on stderr if that is a terminal, and removes it at the end."""
    out = console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    shown = out.is_terminal
    with Progress(*columns, console=out, transient=True, refresh_per_second=4, disable=not shown) as progress:
        yield Stages(progress, total)


@contextmanager
def loading_bar() -> Iterator[Callable[[str], None]]:
    """Shows the stage of loading. It yields a function to be called with the name of each stage."""
    with stages(NUM_LOADING_STAGES) as progress:
        progress.begin("Loading the engine")
        yield lambda stage: progress.begin(f"Loading {stage}")


class PromptBar:
    """Shows a bar of the finished texts, with the tokens per second of all."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("texts", total=total, speed="")
        self._num_tokens = 0
        self._begun = time.perf_counter()

    def advance(self, num_tokens: int, *, is_done: bool) -> None:
        self._num_tokens += num_tokens
        seconds = time.perf_counter() - self._begun
        speed = f"{self._num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
        self._progress.update(self._task, advance=int(is_done), speed=speed)


@contextmanager
def prompt_bar(total: int, *, shown: bool) -> Iterator[PromptBar]:
    """Shows a bar on stderr for several texts if that is a terminal, and removes it at the end."""
    out = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    shown = shown and total > 1 and out.is_terminal
    with Progress(*columns, console=out, transient=True, refresh_per_second=4, disable=not shown) as progress:
        yield PromptBar(progress, total)
