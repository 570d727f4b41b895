"""Run ``truedraft generate --compare`` in a pseudo-terminal and save what it printed as an SVG picture.

python -m tools.terminal_capture [--prompt TEXT] [--output docs/images/generate-compare.svg]

The picture is the command's real output, colours included. Numbers in it are this machine's.
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

WIDTH = 100
# A progress bar hides the cursor while it moves, and is erased at its end.
PROGRESS = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h(\r?\x1b\[1A\x1b\[2K)?", re.DOTALL)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", default="Once upon a time, there was a clever fox")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--output", type=Path, default=PICTURE)
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


if __name__ == "__main__":
    main()
