"""The files in ``benchmarks/results`` have every measured number of this edition, and where it comes from.

A benchmark writes one with ``--result NAME``; ``tools.render_results`` makes the tables of README.md and
docs/ from them, and ``tools.capacity`` reads throughput from them. Imports no engine.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
# Options of the command that change no number.
_NOT_SHOWN = ("--result", "--save", "--work", "--json")
_CODE = ("truedraft", "engine", "server", "loadtest", "benchmarks", ":!benchmarks/results")


@dataclass(frozen=True)
class Figure:
    """A figure is one cell of a table. Half of the repeats lie between ``low`` and ``high``; both are None
    where the single repeats were not kept."""

    row: str
    column: str  # names the unit
    median: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, row: str, column: str, values: Iterable[float]) -> Self:
        """Summarises the values of all repeats."""
        known = sorted(values)
        low = high = known[0]
        if len(known) > 1:
            low, _, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(row, column, *(_rounded(value) for value in (statistics.median(known), low, high)))

    @classmethod
    def of_ratios(cls, row: str, column: str, values: Sequence[float], bases: Sequence[float]) -> Self:
        """Summarises ratios that are taken within each repeat."""
        return cls.of(row, column, [value / base for value, base in zip(values, bases, strict=True)])


def table_of(figures: Iterable[Figure], rows: str) -> list[dict[str, Any]]:
    """Returns the figures' medians as ``print_table`` takes them; ``rows`` names the first column."""
    found: dict[str, dict[str, Any]] = {}
    for figure in figures:
        found.setdefault(figure.row, {rows: figure.row})[figure.column] = figure.median
    return list(found.values())


def _rounded(value: float) -> float:
    """Keeps five digits: more would be noise in every diff."""
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Result:
    what: str  # is the line above a table, without its full stop
    rows: str  # names the first column
    model: str
    dtype: str
    num_repeats: int
    command: str
    commit: str  # names the code that was measured
    date: str
    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)

    @property
    def others(self) -> float | None:
        """Returns the share of the processors that other programs used meanwhile, where it is known."""
        share: float | None = self.machine.get("others")
        return share

    def cell(self, row: str, column: str) -> Figure | None:
        return next((figure for figure in self.figures if (figure.row, figure.column) == (row, column)), None)


def load(name: str) -> Result:
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"There is no {path}; measure it: python -m benchmarks.measure_all --only {name}")
    document = json.loads(path.read_text(encoding="utf-8"))
    return Result(**{**document, "figures": [Figure(**figure) for figure in document["figures"]]})


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def write(name: str, result: Result) -> Path:
    """Writes the file; one figure a line, so that a diff shows which numbers moved."""
    document = asdict(result)
    figures = ",\n".join(f"    {json.dumps(figure)}" for figure in document.pop("figures"))
    head = json.dumps(document, indent=2)[:-2]
    path = FOLDER / f"{name}.json"
    path.write_text(f'{head},\n  "figures": [\n{figures}\n  ]\n}}\n', encoding="utf-8")
    return path


def command_line(arguments: Sequence[str] = tuple(sys.argv)) -> str:
    """Returns the command as a reader would type it: files by their names, without what changes no number."""
    shown: list[str] = []
    given = iter(arguments[1:])
    for argument in given:
        option = argument.split("=")[0]
        if option in _NOT_SHOWN:
            if option == argument:
                next(given, None)
        else:
            shown.append(Path(argument).name if argument.startswith("/") else argument)
    folder = Path(arguments[0]).resolve().parent.name
    return " ".join(["python", "-m", f"{folder}.{Path(arguments[0]).stem}", *shown])


def current_commit() -> str:
    """Returns the checkout's commit, and says so if the code differs from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{commit} with changes" if _git("status", "--porcelain", "--", *_CODE) else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def record(
    name: str | None,
    *,
    what: str,
    rows: str,
    model: str,
    dtype: str,
    num_repeats: int,
    machine: dict[str, Any],
    figures: Sequence[Figure],
) -> None:
    """Writes ``name`` with today's date, this command and this commit; nothing if there is no name."""
    if name is None:
        return
    path = write(
        name,
        Result(
            what=what,
            rows=rows,
            model=model,
            dtype=dtype,
            num_repeats=num_repeats,
            command=command_line(),
            commit=current_commit(),
            date=date.today().isoformat(),
            machine=machine,
            figures=list(figures),
        ),
    )
    print(f"Wrote {path}", file=sys.stderr)
