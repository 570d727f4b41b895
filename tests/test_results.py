"""Measured numbers come from benchmarks/results, and pages have no others."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from benchmarks import measure_all, result_file
from benchmarks.result_file import Figure, Result, command_line
from tools import capacity, render_results
from tools.terminal_capture import SPEED

ROOT = Path(__file__).parent.parent
PAGES = [path.relative_to(ROOT).as_posix() for path in render_results.pages()]
PICTURE = ROOT / "docs" / "images" / "generate-compare.svg"

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = (
    r"tokens(?:/s| (?:a|per) second)",
    r"requests(?:/s| (?:a|per) second)",
    r"(?:ms|us|µs|ns|microseconds|milliseconds)\b",
    r"times\b",
    r"(?:GB/s|GFLOP)",
    r"x(?: speed-up| as| faster|\b(?= \()|\))",
    r"% (?:faster|slower|more tokens|fewer)",
    r"of (?:the|its|their) (?:time|speed)\b",
)
MEASURED = re.compile(
    rf"(?<![\w.]){NUMBER}(?: to {NUMBER})? ?(?:{'|'.join(UNITS)})"
    rf"|\b(?:takes?|took) (?:only |about )?{NUMBER}(?: to {NUMBER})? (?:s|seconds|minutes)\b"
)
# A column of a table is one of measurements if its head says so.
MEASURED_HEAD = re.compile(
    r"tokens/s|requests/s|\bms\b|\bus\b|µs|microseconds|milliseconds|speed-up|speedup|times (?:plain|as)"
    r"|measured|acceptance|accepted|rounds per token|wall time|latency"
)
# A paragraph above a table says the same of all its columns.
MEASURED_TABLE = re.compile(r"tokens per second|medians|milliseconds of|microseconds of")
# Settings, definitions and examples that look like measurements.
NOT_MEASURED = {
    "docs/choosing-a-draft.md": [
        "v = 1.0 (bound by memory)",
        "mtp: 1.62 times the speed at length 2",  # is an example of what the start says
    ],
    "docs/configuration.md": ["0.15 ms for each"],  # is a rule, not a measurement
}


def outside_of_blocks(text: str) -> str:
    return render_results.BLOCK.sub("", text)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def measured(text: str) -> Iterator[str]:
    """Yields what looks like a measurement in ``text``, tables by their heads."""
    yield from (match[0] for match in MEASURED.finditer(text))
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|[-| :]+\|", line):
            heads = cells(lines[number - 1])
            above = "\n".join(lines[: number - 1]).rstrip().rpartition("\n\n")[2]
            is_measured = bool(MEASURED_TABLE.search(above.lower()))
            columns = [i for i, head in enumerate(heads) if is_measured or MEASURED_HEAD.search(head)]
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                yield from (
                    cell for i, cell in enumerate(cells(row)) if i in columns and re.match(r"[*~]*\d", cell)
                )


def without_exceptions(page: str, text: str) -> str:
    for exception in NOT_MEASURED.get(page, ()):
        assert exception in text, f"{page} has no {exception!r} any more: remove the exception"
        text = text.replace(exception, "")
    return text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_results_say(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert render_results.rendered(text) == text, "run: python -m tools.render_results"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_measured_number_of_its_own(page: str) -> None:
    text = without_exceptions(page, outside_of_blocks((ROOT / page).read_text(encoding="utf-8")))
    found = list(measured(text))
    assert not found, f"{page}: {found}: put them into benchmarks/results, or take them out"


@pytest.mark.parametrize(
    "text",
    [
        "It is 2.9 times as fast.",
        "It decodes 1,813 tokens/s.",
        "A mask takes 7 µs, 12 us or 2.7 ms.",
        "A 1.25x speed-up",
        "1.94 x)",
        "two cores read 33 to 55 GB/s",
        "0.87 of the time",
        "Loading took 10.8 s.",
        "2,342 tokens per second",
        "| clients | tokens/s |\n|---|---|\n| 1 | 1,610 |",
        "Tokens per second of one stream:\n\n| | 290M pair |\n|---|---|\n| Truedraft | 114.3 |",
        "| draft | accepted |\n|---|---|\n| as text | **0.41** |",
    ],
)
def test_a_measured_number_is_found(text: str) -> None:
    assert list(measured(text))


@pytest.mark.parametrize(
    "text",
    [
        "drafts 0 to 8 tokens, within 0.25 seconds, at most 1 % of it",
        "2 x layers x key-value heads",
        "576 x 192",
        "| clients | tokens/s |\n|---|---|\n| 1 | as many |",
        "<!-- results: a -->\n\n| clients | tokens/s |\n|---|---|\n| 1 | 1,610 |\n\n<!-- /results -->",
    ],
)
def test_other_numbers_are_let_through(text: str) -> None:
    assert not list(measured(outside_of_blocks(text)))


@pytest.mark.parametrize("name", result_file.names())
def test_a_result_says_where_it_comes_from(name: str) -> None:
    result = result_file.load(name)
    assert {"processor"} <= result.machine.keys()
    assert re.match(r"[0-9a-f]{7,}", result.commit), result.commit
    assert date.fromisoformat(result.date) <= date.today()
    assert result.command.startswith("python -m ")
    assert "/work" not in result.command
    assert result.num_repeats >= 1
    places = [(figure.row, figure.column) for figure in result.figures]
    assert len(places) == len(set(places)) > 0
    for figure in result.figures:
        assert figure.low is None or figure.low <= figure.median <= (figure.high or 0), figure


@pytest.mark.parametrize("name", result_file.names())
def test_a_result_is_on_a_page(name: str) -> None:
    """A file without a page would be one more place for old numbers."""
    shown = {
        request
        for page in PAGES
        for match in render_results.BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
        for request in re.split(r"[,|] *", match["request"].split("|")[0].strip())
    }
    assert name in {*shown, "generate-compare"}


def test_a_changed_number_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A planted bug: somebody measures again and does not render."""
    name = result_file.names()[0]
    result = result_file.load(name)
    (tmp_path / "README.md").write_text(f"Before\n<!-- results: {name} -->\n<!-- /results -->\nAfter\n")
    monkeypatch.setattr(render_results, "ROOT", tmp_path)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["render_results", *arguments])
        render_results.main()

    with pytest.raises(SystemExit, match=r"Out of date: README.md"):
        run("--check")
    run()
    run("--check")
    assert result.figures[0].row in (tmp_path / "README.md").read_text()
    first = dataclasses.replace(result.figures[0], median=123456.0)
    changed = dataclasses.replace(result, figures=[first, *result.figures[1:]])
    monkeypatch.setattr(render_results, "load", lambda _: changed)
    with pytest.raises(SystemExit, match=r"Out of date: README.md"):
        run("--check")
    run()
    assert "123,456" in (tmp_path / "README.md").read_text()


