"""Render the measured numbers of README.md and docs/ from the files in benchmarks/results.

python -m tools.render_results            # writes the pages
python -m tools.render_results --check    # fails if a page is not what it would write

A page has a place for a table between two comments:

    <!-- results: NAME -->                      all columns, with spread, machine and command
    <!-- results: NAME, NAME | COLUMN -->       one column of several files, side by side
    <!-- capacity: NAME | COLUMN | tokens=128 latency=2 rates=5,50 -->
    <!-- /results -->
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.result_file import ROOT, Figure, Result, load
from tools.capacity import Server, predict, replicas, throughput

BLOCK = re.compile(
    r"^<!-- (?P<kind>results|capacity): (?P<request>[^\n]+?) -->\n.*?^<!-- /results -->$",
    re.DOTALL | re.MULTILINE,
)
# More of the processors than this, and a table says that the machine had other work.
BUSY_SHARE = 0.05


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def number(value: float) -> str:
    """Shows three digits or a little more, which is what repeats agree on."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3f}"


def cell(figure: Figure | None, *, spread: bool) -> str:
    if figure is None:
        return ""
    median = number(figure.median)
    if not spread or figure.low is None or figure.high is None:
        return median
    low, high = number(figure.low), number(figure.high)
    return median if low == high == median else f"{median} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|".join(f" {cell} " if cell else " " for cell in cells) for cells in (head, *rows)]
    lines.insert(1, "---|" * (len(head) - 1) + "---")
    return "\n".join(f"|{line}|" for line in lines)


def in_order(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def place(result: Result) -> str:
    """Names the machine and the day."""
    cores = result.machine.get("cores")
    return f"{result.machine['processor']}{f', {cores} cores' if cores else ''}; {result.date}"


def busy(results: Sequence[Result]) -> str:
    """Says so if the machine had other work, in a sentence."""
    share = max(result.others or 0.0 for result in results)
    return f" Other programs used {share:.0%} of the processors meanwhile." if share > BUSY_SHARE else ""


def origin(result: Result) -> str:
    """Says where a table comes from, in a sentence or two."""
    repeats = f"Medians of {result.num_repeats}" if result.num_repeats > 1 else "One run"
    spread = any(figure.low is not None for figure in result.figures) and result.num_repeats > 1
    quartiles = ", with the range of the middle half" if spread else ""
    return f"{repeats}{quartiles}; {place(result)}, commit {result.commit}.{busy([result])}"


def one_table(name: str) -> str:
    result = load(name)
    columns = in_order([figure.column for figure in result.figures])
    rows = [
        [row, *(cell(result.cell(row, column), spread=True) for column in columns)]
        for row in in_order([figure.row for figure in result.figures])
    ]
    return "\n\n".join(
        (
            f"{result.what} ({result.model}, {result.dtype}):",
            table([result.rows, *columns], rows),
            origin(result),
            f"```\n{result.command}\n```",
        )
    )


def side_by_side(names: Sequence[str], column: str) -> str:
    results = [load(name) for name in names]
    longest_first = sorted(results, key=lambda result: -len(result.figures))
    rows = in_order(
        [figure.row for result in longest_first for figure in result.figures if figure.column == column]
    )
    cells = [[row, *(cell(result.cell(row, column), spread=False) for result in results)] for row in rows]
    places = "; ".join(in_order([place(result) for result in results]))
    return "\n\n".join(
        (
            table([column, *(f"{result.model}, {result.dtype}" for result in results)], cells),
            f"Medians; {places}.{busy(results)}",
        )
    )


def capacity_table(name: str, column: str, options: dict[str, str]) -> str:
    server = Server(throughput(name, column))
    tokens, latency = float(options["tokens"]), float(options["latency"])
    rows = []
    for rate in map(float, options["rates"].split(",")):
        needed = replicas(server, tokens, rate, latency, utilisation=0.7)
        load_of_each = predict(server, tokens, rate / needed)
        rows.append(
            [
                f"{rate:,.0f}",
                f"{needed:,}",
                f"{load_of_each.utilisation:.2f}",
                f"{load_of_each.running:.1f}",
                f"{load_of_each.latency:.2f} s",
            ]
        )
    return table(["requests/s", "replicas", "utilisation", "running on each", "mean latency"], rows)


def render(kind: str, request: str) -> str:
    names, *rest = (part.strip() for part in request.split("|"))
    if kind == "capacity":
        column, options = rest
        return capacity_table(names, column, dict(option.split("=") for option in options.split()))
    if rest:
        return side_by_side([name.strip() for name in names.split(",")], rest[0])
    return one_table(names)


def rendered(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        kind, request = match["kind"], match["request"]
        return f"<!-- {kind}: {request} -->\n\n{render(kind, request)}\n\n<!-- /results -->"

    return BLOCK.sub(block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rendered(text)
        if new != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(f"Out of date: {', '.join(stale)}. Run: python -m tools.render_results")
    print(f"{len(stale)} pages written" if not check else "All pages are up to date")


if __name__ == "__main__":
    main()
