"""Fields and values of other servers and of the vendors' packages: served, refused by name or reported."""

import ast
import json
import typing
import zipfile
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types
import pytest
from pydantic import ValidationError

from tests.server.refusals import CHAT, COMPLETIONS, error_of, refused
from tests.server.running import RunningServer
from tests.server.test_leniency import ASK, ignored
from tools.other_servers import DATA, Package, calls_with_names, differences, fields_of, listed
from truedraft.server.schemas import other_servers, unsupported_fields
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.common import ReasoningEffort
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.foreign_parts import CALLS, RESULTS, THOUGHTS, TRACES
from truedraft.server.schemas.messages import MessagesRequest
from truedraft.server.schemas.other_servers import HARMLESS, UNSUPPORTED
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.schemas.unsupported_fields import INSTEAD_OF_PARTS, REFUSED_IN

KNOWN = json.loads(DATA.read_text())
NAMES = sorted({name for names in KNOWN["fields"].values() for name in names})
REQUESTS = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)


def test_every_name_has_its_place() -> None:
    """A name that a release adds is refused until somebody says that it is harmless."""
    for request in REQUESTS:
        declared = {field.alias or name for name, field in request.model_fields.items()}
        for name in NAMES:
            places = [
                name in declared,
                name in REFUSED_IN[request],
                name in HARMLESS or name == "context_management",
            ]
            assert any(places), (request.__name__, name)
    assert not UNSUPPORTED.keys() & HARMLESS


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ChatRequest.model_fields])
def test_no_name_is_ignored_in_silence(server: RunningServer, name: str) -> None:
    response = server.post(CHAT, ASK | {"max_tokens": 1, name: {"some": "thing"}})
    if name in HARMLESS:
        assert response.headers["x-truedraft-ignored"] == name
    else:
        assert (response.status_code, error_of(response)["param"]) == (400, name)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("num_predict", 3, "max_tokens"),
        ("do_sample", False, "temperature"),
        ("stop_sequences", ["a"], "'stop'"),
        ("stop_strings", ["a"], "'stop'"),
        ("stopping_strings", ["a"], "'stop'"),
        ("until", ["a"], "'stop'"),
        ("max_length", 9, "max_tokens"),
        ("min_length", 9, "min_tokens"),
        ("min_new_tokens", 9, "min_tokens"),
        ("typical", 0.9, "top_p"),
        ("tfs", 0.9, "top_p"),
        ("num_beams", 4, "'n'"),
        ("rep_pen", 1.1, "repetition_penalty"),
        ("guidance_scale", 1.5, "not served"),
        ("penalty_alpha", 0.6, "top_k"),
        ("smoothing_factor", 0.2, "top_p"),
        ("ban_eos_token", True, "ignore_eos"),
        ("repeat_last_n", 64, "whole text"),
        ("num_ctx", 4096, "max_model_len"),
        ("options", {"num_predict": 3}, "fields of the request"),
        ("format", "json", "response_format"),
        ("think", True, "reasoning_effort"),
        ("raw", True, "/v1/completions"),
        ("system", "You are a pirate", "system"),
        ("json_mode", True, "response_format"),
        ("response_schema", {}, "response_format"),
        ("logits_bias", {"1": 2}, "logit_bias"),
        ("sampling_params", {"n": 2}, "fields of the request"),
        ("parameters", {"n": 2}, "fields of the request"),
        ("lora_request", {"lora_name": "a"}, "LoRA adapter"),
        ("reasoning_budget", 100, "thinking_budget"),
        ("nvext", {"greed_sampling": True}, "fields of the request"),
        ("watermark", True, "TGI"),
        ("beam_width", 2, "'n'"),
        ("repetition_context_size", 20, "whole text"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_names_that_change_the_output(
    server: RunningServer, path: str, name: str, value: Any, instead: str
) -> None:
    error = refused(server, path, (ASK if path == CHAT else {"prompt": "x"}) | {name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert instead in error["message"]


def test_reasoning_is_an_object_of_responses(server: RunningServer) -> None:
    assert "reasoning_effort" in refused(server, CHAT, ASK | {"reasoning": {"effort": "none"}})["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"samplers": []},
        {"n_predict": -1},
        {"num_predict": -1},
        {"guided_regex": ""},
        {"guided_choice": []},
        {"allowed_token_ids": []},
        {"guided_decoding_backend": "auto"},
        {"add_special_tokens": True},
        {"do_sample": True, "num_beams": 1, "typical": 1.0, "rep_pen": 1},
        {"options": {}, "format": "", "raw": False, "system": "", "stop_sequences": []},
        {"previous_response_id": "", "conversation": "", "documents": [], "thinking_budget_tokens": -1},
        {"watermark": False, "repetition_ngram_size": 0, "parse_tool_calls": False},
    ],
)
def test_what_asks_for_nothing(server: RunningServer, fields: dict[str, Any]) -> None:
    assert ignored(server, CHAT, ASK | {"max_tokens": 1} | fields) == ""


def test_an_empty_schema_asks_for_json(server: RunningServer) -> None:
    for name in ("guided_json", "json_schema", "response_schema"):
        assert refused(server, CHAT, ASK | {name: {}})["param"] == name


def test_no_limit_is_another_length_where_the_default_is_one(server: RunningServer) -> None:
    assert refused(server, COMPLETIONS, {"prompt": "x", "n_predict": -1})["param"] == "n_predict"


def test_a_new_name_would_be_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the planted fault: with a list from memory it is only reported."""
    table = dict(REFUSED_IN[ChatRequest])
    del table["watermark"]
    monkeypatch.setitem(REFUSED_IN, ChatRequest, table)  # type: ignore[arg-type]
    unsupported_fields._refused_in.cache_clear()
    with pytest.raises((AssertionError, KeyError)):
        test_no_name_is_ignored_in_silence(server, "watermark")
    unsupported_fields._refused_in.cache_clear()


# What the vendors' packages list.


def test_efforts() -> None:
    listed = set(KNOWN["enumerations"]["reasoning_effort"])
    assert listed <= set(typing.get_args(ReasoningEffort))
    installed = _strings(openai.types.shared.ReasoningEffort)
    assert installed <= set(typing.get_args(ReasoningEffort))


def _strings(hint: Any) -> set[str]:
    inner = typing.get_args(hint)
    return (
        set().union(*(_strings(each) if not isinstance(each, str) else {each} for each in inner))
        if inner
        else set()
    )


def test_items_parts_and_blocks() -> None:
    """Each is read, left out with a report, or refused with what to send in its place."""
    judged = TRACES | INSTEAD_OF_PARTS.keys() | {*CALLS, *RESULTS, *THOUGHTS}
    for kind in KNOWN["enumerations"]["response_items"]:
        assert kind in judged or _reads(ResponsesRequest, {"input": [{"type": kind}]}), kind
    for kind in KNOWN["enumerations"]["messages_blocks"]:
        content = [{"type": kind}]
        assert kind in judged or _reads(MessagesRequest, _saying(content)), kind
    for kind in KNOWN["enumerations"]["messages_results"]:
        content = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": kind}]}]
        assert kind in judged | {"document", "search_result", "tool_reference"} or _reads(
            MessagesRequest, _saying(content)
        ), kind
    for kind in KNOWN["enumerations"]["chat_parts"]:
        content = [{"type": kind}]
        assert kind in judged or _reads(ChatRequest, {"messages": [{"role": "user", "content": content}]}), (
            kind
        )


def _saying(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def _reads(request: Any, body: dict[str, Any]) -> bool:
    """Returns whether it is one of our own kinds, which miss what the kind needs."""
    try:
        request.model_validate({"model": "m"} | body)
    except ValidationError as error:
        return any(each["type"] in ("missing", "value_error") for each in error.errors())
    return False


def test_installed_packages_know_no_more() -> None:
    blocks = _literals(anthropic.types.ContentBlockParam)
    assert blocks <= set(KNOWN["enumerations"]["messages_blocks"])
    items = _literals(openai.types.responses.ResponseInputItemParam)
    assert items <= set(KNOWN["enumerations"]["response_items"])


def _literals(union: Any) -> set[str]:
    types = set()
    for each in typing.get_args(union):
        hint = typing.get_type_hints(each).get("type")
        types |= _strings(hint)
    return types


# The script that reads them.

SOURCE = """
class Base(BaseModel):
    shared: int = 3
    kind: ClassVar[str] = "a"

class Request(Base):
    json_schema: Annotated[str | None, 1] = Field(default=None, alias="schema")
    scale: float = Field(1.0, ge=0)
    low: int = -1
    made: list[int] = Field(default_factory=list)
    _own: int = 0
"""


def test_fields_of_classes() -> None:
    found = dict(fields_of("Request")(SOURCE))
    assert found == {"shared": 3, "json_schema": None, "schema": None, "scale": 1.0, "low": -1, "made": None}
    with pytest.raises(ValueError, match="Gone"):
        [*fields_of("Gone")(SOURCE)]


def test_names_in_calls() -> None:
    read = calls_with_names(r'field_\\w+\\("(\\w+)"|json_value\\(body, "(\\w+)"'.replace("\\\\", "\\"))
    text = 'add((new field_num("n_keep", p)); json_value(body, "echo", false)'
    assert [*read(text)] == [("n_keep", None), ("echo", None)]


def test_types_are_found_through_imports(tmp_path: Path) -> None:
    files = {
        "sdk/types/a.py": "from .inner.b import B\nA: TypeAlias = Union[B, C]\n"
        "class C(TypedDict):\n    type: Literal['c']\n",
        "sdk/types/inner/b.py": "class B(TypedDict):\n    type: Required[Literal['b1', 'b2']]\n",
    }
    archive = tmp_path / "sdk-1.2-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    package = Package(archive)
    assert package.version == "1.2"
    assert sorted(listed(package, "sdk/types/a.py", "A")) == ["b1", "b2", "c"]
    with pytest.raises(ValueError, match="no gone.py"):
        package.read("gone.py")


def test_differences() -> None:
    new = {"fields": {"vLLM": {"a": None, "b": 1}}, "enumerations": {"effort": ["low"]}}
    old = {"fields": {"vLLM": {"a": None}}, "enumerations": {}}
    assert differences(old, new) == ["fields: vLLM has 'b'", "enumerations: effort has 'low'"]
    assert differences(new, new) == []


def test_the_data_says_where_it_is_from() -> None:
    assert KNOWN["written_by"] == "python -m tools.other_servers"
    assert set(KNOWN["versions"]) >= {"openai", "anthropic", "vllm", "sglang", "ollama", "llama-cpp-python"}
    assert ast.parse(Path(other_servers.__file__).read_text())