def test_the_picture_has_the_numbers_of_its_result() -> None:
    lines = re.findall(r">([^<]*)</text>", PICTURE.read_text(encoding="utf-8"))
    text = "\n".join(line.replace("&#160;", " ") for line in lines)
    in_picture = {row: float(number.replace(",", "")) for row, number in SPEED.findall(text)}
    figures = result_file.load("generate-compare").figures
    assert in_picture == {figure.row: figure.median for figure in figures if figure.column == "tokens/s"}


def test_figures_are_medians_with_the_middle_half() -> None:
    assert Figure.of("row", "ms", [1, 2, 3, 4, 100]) == Figure("row", "ms", 3.0, 2.0, 4.0)
    assert Figure.of("row", "ms", [7]) == Figure("row", "ms", 7.0, 7.0, 7.0)
    assert Figure.of_ratios("row", "times", [2, 9], [1, 3]) == Figure("row", "times", 2.5, 2.25, 2.75)


def test_a_result_is_written_as_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_file, "FOLDER", tmp_path)
    result = Result(
        *("Two streams", "program", "a model", "float32", 3, "python -m benchmarks.peers"),
        *("abcdef0", "2026-01-31", {"processor": "one"}, [Figure("ours", "tokens/s", 3.0, 2.0, 4.0)]),
    )
    result_file.write("name", result)
    assert result_file.names() == ["name"]
    assert result_file.load("name") == result


def test_the_command_is_what_a_reader_would_type() -> None:
    given = [
        "/here/benchmarks/peers.py",
        "--target",
        "/there/a.gguf",
        "--result",
        "x",
        "--work=/tmp/w",
        "--auto",
    ]
    assert command_line(given) == "python -m benchmarks.peers --target a.gguf --auto"


def test_capacity_reads_a_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = capacity.throughput("http-bundled", "default, tokens/s")
    assert {1, 4, 16} <= known.keys()
    line = "capacity --result http-bundled --tokens 10 --rate 1 --latency 100"
    monkeypatch.setattr(sys, "argv", line.split())
    capacity.main()
    assert "replicas" in capsys.readouterr().out


ELSEWHERE = {"attacks", "connections", "gpu-http", "gpu-rounds", "hostile-requests", "rounding-smollm2"} | {
    "cache-types"
}


def test_one_command_measures_all_results(tmp_path: Path) -> None:
    """A GPU, attacks, and questions from elsewhere have commands of their own."""
    arguments = argparse.Namespace(
        llama_cpp_bin=tmp_path, llama_cpp_src=tmp_path, smollm2=tmp_path / measure_all.SMOLLM2, work=tmp_path
    )
    measured = {measurement.name for measurement in measure_all.measurements(arguments)}
    assert measured == set(result_file.names()) - ELSEWHERE


def test_a_quick_measurement_has_each_option_once() -> None:
    measurement = measure_all.Measurement(
        "name",
        ["benchmarks.peers", "--max-tokens", 64],
        ("--repeats", 5),
        ("--max-tokens", 16, "--blocks", 1),
    )
    usual = ["benchmarks.peers", "--max-tokens", "64", "--result", "name", "--repeats", "5"]
    assert measurement.arguments(quick=False) == usual
    quick = ["benchmarks.peers", "--max-tokens", "16", "--result", "name", "--blocks", "1", "--repeats", "2"]
    assert measurement.arguments(quick=True) == quick
