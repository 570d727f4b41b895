"""Run the documentation's examples for clients against a server, and print what they answer, to be read once.

python -m tools.try_examples             (a server of the bundled pair; some minutes)
python -m tools.try_examples --url http://127.0.0.1:8000 docs/quickstart.md

Every curl command and every block of Python with the OpenAI or Anthropic SDK runs as it is printed, but for
the server's address. README's own example and those of the library are tests
(``tests/engine/test_readme.py``, ``tests/test_public_api.py``). Ends with 1 if a command fails.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parent.parent
SHOWN = 400  # characters of an answer
START_SECONDS, TIMEOUT_SECONDS = 300, 120
# Examples of another model than the one that is served, and of libraries that are not installed, say so.
ELSEWHERE = ("does not exist; this server has", "ModuleNotFoundError")
CODE = re.compile(r'"code": ?"(\w+)"')
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SDKS = ("OpenAI(", "Anthropic(")


def examples(text: str) -> Iterator[tuple[str, str]]:
    """Yields the language and the code of each example of a page that asks a server."""
    for language, block in BLOCK.findall(text):
        if language == "python" and any(sdk in block for sdk in SDKS):
            yield "python", block
        elif language in ("", "bash"):
            yield from (("bash", command) for command in curl_commands(block))


def curl_commands(block: str) -> Iterator[str]:
    """Yields commands of one line, and of several: until quotes are closed and no backslash ends the line."""
    lines = iter(block.splitlines())
    for line in lines:
        if not line.removeprefix("$ ").startswith("curl "):
            continue
        command = line.removeprefix("$ ")
        while command.count("'") % 2 or command.endswith("\\"):
            command += "\n" + next(lines)
        yield command


@contextmanager
def server() -> Iterator[str]:
    """Runs the bundled pair on a free port; yields its address."""
    command = [sys.executable, "-m", "truedraft", "serve", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
                if found:
                    until_ready(found[0])
                    yield found[0]
                    return
            raise SystemExit("The server did not start.")
        finally:
            process.terminate()


def until_ready(url: str) -> None:
    """Waits until the models are loaded."""
    for _ in range(START_SECONDS):
        with suppress(OSError), urlopen(f"{url}/ready", timeout=TIMEOUT_SECONDS):
            return
        time.sleep(1)
    raise SystemExit("The models were not loaded in time.")


def run(language: str, code: str, url: str, page: str) -> bool:
    """Runs an example and prints its answer; returns whether it went well, or failed with an error code that
    the page shows."""
    code = re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", url, code)
    program = [sys.executable] if language == "python" else ["bash", "-e"]
    if language == "bash":
        code = re.sub(r"^curl ", "curl --fail-with-body --silent --show-error ", code)
    try:
        done = subprocess.run([*program, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        print("  FAILED: it took too long")
        return False
    answer = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    print("  " + answer.strip()[:SHOWN].replace("\n", "\n  "))
    shown = set(CODE.findall(page))
    went_well = done.returncode == 0 or any(word in answer for word in (*ELSEWHERE, *shown))
    if not went_well:
        print("  FAILED")
    return went_well


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a server that runs; without one the bundled pair is served")
    parser.add_argument("pages", nargs="*", type=Path)
    given = parser.parse_args(arguments)
    pages = given.pages or sorted((ROOT / "docs").glob("*.md"))
    failed = 0
    with server() if given.url is None else _there(given.url) as url:
        for page in pages:
            text = page.read_text(encoding="utf-8")
            for language, code in examples(text):
                print(f"{page.name}: {code.splitlines()[0][:100]}", flush=True)
                failed += not run(language, code, url, text)
    print(f"{failed} failed")
    return int(failed > 0)


@contextmanager
def _there(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    sys.exit(main())
