"""Shows results: a table on stdout, progress on stderr, JSON and a picture in files."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import track

from truedraft.engine.terminal import console, table

T = TypeVar("T")


def note(text: str) -> None:
    """Progress goes to stderr; stdout has the tables only."""
    print(text, file=sys.stderr, flush=True)


def with_progress(items: Sequence[T], name: str) -> Iterable[T]:
    """A bar on stderr while they are worked on, if that is a terminal. Refreshed seldom: load is measured."""
    out = console(stderr=True)
    return track(items, name, console=out, transient=True, refresh_per_second=1, disable=not out.is_terminal)


def print_facts(facts: Mapping[str, Any]) -> None:
    print("  ".join(f"{key.replace('_', ' ')}: {format_cell(value)}" for key, value in facts.items()))


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Columns from the first row's keys; None is shown as -."""
    shown = table([key.replace("_", " ") for key in rows[0]])
    for row in rows:
        shown.add_row(*map(format_cell, row.values()))
    out = console()
    out.print(f"\n{title}")
    out.print(shown)


def format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
    return str(value)


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")
        note(f"Wrote {path}")


def save(path: Path | None, document: Mapping[str, Any], draw: Callable[[Any], None]) -> None:
    """Writes the document as JSON to ``path``, and next to it a PNG that ``draw`` draws with matplotlib."""
    if path is None:
        return
    write_json(path, document)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("No picture: matplotlib is not installed; install it with: pip install '.[bench]' in a checkout")
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    draw(figure)
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    note(f"Wrote {picture}")
