"""``from truedraft import ...``: what the README and docs/python-api.md promise, with the bundled pair."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import truedraft
from truedraft import LLM, Completion, RequestError, SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "python-api.md"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_speculative_tokens=3, cache_memory="64MiB", num_threads=1)


def test_version() -> None:
    assert truedraft.__version__ == version("truedraft")


def test_the_page_names_every_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    fields = [*SamplingParams.__struct_fields__, *Completion.__dataclass_fields__]
    assert [name for name in fields if f"`{name}`" not in page] == []


def test_drafts_change_no_token(llm: LLM) -> None:
    speculative, plain = (
        llm.generate("Once upon a time", SamplingParams(max_tokens=24, seed=1, num_speculative_tokens=length))
        for length in (3, 0)
    )
    assert speculative[0].token_ids == plain[0].token_ids
    assert speculative[0].num_rounds < plain[0].num_rounds == 24


def test_one_completion_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 5)]
    completions = llm.generate(["The old tortoise", llm.tokenizer.encode("A fox")], params)
    assert [len(completion.token_ids) for completion in completions] == [3, 5]


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    text = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.chat([{"role": "user", "content": "Tell me a story."}], params)
    assert answer.token_ids == llm.generate(text, params)[0].token_ids


def test_a_prompt_that_does_not_fit_is_an_error(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1] * 2000], SamplingParams(max_tokens=1))


def test_a_folder_with_modules_of_our_folders_names(tmp_path: Path) -> None:
    """A script's own folder is the first in which Python looks."""
    names = "engine", "server", "loadtest"
    for name in names:
        (tmp_path / f"{name}.py").write_text("MINE = True")
    script = tmp_path / "script.py"
    values = ", ".join(f"{name}.MINE" for name in names)
    script.write_text(
        f"import {', '.join(names)}; from truedraft import LLM; print({values}, LLM.__module__)"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert result.stdout == "True True True truedraft.engine.llm\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "truedraft", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("truedraft ")


def test_every_public_name_is_found_when_it_is_used() -> None:
    assert all(getattr(truedraft, name) is not None for name in truedraft.__all__)
    assert set(truedraft.__all__) == set(dir(truedraft))
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        truedraft.Engine  # noqa: B018


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    """They build on each other, as on the page."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert "of the drafted tokens accepted" in out
    assert "prompt 0: the prompt has" in out
