"""What commands print: colours and progress on a terminal, plain lines elsewhere, and no control characters.

rich decides by the stream: NO_COLOR, TERM and FORCE_COLOR are respected, and a pipe gets plain text.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Wide enough for every table where there is no terminal whose width would count.
PLAIN_WIDTH = 200
# Joiners: without them some emoji and scripts fall apart.
JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Control and formatting characters as escapes, so that a model's text cannot steer a terminal."""
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


def table(columns: Sequence[str], *, num_left: int = 1) -> Table:
    """Numbers to the right, but for the first ``num_left`` columns."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < num_left else "right", no_wrap=True)
    return made


class Stages:
    """A bar with the name of what runs."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._begun = False

    def begin(self, name: str) -> None:
        """The stage before, if any, has ended."""
        self._progress.update(self._task, description=name, advance=int(self._begun))
        self._begun = True


@contextmanager
def stages(total: int) -> Iterator[Stages]:
    """Shown on stderr if that is a terminal, and gone at the end."""
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
