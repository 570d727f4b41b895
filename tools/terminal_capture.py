"""Run ``truedraft generate --compare`` in a pseudo-terminal and save what it printed as an SVG picture.

python -m tools.terminal_capture --result generate-compare [--prompt TEXT] [--output FILE.svg]

The picture is the command's real output, colours included. Its numbers are recorded in
benchmarks/results/generate-compare.json, as those of every page are.
"""

import argparse
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.common import machine
from benchmarks.result_file import Figure, record

WIDTH = 100
# A progress bar hides the cursor while it moves, and is erased at its end.
PROGRESS = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h(\r?\x1b\[1A\x1b\[2K)?", re.DOTALL)
SPEED = re.compile(r"^(plain|speculative|n-grams) +([\d,.]+)", re.MULTILINE)
TIMES = re.compile(r"^(speculation|n-grams) .*?([\d.]+) times as fast", re.MULTILINE)
ESCAPE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "generate-compare.svg"


def run_in_terminal(command: list[str]) -> str:
    """Everything the command writes to a terminal, with its escape sequences."""
    written = bytearray()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 4096)
        written.extend(data)
        return data

    status = pty.spawn(command, read)
    if status:
        raise SystemExit(f"{shlex.join(command)} failed with status {os.waitstatus_to_exitcode(status)}")
    return PROGRESS.sub("", written.decode().replace("\r\n", "\n"))


def picture(command_line: str, output: str) -> str:
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), color_system="standard")  # noqa: SIM115
    console.print(Text.assemble(("$ ", "dim"), (command_line, "bold")))
    console.print(Text.from_ansi(output))
    return console.export_svg(title="truedraft")


def figures(output: str) -> list[Figure]:
    """Returns the numbers that the command printed."""
    text = ESCAPE.sub("", output)
    speeds = [Figure(row, "tokens/s", float(number.replace(",", ""))) for row, number in SPEED.findall(text)]
    rows = {"speculation": "speculative", "n-grams": "n-grams"}
    times = [Figure(rows[name], "times plain", float(number)) for name, number in TIMES.findall(text)]
    return speeds + times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", default="Once upon a time, there was a clever fox")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()

    arguments = [
        "generate",
        options.prompt,
        "--compare",
        "--temperature",
        "0",
        "--max-tokens",
        str(options.max_tokens),
    ]
    truedraft = Path(sys.executable).with_name("truedraft")
    output = run_in_terminal([str(truedraft), *arguments])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(picture(shlex.join(["truedraft", *arguments]), output), encoding="utf-8")
    print(f"Wrote {options.output}")
    if not (found := figures(output)):
        raise SystemExit(f"no speeds in what {truedraft} printed: it has another form now")
    record(
        options.result,
        what="One greedy stream of truedraft generate --compare",
        rows="decoding",
        model="bundled pair",
        dtype="the file's own weights",
        num_repeats=5,
        machine=machine(),
        figures=found,
    )


if __name__ == "__main__":
    main()
