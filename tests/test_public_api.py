"""``from truedraft import ...``: what the README and docs/python-api.md promise, with the bundled pair."""

import gc
import json
import re
import subprocess
import sys
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

import truedraft
from truedraft import LLM, Completion, ConfigError, RequestError, SamplingParams
from truedraft.engine.library.completion import Logprob

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


CONVERSATION = [{"role": "user", "content": "Tell me a story."}]


def test_without_parameters_a_text_gets_16_tokens_and_an_answer_what_the_context_leaves(llm: LLM) -> None:
    (text,) = llm.generate("Once upon a time")
    assert len(text.token_ids) == 16 or text.finish_reason == "stop"
    (answer,) = llm.chat(CONVERSATION, SamplingParams(ignore_eos=True, temperature=0))
    assert len(answer.token_ids) == llm.room(CONVERSATION)


def test_without_parameters_the_model_recommends_them(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    config = llm.core.target.model.generation_config
    for name, value in {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}.items():
        monkeypatch.setattr(config, name, value, raising=False)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, None)
    monkeypatch.setattr(llm.config, "generation_config", "none")
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate("x", {"max_tokens": 5}),
            "params is a dict; write SamplingParams(max_tokens=5)",
        ),
        (lambda llm: llm.generate("x", 5), "params must be SamplingParams, not int"),
        (lambda llm: llm.generate("x", "greedy"), "params must be SamplingParams, not str"),
        (lambda llm: llm.generate(None), "not NoneType"),
        (lambda llm: llm.generate(5), "not int"),
        (lambda llm: llm.chat("Hello"), "not str"),
        (lambda llm: llm.generate("x", SamplingParams(json_schema=5)), "json_schema is a int"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_thread": 1}, "LLM has no setting num_thread. Did you mean num_threads?"),
        ({"dtype": "float17"}, "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', not 'float17'."),
        ({"num_speculative_tokens": 99}, "must be less than or equal to 32 or 'auto', not 99."),
        ({"cache_memory": "much"}, "cache_memory: must be a size such as 512MiB or 4GiB, not 'much'."),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**settings)
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_log_probabilities_have_texts(llm: LLM) -> None:
    (completion,) = llm.generate(
        "Once upon a time", SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1, temperature=0)
    )
    entries = [*completion.logprobs, *(entry for entry in completion.prompt_logprobs or () if entry)]
    assert len(entries) == 7
    assert "".join(entry.text for entry in completion.logprobs) == completion.text
    for entry in entries:
        assert isinstance(entry, Logprob)
        assert entry.top_texts == [llm.decode([token_id]) for token_id, _ in entry.top]


def test_a_pydantic_model_is_a_schema(llm: LLM) -> None:
    class Place(BaseModel):
        kind: Literal["hill", "sea"]

    class Story(BaseModel):
        places: list[Place] = Field(max_length=2)

    (answer,) = llm.generate("A story:", SamplingParams(max_tokens=80, seed=1, json_schema=Story))
    assert answer.finish_reason == "stop"
    assert Story.model_validate_json(answer.text)
    assert set(json.loads(answer.text)) == {"places"}


def test_a_closed_llm_refuses_calls_and_lets_go_of_its_models() -> None:
    with LLM(cache_memory="8MiB", num_threads=1) as llm:
        assert "demo_pair" in repr(llm)
        core = weakref.ref(llm.core)
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
        next(stream)
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    with pytest.raises(RequestError, match="closed"):
        llm.generate("Once upon a time")
    llm.close()
    gc.collect()
    assert core() is None
