"""How results are shown: a table on stdout, progress on stderr, JSON and a picture in files."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def note(text: str) -> None:
    """Progress goes to stderr; stdout has the tables only."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def print_facts(facts: Mapping[str, Any]) -> None:
    print("  ".join(f"{key.replace('_', ' ')}: {format_cell(value)}" for key, value in facts.items()))


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Columns from the first row's keys; None is shown as -."""
    print(f"\n{title}")
    cells = [[key.replace("_", " ") for key in rows[0]]]
    cells += [[format_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


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
    """The document as JSON at ``path``, and beside it a PNG of what ``draw`` puts on a matplotlib figure."""
    if path is None:
        return
    write_json(path, document)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("No picture: matplotlib is not installed; it comes with: pip install 'foretoken[bench]'")
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    draw(figure)
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    note(f"Wrote {picture}")
